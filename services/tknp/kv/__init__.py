"""The KV cache of one node: page bookkeeping (pure, no torch) and page memory.

holding.py    key, span and state of what a request holds
pages.py      the page pool and its state machine
free_runs.py  free pages as runs of adjacent ids
size.py       bytes and pages of a model on one rank
storage.py    the tensor behind the pages of one rank
"""
