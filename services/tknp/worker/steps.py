"""Steps of one rank: from the coordinator (or TP rank 0) to the engine, results back, in order.

    coordinator --Step--> TP rank 0 --engine
                             |  \\--Step, pages filled in--> other TP ranks --engine
                             <----------- StepResult ------------/

TP rank 0 knows the pages of its requests, adds them to the admits that its node owns, and frees
the pages of ended requests once every TP rank of the node has finished a step without them. A step
whose result carries an error is the last one. A stream that ends while requests run, anybody's,
means that the coordinator is gone: the pool's state is lost with it, so every rank fails and is
started anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from grpc import aio

from tknp.engine.batch import Admit, Delta
from tknp.engine.decode import Outcome
from tknp.errors import ProtocolError
from tknp.kv.holding import Key
from tknp.rpc.convert import delta_from, delta_to, token_to
from tknp.rpc.outbox import Outbox
from tknp.v1.attention_owner_pb2_grpc import AttentionOwnerStub
from tknp.v1.decode_root_pb2_grpc import DecodeRootStub
from tknp.v1.step_pb2 import Step, StepResult
from tknp.worker.runtime import DecodeRuntime

if TYPE_CHECKING:
    from tknp.v1.attention_owner_pb2_grpc import AttentionOwnerAsyncStub
    from tknp.v1.decode_root_pb2_grpc import DecodeRootAsyncStub

_IN_FLIGHT = 8


@dataclass
class _Pending:
    delta: Delta
    outcome: Future[Outcome]
    ended: list[Key]


class _Relay:
    """The stream of steps to one other TP rank."""

    def __init__(self, stub: DecodeRootAsyncStub | AttentionOwnerAsyncStub) -> None:
        self.steps: Outbox[Step] = Outbox()
        self._call = stub.Run(self.steps)
        self.results = aiter(self._call)

    def close(self, lost: bool) -> None:
        """No more steps. `lost`: not because they were over, which the other rank has to know."""
        self.steps.close()
        if lost:
            self._call.cancel()


class StepServer:
    """Serves Run on one rank. `siblings`: channels to the other TP ranks, on TP rank 0 only."""

    def __init__(self, runtime: DecodeRuntime, siblings: Sequence[aio.Channel]) -> None:
        self._runtime = runtime
        root = not runtime.pool.layout.blocks[runtime.rank.node].empty
        self._siblings = [DecodeRootStub(c) if root else AttentionOwnerStub(c) for c in siblings]
        self._owned: dict[int, Key] = {}
        self._running: set[int] = set()
        self._busy = False

    async def run(self, steps: AsyncIterator[Step]) -> AsyncIterator[StepResult]:
        """Results of `steps`, one each, in order."""
        if self._busy:
            raise ProtocolError("another coordinator is running this rank's steps")
        self._busy = True
        relays = [_Relay(stub) for stub in self._siblings]
        queue: asyncio.Queue[_Pending | None] = asyncio.Queue()
        reader = asyncio.create_task(self._read(steps, relays, queue))
        try:
            while (pending := await queue.get()) is not None:
                result = await self._finish(pending, relays)
                if not result.error:
                    self._runtime.passed()
                yield result
                if result.error:
                    self._runtime.fail(result.error)
                    return
            await reader
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
        relays: Sequence[_Relay],
        queue: asyncio.Queue[_Pending | None],
    ) -> None:
        try:
            async for message in steps:
                if queue.qsize() >= _IN_FLIGHT:
                    raise ProtocolError(f"more than {_IN_FLIGHT} steps are in flight")
                delta = delta_from(message)
                self._running.difference_update(delta.ends)
                self._running.update(admit.slot for admit in delta.admits)
                ended = [self._owned.pop(s) for s in delta.ends if s in self._owned]
                delta = replace(delta, admits=tuple(map(self._with_pages, delta.admits)))
                outcome = self._runtime.submit(delta)
                for relay in relays:
                    relay.steps.put(delta_to(delta))
                queue.put_nowait(_Pending(delta, outcome, ended))
        finally:
            queue.put_nowait(None)

    def _with_pages(self, admit: Admit) -> Admit:
        if admit.owner != self._runtime.rank.node:
            return admit
        self._owned[admit.slot] = admit.key
        books = self._runtime.books
        if books is None:  # TP rank 0 has filled them in
            return admit
        books.admit(admit.key)
        return replace(admit, pages=books.holding(admit.key).pages)

    async def _finish(self, pending: _Pending, relays: Sequence[_Relay]) -> StepResult:
        delta = pending.delta
        result = StepResult(epoch=delta.epoch, stream=delta.stream, step=delta.step)
        try:
            outcome = await asyncio.wrap_future(pending.outcome)
            _fill(result, outcome)
        except Exception as error:
            result.error = f"rank {self._runtime.rank}, step {delta.step}: {error}"
            return result
        for t, relay in enumerate(relays, start=1):
            try:
                result.error = result.error or (await anext(relay.results)).error
            except (aio.AioRpcError, StopAsyncIteration):
                result.error = f"TP rank {t} of node {self._runtime.rank.node} ended its steps"
        if self._runtime.books is not None and not result.error:
            for key in pending.ended:
                self._runtime.books.release(key)
        return result


def _fill(result: StepResult, outcome: Outcome) -> None:
    result.seconds = outcome.seconds
    result.slots.extend(outcome.slots)
    for row, token in enumerate(outcome.tokens):
        message = token_to(token, outcome.logprobs[row], outcome.errors.get(row))
        result.tokens.append(message)
