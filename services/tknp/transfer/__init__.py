"""KV transfer from prefill ranks to the ranks that own a request.

base           Push, Sender: what the prefill service uses
plan           which tokens, heads and pages go to which owner rank (pure)
extents        ... as runs of memory of two pools (pure)
windows        which writer may write into which pages now (pure)
compatibility  what both sides must agree on
sender         a push as one link to each owner rank
grpc_stream    links that stream KV by value
nixl           links that write into the owner's pool one-sidedly
receiver       the owner's side
factory        makes a sender or receiver of the configured kind
"""
