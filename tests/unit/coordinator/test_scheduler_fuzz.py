"""The scheduler against what it steers: real page pools, and the batch that every rank keeps.

Owners and ranks are `PagePool` and `Batch`, which refuse whatever doesn't fit: a page given twice,
a slot taken twice, an end of a row that doesn't run, a step out of order. Every rule is a message
that may come at any time, in any order that a real pool allows.
"""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tknp.coordinator.limits import Limits
from tknp.coordinator.request import Request, Stage
from tknp.coordinator.scheduler import Scheduler
from tknp.engine.batch import Batch, Delta
from tknp.errors import CapacityError
from tknp.kv.holding import Key
from tknp.kv.pages import PagePool
from tknp.sampling.params import SamplingParams
from tknp.v1.common_pb2 import FinishReason

EOS, STOP, WORD = 0, 1, 2
PAGE_SIZE = 4
LEASE_S = 1.0
TOKENS = st.sampled_from([WORD, WORD, WORD, WORD, EOS, STOP, None])


class SchedulerMachine(RuleBasedStateMachine):
    """`ends`: how often each request has ended. `rows`: it had in steps that were launched."""

    @initialize(
        pages=st.lists(st.integers(2, 9), min_size=1, max_size=3), max_batch=st.integers(1, 6)
    )
    def build(self, pages: list[int], max_batch: int) -> None:
        limits = Limits(
            pages=tuple(pages), page_size=PAGE_SIZE, max_batch=max_batch, max_queue=5,
            max_model_len=30, max_prompt_tokens=30, eos_ids=frozenset({EOS}),
        )  # fmt: skip
        self.scheduler = Scheduler(limits, epoch=3)
        self.books = [PagePool(n + 1, PAGE_SIZE, lambda: 0.0) for n in pages]
        self.batch = Batch(3, 0, len(pages), max_batch)
        self.launched: dict[int, tuple[int, ...]] = {}
        self.answered: list[int] = []
        self.leaving: dict[int, list[tuple[int, Key]]] = {}
        self.keys: dict[int, tuple[int, Key]] = {}
        self.to_release: list[Request] = []
        self.all: list[Request] = []
        self.ends: Counter[Request] = Counter()
        self.rows: Counter[Request] = Counter()
        self.finishes: dict[Request, FinishReason.ValueType] = {}
        self.withheld = [0] * len(pages)

    @rule(output=st.integers(2, 9), number=st.integers(1, 3))
    def arrive(self, output: int, number: int) -> None:
        """The common way into the batch: as far as there is room, submitted and prefilled."""
        for _ in range(number):
            self.submit(3, output, 0, False)
        self.place()
        self._prefill_all()
        self.launch()

    @rule(
        prompt=st.integers(1, 20), output=st.integers(1, 9), priority=st.integers(-1, 1),
        ignore_eos=st.booleans(),
    )  # fmt: skip
    def submit(self, prompt: int, output: int, priority: int, ignore_eos: bool) -> None:
        scheduler = self.scheduler
        if prompt + output > scheduler.limits.longest:
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

    @rule()
    def place(self) -> None:
        waiting = list(self.scheduler.waiting)
        assert waiting == sorted(waiting, key=lambda r: (-r.priority, r.order))
        placed = self.scheduler.place()
        assert placed == waiting[: len(placed)]
        for request in placed:
            tokens = request.tokens_reserved
            self.books[request.owner].reserve(request.key, tokens, LEASE_S)
        if len(placed) < len(waiting) and len(self._slots()) < self.scheduler.limits.max_batch:
            tokens = waiting[len(placed)].tokens_reserved
            assert all(load.free * PAGE_SIZE < tokens for load in self.scheduler.loads)

    @rule(data=st.data())
    @precondition(lambda self: self.scheduler.placed)
    def lose_replica(self, data: st.DataObject) -> None:
        request = self._choose(data, self.scheduler.placed)
        self.books[request.owner].release(request.key)
        key = request.key
        self.scheduler.unplace(request)
        assert request.key == Key(key.request_id, key.attempt + 1)

    @rule(data=st.data(), token=TOKENS.filter(lambda token: token is not None))
    @precondition(lambda self: self.scheduler.placed)
    def first_token(self, data: st.DataObject, token: int) -> None:
        request = self._choose(data, self.scheduler.placed)
        self.books[request.owner].begin(request.key, "prefill")
        assert self.books[request.owner].complete(request.key, "prefill")
        finish = self.scheduler.first_token(request, token)
        self._took(request, token, finish)
        if finish is not None:
            self.to_release.append(request)

    @rule()
    def launch(self) -> None:
        """As a pool does: until there is nothing to launch."""
        while (delta := self.scheduler.delta()) is not None:
            self._launched(delta)
        idle = not (self.scheduler.ready or self.batch.rows)
        assert self.scheduler.in_flight == 2 or idle

    def _launched(self, delta: Delta) -> None:
        self.leaving[delta.step] = [self.keys.pop(slot) for slot in delta.ends]
        self.batch.apply(delta)
        for admit in delta.admits:
            self.books[admit.owner].admit(admit.key)
            self.keys[admit.slot] = (admit.owner, admit.key)
        self.launched[delta.step] = self.batch.order
        self.rows.update(self.scheduler.running[slot] for slot in self.batch.order)
        self.batch.advance()

    @rule(data=st.data())
    @precondition(lambda self: self.launched)
    def answer(self, data: st.DataObject) -> None:
        step = min(self.launched)
        slots = self.launched.pop(step)
        ids = [data.draw(TOKENS) for _ in slots]
        for row, request, finish in self.scheduler.tokens(step, slots, ids):
            assert self.ends[request] == 0
            token = ids[row]
            if token is None:
                assert request.stage is Stage.ENDED
                self.ends[request] += 1
            else:
                self._took(request, token, finish)
        self.answered.append(step)

    @rule()
    @precondition(lambda self: self.answered)
    def finish(self) -> None:
        step = self.answered.pop(0)
        for owner, key in self.leaving.pop(step):
            self.books[owner].release(key)
        self.scheduler.finished(step)

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
        self.books[request.owner].release(request.key)
        self.scheduler.freed(request)

    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        """Pages that nobody holds any more and that can't be given out either."""
        node = data.draw(st.integers(0, len(self.books) - 1))
        key = Key("quarantine", 0)
        self.books[node].release(key)
        pages = data.draw(st.integers(0, self.books[node].free_tokens // PAGE_SIZE))
        if pages:
            self.books[node].reserve(key, pages * PAGE_SIZE, LEASE_S)
        self.withheld[node] = pages
        self.scheduler.withhold(node, pages)

    @invariant()
    def holds(self) -> None:
        scheduler = getattr(self, "scheduler", None)
        if scheduler is None:
            return
        assert scheduler.in_flight <= 2
        slots = self._slots()
        assert len(slots) == len(set(slots)) <= scheduler.limits.max_batch
        for books, load in zip(self.books, scheduler.loads, strict=True):
            books.check_integrity()
            assert load.free * PAGE_SIZE == books.free_tokens
        assert all(count == 1 for count in self.ends.values())
        assert set(scheduler.live) == {r for r in self.all if not self.ends[r]}

    def teardown(self) -> None:
        """Everything ends, and everything is given back."""
        if not hasattr(self, "scheduler"):
            return
        scheduler = self.scheduler
        for node, books in enumerate(self.books):
            books.release(Key("quarantine", 0))
            scheduler.withhold(node, 0)
        while scheduler.live or self.launched or self.answered or self.to_release:
            self._go_on()
        self._go_on()
        assert all(self.ends[request] == 1 for request in self.all)
        assert self._slots() == []
        assert [load.used for load in scheduler.loads] == [0] * len(self.books)
        for request, finish in self.finishes.items():
            wasted = self.rows[request] - (len(request.generated) - 1)
            if finish == FinishReason.FINISH_REASON_LENGTH:
                assert wasted == 0
            else:
                assert wasted in (0, 1)

    def _go_on(self) -> None:
        scheduler = self.scheduler
        self.place()
        self._prefill_all()
        self.launch()
        if self.launched:
            step = min(self.launched)
            slots = self.launched.pop(step)
            for _, request, finish in scheduler.tokens(step, slots, [WORD] * len(slots)):
                self._took(request, WORD, finish)
            self.answered.append(step)
        while self.answered:
            self.finish()
        while self.to_release:
            self.release()

    def _prefill_all(self) -> None:
        for request in sorted(self.scheduler.placed, key=lambda r: r.order):
            self.books[request.owner].begin(request.key, "prefill")
            self.books[request.owner].complete(request.key, "prefill")
            finish = self.scheduler.first_token(request, WORD)
            self._took(request, WORD, finish)
            if finish is not None:
                self.to_release.append(request)

    def _took(self, request: Request, token: int, finish: FinishReason.ValueType | None) -> None:
        """The scheduler's verdict on a token, checked against the plain rules."""
        params = request.params
        stops = token == STOP or (token == EOS and not params.ignore_eos)
        expected = None
        if stops:
            expected = FinishReason.FINISH_REASON_STOP
        elif len(request.generated) == params.max_tokens:
            expected = FinishReason.FINISH_REASON_LENGTH
        assert finish == expected
        assert request.generated[-1] == token
        if finish is not None:
            self.ends[request] += 1
            self.finishes[request] = finish

    def _slots(self) -> list[int]:
        scheduler = self.scheduler
        return [r.slot for r in (*scheduler.placed, *scheduler.ready, *scheduler.running.values())]

    @staticmethod
    def _choose(data: st.DataObject, requests: object) -> Request:
        return data.draw(st.sampled_from(sorted(requests, key=lambda r: r.order)))  # type: ignore[call-overload]


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
