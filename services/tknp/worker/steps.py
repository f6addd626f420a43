"""Steps of one rank: from the coordinator (or TP rank 0) to the engine, results back.

    coordinator --Step--> TP rank 0 --engine
                             |  \\--Step, pages filled in--> other TP ranks --engine
                             <----------- StepResult ------------/

One call carries the steps of every stream of the node. Each stream's results come in the order of
its steps; streams do not wait for each other.

TP rank 0 knows the pages of its requests, adds them to what its node is an owner of, and frees the
pages of ended requests once every TP rank of the node has finished a step without them. A step
whose result carries an error is the last one. A call that ends while requests run, anybody's,
means that the coordinator is gone: the pool's state is lost with it, so every rank fails and is
started anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from grpc import aio

from tknp.engine.batch import Admit, Delta, Grow
from tknp.errors import ProtocolError
from tknp.kv.holding import Key
from tknp.kv.pages import PagePool
from tknp.rpc.convert import delta_from, delta_to
from tknp.v1.attention_owner_pb2_grpc import AttentionOwnerStub
from tknp.v1.decode_root_pb2_grpc import DecodeRootStub
from tknp.v1.step_pb2 import Step, StepResult
from tknp.worker.answers import Answers
from tknp.worker.relay import Relay
from tknp.worker.runtime import DecodeRuntime


class StepServer:
    """Serves Run on one rank. `siblings`: channels to the other TP ranks, on TP rank 0 only."""

    def __init__(self, runtime: DecodeRuntime, siblings: Sequence[aio.Channel]) -> None:
        self._runtime = runtime
        layout, self._node = runtime.pool.layout, runtime.rank.node
        self._streams = [s for s in range(layout.streams) if self._node in layout.members(s)]
        self._divides_tokens = layout.divides == "tokens"
        root = bool(layout.held[self._node])
        self._siblings = [DecodeRootStub(c) if root else AttentionOwnerStub(c) for c in siblings]
        self._running: dict[tuple[int, int], Admit] = {}  # by stream and slot
        self._busy = False

    async def run(self, steps: AsyncIterator[Step]) -> AsyncIterator[StepResult]:
        """Results of `steps`, one each, in the order of each stream."""
        if self._busy:
            raise ProtocolError("another coordinator is running this rank's steps")
        self._busy = True
        results: asyncio.Queue[StepResult | Exception | None] = asyncio.Queue()
        answers = Answers(
            self._runtime.rank, len(self._siblings), results.put_nowait, self._release
        )
        relays = [
            Relay(stub, f"TP rank {t} of node {self._node}", answers)
            for t, stub in enumerate(self._siblings, start=1)
        ]
        reader = asyncio.create_task(self._read(steps, relays, answers, results))
        over = False
        try:
            while not over or answers or not results.empty():
                result = await results.get()
                if result is None:
                    over = True
                elif isinstance(result, Exception):
                    raise result
                else:
                    if not result.error:
                        self._runtime.passed()
                    yield result
                    if result.error:
                        self._runtime.fail(result.error)
                        return
        except Exception as error:
            self._runtime.fail(f"rank {self._runtime.rank} can't take steps: {error}")
            raise
        finally:
            reader.cancel()
            for relay in relays:
                relay.close(lost=bool(self._running))
            self._busy = False
            if self._running:
                self._runtime.fail("the coordinator's steps ended while requests were running")

    async def _read(
        self,
        steps: AsyncIterator[Step],
        relays: Sequence[Relay],
        answers: Answers,
        results: asyncio.Queue[StepResult | Exception | None],
    ) -> None:
        try:
            async for message in steps:
                if message.stream not in self._streams:
                    raise ProtocolError(
                        f"node {self._node} takes no part in stream {message.stream}"
                    )
                answers.check_room(message.stream)
                delta, ended = self._own(delta_from(message))
                outcome = self._runtime.submit(delta)
                for relay in relays:
                    relay.steps.put(delta_to(delta))
                answers.begin(delta, outcome, ended)
        except Exception as error:
            results.put_nowait(error)
        finally:
            results.put_nowait(None)

    def _own(self, delta: Delta) -> tuple[Delta, list[Key]]:
        """`delta` with the pages of this node, and the keys whose pages it lets go."""
        stream = delta.stream
        ended = [(stream, slot) for slot in delta.ends]
        keys = [self._running.pop(place).key for place in ended if place in self._running]
        for admit in delta.admits:
            self._running[stream, admit.slot] = admit
        return replace(
            delta,
            grows=tuple(self._with_more_pages(stream, grow) for grow in delta.grows),
            admits=tuple(map(self._with_pages, delta.admits)),
        ), keys

    def _with_pages(self, admit: Admit) -> Admit:
        books = self._runtime.books  # none beside TP rank 0, which has filled the pages in
        if books is None or self._node not in admit.owners:
            return admit
        return replace(admit, pages=_admitted(books, admit.key))

    def _with_more_pages(self, stream: int, grow: Grow) -> Grow:
        books, admit = self._runtime.books, self._running.get((stream, grow.slot))
        if books is None or admit is None:  # the engine refuses a slot that doesn't run
            return grow
        owners = grow.shares.owners if self._divides_tokens else admit.owners
        if self._node not in owners:
            return grow
        return replace(grow, pages=_admitted(books, admit.key))

    def _release(self, keys: Sequence[Key]) -> None:
        """Every rank of the node is past the last step of `keys`."""
        books = self._runtime.books
        if books is not None:
            for key in keys:
                books.release(key)


def _admitted(books: PagePool, key: Key) -> tuple[int, ...]:
    """The pages of `key`, which runs from now on if it did not before."""
    books.admit(key)
    return books.holding(key).pages
