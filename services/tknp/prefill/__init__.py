"""Prefill: computes the KV of prompts, pushes it to their owners, samples the first token.

compute.py  one rank: runs chunks, layer by layer, pushing each layer's KV as it is done
replica.py  TP rank 0: which chunk is next, the same on every rank of the replica
service.py  the Prefill service
server.py   the process
metrics.py  what a rank measures

    Run -> local pages -> Begin at the owners -> chunks -> token; finish -> Complete -> answer

Nothing stays here once a request is answered. A transfer overlaps the compute of later layers and
chunks. Cancelling the call aborts the transfer at every rank before the owner is told Abort.
"""
