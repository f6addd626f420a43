"""Around every HTTP request: an id, a trace, a count, a line in the log. ASGI middleware.

    x-request-id, traceparent -> REQUEST, logged and handed to the pool -> x-request-id

The id is the client's own where it is fit to be one. Streams pass through untouched, one message at
a time: nothing is buffered here.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from tknp.rpc.tracing import Trace, tracer

log = logging.getLogger(__name__)
CLIENT_GONE = 499
_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_KEY = b"x-request-id"
Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]


@dataclass(frozen=True)
class RequestContext:
    """What is known of a request wherever it is worked on. `trace`: headers for the pool."""

    request_id: str
    trace: Trace


REQUEST: ContextVar[RequestContext | None] = ContextVar("tknp_request", default=None)


class Access:
    """`answered(route, status)` is called once for every request.

    `named`: answers carry the id. Where a proxy before this one adds it, they must not.
    """

    def __init__(
        self,
        app: Callable[..., Awaitable[None]],
        answered: Callable[[str, str], None],
        named: bool = True,
    ) -> None:
        self._app = app
        self._answered = answered
        self._named = named

    async def __call__(
        self, scope: Scope, receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:  # fmt: skip
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = dict(scope["headers"])
        given = headers.get(_KEY, b"")
        request_id = given.decode() if _ID.fullmatch(given) else uuid.uuid4().hex
        began_s, status = time.monotonic(), CLIENT_GONE

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            if message["type"] == "http.response.start" and self._named:
                message["headers"] = [*message.get("headers", ()), (_KEY, request_id.encode())]
            await send(message)

        name = f"{scope['method']} {scope['path']}"
        with tracer().span(name, headers.get(b"traceparent", b"").decode("latin-1")) as trace:
            token = REQUEST.set(RequestContext(request_id, trace))
            try:
                await self._app(scope, receive, noted)
            except Exception:
                if status == CLIENT_GONE:  # whoever catches it answers so
                    status = 500
                raise
            finally:
                REQUEST.reset(token)
                route = getattr(scope.get("route"), "path", "unknown")
                self._answered(route, str(status))
                log.info(
                    "%s %s %d", scope["method"], route, status,
                    extra={
                        "request_id": request_id, "trace_id": trace.trace_id, "route": route,
                        "status": status, "seconds": round(time.monotonic() - began_s, 6),
                    },
                )  # fmt: skip
