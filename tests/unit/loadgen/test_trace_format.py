"""Trace files: what they hold, that bytes are stable, that damage is noticed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tknp_loadgen.errors import FileError
from tknp_loadgen.trace.arrivals import Arrivals
from tknp_loadgen.trace.build import PromptSettings, Settings, build
from tknp_loadgen.trace.format import Trace, read_trace
from tknp_loadgen.trace.lengths import Lengths

# Recorded once: the same settings give these bytes on any machine.
HASHES = {
    "poisson": "ed524b4da0ddeefda910c6c73f8351347ec10eb13b4a6f6b70cf9df0fc452019",
    "gamma": "1a89d6e1db603f636113974b235d71e0859a6fbbf461d97da4cff4818f155a24",
    "ramp": "5fec0dbd8e59d630423afdde089465f1ab2fb238b6e09485d9de1f8237b5df26",
    "diurnal": "86bd3c971e6b04813ab56a0889f19a7a1f0c2f867a8e4acc223be9a740d5394b",
    "lognormal": "8dd2f51fd22afe08b466cab74b0204c645fcf66aee40cbbc76f259587e48c405",
}


def make(name: str) -> Trace:
    arrivals = {
        "gamma": Arrivals("gamma", rate=2, burstiness=0.5),
        "ramp": Arrivals("ramp", rate=1, final_rate=9, duration_s=30, shape="exponential"),
        "diurnal": Arrivals("diurnal", rate=5, period_s=60),
    }.get(name, Arrivals("poisson"))
    lengths = Lengths("lognormal") if name == "lognormal" else Lengths("paper-mixed")
    return build(Settings(arrivals, lengths, num_prompts=256, seed=7))


@pytest.mark.parametrize("name", HASHES)
def test_a_seed_gives_the_same_bytes_everywhere(name: str) -> None:
    assert make(name).sha256 == HASHES[name]


def test_another_seed_gives_another_trace() -> None:
    one, other = (build(Settings(Arrivals("poisson"), num_prompts=9, seed=seed)) for seed in (1, 2))
    assert one.arrival_us.tolist() != other.arrival_us.tolist()
    assert one.sha256 != other.sha256


def test_arrivals_do_not_depend_on_lengths() -> None:
    assert make("poisson").arrival_us.tolist() == make("lognormal").arrival_us.tolist()


def test_written_and_read_back(tmp_path: Path) -> None:
    trace = build(
        Settings(
            Arrivals("closed", users=2, think_s=1), Lengths(input_tokens=9),
            PromptSettings(prefix_groups=2), num_prompts=8, seed=7,
        )
    )  # fmt: skip
    path = tmp_path / "trace.jsonl"
    digest = trace.write(path)
    again = read_trace(path)
    assert again.sha256 == digest == trace.sha256
    assert again.users == 2
    assert again.arrival_us.tolist() == trace.arrival_us.tolist()
    assert [dict(extra) for extra in again.extras] == [dict(extra) for extra in trace.extras]
    head, row = (json.loads(line) for line in path.read_text().splitlines()[:2])
    assert head["seed"] == 7
    assert head["sha256"] == digest
    assert {"arrival_s", "input_tokens", "output_tokens"} <= set(row)


DAMAGE = {
    "not JSON": (2, lambda line: "{", "2: not JSON"),
    "changed length": (3, lambda line: line.replace('"input_tokens": 9', '"input_tokens": 8'),
                       "does not match its sha256"),
    "no tokens": (2, lambda line: line.replace('"output_tokens": 128', '"output_tokens": 0'),
                  "2: output_tokens=0"),
    "a fraction": (2, lambda line: line.replace('"output_tokens": 128', '"output_tokens": 1.5'),
                   "2: output_tokens=1.5"),
    "a negative time": (2, lambda line: line.replace('"arrival_s": ', '"arrival_s": -'),
                        "2: arrival_s=-"),
    "going back": (
        3, lambda line: '{"arrival_s": 0.000001, "input_tokens": 9, "output_tokens": 128}',
        "3: arrives before"),
    "a list": (2, lambda line: "[]", "2: not a JSON object"),
    "a version": (1, lambda line: line.replace('"tknp_load_trace": 1', '"tknp_load_trace": 9'),
                  "1: version 9"),
    "no header": (1, lambda line: "{}", "--replay"),
    "no seed": (1, lambda line: line.replace('"seed"', '"sead"'), "1: seed=None"),
    "an odd user": (2, lambda line: line.replace("{", '{"user": -1, '), "2: user=-1"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named_with_its_line(tmp_path: Path, name: str) -> None:
    number, change, reason = DAMAGE[name]
    path = tmp_path / "trace.jsonl"
    build(Settings(lengths=Lengths(input_tokens=9), num_prompts=4)).write(path)
    lines = path.read_text().splitlines()
    lines[number - 1] = change(lines[number - 1])
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(FileError, match=reason):
        read_trace(path)


def test_missing_rows_and_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    build(Settings(num_prompts=4)).write(path)
    path.write_text("\n".join(path.read_text().splitlines()[:-1]) + "\n")
    with pytest.raises(FileError, match="says 4 rows, there are 3"):
        read_trace(path)
    with pytest.raises(FileError, match="can't be read"):
        read_trace(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(FileError, match="is empty"):
        read_trace(tmp_path / "empty.jsonl")
