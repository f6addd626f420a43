"""The load generator against a running pool: what it measures is what the pool says of itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tknp.cli.ports import free_ports
from tknp.local import InProcessPool
from tknp_loadgen.measure.percentile import QUANTILES, distribution
from tknp_loadgen.measure.server import read_scrapes
from tknp_loadgen.run.plan import Load
from tknp_loadgen.run.settings import RunSettings
from tknp_loadgen.run.supervisor import supervise
from tknp_loadgen.target.factory import TargetSettings
from tknp_loadgen.trace.arrivals import Arrivals
from tknp_loadgen.trace.build import PromptSettings, Settings, build
from tknp_loadgen.trace.lengths import Lengths

pytestmark = pytest.mark.timeout(240)
REQUESTS, OUTPUT_TOKENS = 32, 6


async def test_percentiles_agree_with_the_servers_histograms(
    make_pool: Callable[..., Any], random_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Within the width of a bucket, and of what the way between client and server takes.

    A client's latency of a request can't be below the server's, so neither can a percentile: both
    are observed values of the same rank. How far it may be above follows from the extra of the
    requests themselves, so that a slow machine changes nothing.
    """
    metrics = f"127.0.0.1:{free_ports(1)[0]}"
    pool = make_pool(random_checkpoint(), metrics_address=metrics, kv_memory_bytes="4MiB")
    trace = build(
        Settings(
            Arrivals("poisson", rate=30), Lengths(input_tokens=40, output_tokens=OUTPUT_TOKENS),
            PromptSettings(ids=(0, 255)), num_prompts=REQUESTS, seed=7,
        )
    )  # fmt: skip
    url = f"http://{metrics}/metrics"
    settings = RunSettings(
        TargetSettings(f"grpc://{pool.config.coordinator}"), tmp_path / "out",
        Load(num_warmups=3), metrics_urls=(url,), metrics_interval_s=3600,
    )  # fmt: skip
    async with InProcessPool(pool):
        result = (await supervise(trace, settings)).result
    summary, columns = result.summary, result.columns
    assert summary["completed"] == REQUESTS
    assert summary["completed_tokens"] == REQUESTS * OUTPUT_TOKENS
    assert summary["prompt_length_mismatches"] == 0
    server = summary["server"][url]
    assert server["counters"]["tknp_generation_tokens_total"] == REQUESTS * OUTPUT_TOKENS
    before, after = read_scrapes(tmp_path / "out" / "server_metrics.jsonl")[-2:]

    def check(
        metric: str, measured: dict[str, Any], scale: float, most_s: float = math.inf
    ) -> float:
        """Returns by how much all requests together took longer than in the histogram, seconds.

        No single one can have differed by more, nor by more than `most_s`.
        """
        histogram = server["histograms"][metric]
        assert histogram["count"] == measured["count"] == REQUESTS
        served_s = after.samples[f"{metric}_sum"] - before.samples[f"{metric}_sum"]
        longer_s = float(measured["mean"]) * scale * REQUESTS - served_s
        for name in QUANTILES:
            above_s, up_to_s = histogram[name]
            assert measured[name] * scale > above_s + min(longer_s, 0), (metric, name)
            assert measured[name] * scale <= up_to_s + max(0, min(longer_s, most_s)), (metric, name)
        return longer_s

    own_s = columns["server_ttft_s"]  # as the server said to each request, a moment before
    extras_s = columns["first_token_s"] - columns["scheduled_s"] - own_s
    assert extras_s.min() > 0
    assert check("tknp_time_to_first_token_seconds", distribution(own_s), 1) < extras_s.sum()
    for metric, key, scale, most_s in (
        ("tknp_time_to_first_token_seconds", "ttft_ms", 1e-3, float(extras_s.max())),
        ("tknp_request_e2e_seconds", "completion_s", 1, math.inf),
        ("tknp_normalized_latency_seconds", "normalized_latency_ms_per_token", 1e-3, math.inf),
    ):
        assert check(metric, summary[key], scale, most_s) > 0
