"""Who goes first, who goes on and who ends, in a whole pool with two small nodes.

Each node holds six pages of 16 tokens. Requests are held at the prefill replica's own seams
(compute a chunk, finish a transfer), and time passes when a test says so.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from click.testing import CliRunner

from tknp.cli.main import main
from tknp.client import Client, RequestFailed, request_for
from tknp.local import InProcessPool
from tknp.rpc.ids import unpack_ids
from tknp.v1.common_pb2 import Sampling
from tknp.v1.coordinator_pb2 import Status
from tknp.v1.inference_pb2 import GenerateRequest, GenerateResponse

pytestmark = pytest.mark.asyncio(loop_scope="module")
Stream = AsyncGenerator[GenerateResponse, None]
NODE_TOKENS = 96
LATER_S = 1000.0
STAGES = {"queued": "queued", "prefill": "placed", "transfer": "placed", "running": "running"}
SEAMS = {"prefill": "chunk", "transfer": "finish"}


class Gate:
    """Holds whoever comes to `seam` of a prefill replica, until it is opened."""

    def __init__(self, requests: Any, seam: str) -> None:
        self.reached = asyncio.Event()
        self.opened = asyncio.Event()
        self._requests = requests
        self._seam = seam
        self._real = getattr(requests, seam)
        setattr(requests, seam, self._hold)

    def open(self) -> None:
        setattr(self._requests, self._seam, self._real)
        self.opened.set()

    async def _hold(self, *values: Any) -> Any:
        self.reached.set()
        await self.opened.wait()
        return await self._real(*values)


class Theatre:
    """A running pool, its client and its clock."""

    def __init__(self, recording: Path) -> None:
        self.recording = recording
        self.skew_s = 0.0
        self._alone: dict[tuple[tuple[int, ...], int], list[int]] = {}
        self.pool: InProcessPool
        self.client: Client

    def clock(self) -> float:
        return time.monotonic() + self.skew_s

    def stream(self, prompt: Sequence[int], tokens: int, **values: Any) -> Stream:
        request = request_for(prompt, Sampling(max_tokens=tokens, ignore_eos=True))
        request.MergeFrom(GenerateRequest(**values))
        return self.client.generate(request)

    async def alone(self, prompt: Sequence[int], tokens: int) -> list[int]:
        """What a request gives when nothing else runs; asked once."""
        key = tuple(prompt), tokens
        if key not in self._alone:
            self._alone[key] = await ids(self.stream(prompt, tokens))
        return self._alone[key]

    async def until(self, true: Callable[[Status], bool]) -> Status:
        """Wait until the status is as `true` says."""
        while not true(status := await self.client.status()):
            pass
        return status

    async def at_rest(self) -> None:
        """Wait until no page is used, and compare with the owners' own books."""
        await self.until(lambda status: not any(node.used_pages for node in status.nodes))
        for node in self.pool.nodes:
            books = node.runtime.books
            assert books is not None
            books.check_integrity()
            assert books.free_tokens == books.total_tokens

    def recorded(self) -> list[dict[str, Any]]:
        """Calls of the scheduler so far, up to the last step that has finished."""
        text = self.recording.read_text()
        return [json.loads(line) for line in text[: text.rindex("\n")].splitlines()[1:]]

    @asynccontextmanager
    async def victim(self, where: str, **values: Any) -> AsyncIterator[Stream]:
        """A request held at `where`, beside two that run and must not notice what becomes of it."""
        tokens = NODE_TOKENS - 16 if where == "queued" else NODE_TOKENS - 48
        jobs = [([n + 1] * 16, tokens) for n in range(2)]
        alone = [await self.alone(*job) for job in jobs]
        others = [self.stream(*job) for job in jobs]
        begun = [await next_ids(other) for other in others]
        gate = None
        if where in SEAMS:
            gate = Gate(self.pool.prefill[0].runtime.requests, SEAMS[where])
        victim = self.stream([9] * 8, 24, **values)
        assert (await anext(victim)).HasField("accepted")
        if where == "running":
            await next_ids(victim)
            await next_ids(victim)  # a step's
        elif gate is not None:
            await gate.reached.wait()
        else:
            await self.until(lambda status: status.queued == 1)
        yield victim
        if gate is not None:  # held pages are free before the replica goes on
            used = {-(-(16 + tokens) // 16), 0}
            await self.until(lambda status: {n.used_pages for n in status.nodes} <= used)
            gate.open()
        assert [b + await ids(o) for b, o in zip(begun, others, strict=True)] == alone
        await self.at_rest()


def calls_of(lines: list[dict[str, Any]], call: str) -> list[dict[str, Any]]:
    return [line for line in lines if line["call"] == call]


async def ids(stream: Stream) -> list[int]:
    return [i async for r in stream for i in unpack_ids("token_ids", r.token_ids)]


async def next_ids(stream: Stream) -> list[int]:
    """Wait for the next tokens of `stream`, which goes on."""
    async for response in stream:
        if response.token_ids:
            return unpack_ids("token_ids", response.token_ids)
    raise AssertionError("the stream ended without tokens")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def theatre(
    make_pool: Callable[..., Any],
    random_checkpoint: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Theatre]:
    theatre = Theatre(tmp_path_factory.mktemp("recording") / "scheduling.jsonl")
    opened = make_pool(
        random_checkpoint(layers=2, q_heads=4, kv_heads=2), nodes=2, page_size=16,
        prefill_chunk=16, kv_memory_bytes=7 * 16 * 512, kv_transfer="grpc", lease_s=3600,
        record=str(theatre.recording),
    )  # fmt: skip
    async with (
        InProcessPool(opened, theatre.clock) as theatre.pool,
        Client(opened.config.coordinator) as theatre.client,
    ):
        yield theatre


async def test_what_does_not_fit_waits_and_then_runs(theatre: Theatre) -> None:
    jobs = [([n + 1] * 40, 30) for n in range(6)]
    alone = [await theatre.alone(*job) for job in jobs]
    together = asyncio.gather(*(ids(theatre.stream(*job)) for job in jobs))
    status = await theatre.until(lambda status: status.queued > 0)
    assert all(node.used_pages <= node.pages for node in status.nodes)
    assert await together == alone
    await theatre.at_rest()


async def test_higher_priorities_go_first_and_equals_in_order(theatre: Theatre) -> None:
    """Each needs a whole node; two others hold the nodes until all four wait."""
    gate = Gate(theatre.pool.prefill[0].runtime.requests, "chunk")
    blockers = [theatre.stream([n + 1] * 80, 16) for n in range(2)]
    for blocker in blockers:
        await anext(blocker)
    streams = []
    for waiting, priority in enumerate([-5, 0, 0, 7], start=1):
        streams.append(theatre.stream([3] * 80, 16, priority=priority))
        await anext(streams[-1])
        await theatre.until(lambda status, waiting=waiting: status.queued == waiting)
    gate.open()
    found = await asyncio.gather(*(ids(stream) for stream in (*blockers, *streams)))
    assert found[2] == found[3] == found[4] == found[5]
    await theatre.at_rest()
    lines = theatre.recorded()
    low, first, second, high = range(len(calls_of(lines, "submit")))[-4:]
    placed = [order for line in calls_of(lines, "place") for order, *_ in line["gave"]]
    assert placed[-4:] == [high, first, second, low]


@pytest.mark.parametrize("where", STAGES)
async def test_a_client_that_goes_away_leaves_nothing(where: str, theatre: Theatre) -> None:
    before = await theatre.client.status()
    async with theatre.victim(where) as victim:
        await victim.aclose()
        await theatre.until(lambda status: status.cancelled == before.cancelled + 1)
    after = await theatre.client.status()
    assert (after.cancelled, after.failed) == (before.cancelled + 1, before.failed)


async def test_a_cancelled_row_leaves_with_the_next_step(theatre: Theatre) -> None:
    """Of its two steps in flight the last ends before the step that begins without it."""
    async with theatre.victim("running") as victim:
        await victim.aclose()
    lines = theatre.recorded()
    at = max(i for i, line in enumerate(lines) if line["call"] == "end")
    assert lines[at]["gave"] == "running"
    _, ends, *_ = calls_of(lines[at:], "delta")[0]["gave"]
    assert len(ends) == 1


@pytest.mark.parametrize("where", ["queued", "prefill", "transfer"])
async def test_a_deadline_ends_a_request_before_it_runs(where: str, theatre: Theatre) -> None:
    before = await theatre.client.status()
    async with theatre.victim(where, timeout_s=LATER_S / 2) as late:
        theatre.skew_s += LATER_S
        with pytest.raises(RequestFailed) as raised:
            await ids(late)
    assert raised.value.code == "DEADLINE_EXCEEDED"
    assert raised.value.message == f"not done within 500 s: it was still {STAGES[where]}"
    assert (await theatre.client.status()).failed == before.failed + 1


async def test_a_deadline_ends_a_running_request(theatre: Theatre) -> None:
    stream = theatre.stream([5] * 16, 80, timeout_s=LATER_S / 2)
    got = await next_ids(stream)
    theatre.skew_s += LATER_S
    with pytest.raises(RequestFailed, match="it was still running") as raised:
        got += await ids(stream)
    assert raised.value.code == "DEADLINE_EXCEEDED"
    assert len(got) < 80
    await theatre.at_rest()


async def test_the_calls_own_deadline_counts_too(theatre: Theatre) -> None:
    blockers = [theatre.stream([n + 1] * 80, 16) for n in range(2)]
    gate = Gate(theatre.pool.prefill[0].runtime.requests, "chunk")
    for blocker in blockers:
        await anext(blocker)
    waiting = theatre.client.generate(request_for([1], Sampling(max_tokens=1)), timeout_s=0.3)
    with pytest.raises(RequestFailed) as raised:
        await ids(waiting)
    assert raised.value.code == "DEADLINE_EXCEEDED"
    await theatre.until(lambda status: status.queued == 0)
    gate.open()
    assert [len(await ids(blocker)) for blocker in blockers] == [16, 16]
    await theatre.at_rest()


async def test_a_long_prompt_does_not_hold_up_a_short_one(theatre: Theatre) -> None:
    """The long prompt has computed one chunk of five when the short one comes."""
    requests: Any = theatre.pool.prefill[0].runtime.requests
    real, chunks = requests.chunk, []
    short_came = asyncio.Event()

    async def chunk(key: Any, part: Sequence[int], *values: Any) -> asyncio.Future[Any]:
        chunks.append(part[0])
        if part[0] == 2:
            short_came.set()
        computed = await real(key, part, *values)

        async def after() -> Any:
            drawn = await computed
            await short_came.wait()
            return drawn

        return asyncio.ensure_future(after())

    requests.chunk = chunk
    try:
        long = theatre.stream([1] * 80, 4)
        await anext(long)
        short = theatre.stream([2] * 8, 4)
        finished: list[str] = []

        async def run(name: str, stream: Stream) -> None:
            await next_ids(stream)
            finished.append(name)
            await ids(stream)

        await asyncio.gather(run("long", long), run("short", short))
    finally:
        del requests.chunk
    assert sorted(chunks) == [1] * 5 + [2]
    assert chunks.index(2) == 1
    assert finished == ["short", "long"]
    await theatre.at_rest()


async def test_streams_survive_a_crowd_that_comes_and_goes(theatre: Theatre) -> None:
    """Cancellations at any moment, of every kind of request; those that stay are exact."""
    dice = random.Random(5)
    jobs = [([n + 1] * dice.randint(1, 60), dice.randint(1, 30)) for n in range(24)]
    alone = [await theatre.alone(*job) for job in jobs[::3]]

    async def leave(job: tuple[list[int], int], messages: int) -> None:
        stream = theatre.stream(*job, priority=dice.randint(0, 1))
        for _ in range(messages):
            if await anext(stream, None) is None:
                break
        await stream.aclose()

    stay = [ids(theatre.stream(*job)) for job in jobs[::3]]
    go = [leave(job, dice.randint(1, 6)) for i, job in enumerate(jobs) if i % 3]
    found = await asyncio.gather(*stay, *go)
    assert found[: len(alone)] == alone
    await theatre.at_rest()


async def test_all_of_it_can_be_replayed(theatre: Theatre, tmp_path: Path) -> None:
    """Every decision that the tests above have led to; another one is found."""
    while len(theatre.recorded()) <= 1000:  # by itself: there were none
        await ids(theatre.stream([5] * 8, 24))
    same = CliRunner().invoke(main, ["replay", str(theatre.recording)])
    assert same.exit_code == 0, same.output
    calls, _, words = same.output.partition(" ")
    assert int(calls.replace(",", "")) > 1000
    assert "every decision as recorded" in words
    *lines, _ = theatre.recording.read_text().splitlines()  # the last may be half a line
    at = max(i for i, line in enumerate(lines) if '"call":"delta"' in line)
    changed = {**json.loads(lines[at]), "gave": "something else"}
    other = tmp_path / "other.jsonl"
    other.write_text("\n".join([*lines[:at], json.dumps(changed), ""]))
    found = CliRunner().invoke(main, ["replay", str(other)])
    assert found.exit_code == 1
    assert f"line {at + 1}: delta gave something else" in " ".join(found.output.split())
