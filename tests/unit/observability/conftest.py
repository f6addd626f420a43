"""Dashboards, rules, and what their expressions may name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml

from tknp.metrics.table import TABLE, Metric

CHART = Path(__file__).parents[3] / "charts" / "tknp"
RULES = CHART / "alerts" / "tknp.yaml"
# Set by the pod monitor and by Prometheus itself.
TARGET_LABELS = {"namespace", "pool", "instance", "job", "pod"}
# What Grafana puts in; a node of "all" is a pattern.
VARIABLES = {
    "$__rate_interval": "5m", "$__range": "1h", "$namespace": "ai", "$pool": "p", "$node": ".*",
}  # fmt: skip
Labels = dict[str, set[str]]
OPERATOR_LABELS = {"namespace", "pool", "result", "verb"}


def labels_of(metric: Metric) -> Labels:
    """Labels of each series that `metric` has."""
    own = set(metric.labels) | TARGET_LABELS
    if metric.kind != "histogram":
        return {metric.name: own}
    plain = {f"{metric.name}_{part}": own for part in ("sum", "count")}
    return {**plain, f"{metric.name}_bucket": own | {"le"}}


def recorded() -> Labels:
    """Labels of what the rules record."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    names = [rule["record"] for group in groups for rule in group["rules"] if "record" in rule]
    return {name: {"namespace", "pool", "slo"} for name in names}


@pytest.fixture(scope="session")
def known() -> Labels:
    """Every series that TKNP's processes and rules give, with its labels."""
    from tknp_operator.controller.metrics import Metrics

    found: Labels = recorded()
    for metric in TABLE:
        found |= labels_of(metric)
    for family in Metrics().registry.collect():
        ending = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
        for end in ending.get(family.type, ("",)):
            found[family.name + end] = OPERATOR_LABELS | TARGET_LABELS | {"le"}
    return found


def selectors(expression: promql.Expr) -> Iterator[promql.VectorSelector]:
    """Every selector of series within `expression`."""
    if isinstance(expression, promql.VectorSelector):
        yield expression
    for name in ("lhs", "rhs", "expr", "vector_selector", "args", "param"):
        inner = getattr(expression, name, None)
        for part in inner if isinstance(inner, list) else [inner]:
            if isinstance(part, promql.Expr):
                yield from selectors(part)


def grouping(expression: promql.Expr) -> Iterator[str]:
    """Every label that an aggregation within `expression` keeps."""
    if isinstance(expression, promql.AggregateExpr) and expression.modifier is not None:
        yield from expression.modifier.labels
    for name in ("lhs", "rhs", "expr", "args", "param"):
        inner = getattr(expression, name, None)
        for part in inner if isinstance(inner, list) else [inner]:
            if isinstance(part, promql.Expr):
                yield from grouping(part)


@pytest.fixture(scope="session")
def check(known: Labels) -> Callable[[str], None]:
    """Fails unless an expression parses and names only series and labels that there are."""

    def checked(text: str) -> None:
        parsed = promql.parse(text)
        found = list(selectors(parsed))
        assert found, text
        for selector in found:
            assert selector.name in known, f"{selector.name} in {text}"
            used = {matcher.name for matcher in selector.matchers.matchers}
            assert used <= known[selector.name], f"{selector.name} in {text}"
        every = set().union(*(known[selector.name] for selector in found))
        assert set(grouping(parsed)) <= every, text

    return checked


def filled(text: str) -> str:
    """`text` with Grafana's variables replaced, the longest names first."""
    for name in sorted(VARIABLES, key=len, reverse=True):
        text = text.replace(name, VARIABLES[name])
    assert "$" not in text, text
    return text


@pytest.fixture(scope="session")
def boards() -> dict[str, dict[str, Any]]:
    """The committed dashboards by name."""
    files = sorted((CHART / "dashboards").glob("*.json"))
    return {file.stem: json.loads(file.read_text()) for file in files}


@pytest.fixture(scope="session")
def queries(boards: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Expressions of all panels, variables filled in, by where each is."""
    return {
        f"{name}: {panel['title']} {target['refId']}": filled(target["expr"])
        for name, board in boards.items()
        for panel in board["panels"]
        for target in panel.get("targets", ())
    }


@pytest.fixture(scope="session")
def rules() -> dict[str, Any]:
    """The rules file."""
    loaded: dict[str, Any] = yaml.safe_load(RULES.read_text())
    return loaded


@pytest.fixture(scope="session")
def promtool() -> str:
    """The command of Prometheus' package."""
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not installed: apt-get install prometheus")
    return found
