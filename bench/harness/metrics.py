"""What the processes of a pool say of themselves, as numbers to subtract."""

from __future__ import annotations

import asyncio
import urllib.request
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from tknp.config import PoolConfig
from tknp.metrics.table import Metric

_SCRAPE_S = 10.0


@dataclass(frozen=True)
class Samples:
    """One scrape of all processes: (sample name, label, value) and its number."""

    values: list[tuple[str, dict[str, str], float]]

    def total(self, metric: Metric, suffix: str = "", **labels: str) -> float:
        """Sum of `metric` over all series with `labels`. `suffix`: _sum or _count of histograms."""
        name = metric.name + suffix
        return sum(
            value
            for sample, found, value in self.values
            if sample == name and labels.items() <= found.items()
        )


async def scrape(config: PoolConfig) -> Samples:
    """Every process of the pool once."""
    addresses = [config.metrics_address]
    for node in config.nodes:
        addresses += node.metrics_addresses
    for replica in config.prefill:
        addresses += replica.metrics_addresses
    pages = await asyncio.gather(*(asyncio.to_thread(_page, a) for a in addresses))
    samples = (
        sample
        for page in pages
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    )
    return Samples([(s.name, s.labels, s.value) for s in samples])


def _page(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=_SCRAPE_S) as answer:
        text: str = answer.read().decode()
    return text
