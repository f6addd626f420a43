"""The scheduler against what it steers: real page pools, and the batches that every rank keeps.

Owners and ranks are `PagePool` and `Batch`, which refuse whatever doesn't fit: a page given twice,
a slot taken twice, an end of a row that doesn't run, a step out of order. Every rule is a message
that may come at any time, in any order that a real pool allows, under every way to divide requests:
several streams, several owners, and pages that come while a request runs. Rules share one state,
hence one class and one file.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tknp.coordinator.division import Division
from tknp.coordinator.growth import Growth
from tknp.coordinator.limits import Limits
from tknp.coordinator.request import Request, Stage
from tknp.coordinator.scheduler import Scheduler
from tknp.engine.batch import Batch, Delta, Row
from tknp.errors import CapacityError, ProtocolError
from tknp.kv.holding import Key
from tknp.kv.pages import PagePool
from tknp.layout.layout import NodeSpec, make_layout
from tknp.layout.strategy import Strategy
from tknp.model.config import ModelConfig
from tknp.sampling.params import SamplingParams
from tknp.v1.common_pb2 import FinishReason

EOS, STOP, WORD = 0, 1, 2
PAGE_SIZE = 4
LEASE_S = 1.0
MOST_TURNS = 2000
TOKENS = st.sampled_from([*range(WORD, 30), EOS, STOP])
MODEL = ModelConfig(
    family="llama", layers=4, hidden_size=64, intermediate_size=96, q_heads=4, kv_heads=4,
    head_dim=16, vocab_size=100, max_position=512, norm_eps=1e-5, rope_theta=1e4,
)  # fmt: skip
LAYOUTS: dict[str, dict[str, Any]] = {
    "one owner": {"strategy": Strategy.TKNP, "width": 1},
    "several owners": {"strategy": Strategy.TKNP, "interleave": 2},
    "two copies": {"strategy": Strategy.TKNP, "copies": 2, "width": 2, "interleave": 3},
    "replicas": {"strategy": Strategy.DP},
    "layers": {"strategy": Strategy.PP},
    "all together": {"strategy": Strategy.HELIX, "interleave": 2},
}


class SchedulerMachine(RuleBasedStateMachine):
    """`ends`: how often each request has ended. `rows`: it had in steps that were launched.

    `scripts`: what each request draws, whatever attempt or step it draws in.
    """

    @initialize(
        name=st.sampled_from(sorted(LAYOUTS)),
        pages=st.sampled_from([2, 2, 4]).flatmap(
            lambda n: st.lists(st.integers(3, 9), min_size=n, max_size=n)
        ),
        max_batch=st.integers(1, 6), reserve_ratio=st.sampled_from([0.0, 0.5, 1.0]),
    )  # fmt: skip
    def build(self, name: str, pages: list[int], max_batch: int, reserve_ratio: float) -> None:
        layout = make_layout(MODEL, "float32", 1, [NodeSpec(0)] * len(pages), **LAYOUTS[name])
        limits = Limits(
            pages=tuple(pages), division=Division.of(layout, PAGE_SIZE), max_batch=max_batch,
            max_queue=5, max_model_len=60, max_prompt_tokens=60, eos_ids=frozenset({EOS}),
            reserve_ratio=reserve_ratio,
        )  # fmt: skip
        self.layout = layout
        self.scheduler = Scheduler(limits, epoch=3)
        self.books = [PagePool(n + 1, PAGE_SIZE, lambda: 0.0) for n in pages]
        streams = range(layout.streams)
        self.batches = [Batch(3, layout, max_batch, stream) for stream in streams]
        self.launched: list[dict[int, tuple[int, ...]]] = [{} for _ in streams]
        self.answered: list[list[int]] = [[] for _ in streams]
        self.leaving: list[dict[int, list[Key]]] = [{} for _ in streams]
        self.to_release: list[Request] = []
        self.growing: list[tuple[Growth, list[int] | None]] = []
        self.all: list[Request] = []
        self.scripts: dict[Request, list[int]] = {}
        self.ends: Counter[Request] = Counter()
        self.rows: Counter[Request] = Counter()
        self.finishes: dict[Request, FinishReason.ValueType] = {}

    @rule(output=st.integers(2, 24), number=st.integers(1, 3))
    def arrive(self, output: int, number: int) -> None:
        """The common way into the batch: as far as there is room, submitted and prefilled."""
        for _ in range(number):
            self.submit(3, output, 0, False, [WORD])
        self.place()
        self._prefill_all()
        self.launch()

    @rule(
        prompt=st.integers(1, 30), output=st.integers(1, 20), priority=st.integers(-1, 1),
        ignore_eos=st.booleans(), words=st.lists(TOKENS, min_size=1, max_size=20),
    )  # fmt: skip
    def submit(
        self, prompt: int, output: int, priority: int, ignore_eos: bool, words: list[int]
    ) -> None:
        scheduler = self.scheduler
        division, pages = scheduler.limits.division, scheduler.limits.pages
        if division.fewest_owners(pages, prompt, prompt + output) is None:
            return
        params = SamplingParams(max_tokens=output, ignore_eos=ignore_eos, stop_token_ids=(STOP,))
        request = Request(Key(f"r{len(self.all)}", 0), range(prompt), params, 0.0, priority)
        full = len(scheduler.waiting) >= 5
        try:
            scheduler.submit(request)
        except CapacityError:
            assert full
        else:
            assert not full
            self.all.append(request)
            self.scripts[request] = (words * output)[:output]

    @rule()
    def place(self) -> None:
        waiting = list(self.scheduler.waiting)
        assert waiting == sorted(waiting, key=lambda r: (-r.priority, r.order))
        placed = self.scheduler.place()
        assert placed == waiting[: len(placed)]
        for request in placed:
            tokens = self.scheduler.reserved_tokens(request)
            for node, count in zip(request.owners, tokens, strict=True):
                self.books[node].reserve(request.key, count, LEASE_S)
            if request.preemptions:  # it never has to ask again
                assert request.covered == request.most_tokens

    @rule(data=st.data())
    @precondition(lambda self: self.scheduler.placed)
    def lose_replica(self, data: st.DataObject) -> None:
        request = self._choose(data, self.scheduler.placed)
        self._release(request.key)
        key = request.key
        self.scheduler.unplace(request)
        assert request.key == Key(key.request_id, key.attempt + 1)

    @rule(data=st.data())
    @precondition(lambda self: self.scheduler.placed)
    def first_token(self, data: st.DataObject) -> None:
        self._prefill(self._choose(data, self.scheduler.placed))

    @rule()
    def launch(self) -> None:
        """As a pool does: until there is nothing to launch."""
        for stream, batch in zip(self.scheduler.streams, self.batches, strict=True):
            while (delta := self.scheduler.delta(stream.number)) is not None:
                self._launched(delta, batch)
            asked = {growth.request for growth, _ in self.growing}
            held = any(request in asked for request in stream.short())
            assert len(stream.in_flight) == 2 or held or not (stream.ready or batch.rows)

    def _launched(self, delta: Delta, batch: Batch) -> None:
        left = [batch.rows[slot].admit.key for slot in delta.ends]
        before = {slot: row.owners for slot, row in batch.rows.items()}
        self.leaving[delta.stream][delta.step] = left
        batch.apply(delta)
        for admit in delta.admits:
            for node in admit.owners:
                self.books[node].admit(admit.key)
        for grow in delta.grows:
            row = batch.rows[grow.slot]
            for node in set(row.owners) - set(before[grow.slot]):
                self.books[node].admit(row.admit.key)
        self.launched[delta.stream][delta.step] = batch.order
        stream = self.scheduler.streams[delta.stream]
        for slot in batch.order:
            self.rows[stream.running[slot]] += 1
            self._check_room(batch.rows[slot])
        batch.advance()

    def _check_room(self, row: Row) -> None:
        """Whoever keeps the row's token has a slot for it."""
        tokens, shares = row.position + 1, row.shares
        for shard, node in enumerate(row.owners):
            divided = self.layout.divides == "tokens"
            kept = shares.length(shard, tokens) if divided else tokens
            assert kept <= len(self.books[node].holding(row.admit.key).pages) * PAGE_SIZE

    @rule(data=st.data(), fails=st.sampled_from([False, False, False, True]))
    @precondition(lambda self: any(self.launched))
    def answer(self, data: st.DataObject, fails: bool) -> None:
        stream = data.draw(st.sampled_from([s for s, steps in enumerate(self.launched) if steps]))
        self._answer(stream, fails)

    def _answer(self, stream: int, fails: bool = False) -> None:
        step = min(self.launched[stream])
        slots = self.launched[stream].pop(step)
        rows = self.scheduler.streams[stream].in_flight[step]
        ids: list[int | None] = [self._drawn(rows[slot]) for slot in slots]
        if fails and ids:
            ids[0] = None
        for row, request, finish in self.scheduler.tokens(step, slots, ids, stream):
            assert self.ends[request] == 0
            if ids[row] is None:
                assert request.stage is Stage.ENDED
                self.ends[request] += 1
            else:
                self._took(request, finish)
        self.answered[stream].append(step)

    @rule(data=st.data())
    @precondition(lambda self: any(self.answered))
    def finish(self, data: st.DataObject) -> None:
        self._finish(data.draw(st.sampled_from([s for s, a in enumerate(self.answered) if a])))

    def _finish(self, stream: int) -> None:
        step = self.answered[stream].pop(0)
        for key in self.leaving[stream].pop(step):
            self._release(key)
        self.scheduler.finished(step, stream)

    @rule()
    def grow(self) -> None:
        self.growing += [(growth, None) for growth in self.scheduler.growths()]

    @rule(data=st.data(), refused=st.sampled_from([False, False, True]))
    @precondition(lambda self: any(given is None for _, given in self.growing))
    def owners_are_asked(self, data: st.DataObject, refused: bool) -> None:
        asked = [i for i, (_, given) in enumerate(self.growing) if given is None]
        self._ask(data.draw(st.sampled_from(asked)), refused)

    def _ask(self, index: int, refused: bool) -> None:
        growth = self.growing[index][0]
        given = []
        for node in growth.nodes:
            books = self.books[node]
            if refused:
                continue
            try:
                if node == growth.further:
                    books.reserve(growth.key, PAGE_SIZE, LEASE_S)
                    books.settle(growth.key)
                else:
                    books.extend(growth.key, PAGE_SIZE)
            except ProtocolError:  # it has left meanwhile; a lack of room is a failure of the test
                continue
            given.append(node)
        self.growing[index] = growth, given

    @rule(data=st.data())
    @precondition(lambda self: any(given is not None for _, given in self.growing))
    def owners_answer(self, data: st.DataObject) -> None:
        told = [i for i, (_, given) in enumerate(self.growing) if given is not None]
        self._grew(data.draw(st.sampled_from(told)))

    def _grew(self, index: int) -> None:
        growth, given = self.growing.pop(index)
        assert given is not None
        if not self.scheduler.grew(growth, given):
            if growth.further is not None:
                self.books[growth.further].release(growth.key)
            self.scheduler.shrunk(growth)

    @rule(data=st.data())
    @precondition(lambda self: self.scheduler.live)
    def end(self, data: st.DataObject) -> None:
        request = self._choose(data, self.scheduler.live)
        before = request.stage
        assert self.scheduler.end(request) is before
        self.ends[request] += 1
        if before in (Stage.PLACED, Stage.READY):
            self.to_release.append(request)
        assert self.scheduler.end(request) is Stage.ENDED

    @rule()
    @precondition(lambda self: self.to_release)
    def release(self) -> None:
        request = self.to_release.pop()
        self._release(request.key)
        self.scheduler.freed(request)

    @rule(data=st.data())
    @precondition(lambda self: not self.growing)
    def quarantine(self, data: st.DataObject) -> None:
        """Pages that nobody holds any more and that can't be given out either."""
        node = data.draw(st.integers(0, len(self.books) - 1))
        key = Key("quarantine", 0)
        self.books[node].release(key)
        pages = data.draw(st.integers(0, self.books[node].free_tokens // PAGE_SIZE))
        if pages:
            self.books[node].reserve(key, pages * PAGE_SIZE, LEASE_S)
        self.scheduler.withhold(node, pages)

    @invariant()
    def holds(self) -> None:
        scheduler = getattr(self, "scheduler", None)
        if scheduler is None:
            return
        for stream in scheduler.streams:
            assert len(stream.in_flight) <= 2
            slots = [r.slot for r in self._seated(stream.number)]
            assert len(slots) == len(set(slots)) <= scheduler.limits.max_batch
        for books, load in zip(self.books, scheduler.loads, strict=True):
            books.check_integrity()
            free = books.free_tokens // PAGE_SIZE
            assert 0 <= load.free <= free
            assert load.free == free or self.growing
        assert all(count == 1 for count in self.ends.values())
        assert all(request.preemptions <= 1 for request in self.all)
        assert set(scheduler.live) == {r for r in self.all if not self.ends[r]}
        for request in self.all:
            assert request.generated == self.scripts[request][: len(request.generated)]

    def teardown(self) -> None:
        """Everything ends, and everything is given back."""
        if not hasattr(self, "scheduler"):
            return
        scheduler = self.scheduler
        for node, books in enumerate(self.books):
            books.release(Key("quarantine", 0))
            scheduler.withhold(node, 0)
        turns = 0
        while scheduler.live or self.growing or self.to_release or self._steps_open():
            turns += 1
            assert turns < MOST_TURNS
            self._go_on()
        self._go_on()
        assert all(self.ends[request] == 1 for request in self.all)
        assert [load.used for load in scheduler.loads] == [0] * len(self.books)
        for stream in scheduler.streams:
            assert (len(stream.slots), stream.requests) == (
                scheduler.limits.max_batch, [0] * len(self.books),
            )  # fmt: skip
        for request, finish in self.finishes.items():
            wasted = self.rows[request] - (len(request.generated) - 1)
            if request.preemptions:
                continue
            if finish == FinishReason.FINISH_REASON_LENGTH:
                assert wasted == 0
            else:
                assert wasted in (0, 1)

    def _go_on(self) -> None:
        self.place()
        self._prefill_all()
        self.launch()
        for stream in range(len(self.launched)):
            if self.launched[stream]:
                self._answer(stream)
            while self.answered[stream]:
                self._finish(stream)
        self.grow()
        while self.growing:
            if self.growing[-1][1] is None:
                self._ask(len(self.growing) - 1, refused=False)
            self._grew(len(self.growing) - 1)
        while self.to_release:
            self.release()

    def _prefill_all(self) -> None:
        for request in sorted(self.scheduler.placed, key=lambda r: r.order):
            self._prefill(request)

    def _prefill(self, request: Request) -> None:
        assert request.shares.prompt == request.tokens
        for node in request.owners:
            self.books[node].begin(request.key, "prefill")
            assert self.books[node].complete(request.key, "prefill")
        finish = self.scheduler.first_token(request, self._drawn(request))
        self._took(request, finish)
        if finish is not None:
            self.to_release.append(request)

    def _drawn(self, request: Request) -> int:
        """Its next token; any where the row is a discarded one."""
        script = self.scripts[request]
        return script[min(len(request.generated), len(script) - 1)]

    def _took(self, request: Request, finish: FinishReason.ValueType | None) -> None:
        """The scheduler's verdict on a token, checked against the plain rules."""
        params, token = request.params, request.generated[-1]
        stops = token == STOP or (token == EOS and not params.ignore_eos)
        expected = None
        if stops:
            expected = FinishReason.FINISH_REASON_STOP
        elif len(request.generated) == params.max_tokens:
            expected = FinishReason.FINISH_REASON_LENGTH
        assert finish == expected
        if finish is not None:
            self.ends[request] += 1
            self.finishes[request] = finish

    def _release(self, key: Key) -> None:
        for books in self.books:
            books.release(key)

    def _steps_open(self) -> bool:
        return any(self.launched) or any(self.answered)

    def _seated(self, stream: int) -> list[Request]:
        state = self.scheduler.streams[stream]
        placed = [r for r in self.scheduler.placed if r.stream == stream]
        return [*placed, *state.ready, *state.running.values()]

    @staticmethod
    def _choose(data: st.DataObject, requests: object) -> Request:
        return data.draw(st.sampled_from(sorted(requests, key=lambda r: r.order)))  # type: ignore[call-overload]


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
