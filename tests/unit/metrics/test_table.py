"""The table keeps the promises that dashboards are built on."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from tknp.metrics import table
from tknp.metrics.docs import markdown
from tknp.metrics.table import TABLE, Metric, Service

DOCS = Path(__file__).parents[3] / "docs" / "metrics.md"
each = pytest.mark.parametrize("metric", TABLE, ids=lambda metric: metric.name)


@each
def test_names_say_kind_and_unit(metric: Metric) -> None:
    assert re.fullmatch(r"tknp(_[a-z0-9]+)+", metric.name)
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert not re.search(
        r"_(percent|perc|ms|count|sum|bucket|created|info_total)(_|$)", metric.name
    )
    for label in metric.labels:
        assert re.fullmatch(r"[a-z]+", label)
        assert label != "le"


@each
def test_rows_are_whole(metric: Metric) -> None:
    assert metric.help.endswith((".", "grpc."))
    assert "\n" not in metric.help
    assert "|" not in metric.help
    assert metric.services
    assert set(metric.services) <= set(get_args(Service))
    assert bool(metric.buckets) == (metric.kind == "histogram")
    assert list(metric.buckets) == sorted(set(metric.buckets))
    assert all(0 < bound < float("inf") for bound in metric.buckets)


def test_every_constant_is_in_the_table_once() -> None:
    names = [metric.name for metric in TABLE]
    assert len(set(names)) == len(names)
    constants = {value.name for value in vars(table).values() if isinstance(value, Metric)}
    assert constants == set(names)


def test_a_family_is_no_series_of_another() -> None:
    """A histogram exposes NAME_sum, NAME_count and NAME_bucket; a counter NAME without _total."""
    families = {metric.name.removesuffix("_total") for metric in TABLE}
    assert len(families) == len(TABLE)
    for metric in TABLE:
        for suffix in ("sum", "count", "bucket", "created"):
            assert f"{metric.name}_{suffix}" not in families


def test_no_two_services_expose_one_value() -> None:
    """Rows of several services are told apart by a label, or belong to the roles of one rank."""
    for metric in TABLE:
        if len(metric.services) > 1:
            assert metric.services == table.RANK or "service" in metric.labels


def test_rows_of_a_service() -> None:
    both = {metric.name for metric in table.of("decode-root", "attention-owner")}
    assert both == {m.name for m in (*table.of("decode-root"), *table.of("attention-owner"))}
    assert table.PAGES not in table.of("decode-root")
    assert table.TRANSFER not in table.of("coordinator")
    assert [m for m in TABLE if m in table.of("prefill")] == list(table.of("prefill"))


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("tknp_a_seconds", "seconds"),
        ("tknp_a_bytes_total", "bytes"),
        ("tknp_a_ratio", "ratio"),
        ("tknp_seconds_of_a", ""),
        ("tknp_steps_total", ""),
    ],
)
def test_units(name: str, unit: str) -> None:
    assert Metric(name, "gauge", "", ()).unit == unit


def test_docs_are_those_of_the_table() -> None:
    assert DOCS.read_text() == markdown(), "run: python -m tknp.metrics.docs > docs/metrics.md"


def test_questions_of_the_docs_name_metrics_of_the_table() -> None:
    series = set()
    for metric in TABLE:
        parts = ("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",)
        series |= {metric.name + part for part in parts}
    asked = set(re.findall(r"tknp_\w+", markdown().partition("## Questions")[2]))
    assert asked
    assert asked <= series
