"""The pools behind a gateway: where they are, whether they are ready, and which to ask.

    targets -> addresses (a DNS name may have many, and they change)
            -> one Upstream each: GetStatus every second, GetModel whenever it has come (back)
            -> pick: the ready one of a model with the least to do

A pool is asked for as long as it is named. One that doesn't answer, or says that it is not ready,
gets no requests until it does; what runs there is the business of `tknp.gateway.generation`. One
that drains is left to its streams, and its address dialled anew: a Service may lead to another one
by now. One that its name has no more is left so, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

from tknp.client import Client
from tknp.errors import DeadlineExceeded, InvalidValue, TknpError, Unavailable
from tknp.gateway.addresses import addresses
from tknp.v1.common_pb2 import Phase
from tknp.v1.coordinator_pb2 import Status
from tknp.v1.inference_pb2 import GetModelResponse

_LOOK_S = 1.0
_RESOLVE_S = 5.0
_CALL_S = 3.0


class UnknownModel(TknpError):
    """No pool serves a model of that name."""

    status = "NOT_FOUND"


class Upstream:
    """One pool. `inflight`: requests of this replica that it has now."""

    def __init__(self, target: str, client: Client) -> None:
        self.target = target
        self.client = client
        self.model: GetModelResponse | None = None
        self.status: Status | None = None
        self.error = "it has not answered yet"
        self.inflight = 0
        self._broken = 0

    @property
    def ready(self) -> bool:
        return self.model is not None and not self.error

    @property
    def drains(self) -> bool:
        """Whether it said last that it takes no more requests and ends those that it has."""
        return self.status is not None and self.status.phase == Phase.PHASE_DRAINING

    @property
    def load(self) -> int:
        """Requests that it has, as it said last or as this replica knows better."""
        said = self.status
        known = said.queued + said.prefilling + said.running if said is not None else 0
        return max(known, self.inflight)

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """A request is there for as long as the context lasts."""
        self.inflight += 1
        try:
            yield
        finally:
            self.inflight -= 1

    def lost(self, reason: str) -> None:
        """It broke a call: nobody is sent there until it answers again."""
        self.error = reason
        self._broken += 1

    async def look(self) -> None:
        """Ask how it is."""
        broken = self._broken
        try:
            self.status = await self.client.status(_CALL_S)
            if not self.status.ready:
                self.error = self.status.error or "it is not ready"
                return
            if self.model is None or self.error:  # another pool may have come back in its place
                self.model = await self.client.model(_CALL_S)
            if broken == self._broken:  # else it may have answered before it broke a call
                self.error = ""
        except TknpError as error:
            self.error = str(error)


class Pools:
    """Every pool that `targets` name. `connect` makes a client of an address."""

    def __init__(
        self, targets: Sequence[str], connect: Callable[[str], Client],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._targets = tuple(targets)
        self._connect = connect
        self._clock = clock
        self._served_s = float("-inf")
        self._upstreams: dict[str, Upstream] = {}
        self._left: list[Upstream] = []  # those that drain or are named no more
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def upstreams(self) -> list[Upstream]:
        return list(self._upstreams.values())

    @property
    def ready(self) -> bool:
        """Whether some pool takes requests."""
        return any(upstream.ready for upstream in self.upstreams)

    @property
    def away_s(self) -> float:
        """Seconds since a pool was last seen ready: 0 while one is, infinite before the first."""
        return 0.0 if self.ready else self._clock() - self._served_s

    @property
    def models(self) -> list[GetModelResponse]:
        """Models that have been seen, one of each name."""
        found = {u.model.name: u.model for u in self.upstreams if u.model is not None}
        return [found[name] for name in sorted(found)]

    async def start(self) -> None:
        """Find the pools and keep looking after them; returns after a first look."""
        await self._resolve()
        await self._look()
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for upstream in (*self.upstreams, *self._left):
            await upstream.client.close()

    def check(self) -> None:
        """Raise Unavailable if nobody looks after the pools any more."""
        if self._task is not None and self._task.done():
            raise Unavailable("the pools are no longer looked after")

    async def looked(self) -> None:
        """Wait until every pool has been asked again."""
        self._changed.clear()
        await self._changed.wait()

    def model(self, name: str) -> GetModelResponse:
        """The model called `name`; raises UnknownModel, or Unavailable while it may yet appear."""
        for model in self.models:
            if model.name == name:
                return model
        silent = [u for u in self.upstreams if u.model is None]
        if silent or not self._upstreams:
            raise Unavailable(self._why(silent))
        known = ", ".join(model.name for model in self.models)
        raise UnknownModel(f"model={name!r}: no pool serves it; served here: {known}")

    def named(self, name: str | None, field: str = "model") -> str:
        """The model asked for; where only one is served `field` may stay empty."""
        if name:
            return name
        known = self.models
        if len(known) > 1:
            names = ", ".join(model.name for model in known)
            raise InvalidValue(field, name, f"is required: {names} are served")
        if not known:
            raise Unavailable(self._why(self.upstreams))
        return known[0].name

    def pick(self, name: str) -> Upstream:
        """The ready pool of model `name` with the least to do; raises as `model` does."""
        self.model(name)
        serving = [u for u in self.upstreams if u.model is not None and u.model.name == name]
        ready = [u for u in serving if u.ready]
        if not ready:
            raise Unavailable(self._why(serving))
        return min(ready, key=lambda upstream: upstream.load)

    async def wait(self, name: str, longest_s: float, deadline_s: float = float("inf")) -> Upstream:
        """As `pick`, but waits for a pool to come (back); raises what `pick` said last.

        At `deadline_s`, on the clock of `time.monotonic`, it raises DeadlineExceeded instead.
        """
        try:
            async with asyncio.timeout(max(0.0, min(longest_s, deadline_s - time.monotonic()))):
                while True:
                    with contextlib.suppress(Unavailable):
                        return self.pick(name)
                    await self.looked()
        except TimeoutError:
            try:
                return self.pick(name)
            except Unavailable as error:
                if time.monotonic() < deadline_s:
                    raise
                raise DeadlineExceeded(f"the time was up: {error}") from error

    def _why(self, upstreams: Sequence[Upstream]) -> str:
        if not upstreams:
            return f"no pool is found at {', '.join(self._targets)}"
        return "; ".join(f"the pool at {u.target} takes no requests: {u.error}" for u in upstreams)

    async def _run(self) -> None:
        looks = 0
        while True:
            await asyncio.sleep(_LOOK_S)
            looks += 1
            if looks * _LOOK_S % _RESOLVE_S == 0:
                await self._resolve()
            await self._look()

    async def _look(self) -> None:
        for upstream in [left for left in self._left if left.inflight == 0]:
            self._left.remove(upstream)
            await upstream.client.close()
        await asyncio.gather(*(upstream.look() for upstream in self.upstreams))
        draining = [upstream for upstream in self.upstreams if upstream.drains]
        await asyncio.gather(*(self._follow(upstream).look() for upstream in draining))
        if self.ready:
            self._served_s = self._clock()
        self._changed.set()

    def _follow(self, drained: Upstream) -> Upstream:
        """Whoever is at the address of `drained` now, which is left to its streams."""
        following = Upstream(drained.target, self._connect(drained.target))
        following.model = drained.model  # which is listed until it is asked anew
        self._left.append(drained)
        self._upstreams[drained.target] = following
        return following

    async def _resolve(self) -> None:
        """Know the addresses of all targets; while one doesn't resolve, none is left."""
        asked = await asyncio.gather(*(addresses(target) for target in self._targets))
        found = {address for known in asked if known is not None for address in known}
        for address in sorted(found - self._upstreams.keys()):
            self._upstreams[address] = Upstream(address, self._connect(address))
        if None not in asked:
            for address in self._upstreams.keys() - found:
                self._left.append(self._upstreams.pop(address))
