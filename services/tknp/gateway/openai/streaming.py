"""Several choices as one stream of server-sent events.

    choice 0: pieces \\
    choice 1: pieces  -> queue (one piece a choice waits) -> data: {...} -> client
    choice 2: pieces /

A reader that is slow holds back its own choices: each waits until its piece is taken. Leaving early
cancels all of them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from json.encoder import encode_basestring

from tknp.errors import TknpError
from tknp.gateway.gateway import Gateway
from tknp.gateway.generation import Ask, Piece
from tknp.gateway.openai.errors import reply_of
from tknp.gateway.openai.replies import Choice, Json, Reply

DONE = b"data: [DONE]\n\n"
_MARK = "\ue000"  # the text stands last in an event: whatever comes before it may hold one too


def event(data: Json) -> bytes:
    """One server-sent event."""
    return (
        b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
    )


class Frame:
    """Events of one choice that carry nothing but text, which is all that differs between them.

    They are most of a stream: what stays is encoded once, from an event with a mark for its text.
    """

    def __init__(self, reply: Reply, choice: Choice) -> None:
        whole = event(reply.chunk(choice, Piece(_MARK, (), ()), 0))
        self._head, _, self._tail = whole.rpartition(encode_basestring(_MARK).encode())

    def __call__(self, text: str) -> bytes:
        return self._head + encode_basestring(text).encode() + self._tail


async def pieces(gateway: Gateway, asks: Sequence[Ask]) -> AsyncIterator[tuple[int, Piece]]:
    """Pieces of every ask, by its index, as they come. The first error ends all."""
    if len(asks) == 1:
        async with aclosing(gateway.run(asks[0])) as alone:  # type: ignore[type-var]
            async for piece in alone:
                yield 0, piece
        return
    queue: asyncio.Queue[tuple[int, Piece | Exception | None]] = asyncio.Queue(len(asks))

    async def feed(index: int, ask: Ask) -> None:
        ended: Exception | None = None
        try:
            async with aclosing(gateway.run(ask)) as found:  # type: ignore[type-var]
                async for piece in found:
                    await queue.put((index, piece))
        except Exception as error:
            ended = error
        await queue.put((index, ended))

    tasks = [asyncio.create_task(feed(index, ask)) for index, ask in enumerate(asks)]
    try:
        running = len(tasks)
        while running:
            index, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def events(
    reply: Reply,
    count: int,
    first: tuple[int, Piece],
    rest: AsyncIterator[tuple[int, Piece]],
    *,
    include_usage: bool,
) -> AsyncIterator[bytes]:
    """The body of a streamed answer of `count` choices. An error is its last event."""
    choices = [Choice(index) for index in range(count)]
    frames = [Frame(reply, choice) for choice in choices]

    def chunk(index: int, piece: Piece) -> bytes:
        offset = choices[index].offset
        choices[index].count(piece)
        if piece.finish is None and not reply.logprobs:
            return frames[index](piece.text)
        return event(reply.chunk(choices[index], piece, offset))

    try:
        if reply.chat:
            for choice in choices:
                yield event(reply.first(choice))
        yield chunk(*first)
        async for index, piece in rest:
            yield chunk(index, piece)
        if include_usage:
            yield event(reply.last(choices))
        yield DONE
    except TknpError as error:
        yield event(reply_of(error).body)


async def gathered(gateway: Gateway, asks: Sequence[Ask]) -> list[Choice]:
    """Every choice, whole."""
    choices = [Choice(index) for index in range(len(asks))]
    async with aclosing(pieces(gateway, asks)) as found:  # type: ignore[type-var]
        async for index, piece in found:
            choices[index].add(piece)
    return choices
