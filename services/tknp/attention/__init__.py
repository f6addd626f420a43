"""Attention over pages: decode backends, prefill and the exact merge of partial outputs.

base.py        the decode protocol, the shape of a rank's heads, the rows of a step
append.py      rotary embedding and the store of new keys and values, shared by backends
reference.py   brute force, the oracle of the tests
torch_cpu.py   CPU, torch's flash kernel over pages in place
torch_cuda.py  CUDA, torch's variable-length flash kernel over a block table
factory.py     which backend serves a device
prefill.py     causal attention of a prompt's chunk
merge.py       merge of partial outputs by log-sum-exp
flash.py       torch's flash operators with their log-sum-exp
"""
