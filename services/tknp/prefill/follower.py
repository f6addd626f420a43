"""The other TP ranks of a replica: they run the chunks that TP rank 0 sends, in its order.

When TP rank 0 is lost, which is any other end than its own, nobody can say any more what becomes of
the requests under way: this rank fails too, and its own end aborts what it was pushing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable

from tknp.errors import ProtocolError
from tknp.kv.holding import Key
from tknp.prefill.compute import Drawn, first_row
from tknp.prefill.requests import LocalRequests, Target
from tknp.rpc.checks import check_ids
from tknp.rpc.convert import key_from
from tknp.rpc.ids import unpack_ids
from tknp.sampling.params import SamplingParams
from tknp.v1.prefill_pb2 import ChunkDone, PrefillChunk


async def follow(
    requests: LocalRequests,
    vocab_size: int,
    chunks: AsyncIterator[PrefillChunk],
    lost: Callable[[str], None],
) -> AsyncGenerator[ChunkDone]:
    """Answer each of `chunks`, possibly out of order: a request's last when its KV is delivered.

    `lost(reason)`: TP rank 0 is gone.
    """
    over = False
    done: asyncio.Queue[ChunkDone | None] = asyncio.Queue()
    answering: set[asyncio.Task[None]] = set()

    async def read() -> None:
        expected = 0
        try:
            async for message in chunks:
                if message.sequence != expected:
                    raise ProtocolError(f"chunk {message.sequence} came, {expected} expected")
                expected += 1
                try:
                    running = await _start(requests, vocab_size, message)
                except Exception as error:
                    answer = ChunkDone(sequence=message.sequence, error=str(error))
                    done.put_nowait(answer)
                    continue
                task = asyncio.create_task(_answer(requests, message, running, done))
                answering.add(task)
                task.add_done_callback(answering.discard)
        finally:
            done.put_nowait(None)

    reader = asyncio.create_task(read())
    try:
        while (answer := await done.get()) is not None:
            yield answer
        await reader
        over = True
    finally:
        if not over:
            lost("TP rank 0 of this prefill replica is lost")
        reader.cancel()
        for task in answering:
            task.cancel()


async def _start(
    requests: LocalRequests, vocab_size: int, message: PrefillChunk
) -> asyncio.Future[Drawn | None] | None:
    key = key_from(message.key)
    if message.abort:
        return None
    if message.start == 0:
        target = Target(message.epoch, message.writer, message.placements, message.owners)
        await requests.open(key, message.prompt_tokens, target)
    ids = unpack_ids("token_ids", message.token_ids)
    check_ids(ids, vocab_size)
    # TP rank 0 draws; this row only says that the chunk ends the prompt.
    row = first_row(SamplingParams(), vocab_size, ids, 0) if message.last else None
    return await requests.chunk(key, ids, message.start, row)


async def _answer(
    requests: LocalRequests,
    message: PrefillChunk,
    running: asyncio.Future[Drawn | None] | None,
    done: asyncio.Queue[ChunkDone | None],
) -> None:
    key: Key = key_from(message.key)
    answer = ChunkDone(sequence=message.sequence)
    try:
        if running is None:
            await requests.abort(key)
        else:
            await running
            if message.last:
                answer.transferred_bytes = await requests.finish(key)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        answer.error = f"{key} was aborted before this chunk was computed"
    except Exception as error:
        answer.error = str(error) or type(error).__name__
    done.put_nowait(answer)
