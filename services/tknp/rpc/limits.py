"""The largest request that each method reads.

A port refuses more than the most of its methods before it has read it; a method of that port with a
lower limit refuses the message before it is parsed. Either way RESOURCE_EXHAUSTED, and the port
serves on.
"""

from __future__ import annotations

from collections.abc import Iterable

MIB = 1 << 20

# A text of a million tokens takes 4 MiB. Prefill gets ids, 4 bytes each, and the pages to fill. A
# step brings the ids of every request that it admits with penalties. A chunk of KV is 512 KiB, or
# one head of one page where that is more.
_REQUEST_BYTES = {
    "/tknp.v1.Inference/": 8 * MIB,
    "/tknp.v1.Coordinator/": 1 * MIB,
    "/tknp.v1.Prefill/": 16 * MIB,
    "/tknp.v1.DecodeRoot/Run": 64 * MIB,
    "/tknp.v1.AttentionOwner/Run": 64 * MIB,
    "/tknp.v1.AttentionOwner/Write": 8 * MIB,
}
_OTHER_BYTES = 1 * MIB
RESPONSE_BYTES = 64 * MIB


def request_bytes(method: str) -> int:
    """Most bytes of one request message of `method`, which is /package.Service/Method."""
    service = method[: method.rfind("/") + 1]
    return _REQUEST_BYTES.get(method, _REQUEST_BYTES.get(service, _OTHER_BYTES))


def port_bytes(services: Iterable[str]) -> int:
    """Most bytes of a message to a port of `services` (full names)."""
    starts = tuple(f"/{name}/" for name in services)
    limits = (size for method, size in _REQUEST_BYTES.items() if method.startswith(starts))
    return max(limits, default=_OTHER_BYTES)
