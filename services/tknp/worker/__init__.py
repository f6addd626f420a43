"""What the process of one decode rank consists of, apart from its services.

runtime.py  weights, pages, transport, the engine thread, and the phase they are in
steps.py    steps from the coordinator to the engine and to the node's other TP ranks
answers.py  a step's answer, once every rank of the node has finished it
metrics.py  what the rank measures
memory.py   the KV budget where none is declared
"""
