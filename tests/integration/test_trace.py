"""`tknp trace` on running pools: what ranks report is what their programs say."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest
from click.testing import CliRunner

from tknp.cli.main import main
from tknp.cli.trace import record
from tknp.client import Client, request_for
from tknp.config import PoolConfig, write_pool
from tknp.errors import CapacityError, TknpError, Unavailable
from tknp.layout.program import Kind
from tknp.local import InProcessPool
from tknp.v1.common_pb2 import Sampling

T = TypeVar("T")
LAYERS = 4


@pytest.fixture
def pool_of(
    make_pool: Callable[..., Any], random_checkpoint: Callable[..., Path]
) -> Callable[..., Any]:
    def make(**settings: Any) -> Any:
        path = random_checkpoint(layers=LAYERS, q_heads=4, kv_heads=2, head_dim=16)
        return make_pool(path, page_size=16, kv_memory_bytes="512KiB", **settings)

    return make


async def _serving(config: PoolConfig, recording: Coroutine[Any, Any, T]) -> T:
    """What comes of `recording` while requests run."""
    request = request_for("a few words", Sampling(max_tokens=12, ignore_eos=True))
    task = asyncio.create_task(recording)
    async with Client(config.coordinator) as client:
        while not task.done():
            async for _ in client.generate(request, 60.0):
                pass
    return await task


async def test_every_rank_reports_every_operation_of_its_steps(pool_of: Any) -> None:
    pool = pool_of(nodes=2, tp=2)
    async with InProcessPool(pool):
        spans = await _serving(pool.config, record(pool.config, 3, 60.0))
    assert {span.rank for span in spans} == set(pool.layout.ranks())
    whole = Counter((s.rank, s.step) for s in spans if s.kind is Kind.PROJECT)
    blocks = {n: len(pool.layout.held[n][0].layers) for n in range(2)}
    assert all(count == blocks[rank.node] for (rank, _), count in whole.items())
    assert all(span.waited_s <= span.seconds + 1e-6 for span in spans)
    assert min(span.start_s for span in spans) == 0
    assert {span.layer for span in spans} == {-1, *range(LAYERS)}


async def test_the_command_writes_a_trace_of_all_and_a_picture_of_one_step(
    pool_of: Any, tmp_path: Path
) -> None:
    pool = pool_of(nodes=2)
    file, picture, trace = (tmp_path / name for name in ("pool.yaml", "step.html", "trace.json"))
    write_pool(pool.config, file)
    argv = ["trace", "--pool", str(file), "--steps", "4", "--timeout", "60",
            "--timeline", str(picture), "--output", str(trace)]  # fmt: skip
    async with InProcessPool(pool):
        command = asyncio.to_thread(CliRunner().invoke, main, argv)
        result = await _serving(pool.config, command)
    assert result.exit_code == 0, result.output
    (drawn,) = re.findall(r"<svg.*?</svg>", picture.read_text(), re.DOTALL)
    assert re.findall(r'class="node"[^>]*>([^<]*)<', drawn) == ["node 0", "node 1"]
    assert drawn.count('class="dense-0"') > LAYERS
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["pid"] for event in events if event["ph"] == "X"} == {0, 1}


async def test_streams_are_told_apart(pool_of: Any) -> None:
    pool = pool_of(nodes=2, strategy="dp")
    request = request_for("a few words", Sampling(max_tokens=12, ignore_eos=True))
    async with InProcessPool(pool), Client(pool.config.coordinator) as client:

        async def generate() -> None:
            async for _ in client.generate(request, 60.0):
                pass

        recording = asyncio.create_task(record(pool.config, 2, 60.0))
        while not recording.done():
            await asyncio.gather(generate(), generate())
        spans = await recording
    assert all(span.stream == span.rank.node for span in spans)


async def test_an_idle_pool_has_nothing_to_record(pool_of: Any) -> None:
    pool = pool_of(nodes=2)
    async with InProcessPool(pool) as running:
        with pytest.raises(Unavailable, match="send requests meanwhile"):
            await record(pool.config, 1, 0.2)
        assert not any(node.runtime.recorder.on for node in running.nodes)


async def test_one_recording_at_a_time(pool_of: Any) -> None:
    pool = pool_of(nodes=2)
    async with InProcessPool(pool) as running:
        held = running.nodes[0].runtime.recorder.start(1)
        with pytest.raises(CapacityError, match="being recorded already"):
            await record(pool.config, 1, 60.0)
        running.nodes[0].runtime.recorder.stop(held)


async def test_bad_values_are_refused(pool_of: Any) -> None:
    pool = pool_of(nodes=2)
    async with InProcessPool(pool):
        with pytest.raises(TknpError, match="steps=1000"):
            await record(pool.config, 1000, 1.0)
