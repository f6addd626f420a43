"""The server's own Prometheus counters, scraped while a run goes on.

One line a scrape: {"at_s": seconds from release, "url": .., "samples": {'name{labels}': value}}.
Counters and histograms are differences between the last scrape and the last one before release,
which comes after warm-up.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tknp_loadgen.errors import FileError

_BUCKET = re.compile(r"^(?P<name>[^{]+)_bucket\{(?P<before>.*?)le=\"(?P<le>[^\"]+)\",?(.*)\}$")
# How full the KV cache is, under the names of the servers that tell.
KV_USAGE = ("tknp_kv_usage_ratio", "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc",
            "sglang:token_usage")  # fmt: skip


@dataclass(frozen=True)
class Scrape:
    at_s: float
    url: str
    samples: Mapping[str, float]


def parse_text(text: str) -> dict[str, float]:
    """Samples of Prometheus' text format by 'name{label="value",...}'; NaN is left out."""
    from prometheus_client.parser import text_string_to_metric_families

    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if math.isnan(sample.value) or sample.name.endswith("_created"):
                continue
            labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
            samples[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return samples


def read_scrapes(path: Path) -> list[Scrape]:
    """All scrapes of a run; none where it had no --metrics-url."""
    if not path.exists():
        return []
    scrapes = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            said = json.loads(line)
            scrapes.append(Scrape(float(said["at_s"]), said["url"], said["samples"]))
        except (ValueError, KeyError, TypeError) as error:
            raise FileError(path, number, f"not a scrape: {error!r}") from None
    return scrapes


def server_summary(scrapes: Sequence[Scrape]) -> dict[str, Any] | None:
    """Increases of counters and quantile bounds of histograms over the run, by endpoint."""
    result = {}
    for url in dict.fromkeys(scrape.url for scrape in scrapes):
        own = [scrape for scrape in scrapes if scrape.url == url]
        before = [scrape for scrape in own if scrape.at_s <= 0] or own
        first, last = before[-1].samples, own[-1].samples
        result[url] = {
            "scrapes": len(own),
            "counters": {
                name: last[name] - first.get(name, 0.0)
                for name in last
                if name.split("{")[0].endswith("_total")
            },
            "histograms": _histograms(first, last),
            "kv_usage_max_ratio": max((kv for s in own if (kv := kv_usage(s)) is not None),
                                      default=None),
        }  # fmt: skip
    return result or None


def kv_usage(scrape: Scrape) -> float | None:
    """How full the fullest KV cache of an endpoint is, 0 to 1."""
    values = [value for name, value in scrape.samples.items() if name.split("{")[0] in KV_USAGE]
    return max(values) if values else None


def _histograms(first: Mapping[str, float], last: Mapping[str, float]) -> dict[str, Any]:
    buckets: dict[str, dict[float, float]] = {}
    for name, value in last.items():
        found = _BUCKET.match(name)
        if found:
            labels = (found["before"] + found[4]).strip(",")
            key = f"{found['name']}{{{labels}}}" if labels else found["name"]
            bound = float(found["le"].replace("+Inf", "inf"))
            buckets.setdefault(key, {})[bound] = value - first.get(name, 0.0)
    return {name: _quantiles(counts) for name, counts in buckets.items() if max(counts.values())}


def _quantiles(counts: Mapping[float, float]) -> dict[str, Any]:
    """The bucket (above, up to) that holds each quantile."""
    bounds = sorted(counts)
    total = counts[bounds[-1]]
    result: dict[str, Any] = {"count": total}
    for name, quantile in (("p50", 0.5), ("p90", 0.9), ("p95", 0.95), ("p99", 0.99)):
        index = next(i for i, bound in enumerate(bounds) if counts[bound] >= quantile * total)
        result[name] = [bounds[index - 1] if index else 0.0, bounds[index]]
    return result
