from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tknp.cli.main import main

PUBLISHED = ["--model", "llama-3.1-405b", "--nodes", "4", "--tp", "8", "--batch", "128"]


def _run(*arguments: str, columns: int = 80) -> Result:
    return CliRunner().invoke(main, ["explain", *arguments], env={"COLUMNS": str(columns)})


def test_json_carries_the_published_traffic_at_top_level() -> None:
    result = _run("--strategy", "tknp", *PUBLISHED, "--json")
    found = json.loads(result.stdout)
    assert found["scatter_bytes_per_owner_rank"] == 144 * 1024
    assert found["gather_bytes_per_owner_rank"] == 128 * 1024
    assert found["layer_payload_bytes_per_rank_group"] == 816 * 1024
    assert found["all_reduce_operand_bytes"] == 4 * 2**20
    assert found["kv_capacity_ratio_to_dp"] == pytest.approx(4.4, rel=0.02)
    assert found["layout"][0]["blocks"][0]["start"] == 0


@pytest.mark.parametrize("strategy", ["tknp", "dp", "tp", "pp", "dcp", "helix"])
def test_every_strategy_fits_80_columns(strategy: str) -> None:
    result = _run("--strategy", strategy, *PUBLISHED)
    assert result.exit_code == 0
    assert max(len(line) for line in result.stdout.splitlines()) <= 80
    for heading in ("layout", "program of a step", "sent in a step", "forecast"):
        assert heading in result.stdout


def test_text_names_blocks_roots_owners_and_bytes() -> None:
    text = " ".join(_run(*PUBLISHED, "--context", "32768", columns=100).stdout.split())
    for fact in (
        "llama-3.1-405b · TKNP · 4 machines of 8 ranks", "embedding, layers 0-30",
        "4.41 times the KV of data parallelism", "4.20 with a replica's memory budget",
        "scatter 128 rows → 3 owners: 144 KiB qkv each, network",
        "gather 32 rows → root: 128 KiB attention, network", "4.0 MiB over the node",
        "such requests at once, the other",
    ):  # fmt: skip
        assert fact in text


def test_a_checkpoint_is_explained_by_its_shapes() -> None:
    found = json.loads(_run("--model", "smollm2", "--hardware", "cpu", "--json").stdout)
    table = json.loads(_run("--model", "smollm2-135m", "--hardware", "cpu", "--json").stdout)
    assert found["layout"] == table["layout"]


def test_timelines_are_written(tmp_path: Path) -> None:
    path = tmp_path / "step.html"
    assert _run("--timeline", str(path)).exit_code == 0
    assert path.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "gpt-5"], "llama-3.1-70b"),
        (["--copies", "2", "--nodes", "3"], "copies=2"),
        (["--timeline", "step.gif"], ".html or .png"),
        ([*PUBLISHED, "--memory", "1GiB"], "take more nodes"),
    ],
)
def test_refusals_name_the_remedy(arguments: list[str], words: str) -> None:
    result = _run(*arguments)
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.split())
