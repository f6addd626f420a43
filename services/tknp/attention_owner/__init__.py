"""The AttentionOwner service: pages of its requests, and KV that prefill writes into them.

service.py    the RPCs
transfers.py  from Begin until nothing of a transfer can land any more
writers.py    which writers are dead for certain
"""
