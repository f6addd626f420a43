"""Refuses bodies that are too large, before they are read whole."""

from __future__ import annotations

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
            return await self._app(scope, receive, send)
        said = dict(scope["headers"]).get(b"content-length", b"0")
        if said.isdigit() and int(said) > self._max_bytes:
            return await self._refuse(scope, receive, send)
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
            started = True
            await send(message)

        try:
            await self._app(scope, limited, noted)
        except _TooLarge:
            if not started:
                await self._refuse(scope, receive, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = ErrorReply(TOO_LARGE, f"the body is larger than {self._max_bytes} bytes")
        await JSONResponse(error.body, TOO_LARGE)(scope, receive, send)
