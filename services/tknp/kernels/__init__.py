"""CPU operations in C++, compiled on first use, for bfloat16.

    csrc/         the operations; a plain C interface, no torch headers
    isa.py        which instruction set this processor offers
    build.py      compiles csrc/ once into the user's cache
    library.py    loads it: available(), load()
    dense.py      KernelDense              twin: tknp.model.dense.TorchDense
    decode.py     KernelDecodeAttention    twin: tknp.attention.torch_cpu.TorchCpuAttention
    layers.py     KernelLayers             twin: those two and the transport, layer by layer
    exchange.py   the messages of KernelLayers
    mailbox.py    NativeLane               twin: tknp.transport.lane.PythonLane
    cores.py      keeps the threads of a rank that has all cores on one each
    prefill.py    KernelPrefillAttention   twin: tknp.attention.prefill.PrefillAttention
                  KernelPrefillLayers      twin: that and KernelDense, layer by layer

Where `available()` says no (no g++, no AVX2, TKNP_KERNELS=off), callers take the twin and tell the
user its reason. Results depend on neither the batch, nor the pages, nor the number of threads, bit
for bit; they do depend on the instruction set, so the processes of one pool must agree on it.
"""
