"""`tknp up` with the real services: a pool that serves, and that leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import psutil
import pytest
from click.testing import CliRunner

from tknp.cli.main import main

Start = Callable[..., subprocess.Popen[str]]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def gone(pid: int) -> bool:
    """Whether `pid` has ended, or is a zombie that only its parent's wait keeps."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def until(condition: Callable[[], bool]) -> None:
    """Wait for another process; pytest's own limit ends a wait in vain."""
    while not condition():
        time.sleep(0.01)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts `tknp up --json ARGUMENTS`; whatever a test leaves is killed."""
    started: list[subprocess.Popen[str]] = []

    def up(*arguments: str) -> subprocess.Popen[str]:
        argv = [sys.executable, "-m", "tknp.cli.main", "up", "--json", "--port", "0",
                "--kv-memory", "64MiB", *arguments]  # fmt: skip
        started.append(
            subprocess.Popen(
                argv,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, "TMPDIR": str(tmp_path)},
            )
        )
        return started[-1]

    yield up
    for process in started:
        process.kill()
        process.communicate()


def ready(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The line that `tknp up --json` prints."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        assert process.stderr is not None
        pytest.fail(process.stderr.read())
    return dict(json.loads(line))


def tknp(*arguments: str, stdin: str | None = None) -> str:
    result = CliRunner().invoke(main, arguments, input=stdin)
    assert result.exit_code == 0, result.stderr
    return result.stdout


def test_a_pool_serves_and_ctrl_c_leaves_nothing(start: Start, tmp_path: Path) -> None:
    process = start("--model", "smollm2", "--nodes", "2")
    facts = ready(process)
    target, pids = facts["target"], list(facts["pids"].values())
    assert set(facts["pids"]) == {"coordinator", "prefill-0", "decode-node-0", "decode-node-1"}
    assert Path(facts["pool_file"]).exists()

    answers = tknp("generate", "--target", target, "--json", "--max-tokens", "6", "Hello", "Hi")
    records = [json.loads(line) for line in answers.splitlines()]
    assert [record["completion_tokens"] for record in records] == [6, 6]
    assert {*map(tuple, (record["owners"] for record in records))} == {(0,), (1,)}

    schema = tmp_path.with_suffix(".json")
    schema.write_text(json.dumps(PERSON))
    held = ("--target", target, "--json-schema", str(schema), "--temperature", "0")
    answer = tknp("generate", *held, "--max-tokens", "100", "A person, as JSON.")
    jsonschema.validate(json.loads(answer), PERSON)
    said = tknp("chat", *held, stdin="A person, as JSON.\n")
    jsonschema.validate(json.loads(said), PERSON)

    status = json.loads(tknp("status", "--target", target, "--json"))
    assert status["ready"]
    assert status["completed"] == 4
    blocks = [
        (block["layer_start"], block["layer_stop"])
        for node in status["nodes"]
        for block in node["blocks"]
    ]
    assert (blocks[0][0], blocks[0][1], blocks[1][1]) == (0, blocks[1][0], 30)

    process.send_signal(signal.SIGINT)
    assert process.wait() == 0
    assert all(gone(pid) for pid in pids)
    assert list(tmp_path.iterdir()) == []


def test_a_killed_service_is_named_and_ends_the_pool(
    start: Start, random_checkpoint: Callable[..., Path]
) -> None:
    process = start("--model", str(random_checkpoint()), "--nodes", "1")
    pids = ready(process)["pids"]
    os.kill(pids["decode-node-0"], signal.SIGKILL)
    _, errors = process.communicate()
    assert process.returncode == 1
    assert "error: decode-node-0 was killed by SIGKILL; its log is " in errors
    assert all(gone(pid) for pid in pids.values())


def test_services_end_with_a_pool_that_is_killed(
    start: Start, random_checkpoint: Callable[..., Path]
) -> None:
    process = start("--model", str(random_checkpoint()), "--nodes", "1")
    pids: Sequence[int] = list(ready(process)["pids"].values())
    process.kill()
    process.wait()
    until(lambda: all(gone(pid) for pid in pids))


def test_a_bad_checkpoint_starts_nothing(start: Start, tmp_path: Path) -> None:
    process = start("--model", str(tmp_path / "absent"))
    output, errors = process.communicate()
    assert (process.returncode, output) == (2, "")
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
