"""`bench/strategies.py` shows what earlier runs have measured, without measuring anything."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "bench" / "strategies.py"


def cell(variant: str, batch: int, *speeds: float, link: str = "host") -> dict[str, Any]:
    times = {"waiting_s": 0.1, "itl_s": 0.05, "completion_s": 3.0, "read_gb_per_s": [11.0, 19.0]}
    runs = [{"tokens_per_s": speed, **times} for speed in speeds]
    return {"link": link, "variant": variant, "context": 2048, "batch": batch, "tokens": 64,
            "runs": runs}  # fmt: skip


@pytest.mark.full
def test_cells_of_a_file_are_compared_and_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "cells.json"
    cells = [
        cell("DP", 4, 50.0), cell("TKNP", 4, 60.0),
        cell("DP", 8, 39.0, 40.0, 90.0), cell("DP alone, doubled", 8, 50.0), cell("PP", 8, 100.0),
        cell("TKNP", 8, 70.0), cell("TKNP offset", 8, 79.0, 80.0, 81.0),
        cell("DP", 8, 30.0, link="200 us"),
    ]  # fmt: skip
    file.write_text(json.dumps(cells))
    argv = [SCRIPT, "--variants", "--cells", file, "--figures", tmp_path / "plots", "--json"]
    done = subprocess.run(
        [sys.executable, *map(str, argv)], check=True, capture_output=True, text=True
    )
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    best = "context 2048, 8 offered: best token-parallel schedule (TKNP offset) to "
    assert (rows[best + "DP"]["ratio"], rows[best + "DP"]["ok"]) == (2.0, True)
    assert rows[best + "DP"]["target"] == "ratio >= 1.9"
    assert rows[best + "DP alone, doubled"]["ok"] is True
    assert (rows[best + "PP"]["ratio"], rows[best + "PP"]["target"]) == (0.8, None)
    few = rows["context 2048, 4 offered: best token-parallel schedule (TKNP) to DP"]
    assert (few["ratio"], few["target"]) == (1.2, None)
    assert rows["read bandwidth of 1 thread, lowest"]["ours"] == 11.0
    drawn = {path.name for path in (tmp_path / "plots").iterdir()}
    of_a_link = {"", "-throughput", "-times", "-schedules"}
    assert drawn == {
        "strategies-capacity.png", "strategies-links.png",
        *(f"strategies{name}.png" for name in of_a_link),
        *(f"strategies{name}-200-us.png" for name in of_a_link),
    }  # fmt: skip
    assert json.loads(file.read_text()) == cells
