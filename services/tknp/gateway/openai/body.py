"""Refuses bodies that are too large, before they are read whole."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.responses import JSONResponse

from tknp.gateway.openai.errors import ErrorReply

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
TOO_LARGE = 413


class _TooLarge(Exception):
    pass


class BodyLimit:
    """ASGI middleware: at most `max_bytes` a request, whether it says its length or not."""

    def __init__(self, app: Callable[..., Awaitable[None]], max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        said = dict(scope["headers"]).get(b"content-length", b"0")
        if said.isdigit() and int(said) > self._max_bytes:
            await self._refuse(scope, receive, send)
            return
        taken, started = 0, False

        async def limited() -> MutableMapping[str, Any]:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self._max_bytes:
                raise _TooLarge
            return message

        async def noted(message: MutableMapping[str, Any]) -> None:
            nonlocal started
            if taken > self._max_bytes and not started:
                return  # what the application makes of the exception; the answer is below
            started = True
            await send(message)

        with contextlib.suppress(_TooLarge):
            await self._app(scope, limited, noted)
        if taken > self._max_bytes and not started:
            await self._refuse(scope, receive, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = ErrorReply(TOO_LARGE, f"the body is larger than {self._max_bytes} bytes")
        await JSONResponse(error.body, TOO_LARGE)(scope, receive, send)
