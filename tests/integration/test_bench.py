"""`make bench`: every benchmark writes rows of one form to build/bench/NAME.json."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KEYS = {"name", "ours", "peer", "ratio", "unit", "target", "ok"}


def test_every_benchmark_has_a_file_of_its_own() -> None:
    plan = subprocess.run(
        ["make", "-n", "bench"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    written = set(re.findall(r"bench/(\w+)\.py --json +>build/bench/(\w+)\.json", plan.stdout))
    runnable = {p.stem for p in (ROOT / "bench").glob("*.py") if "__main__" in p.read_text()}
    assert runnable
    assert written == {(name, name) for name in runnable}


def test_a_row_says_what_was_measured_beside_what_and_whether_it_is_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(ROOT / "bench")
    from harness.report import Row, Target, at_least

    beside = Row("decode", 30.0, "tokens/s", 20.0, at_least(1.6)).plain()
    assert beside == {
        "name": "decode", "ours": 30.0, "peer": 20.0, "ratio": 1.5, "unit": "tokens/s",
        "target": "ratio >= 1.6", "ok": False,
    }  # fmt: skip
    assert beside.keys() == KEYS
    assert Row("exchange", 12.0, "us", target=Target("ours", most=15.0)).plain()["ok"] is True
    absent = Row("decode", 30.0, "tokens/s", None, at_least(1.6)).plain()
    assert (absent["ratio"], absent["ok"]) == (None, None)


@pytest.mark.full
def test_a_benchmark_writes_such_rows() -> None:
    """The one that needs neither processes nor kernels."""
    command = [sys.executable, ROOT / "bench" / "coordinator.py", "--json", "--quick"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    rows = json.loads(done.stdout)
    assert all(row.keys() == KEYS for row in rows)
    (bounded,) = [row for row in rows if row["target"] is not None]
    assert bounded["target"] == "ratio <= 0.05"
    assert bounded["ok"] == (bounded["ratio"] <= 0.05)
