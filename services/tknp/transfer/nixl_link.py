"""The NIXL writes of one push to one owner rank: posted by the worker, awaited by the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

import torch

from tknp.errors import DeadlineExceeded, TknpError, Unavailable
from tknp.kv.storage import KvStorage
from tknp.transfer.extents import Extent, PoolShape, extents
from tknp.transfer.nixl_agent import NixlAgent
from tknp.transfer.nixl_remote import Remote
from tknp.transfer.nixl_worker import NixlWorker, Write
from tknp.transfer.plan import Route


class NixlLink:
    """The writes of one push to one owner rank.

    `_running`, `_sent_bytes`, `_failure` change on the worker thread only; others read them.
    """

    def __init__(
        self,
        worker: NixlWorker,
        agent: NixlAgent,
        remote: Remote,
        name: str,
        route: Route,
        storage: KvStorage,
        shape: PoolShape,
        pages: tuple[int, ...],
        timeout_s: float,
    ) -> None:
        self._worker = worker
        self._agent = agent
        self._remote = remote
        self._name = name
        self._route = route
        self._storage = storage
        self._shape = shape
        self._pages = pages
        self._timeout_s = timeout_s
        self._tokens = (0, 0)
        self._first: Sequence[Extent] = ()
        self._running = 0
        self._sent_bytes = 0
        self._failure: TknpError | None = None
        self._aborted = False
        self._ended: Future[None] | None = None

    def send(self, layer: int, start: int, stop: int) -> None:
        if self._failure:
            raise self._failure
        if self._aborted:
            raise Unavailable(f"{self._name}: the transfer was aborted")
        runs = self._runs(layer, start, stop)
        if not runs:
            return
        agent, remote = self._agent, self._remote
        behind = layer - self._route.layers.start
        src = self._storage.data.data_ptr() + behind * self._shape.layer_bytes
        dst = remote.address + behind * remote.shape.layer_bytes
        local_runs = [(src + run.src, run.nbytes, agent.device) for run in runs]
        remote_runs = [(dst + run.dst, run.nbytes, remote.device) for run in runs]
        computed = None
        if self._storage.data.is_cuda:
            computed = torch.cuda.Event()  # type: ignore[no-untyped-call]
            computed.record()

        def post() -> int:
            if computed is not None:
                computed.synchronize()
            return agent.write(local_runs, remote_runs, remote.segment, remote.name)

        nbytes = sum(run.nbytes for run in runs)
        self._worker.submit(Write(post, self._stopped, self._count, partial(self._end, nbytes)))

    def _runs(self, layer: int, start: int, stop: int) -> Sequence[Extent]:
        """As in the first layer of the route: every layer of a chunk has the same."""
        if layer not in self._route.layers:
            return ()
        if self._tokens != (start, stop):
            self._tokens = start, stop
            self._first = extents(
                self._route, self._pages, self._shape, self._remote.shape,
                self._route.layers.start, start, stop,
            )  # fmt: skip
        return self._first

    async def finish(self) -> int:
        await self._drained()
        if self._failure:
            raise self._failure
        return self._sent_bytes

    async def abort(self) -> None:
        self._aborted = True
        await self._drained()

    def _count(self) -> None:
        self._running += 1
        self._remote.running += 1

    def _stopped(self) -> bool:
        return self._aborted or self._failure is not None

    def _end(self, nbytes: int, error: Exception | None) -> None:
        self._running -= 1
        self._remote.running -= 1
        if error is not None:
            self._remote.lost = True
            self._failure = self._failure or Unavailable(
                f"{self._name}: a NIXL write failed ({type(error).__name__}: {error}); its process "
                "is gone or can't be reached"
            )
        elif not self._stopped():
            self._sent_bytes += nbytes
        self._settle()

    def _settle(self) -> None:
        if self._ended is not None and not self._running and not self._ended.done():
            self._ended.set_result(None)

    async def _drained(self) -> None:
        """Wait until no write of this link waits or runs; `timeout_s` without progress raises."""
        ended: Future[None] = Future()

        def watch() -> None:
            self._ended = ended
            self._settle()

        self._worker.call(watch)
        waiter = asyncio.wrap_future(ended)
        while True:
            running = self._running
            done, _ = await asyncio.wait([waiter], timeout=self._timeout_s)
            if done:
                return
            if self._running >= running:
                raise DeadlineExceeded(
                    f"{self._name} let no NIXL write end within {self._timeout_s} s; "
                    f"{running} are in flight, so its pages must stay quarantined"
                )
