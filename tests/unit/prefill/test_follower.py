"""The other TP ranks of a replica answer every chunk, whatever becomes of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

from tknp.kv.holding import Key
from tknp.prefill.follower import follow
from tknp.prefill.requests import LocalRequests
from tknp.rpc.ids import pack_ids
from tknp.v1.common_pb2 import RequestKey
from tknp.v1.prefill_pb2 import PrefillChunk


class Requests:
    """Chunks that are never computed: an abort takes them back, as the engine thread does."""

    def __init__(self) -> None:
        self.queued: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def open(self, key: Key, prompt_tokens: int, target: object) -> None:
        return None

    async def chunk(self, *arguments: Any) -> asyncio.Future[None]:
        return self.queued

    async def abort(self, key: Key) -> None:
        self.queued.cancel()


async def test_a_chunk_that_an_abort_takes_back_is_answered_too() -> None:
    requests = Requests()
    key = RequestKey(request_id="r")
    over = asyncio.Event()

    async def chunks() -> AsyncIterator[PrefillChunk]:
        yield PrefillChunk(key=key, token_ids=pack_ids([1, 2]), prompt_tokens=4)
        yield PrefillChunk(key=key, sequence=1, abort=True)
        await over.wait()

    answers = {}
    async with asyncio.timeout(60):
        async for done in follow(cast(LocalRequests, requests), 100, chunks(), lambda _: None):
            answers[done.sequence] = done.error
            if len(answers) == 2:
                over.set()
    assert "aborted" in answers[0]
    assert answers[1] == ""
