"""A pool of real processes on this machine, and closed batches of requests through it.

Requests are token ids of an exact length, greedy, and go on to the last token asked for. Times are
those at which their client, this process, sees tokens, each as it comes or `interval` together:

    submit all        first tokens (prefill)             held until all are ready      last tokens
    |---- ttft ----->|                                  |-- step --|-- step --| ... --|
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise

from rich.console import Console

from tknp.cli.local_pool import LOOPBACK, LocalPool, RunningPool, client_of, running
from tknp.client import Client, received_ids, request_for
from tknp.v1.common_pb2 import Sampling

_START_S = 600.0
_HOLD_S = 3600.0  # lease of a request that is held after its prefill
_VOCABULARY = 49_152  # of SmolLM2


@dataclass
class Stream:
    """One request as its client saw it: when each token arrived, in seconds since submission."""

    tokens_s: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Decoded:
    """A batch that decoded together: token k of `streams` came from one step, for every k > 0."""

    streams: Sequence[Stream]
    interval: int = 1

    @property
    def ends_s(self) -> list[float]:
        """When the last client had the last token of each message but its first."""
        ends = [max(times) for times in zip(*(s.tokens_s for s in self.streams), strict=True)]
        return ends[self.interval :: self.interval]

    @property
    def step_s(self) -> float:
        """Median time from step to step, over the steps of a message."""
        gaps = [after - before for before, after in pairwise(self.ends_s)]
        return statistics.median(gaps) / self.interval

    @property
    def tokens_per_s(self) -> float:
        """Over all steps but those of the first `interval` tokens, in which requests join."""
        ends = self.ends_s
        steps = (len(ends) - 1) * self.interval
        return len(self.streams) * steps / (ends[-1] - ends[0])


def prompts(count: int, tokens: int) -> list[list[int]]:
    """Different random prompts, the same in every run."""
    source = random.Random(tokens)
    return [[source.randrange(_VOCABULARY) for _ in range(tokens)] for _ in range(count)]


@asynccontextmanager
async def pool(
    threads: int, *, nodes: int = 1, tp: int = 1, prefill: int = 1, memory_bytes: int = 0,
    kv_memory_bytes: int | None = None, settings: Mapping[str, object],
) -> AsyncIterator[tuple[RunningPool, Client]]:  # fmt: skip
    """SmolLM2 in bfloat16; every process computes with `threads`.

    `memory_bytes`: weights plus KV of each rank; 0: `kv_memory_bytes` is its KV.
    """
    os.environ["OMP_NUM_THREADS"] = str(threads)
    local = LocalPool(
        "smollm2", nodes, tp, prefill, 1, LOOPBACK, 0,
        memories=(memory_bytes,) * nodes if memory_bytes else (),
        settings={
            "dtype": "bfloat16", "kv_memory_bytes": kv_memory_bytes, "lease_s": _HOLD_S, **settings,
        },
    )  # fmt: skip
    config = local.configure()
    async with (
        running(config, Console(stderr=True), _START_S) as up,
        client_of(config) as client,
    ):
        yield up, client


async def generate(client: Client, prompt: Sequence[int], tokens: int, interval: int = 1) -> Stream:
    """One request, to its end."""
    request = request_for(prompt, Sampling(max_tokens=tokens, ignore_eos=True))
    request.stream_interval = interval
    began, stream = time.perf_counter(), Stream()
    async for response in client.generate(request):
        now = time.perf_counter() - began
        stream.tokens_s += [now] * len(received_ids(response.token_ids))
    return stream


async def decode(
    client: Client, batch: Sequence[Sequence[int]], tokens: int, interval: int = 1
) -> Decoded:
    """`batch` at once, `tokens` each."""
    asked = (generate(client, prompt, tokens, interval) for prompt in batch)
    return Decoded(await asyncio.gather(*asked), interval)
