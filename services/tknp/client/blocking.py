"""The client for programs without an event loop: the same calls, which wait.

A thread of its own runs the loop of a `Client`; calls from any number of threads share its channel.
Leaving the iterator of `generate` early cancels the request, as closing the client does to all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from threading import Thread
from types import TracebackType
from typing import Any, Self, TypeVar

from tknp.client.channel import CALL_TIMEOUT_S, DEFAULT_TARGET, GENERATE_TIMEOUT_S, Client
from tknp.v1.coordinator_pb2 import Status
from tknp.v1.inference_pb2 import ChatMessage, GenerateRequest, GenerateResponse, GetModelResponse

T = TypeVar("T")


class BlockingClient:
    """`Client`, see there for arguments and errors; close it, or use it in a `with` statement."""

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        tls_ca: str | None = None,
        token: str | None = None,
        *,
        retries: int = 0,
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name="tknp-client", daemon=True)
        self._thread.start()

        async def opened() -> Client:
            return Client(target, tls_ca, token, retries=retries)

        try:
            self._client = self._wait(opened())
        except BaseException:
            self._stop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()

    def close(self) -> None:
        """End open calls and the thread; a second time does nothing."""
        if not self._loop.is_closed():
            self._wait(self._client.close())
            self._stop()

    def status(self, timeout_s: float = CALL_TIMEOUT_S) -> Status:
        return self._wait(self._client.status(timeout_s))

    def model(self, timeout_s: float = CALL_TIMEOUT_S) -> GetModelResponse:
        return self._wait(self._client.model(timeout_s))

    def tokenize(
        self,
        prompt: str | Sequence[ChatMessage],
        timeout_s: float = CALL_TIMEOUT_S,
        *,
        add_special_tokens: bool = True,
    ) -> list[int]:
        """Ids of a text or a chat. `add_special_tokens`: of a text, such as BOS."""
        return self._wait(
            self._client.tokenize(prompt, timeout_s, add_special_tokens=add_special_tokens)
        )

    def detokenize(self, token_ids: Sequence[int], timeout_s: float = CALL_TIMEOUT_S) -> str:
        return self._wait(self._client.detokenize(token_ids, timeout_s))

    def generate(
        self, request: GenerateRequest, timeout_s: float = GENERATE_TIMEOUT_S
    ) -> Iterator[GenerateResponse]:
        """Messages as the server sends them; the last one carries `finish`."""
        stream = self._client.generate(request, timeout_s)

        async def following() -> GenerateResponse | None:
            return await anext(stream, None)

        try:
            while (response := self._wait(following())) is not None:
                yield response
        finally:
            if not self._loop.is_closed():
                self._wait(stream.aclose())

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
