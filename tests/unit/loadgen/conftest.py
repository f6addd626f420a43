"""What the tests of the load generator share."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tknp_loadgen.echo.grpc_server import GrpcEcho
from tknp_loadgen.echo.http import HttpEcho, Seen
from tknp_loadgen.echo.script import Plan, RealTime, Received, Script
from tknp_loadgen.measure.result import Result, read_result, write_summary
from tknp_loadgen.run.plan import Load, WorkerPlan
from tknp_loadgen.run.settings import RunSettings
from tknp_loadgen.run.timer import make_timer
from tknp_loadgen.run.worker import Worker
from tknp_loadgen.target.factory import TargetSettings, open_target
from tknp_loadgen.trace.format import Trace

SAMPLES = Path(__file__).parents[4] / "shared" / "traces"


@pytest.fixture(scope="session")
def sample() -> Callable[[str], Path]:
    """A sample of a published trace; the test is skipped where there is none."""

    def find(name: str) -> Path:
        path = SAMPLES / name
        if not path.exists():
            pytest.skip(f"no sample {name}")
        return path

    return find


@pytest.fixture(scope="session")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer.json of one token a byte, with one token before every prompt."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: number for number, letter in enumerate(letters)}
    tokenizer: Any = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture(scope="session")
def word_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer.json of one token a word of three letters or more; others fall into bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    from tknp_loadgen.trace.words import WORDS

    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([" " + " ".join(WORDS)] * 3, trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


class VirtualTime:
    """A clock that only the echo server and the schedule move: every time in a test is exact.

    Before it moves on, the server waits until the client has stamped what was sent last. Good for
    one request at a time.
    """

    def __init__(self) -> None:
        self.now_ns = 1_000_000_000
        self._stamps = self._expected = 0
        self._stamped = asyncio.Event()

    def clock(self) -> int:
        """The worker's."""
        return self.now_ns

    def stamp(self) -> int:
        """The target's: read once for whatever arrives."""
        self._stamps += 1
        self._stamped.set()
        return self.now_ns

    def begin(self) -> None:
        """A request has reached the server."""
        self._expected = self._stamps

    def at(self, deadline_ns: int, callback: Callable[[], None]) -> None:
        self.now_ns = max(self.now_ns, deadline_ns)
        asyncio.get_running_loop().call_soon(callback)

    def close(self) -> None: ...

    async def pause(self, seconds: float) -> None:
        self.now_ns += round(seconds * 1e9)

    async def written(self) -> None:
        self._expected += 1
        while self._stamps < self._expected:
            self._stamped.clear()
            await self._stamped.wait()


def make_trace(
    outputs: Sequence[int], arrivals_s: Sequence[float] | None = None, inputs: int = 7, **more: Any
) -> Trace:
    """A trace of requests with these output lengths."""
    at = np.zeros(len(outputs)) if arrivals_s is None else np.array(arrivals_s)
    return Trace(
        7, more.pop("generator", {"arrivals": {"kind": "by hand"}}),
        {"kind": "ids", "first_id": 1, "last_id": 99}, np.rint(at * 1e6).astype(np.int64),
        np.full(len(outputs), inputs, np.int64), np.array(outputs, np.int64), **more,
    )  # fmt: skip


async def stop_when(worker: Worker, stop: Callable[[Worker], bool]) -> None:
    while not stop(worker):  # noqa: ASYNC110  # it is the worker's state
        await asyncio.sleep(0.005)


async def run_once(
    directory: Path,
    trace: Trace,
    plan: Plan,
    api: str = "http",
    virtual: bool = True,
    goodput: tuple[str, ...] = (),
    **options: Any,
) -> tuple[Result, Seen]:
    """Run `trace` with one worker in this process against an echo server; read the result back.

    `options` are fields of Load, of the target (chunk_usage, ignore_eos), or `server_time` and
    `drop` of the echo server; `stop` is called with the worker until it returns true.
    """
    gc.freeze()  # until the worker's end, or it collects what all other tests have left: a second
    time_ = VirtualTime()

    def begin(received: Received) -> Script:
        time_.begin()
        return plan(received)

    server_time = options.pop("server_time", time_ if virtual else RealTime())
    drop, stop = options.pop("drop", None), options.pop("stop", None)
    echo: HttpEcho | GrpcEcho = (
        GrpcEcho(begin, server_time)
        if api == "grpc"
        else HttpEcho(begin, server_time, keep_bodies=True, drop=drop)
    )
    port = await echo.start()
    url = f"grpc://127.0.0.1:{port}" if api == "grpc" else f"http://127.0.0.1:{port}/v1"
    target_options = {
        name: options.pop(name) for name in ("chunk_usage", "ignore_eos") if name in options
    }
    target = TargetSettings(url, "m", chat=api == "chat", **target_options)
    trace.write(directory / "trace.jsonl")
    load = Load(**{"num_warmups": 0, "connections": 1, **options})
    settings = RunSettings(target, directory, load, goodput)
    opened = open_target(target, time_.stamp if virtual else time.monotonic_ns)
    timer = time_ if virtual else make_timer()
    clock = time_.clock if virtual else time.monotonic_ns
    worker = Worker(
        WorkerPlan(0, 1, str(directory), target, load, goodput), trace, opened, clock, timer
    )
    try:
        await worker.prepare()
        stopper = asyncio.create_task(stop_when(worker, stop)) if stop else None
        done = await worker.run(clock())
        if stopper is not None:
            await stopper
    finally:
        timer.close()
        await opened.close()
        await echo.stop()
    config = settings.config(trace) | {"workers": [done]}
    (directory / "config.yaml").write_text(yaml.safe_dump(config))
    result = read_result(directory)
    write_summary(result)
    return result, echo.seen


@pytest.fixture
def trace_of() -> Callable[..., Trace]:
    return make_trace


@pytest.fixture
def run_echo(tmp_path: Path) -> Callable[..., Any]:
    """`await run_echo(trace, plan, ...)`: see run_once."""

    (tmp_path / "run").mkdir()

    async def run(trace: Trace, plan: Plan, *arguments: Any, **options: Any) -> Any:
        return await run_once(tmp_path / "run", trace, plan, *arguments, **options)

    return run
