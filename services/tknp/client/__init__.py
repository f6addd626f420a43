"""Clients of a pool's public port, or of a gateway's gRPC port: asyncio, and one that waits."""

from tknp.client.blocking import BlockingClient
from tknp.client.channel import CALL_TIMEOUT_S, DEFAULT_TARGET, GENERATE_TIMEOUT_S, Client
from tknp.client.messages import Completion, Prompt, RequestFailed, received_ids, request_for

__all__ = [
    "CALL_TIMEOUT_S",
    "DEFAULT_TARGET",
    "GENERATE_TIMEOUT_S",
    "BlockingClient",
    "Client",
    "Completion",
    "Prompt",
    "RequestFailed",
    "received_ids",
    "request_for",
]
