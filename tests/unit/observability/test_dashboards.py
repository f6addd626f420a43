"""Dashboards keep their promises: each panel says what it shows, from metrics that exist."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

CHART = Path(__file__).parents[3] / "charts" / "tknp"
SOURCE = CHART / "dashboards" / "source"
Boards = dict[str, dict[str, Any]]


def panels(board: dict[str, Any]) -> Iterator[dict[str, Any]]:
    return (panel for panel in board["panels"] if panel["type"] != "row")


def test_there_are_the_four(boards: Boards) -> None:
    assert boards.keys() == {"tknp-overview", "tknp-owners", "tknp-roots", "tknp-slo"}
    assert len({board["uid"] for board in boards.values()}) == 4


def test_every_panel_has_title_unit_description_and_a_query(boards: Boards) -> None:
    for name, board in boards.items():
        titles = [panel["title"] for panel in panels(board)]
        assert len(set(titles)) == len(titles), name
        for panel in panels(board):
            where = f"{name}: {panel['title']}"
            assert panel["fieldConfig"]["defaults"]["unit"], where
            assert re.search(r"\w{3}.*\.$", panel["description"]), where
            assert panel["targets"], where
            assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}, where


def test_a_pool_is_chosen_by_variables(boards: Boards) -> None:
    for name, board in boards.items():
        variables = [variable["name"] for variable in board["templating"]["list"]]
        assert variables[:3] == ["datasource", "namespace", "pool"], name
        for panel in panels(board):
            for target in panel["targets"]:
                if "tknp_operator_" not in target["expr"]:
                    selected = target["expr"].count("{")
                    assert target["expr"].count('namespace="$namespace", pool="$pool"') == selected


def test_panels_fill_rows_without_gap_or_overlap(boards: Boards) -> None:
    for name, board in boards.items():
        taken: set[tuple[int, int]] = set()
        for panel in board["panels"]:
            place = panel["gridPos"]
            cells = {
                (x, y)
                for x in range(place["x"], place["x"] + place["w"])
                for y in range(place["y"], place["y"] + place["h"])
            }
            assert not cells & taken, f"{name}: {panel['title']}"
            taken |= cells
        assert len(taken) == 24 * (max(y for _, y in taken) + 1), name
        assert max(x for x, _ in taken) == 23, name


def test_expressions_name_what_there_is(
    queries: dict[str, str], check: Callable[[str], None]
) -> None:
    assert len(queries) > 90
    for text in queries.values():
        check(text)


def test_latencies_are_quantiles_never_means(queries: dict[str, str]) -> None:
    for where, text in queries.items():
        assert not re.search(r"_seconds_sum|\bavg|avg_over_time", text), where
        if "_bucket" in text and "histogram_quantile" not in text:
            assert re.search(r"sum by \(le\)|le=", text), where


def test_the_check_finds_what_is_wrong(check: Callable[[str], None]) -> None:
    for wrong in (
        "tknp_kv_usage", 'tknp_kv_usage_ratio{rank="0"}', "sum by (rank) (tknp_kv_usage_ratio)",
        "tknp_step_seconds", "sum(rate(tknp_step_seconds_bucket[1m])",
    ):  # fmt: skip
        with pytest.raises((AssertionError, ValueError)):
            check(wrong)


def test_files_are_those_of_their_source_and_fit_the_schema(
    boards: Boards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("grafana_foundation_sdk", reason="pip install grafana-foundation-sdk")
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    monkeypatch.setattr(sys, "path", [str(SOURCE), *sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for file in importlib.import_module("write").written(tmp_path):
        assert file.read_text() == (CHART / "dashboards" / file.name).read_text()
    register_default_plugins()
    for name, board in boards.items():
        understood = json.loads(JSONEncoder().encode(Dashboard.from_json(board)))
        assert lost(board, understood, name) == []


def lost(ours: Any, understood: Any, where: str) -> list[str]:
    """Places of `ours` that Grafana's own types dropped or changed."""
    if isinstance(ours, dict) and isinstance(understood, dict):
        gone = [f"{where}.{key}" for key in ours if key not in understood]
        both = ours.keys() & understood.keys()
        return gone + [
            p for key in both for p in lost(ours[key], understood[key], f"{where}.{key}")
        ]
    if isinstance(ours, list) and isinstance(understood, list) and len(ours) == len(understood):
        pairs = enumerate(zip(ours, understood, strict=True))
        return [p for n, (a, b) in pairs for p in lost(a, b, f"{where}[{n}]")]
    return [] if ours == understood else [where]
