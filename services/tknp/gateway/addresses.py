"""Where a target of a gateway leads now: HOST:PORT itself, or all that a name has."""

from __future__ import annotations

import asyncio
import logging
import socket

log = logging.getLogger(__name__)
_DNS = "dns:"


async def addresses(target: str) -> list[str] | None:
    """Every address of HOST:PORT or dns:HOST:PORT; None while the name doesn't resolve."""
    if not target.startswith(_DNS):
        return [target]
    host, _, port = target.removeprefix(_DNS).rpartition(":")
    loop = asyncio.get_running_loop()
    try:
        infos = await loop.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        log.warning("%s does not resolve: %s", target, error)
        return None
    hosts = sorted({str(info[4][0]) for info in infos})
    return [f"[{h}]:{port}" if ":" in h else f"{h}:{port}" for h in hosts]
