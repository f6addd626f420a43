"""A decode node: the process of one TP rank, with its services.

DecodeRoot and AttentionOwner are separate services with separate state. A decode node runs both on
one engine; a root-only or attention-only node runs one. Its life:

    port open, Describe answers    LOADING   weights, pages
                                   JOINING   data plane: every rank of the pool
                                   WARMING   waits for its first step
                                   READY     steps from the coordinator
                                   FAILED    a step failed or hung, memory was short, or the
                                             coordinator went away: exit 1
"""
