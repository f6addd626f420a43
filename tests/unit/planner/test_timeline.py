"""Spans, pictures and traces of them."""

from __future__ import annotations

import re
import struct
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tknp.layout.program import Kind
from tknp.layout.rank import Rank
from tknp.planner import chrome, html, png
from tknp.planner.spans import Span, busy_ratio, idle, union, window
from tknp.planner.timeline import ROWS, Timeline, draw


def _span(kind: Kind, start: float, seconds: float, waited: float = 0.0, **where: int) -> Span:
    rank = Rank(where.get("node", 0), 0)
    layer, stream = where.get("layer", 0), where.get("stream", 0)
    return Span(rank, stream, 0, kind, layer, start, seconds, waited)


SPANS = [
    _span(Kind.PROJECT, 0.0, 1.0),
    _span(Kind.SCATTER, 1.0, 3.0, waited=2.0),
    _span(Kind.ATTEND, 4.0, 2.0, stream=1),
    _span(Kind.ATTEND, 3.0, 1.0, node=1),
]


def test_intervals() -> None:
    assert union([(3, 4), (0, 1), (1, 2), (5, 5)]) == [(0, 2), (3, 4)]
    assert idle(SPANS[:3], 0.0, 7.0) == [(1.0, 3.0), (6.0, 7.0)]
    assert busy_ratio(SPANS[:3], "exchange", 10.0) == pytest.approx(0.1)


def test_a_window_cuts_waiting_and_work_where_they_are() -> None:
    (cut,) = window([SPANS[1]], 2.0, 3.5)
    assert (cut.start_s, cut.seconds, cut.waited_s) == (0.0, 1.5, 1.0)
    (late,) = window([SPANS[1]], 3.5, 9.0)
    assert (late.start_s, late.seconds, late.waited_s) == (0.0, 0.5, 0.0)
    assert window(SPANS, 8.0, 9.0) == []


def test_a_track_has_a_row_a_lane_and_what_is_left_is_idle() -> None:
    (panel,) = draw(SPANS, "title", "", start_s=0.0, stop_s=8.0).panels
    first, second = panel.tracks
    assert (first.name, second.name) == ("node 0", "node 1")
    assert [len(bars) for bars in first.bars] == [1, 1, 1, 2]
    assert first.ratios == pytest.approx((1 / 8, 2 / 8, 1 / 8, 4 / 8))
    assert [bar.stream for bar in first.bars[1]] == [1]


@pytest.fixture(scope="module")
def step(explained: Any) -> Timeline:
    """Llama 405B, dual roots: streams, many layers, two panels."""
    found = explained("tknp", 2, copies=2).forecast
    return draw(found.spans, "a <title>", "more", start_s=found.start_s, stop_s=found.stop_s)


def test_many_layers_get_a_closer_look(step: Timeline) -> None:
    whole, close = step.panels
    assert close.seconds < whole.seconds / 10
    assert all(all(track.bars[:-1]) for panel in step.panels for track in panel.tracks)


def test_html_is_one_file_that_draws_everything(step: Timeline) -> None:
    text = html.render(step)
    assert "a &lt;title&gt;" in text
    assert not re.search(r"(src|href)=|https?:|@import", text)
    assert "prefers-color-scheme: dark" in text
    pictures = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(pictures) == len(step.panels)
    for picture, panel in zip(pictures, step.panels, strict=True):
        drawn = [
            e for e in ElementTree.fromstring(picture).iter("rect") if e.get("class") != "band"
        ]
        assert len(drawn) == sum(len(bars) for track in panel.tracks for bars in track.bars)
        for bar in drawn:
            assert 149 < float(bar.get("x", "")) < 1137


def test_colours_of_every_lane_and_stream_are_defined(step: Timeline) -> None:
    text = html.render(step)
    used = set(re.findall(r'<rect class="([^"]+)"', text)) - {"band"}
    assert used >= {f"{row}-{i}" for row in ROWS[:-1] for i in range(2)}
    for name in used:
        assert re.search(rf"\.{name} {{", text)


def test_png_is_a_picture(step: Timeline, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    png.write(step, tmp_path / "step.png")
    data = (tmp_path / "step.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert width == 1800
    assert height > 600


@pytest.mark.parametrize("seconds", [3e-6, 0.00123, 0.065, 7.0])
def test_ticks_are_few_and_round(seconds: float) -> None:
    marks = html.ticks(seconds)
    assert 3 <= len(marks) <= 9
    assert marks[0] == 0
    assert marks[-1] <= seconds
    assert f"{marks[1]:.0e}"[0] in "125"


def test_chrome_trace_has_nodes_threads_and_microseconds() -> None:
    events = chrome.trace(SPANS)["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {event["pid"] for event in slices} == {0, 1}
    assert names >= {"t 0 dense, stream 0", "t 0 waiting, stream 0", "t 0 attention, stream 1"}
    assert {"name": "scatter 0", "ts": 3e6, "dur": 1e6}.items() <= next(
        event for event in slices if event["cat"] == "exchange"
    ).items()
    waits = [event for event in slices if event["cat"] == "waiting"]
    assert [(event["ts"], event["dur"]) for event in waits] == [(1e6, 2e6)]


def test_slices_of_one_thread_do_not_overlap() -> None:
    slices = [e for e in chrome.trace(SPANS)["traceEvents"] if e["ph"] == "X"]
    threads = {(e["pid"], e["tid"]) for e in slices}
    for thread in threads:
        mine = sorted((e["ts"], e["dur"]) for e in slices if (e["pid"], e["tid"]) == thread)
        assert all(a[0] + a[1] <= b[0] for a, b in pairwise(mine))
