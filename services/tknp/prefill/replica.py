"""TP rank 0 of a replica: takes requests, gives every rank the same chunks in the same order.

    for each request   room -> Begin -> open on all ranks -> chunk, chunk, ... -> finish -> Complete
    between requests   a request submits its next chunk when its last is done, so that chunks of
                       concurrent requests alternate and a long prompt doesn't hold up short ones

Leases at the owners are renewed while a request is under way. Any failure, the caller's going away
among them, aborts the transfer on every rank first and tells the owners after. Where a write can't
be brought to an end (its owner is frozen), the owners are told when it has ended.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from grpc import aio

from tknp.errors import TknpError, Unavailable
from tknp.kv.holding import Key
from tknp.prefill.compute import Drawn, first_row
from tknp.prefill.metrics import PrefillMetrics
from tknp.prefill.requests import LocalRequests, Target
from tknp.rpc.convert import key_to
from tknp.rpc.ids import pack_ids
from tknp.rpc.outbox import Outbox
from tknp.rpc.status import error_from
from tknp.sampling.grammar import Grammars
from tknp.sampling.params import SamplingParams
from tknp.v1.attention_owner_pb2 import TransferRequest, TransferResponse
from tknp.v1.attention_owner_pb2_grpc import AttentionOwnerStub
from tknp.v1.common_pb2 import Compatibility, Placement
from tknp.v1.prefill_pb2 import ChunkDone, PrefillChunk
from tknp.v1.prefill_pb2_grpc import PrefillStub

if TYPE_CHECKING:
    from tknp.v1.attention_owner_pb2_grpc import AttentionOwnerAsyncStub

log = logging.getLogger(__name__)
_OWNER_CALL_S = 5.0
_SIBLING_CLOSE_S = 1.0
_RENEWALS_A_LEASE = 6
_CLOSING = "this prefill replica is shutting down"
_SIBLING_ENDED = "a TP rank of this prefill replica has ended"


@dataclass(frozen=True)
class Job:
    """One prompt. `generated`: how many of its last ids a replay had generated before."""

    key: Key
    epoch: int
    prompt: Sequence[int]
    params: SamplingParams
    placements: Sequence[Placement]
    owners: Sequence[str]
    generated: int


@dataclass(frozen=True)
class Result:
    drawn: Drawn
    compute_s: float
    transfer_s: float
    transferred_bytes: int


class Replica:
    """`siblings`: channels to the other TP ranks. `compatibility`: shown to owners on Begin.

    `channel`: opens one to an owner. `addresses`: of the replica's ranks. `one_sided`: how it
    writes. `broken(reason)`: called when another rank of the replica is lost.
    """

    def __init__(
        self,
        requests: LocalRequests,
        siblings: Sequence[aio.Channel],
        channel: Callable[[str], aio.Channel],
        *,
        vocab_size: int,
        chunk_tokens: int,
        compatibility: Compatibility,
        addresses: Sequence[str],
        one_sided: bool,
        lease_s: float,
        metrics: PrefillMetrics,
        broken: Callable[[str], None],
        grammars: Grammars,
    ) -> None:
        self._grammars = grammars
        self._requests = requests
        self._vocab_size = vocab_size
        self._chunk_tokens = chunk_tokens
        self._compatibility = compatibility
        self._lease_s = lease_s
        self._metrics = metrics
        self._writer = f"prefill-{uuid.uuid4().hex[:12]}"
        self._open = channel
        self._owners: dict[str, aio.Channel] = {}
        self._sequence = 0
        self._order = asyncio.Lock()
        self._entry = asyncio.Lock()
        self._addresses = addresses
        self._one_sided = one_sided
        self._siblings = [_Sibling(channel, broken) for channel in siblings]
        self._jobs: set[asyncio.Task[Result]] = set()
        self._aborts: set[asyncio.Task[None]] = set()
        self._closing = False

    async def run(self, job: Job) -> Result:
        """Compute and deliver `job`. Raises TknpError; nothing of it is left then."""
        if self._closing:
            raise Unavailable(_CLOSING)
        task = asyncio.create_task(self._run(job))
        self._jobs.add(task)
        task.add_done_callback(self._jobs.discard)
        try:
            return await task
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if self._closing and not (caller is not None and caller.cancelling()):
                raise Unavailable(_CLOSING) from None
            raise

    async def _run(self, job: Job) -> Result:
        if job.params.json_schema:  # read now, so that no chunk waits for it
            await asyncio.to_thread(self._grammars.compile, job.params.json_schema)
        target = Target(job.epoch, self._writer, job.placements, job.owners)
        leaders = [
            AttentionOwnerStub(self._channel(address))
            for placement, address in zip(job.placements, job.owners, strict=True)
            if placement.tp_rank == 0
        ]
        transfer = TransferRequest(
            key=key_to(job.key), epoch=job.epoch, writer=self._writer, lease_s=self._lease_s,
            compatibility=self._compatibility, one_sided=self._one_sided,
            writer_addresses=self._addresses,
        )  # fmt: skip
        renewing = asyncio.create_task(self._renew(leaders, transfer))
        try:
            async with self._entry:
                await self._requests.room(len(job.prompt))
                await _each([leader.Begin for leader in leaders], transfer)
                await self._requests.open(job.key, len(job.prompt), target)
            result = await self._deliver(job, target)
            await _each([leader.Complete for leader in leaders], transfer)
            self._metrics.delivered(
                len(job.prompt), result.compute_s, result.transfer_s, result.transferred_bytes
            )
            return result
        except BaseException as error:
            self._metrics.aborted(error)
            # The caller may be gone; what must not be cut short runs on its own.
            await asyncio.shield(self._keep(self._abort(job, leaders, transfer)))
            raise
        finally:
            renewing.cancel()

    async def close(self) -> None:
        """End every request: nothing of it is written after this."""
        self._closing = True
        for job in self._jobs:
            job.cancel()
        await asyncio.gather(*self._jobs, return_exceptions=True)
        for abort in self._aborts:
            abort.cancel()
        for sibling in self._siblings:
            await sibling.close()
        for channel in self._owners.values():
            await channel.close(None)

    async def _deliver(self, job: Job, target: Target) -> Result:
        began = time.perf_counter()
        drawn: Drawn | None = None
        delivered: list[asyncio.Future[ChunkDone]] = []
        for start in range(0, len(job.prompt), self._chunk_tokens):
            ids = job.prompt[start : start + self._chunk_tokens]
            last = start + len(ids) == len(job.prompt)
            row = None
            if last:
                row = first_row(
                    job.params, self._vocab_size, job.prompt, job.generated, self._grammars
                )
            async with self._order:
                answers = self._tell_siblings(
                    PrefillChunk(
                        key=key_to(job.key), epoch=job.epoch, token_ids=pack_ids(ids),
                        start=start, prompt_tokens=len(job.prompt), last=last,
                        placements=target.placements if start == 0 else (),
                        owners=target.owners if start == 0 else (), writer=target.writer,
                    )
                )  # fmt: skip
                own = await self._requests.chunk(job.key, ids, start, row)
            drawn = await own
            if last:
                delivered = answers
            else:
                await _all_done(answers)
        computed = time.perf_counter()
        sent = await self._requests.finish(job.key)
        sent += sum(done.transferred_bytes for done in await _all_done(delivered))
        if drawn is None:
            raise TknpError(f"prefill of {job.key} drew no token")
        return Result(drawn, computed - began, time.perf_counter() - computed, sent)

    def _tell_siblings(self, chunk: PrefillChunk) -> list[asyncio.Future[ChunkDone]]:
        if not self._siblings:
            return []
        chunk.sequence = self._sequence
        self._sequence += 1
        return [sibling.send(chunk) for sibling in self._siblings]

    async def _abort(
        self, job: Job, leaders: Sequence[AttentionOwnerAsyncStub], transfer: TransferRequest
    ) -> None:
        try:
            await self._stop(job)
        except TknpError as error:
            log.warning("abort of %s: %s; its pages stay quarantined", job.key, error)
            self._keep(self._abort_later(job, leaders, transfer))
        else:
            await self._tell_aborted(job, leaders, transfer)

    async def _abort_later(
        self, job: Job, leaders: Sequence[AttentionOwnerAsyncStub], transfer: TransferRequest
    ) -> None:
        """Writes of `job` are in flight and can't be recalled: wait for their end."""
        while True:
            await asyncio.sleep(self._lease_s / _RENEWALS_A_LEASE)
            try:
                await self._stop(job)
            except TknpError as error:
                log.debug("abort of %s: %s", job.key, error)
            else:
                return await self._tell_aborted(job, leaders, transfer)

    async def _stop(self, job: Job) -> None:
        """Stop `job` on every rank. Raises TknpError if something of it may be in flight still."""
        lost: TknpError | None = None
        answers: list[asyncio.Future[ChunkDone]] = []
        try:
            async with self._order:
                abort = PrefillChunk(key=key_to(job.key), epoch=job.epoch, abort=True)
                answers = self._tell_siblings(abort)
        except TknpError as error:  # this rank has to stop all the same
            lost = error
        await self._requests.abort(job.key)
        await _all_done(answers)
        if lost is not None:
            raise lost

    async def _tell_aborted(
        self, job: Job, leaders: Sequence[AttentionOwnerAsyncStub], transfer: TransferRequest
    ) -> None:
        try:
            await _each([leader.Abort for leader in leaders], transfer)
        except TknpError as error:
            log.warning("owners of %s were not told of its abort: %s", job.key, error)

    def _keep(self, abort: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(abort)
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)
        return task

    async def _renew(
        self, leaders: Sequence[AttentionOwnerAsyncStub], transfer: TransferRequest
    ) -> None:
        while True:
            await asyncio.sleep(self._lease_s / _RENEWALS_A_LEASE)
            try:
                await _each([leader.Renew for leader in leaders], transfer)
            except TknpError as error:
                log.warning("lease of %s not renewed: %s", transfer.key.request_id, error)

    def _channel(self, address: str) -> aio.Channel:
        if address not in self._owners:
            self._owners[address] = self._open(address)
        return self._owners[address]


class _Sibling:
    """The stream of chunks to one other TP rank."""

    def __init__(self, channel: aio.Channel, broken: Callable[[str], None]) -> None:
        self._stub = PrefillStub(channel)
        self._broken = broken
        self._closing = False
        self._chunks: Outbox[PrefillChunk] = Outbox()
        self._waiting: dict[int, asyncio.Future[ChunkDone]] = {}
        self._reader: asyncio.Task[None] | None = None

    def send(self, chunk: PrefillChunk) -> asyncio.Future[ChunkDone]:
        if self._reader is None:
            self._reader = asyncio.create_task(self._read())
        if self._reader.done():
            raise Unavailable(_SIBLING_ENDED)
        answer: asyncio.Future[ChunkDone] = asyncio.get_running_loop().create_future()
        self._waiting[chunk.sequence] = answer
        self._chunks.put(chunk)
        return answer

    async def close(self) -> None:
        """No more chunks; the other rank may tell this end from a loss."""
        self._closing = True
        self._chunks.close()
        if self._reader is not None:
            await asyncio.wait([self._reader], timeout=_SIBLING_CLOSE_S)
            self._reader.cancel()

    async def _read(self) -> None:
        reason = _SIBLING_ENDED
        try:
            async for done in self._stub.Follow(self._chunks):
                self._waiting.pop(done.sequence).set_result(done)
        except aio.AioRpcError as error:
            reason = f"{reason}: {error.details()}"
        finally:
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(Unavailable(reason))
                    answer.exception()  # its request may have ended without waiting for it
            if not self._closing:
                self._broken(reason)


async def _all_done(answers: Sequence[asyncio.Future[ChunkDone]]) -> list[ChunkDone]:
    done = await asyncio.gather(*answers)
    for answer in done:
        if answer.error:
            raise TknpError(answer.error)
    return list(done)


async def _each(
    calls: Sequence[aio.UnaryUnaryMultiCallable[TransferRequest, TransferResponse]],
    transfer: TransferRequest,
) -> None:
    """Make all `calls`. None is under way any more when this ends, by an error or otherwise.

    What comes after a failure is Abort, and a Begin must not overtake it.
    """
    answers = await asyncio.gather(
        *(call(transfer, timeout=_OWNER_CALL_S) for call in calls), return_exceptions=True
    )
    for answer in answers:
        if isinstance(answer, aio.AioRpcError):
            raise error_from(answer, "attention owner") from answer
        if isinstance(answer, BaseException):
            raise answer
