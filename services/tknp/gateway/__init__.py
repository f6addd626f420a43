"""The front door: OpenAI HTTP and gRPC in front of any number of pools.

    HTTP or gRPC -> key and limits -> ids of the prompt -> least loaded pool -> tokens
                                                              | pool lost
                                                              +-> prompt and tokens, elsewhere

A gateway holds no model and no state of its own: what a request needs to go on elsewhere is the
prompt and the tokens that have come. `http` and `grpc` are two faces of one `Gateway`; Ray Serve
runs replicas of it (`serve_app`), and nothing but that module knows of Ray.

A stream ends in one way: with a finish reason, or with an error that says who failed and why. A
client that goes away cancels its request at the pool. A pool that is lost costs time, not streams,
unless replay is off.
"""
