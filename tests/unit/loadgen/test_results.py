"""What is made of result directories: validation, comparison, merging, search, reports."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tknp_loadgen.check import check_result
from tknp_loadgen.compare import compare
from tknp_loadgen.echo.script import Received, Script, Step
from tknp_loadgen.errors import FileError, InputError
from tknp_loadgen.measure.result import Result, read_result
from tknp_loadgen.merge import merge
from tknp_loadgen.report.page import write_report
from tknp_loadgen.sweep import judge, search

TraceOf = Callable[..., Any]
RunEcho = Callable[..., Any]
OUTPUTS = [4, 8, 6, 4, 8, 6, 4, 8]


def served(itl_s: float, failing: int | None = None) -> Callable[[Received], Script]:
    def plan(received: Received) -> Script:
        if received.number == failing:
            return Script((Step(0.1),), error="lost")
        return Script((Step(0.2), *[Step(itl_s)] * (received.max_tokens - 1)))

    return plan


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the first test that needs the pair leaves it for the others to copy."""
    return tmp_path_factory.mktemp("pair")


@pytest.fixture
async def pair(
    run_echo: RunEcho, trace_of: TraceOf, tmp_path: Path, kept: Path
) -> tuple[Path, Path]:
    """Two runs of one trace, the second one twice as slow and with one failure."""
    plans = {"fast": served(0.05), "slow": served(0.1, failing=7)}
    if not (kept / "slow").exists():
        for name, plan in plans.items():
            await run_echo(trace_of(OUTPUTS), plan, "http", max_concurrency=1)
            run = tmp_path / "run"
            config = yaml.safe_load((run / "config.yaml").read_text()) | {"name": name}
            (run / "config.yaml").write_text(yaml.safe_dump(config))
            rewrite(run)
            shutil.copytree(run, kept / name)
    for name in plans:
        shutil.copytree(kept / name, tmp_path / name)
    return tmp_path / "fast", tmp_path / "slow"


def rewrite(directory: Path) -> Result:
    from tknp_loadgen.measure.result import write_summary

    result = read_result(directory)
    write_summary(result)
    return result


def test_runs_of_one_trace_are_compared_request_by_request(pair: tuple[Path, Path]) -> None:
    said = compare([read_result(path) for path in pair])
    (run,) = said["runs"]
    assert (said["base"], run["name"]) == ("fast", "slow")
    assert run["paired"] == 7
    assert run["failed"] == [0, 1]
    tpot = run["metrics"]["tpot_ms"]
    assert tpot["ratio"] == pytest.approx(2)
    assert [tpot[key] for key in ("difference", "ci_low", "ci_high")] == pytest.approx([50] * 3)
    assert tpot["faster_ratio"] == 0
    completion = run["metrics"]["completion_s"]
    assert completion["ci_low"] < completion["difference"] < completion["ci_high"]
    assert run["good_only_in_base"] >= 1
    assert run["good_only_in_run"] == 0


async def test_other_traces_are_refused(
    pair: tuple[Path, Path], run_echo: RunEcho, trace_of: TraceOf, tmp_path: Path
) -> None:
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "run").mkdir()
    other, _ = await run_echo(trace_of([4, 4]), served(0.05), "http")
    with pytest.raises(InputError, match="only runs of one trace"):
        compare([read_result(pair[0]), other])
    with pytest.raises(InputError, match="two result directories"):
        compare([other])


def test_a_sound_result_validates(pair: tuple[Path, Path]) -> None:
    assert check_result(pair[1])["records"] == 8


def edit(path: Path, change: Callable[[str], str]) -> None:
    path.write_text(change(path.read_text()))


HARM = {
    "a better summary": (
        lambda d: edit(d / "summary.json", lambda t: t.replace('"failed": 1', '"failed": 0')),
        "failed is not what the records give"),
    "a record less": (
        lambda d: edit(d / "requests.0.jsonl", lambda t: "".join(t.splitlines(True)[1:])),
        "has no record|is not what"),
    "a record twice": (
        lambda d: edit(d / "requests.0.jsonl", lambda t: t + t.splitlines(True)[0]),
        "row 0 has two records"),
    "half a record": (lambda d: edit(d / "requests.0.jsonl", lambda t: t[:-20]),
                      r"jsonl:8: not a record"),
    "half a chunk": (lambda d: (d / "tokens.0.bin").write_bytes(
                         (d / "tokens.0.bin").read_bytes()[:-3]), "cut within an entry"),
    "fewer chunks": (lambda d: (d / "tokens.0.bin").write_bytes(
                         (d / "tokens.0.bin").read_bytes()[:-14]), "tokens in tokens"),
    "another trace": (lambda d: edit(d / "config.yaml", lambda t: re.sub(
                          "trace_sha256: .{4}", "trace_sha256: aaaa", t)), "another trace"),
    "no config": (lambda d: (d / "config.yaml").unlink(), "not the output of a run"),
    "no records": (lambda d: (d / "requests.0.jsonl").unlink(), "holds no requests"),
    "no summary": (lambda d: (d / "summary.json").unlink(), "can't be read"),
}  # fmt: skip


@pytest.mark.parametrize("name", HARM)
def test_harm_to_a_result_is_noticed(pair: tuple[Path, Path], name: str) -> None:
    harm, reason = HARM[name]
    harm(pair[1])
    with pytest.raises(FileError, match=reason):
        check_result(pair[1])


async def test_slices_merge_into_one_run(
    run_echo: RunEcho, trace_of: TraceOf, tmp_path: Path
) -> None:
    trace = trace_of(OUTPUTS)
    whole, _ = await run_echo(trace, served(0.05), "http", max_concurrency=1)
    parts = []
    for part in range(2):
        await run_echo(trace, served(0.05), "http", max_concurrency=1, slice=(part, 2))
        parts.append(tmp_path / f"part{part}")
        shutil.copytree(tmp_path / "run", parts[-1])
    assert read_result(parts[0]).summary["not_released"] == 0
    merged = merge(parts, tmp_path / "merged")
    assert merged.summary["completed"] == 8
    assert merged.summary["not_released"] == 0
    assert merged.summary["completed_tokens"] == whole.summary["completed_tokens"]
    assert merged.summary["itl_ms"] == whole.summary["itl_ms"]
    assert [worker["worker"] for worker in merged.summary["client"]["workers"]] == [0, 1]
    check_result(tmp_path / "merged")
    with pytest.raises(FileError, match="has two records"):
        merge([parts[0], parts[0]], tmp_path / "again")
    edit(parts[1] / "config.yaml", lambda t: t + "released_at_unix_s: 99.0\n")
    with pytest.raises(InputError, match="--start-at"):
        merge(parts, tmp_path / "late")


def test_reports_need_nothing_from_elsewhere(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """A single run has a full page too: a peer's is empty."""
    results = [read_result(path) for path in pair]
    for runs in (results[1:], results):
        html, picture, table = write_report(runs, tmp_path / "report")
        page = html.read_text()
        assert page.count("<svg") == (10 if len(runs) == 1 else 7 + 3 * len(runs))
        for outside in (
            "<script",
            "<link",
            "@import",
            "url(http",
            " src=",
            "<image",
            'xlink:href="http',
        ):
            assert outside not in page, outside
        assert "prefers-color-scheme:dark" in page
        assert "#0001" not in page  # every placeholder color has become a variable
        assert picture.read_bytes().startswith(b"\x89PNG")
        rows = dict(line.split(",", 1) for line in table.read_text().splitlines() if "," in line)
        assert rows["completed"].split(",") == [str(r.summary["completed"]) for r in runs]
    assert "1 x error: the server sent an error" in page


def test_reports_of_nothing_completed(pair: tuple[Path, Path], tmp_path: Path) -> None:
    records = pair[0] / "requests.0.jsonl"
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    gone = {"status": "error", "error": "none", "first_token_s": None, "last_token_s": None,
            "counted_tokens": 0, "completion_tokens": 0, "chunks": 0,
            "max_gap_s": None}  # fmt: skip
    records.write_text("".join(json.dumps(line | gone) + "\n" for line in lines))
    (pair[0] / "tokens.0.bin").write_bytes(b"")
    result = rewrite(pair[0])
    assert result.summary["completed"] == 0
    assert result.summary["completion_throughput_tokens_per_s"] == 0
    write_report([result], tmp_path / "report")


def capacity(limit: float) -> Callable[[float, int], tuple[int, int]]:
    return lambda rate, attempt: (100 if rate <= limit else 20, 100)


def test_the_search_closes_in_on_the_highest_rate() -> None:
    found = search(capacity(3.0), 0.5, 16, 0.9, precision=0.05)
    assert found.passed is not None
    assert found.failed is not None
    assert found.passed <= 3.0 < found.failed <= found.passed * 1.05
    said = found.describe()
    assert said["confident"]
    assert len(said["rates"]) < 12


def test_the_search_says_when_the_answer_is_outside() -> None:
    low = search(capacity(0.1), 0.5, 16, 0.9)
    assert (low.passed, low.failed) == (None, 0.5)
    high = search(capacity(99), 0.5, 16, 0.9)
    assert (high.passed, high.failed) == (16, None)
    with pytest.raises(InputError, match="LOW:HIGH"):
        search(capacity(1), 2, 1, 0.9)


def test_a_rate_near_the_target_is_tried_again_with_other_seeds() -> None:
    tries = []

    def probe(rate: float, attempt: int) -> tuple[int, int]:
        tries.append(attempt)
        return 91, 100

    verdict = judge(probe, 1.0, 0.9)
    assert tries == [0, 1, 2, 3]
    assert verdict.passed
    assert not verdict.confident
    assert verdict.scheduled == 400
    sure = judge(lambda rate, attempt: (100, 100), 1.0, 0.9)
    assert (sure.tries, sure.confident) == (1, True)
