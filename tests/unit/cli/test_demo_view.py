from __future__ import annotations

from io import StringIO
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from tknp.cli.demo_view import Lines, Panels, mean_itl, median, owners_table, results_table
from tknp.client import Completion
from tknp.rpc.ids import pack_ids
from tknp.v1.inference_pb2 import Finish, GenerateResponse


def text_of(console: Console) -> str:
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def completion(*times: float, owner: int = 0) -> Completion:
    """A completion whose tokens came one at a time, `times` seconds after the start."""
    result = Completion(0.0)
    for time in times:
        result.add(GenerateResponse(token_ids=pack_ids([1])), time)
    result.add(GenerateResponse(finish=Finish(owners=[owner])), times[-1])
    return result


def test_lines_interleave_whole_and_numbered() -> None:
    console = Console(file=StringIO(), width=200)
    with (lines := Lines(console, ["p one", "p two"])):
        lines.add(0, "first ")
        lines.add(1, "x" * 80)
        lines.add(0, "line\nsecond")
        lines.end(0, "done", good=True)
        lines.end(1, "lost", good=False)
    assert text_of(console).splitlines() == [
        "[1] > p one", "[2] > p two", "[2] " + "x" * 76, "[1] first line", "[1] second",
        "[1] (done)", "[2] xxxx", "[2] (lost)",
    ]  # fmt: skip


def test_lines_break_between_words() -> None:
    console = Console(file=StringIO(), width=200)
    lines = Lines(console, ["p"])
    lines.add(0, "word " * 20)
    assert text_of(console) == "[1] " + ("word " * 15).rstrip() + "\n"


@pytest.mark.parametrize(("width", "height"), [(80, 24), (24, 60), (200, 60)])
def test_panels_fit_the_terminal_and_show_the_end(width: int, height: int) -> None:
    console = Console(file=StringIO(), width=width, height=height, force_terminal=True)
    with (panels := Panels(console, [f"prompt {n}" for n in range(6)])):
        panels.add(0, "early \x1b[31m " + "middle " * 300 + "latest")
        panels.end(0, "fine", good=True)
    assert "latest" in text_of(console)
    assert "early" not in text_of(console)
    plain = Text.from_ansi(text_of(console)).plain
    assert max(cell_len(line) for line in plain.splitlines()) <= width


def test_latencies_are_over_tokens() -> None:
    fast, slow = completion(1.0, 1.1, 1.2, 1.3), completion(3.0, 4.0)
    assert mean_itl([fast, slow]) == pytest.approx((0.3 + 1.0) / 4)
    assert mean_itl([completion(1.0)]) is None
    assert [median([]), median([3.0, 1.0, 2.0]), median([1.0, 2.0])] == [None, 2.0, 1.5]


def test_tables_say_who_did_what(fake_pool: Any) -> None:
    console = Console(file=StringIO(), width=80)
    done = [completion(0.5, 0.6, owner=1), completion(1.5, 1.6, owner=1)]
    console.print(results_table(done, asked=3, elapsed_s=2.0))
    console.print(owners_table(fake_pool.status, done, {1: 3168}))
    text = " ".join(text_of(console).split())
    for fact in (
        "2 of 3 completed", "4 in 2.00 s", "2.0 tokens/s", "1.00 s p50, 1.50 s max",
        "100.0 ms mean", "0 embedding, layers 0-14, head 0 0 tokens 0.0%",
        "1 layers 15-29 2 3,168 tokens 50.0%",
    ):  # fmt: skip
        assert fact in text
