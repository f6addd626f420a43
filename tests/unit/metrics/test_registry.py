"""A registry exposes the rows of its services, all of them and nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import tknp
from tknp.errors import InvalidValue
from tknp.metrics import table
from tknp.metrics.registry import Registry


def scrape(registry: Registry) -> dict[str, Metric]:
    """Families as a scraper reads them, by name."""
    collectors = CollectorRegistry()
    collectors.register(registry)
    families: Iterator[Metric] = text_string_to_metric_families(
        generate_latest(collectors).decode()
    )
    return {family.name: family for family in families}


@pytest.mark.parametrize(
    "services",
    [("coordinator",), ("prefill",), ("decode-root",), ("attention-owner",),
     ("decode-root", "attention-owner")],
)  # fmt: skip
def test_rows_without_values_are_exposed_with_type_and_help(
    services: tuple[table.Service, ...],
) -> None:
    found = scrape(Registry(*services))
    rows = {metric.name.removesuffix("_total"): metric for metric in table.of(*services)}
    assert list(found) == list(rows)
    for name, family in found.items():
        assert family.type == rows[name].kind
        assert family.documentation == rows[name].help
        assert not family.samples or name == "tknp_build_info"


def test_build_info_names_every_service_and_the_version() -> None:
    samples = scrape(Registry("decode-root", "attention-owner"))["tknp_build_info"].samples
    assert [(s.labels, s.value) for s in samples] == [
        ({"service": service, "version": tknp.__version__}, 1.0)
        for service in ("attention-owner", "decode-root")
    ]


def test_values_are_read_when_scraped() -> None:
    registry = Registry("attention-owner")
    pages = {("0", "free"): 3.0}
    ready = [False]
    registry.read(table.PAGES, lambda: pages)
    registry.ready(lambda: ready[0])
    assert scrape(registry)["tknp_ready"].samples[0].value == 0.0
    pages[("0", "live")] = 4.0
    ready[0] = True
    found = scrape(registry)
    assert found["tknp_ready"].samples[0].value == 1.0
    assert [(s.labels, s.value) for s in found["tknp_pages"].samples] == [
        ({"node": "0", "state": "free"}, 3.0),
        ({"node": "0", "state": "live"}, 4.0),
    ]


def test_counters_start_at_zero_where_their_labels_are_known() -> None:
    registry = Registry("coordinator")
    refusals = registry.counter(table.REFUSALS, "unavailable")
    tokens = registry.counter(table.GENERATION_TOKENS)
    found = scrape(registry)
    assert [s.value for s in found["tknp_refusals"].samples] == [0.0]
    assert [s.value for s in found["tknp_generation_tokens"].samples] == [0.0]
    refusals.add(2, "unavailable")
    refusals.add(1, "internal")
    tokens.add(7)
    found = scrape(registry)
    assert {s.labels["reason"]: s.value for s in found["tknp_refusals"].samples} == {
        "unavailable": 2.0,
        "internal": 1.0,
    }
    (sample,) = found["tknp_generation_tokens"].samples
    assert (sample.name, sample.value) == ("tknp_generation_tokens_total", 7.0)


def test_histogram() -> None:
    registry = Registry("decode-root")
    histogram = registry.histogram(table.STEP, "1", "0")
    assert registry.histogram(table.STEP, "1", "0") is histogram
    histogram.observe(0.02, 3)
    histogram.observe(1000.0)
    samples = scrape(registry)["tknp_step_seconds"].samples
    buckets = {s.labels["le"]: s.value for s in samples if s.name.endswith("_bucket")}
    assert list(map(float, buckets)) == [*table.STEP.buckets, float("inf")]
    assert (buckets["0.01"], buckets["0.025"], buckets["+Inf"]) == (0.0, 3.0, 4.0)
    totals = {s.name: s.value for s in samples if s.name.endswith(("_sum", "_count"))}
    assert totals == {
        "tknp_step_seconds_sum": pytest.approx(1000.06),
        "tknp_step_seconds_count": 4.0,
    }
    assert {s.labels["node"] + s.labels["rank"] for s in samples} == {"10"}


def test_registries_of_one_process_are_apart() -> None:
    first, second = Registry("coordinator"), Registry("coordinator")
    first.counter(table.GENERATION_TOKENS).add(5)
    assert not scrape(second)["tknp_generation_tokens"].samples


def test_what_the_table_does_not_have_is_refused() -> None:
    registry = Registry("decode-root")
    with pytest.raises(InvalidValue, match=r"tknp_pages.*no row of decode-root"):
        registry.read(table.PAGES, dict)
    with pytest.raises(InvalidValue, match=r"tknp_step_seconds.*is a histogram"):
        registry.counter(table.STEP)
    with pytest.raises(InvalidValue, match="is a histogram"):
        registry.read(table.STEP, dict)
    with pytest.raises(InvalidValue, match="is a counter"):
        registry.histogram(table.EXCHANGE_BYTES, "0", "0", "cross_node")
    with pytest.raises(InvalidValue, match=r"labels.*tknp_step_seconds has labels"):
        registry.histogram(table.STEP, "0")
    registry.read(table.WEIGHT_BYTES, lambda: {("0",): 1.0})
    with pytest.raises(InvalidValue, match=r"labels.*tknp_weight_bytes has labels"):
        list(registry.collect())


def test_contains() -> None:
    assert table.PAGES in Registry("attention-owner")
    assert table.PAGES not in Registry("decode-root")
