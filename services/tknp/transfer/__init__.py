"""KV transfer from prefill ranks to the ranks that own a request.

`base` has the interfaces, `plan` which bytes go where, `grpc_stream` and `nixl` move them.
"""
