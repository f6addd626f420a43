"""Published traces: small files of the same formats, and the real samples where they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tknp_loadgen.errors import FileError, InputError
from tknp_loadgen.trace.arrivals import Arrivals
from tknp_loadgen.trace.build import ReplaySettings, Settings, build
from tknp_loadgen.trace.lengths import Lengths
from tknp_loadgen.trace.prompts import Prompts
from tknp_loadgen.trace.public import dejitter, read_public

MOONCAKE = """\
{"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]}
{"timestamp": 0, "input_length": 700, "output_length": 6, "hash_ids": [0, 9]}
{"timestamp": 3000, "input_length": 1200, "output_length": 7, "hash_ids": [0, 1, 5]}
"""
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 18:17:03.9799600,4808,10\r\n2023-11-16 18:17:04.0319605,3180,8\r\n"
    "2023-11-16 18:17:05,10,1\r\n"
)
BURSTGPT = """\
Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45.25,ChatGPT,1087,0,1087,Conversation log
118,GPT-4,417,276,693,Conversation log
"""


def written(path: Path, text: str) -> Path:
    path.write_bytes(text.encode())
    return path


@pytest.mark.parametrize(
    ("text", "kind", "arrivals", "inputs"),
    [
        (MOONCAKE, "mooncake", [0, 0, 3_000_000], [1100, 700, 1200]),
        # seven digits: 51,999.65 ms in 100 ns ticks, not cut to 10 ms
        (AZURE, "azure", [0, 52_001, 1_020_040], [4808, 3180, 10]),
        (BURSTGPT, "burstgpt", [0, 113_000_000], [472, 417]),
    ],
)
def test_formats(
    tmp_path: Path, text: str, kind: str, arrivals: list[int], inputs: list[int]
) -> None:
    source = read_public(written(tmp_path / "trace", text))
    assert source.format == kind
    assert source.arrival_us.tolist() == arrivals
    assert source.input_tokens.tolist() == inputs
    assert source.unserved == (1 if kind == "burstgpt" else 0)


def test_rows_out_of_order_are_sorted(tmp_path: Path) -> None:
    lines = MOONCAKE.splitlines(keepends=True)
    source = read_public(written(tmp_path / "trace", "".join(reversed(lines))))
    assert source.arrival_us.tolist() == [0, 0, 3_000_000]


BAD = {
    "half a row": (MOONCAKE + '{"timestamp": 5,\n', r"trace:4: not JSON"),
    "a word": (MOONCAKE + '{"timestamp": "soon", "input_length": 1, "output_length": 1}\n',
               r"trace:4: timestamp 'soon'"),
    "no length": (MOONCAKE + '{"timestamp": 5, "output_length": 1}\n',
                  r"trace:4: input_length=None"),
    "odd blocks": (MOONCAKE + '{"timestamp": 5, "input_length": 1, "output_length": 1, '
                   '"hash_ids": ["a"]}\n', r"trace:4: hash_ids"),
    "no time": (AZURE + "yesterday,5,5\r\n", r"trace:5: TIMESTAMP='yesterday'"),
    "negative": (AZURE + "2023-11-16 18:17:06.0,-5,5\r\n", r"trace:5: ContextTokens='-5'"),
    "a short row": (AZURE + "2023-11-16 18:17:06.0,5\r\n", r"trace:5: GeneratedTokens=None"),
    "not a number": (BURSTGPT + "nan,GPT-4,1,1,2,x\n", r"trace:5: timestamp 'nan'"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_malformed_rows_are_refused_or_counted(tmp_path: Path, name: str) -> None:
    text, reason = BAD[name]
    path = written(tmp_path / "trace", text)
    with pytest.raises(FileError, match=reason):
        read_public(path)
    source = read_public(path, skip_malformed=True)
    assert source.malformed == 1
    trace = build(Settings(replay=ReplaySettings(path, skip_malformed=True)))
    assert trace.generator["replay"]["malformed"] == 1


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="no known format"):
        read_public(written(tmp_path / "trace", "hello\n"))
    with pytest.raises(FileError, match="--lengths empirical"):
        read_public(written(tmp_path / "trace", "num_prefill_tokens,num_decode_tokens\n1,1\n"))
    with pytest.raises(FileError, match="no usable rows"):
        read_public(written(tmp_path / "trace", AZURE.splitlines()[0] + "\n"))
    with pytest.raises(InputError, match="format"):
        read_public(tmp_path / "trace", "parquet")


def test_dejitter_spreads_bins_and_keeps_order() -> None:
    binned = np.repeat(np.array([0, 3, 6, 12]) * 1_000_000, [5, 1, 4, 3])
    spread = dejitter(binned, 7)
    assert (np.diff(spread) >= 0).all()
    assert len(set(spread.tolist())) == len(spread)
    bins = np.searchsorted([0, 3_000_000, 6_000_000, 12_000_000], spread, side="right")
    assert bins.tolist() == np.repeat([1, 2, 3, 4], [5, 1, 4, 3]).tolist()
    assert spread[-1] < 15_000_000
    assert dejitter(binned, 7).tolist() == spread.tolist()
    assert dejitter(np.zeros(3, np.int64), 7).tolist() == [0, 0, 0]


def test_scaling_clipping_and_lengths(tmp_path: Path) -> None:
    path = written(tmp_path / "trace", AZURE)
    half = build(Settings(replay=ReplaySettings(path, time_scale=0.5)))
    assert half.arrival_us.tolist() == [0, 26_000, 510_020]  # below a second, and not cut
    clipped = build(Settings(replay=ReplaySettings(path, clip_s=1.0)))
    assert len(clipped) == 2
    assert len(build(Settings(replay=ReplaySettings(path), num_prompts=1))) == 1
    small = build(Settings(lengths=Lengths(scale=0.1), replay=ReplaySettings(path)))
    assert small.input_tokens.tolist() == [481, 318, 1]
    with pytest.raises(InputError, match="leaves no request"):
        build(Settings(replay=ReplaySettings(path, clip_s=-1.0)))


def test_our_own_traces_replay_too(tmp_path: Path) -> None:
    first = build(Settings(Arrivals("poisson"), num_prompts=5, seed=3))
    first.write(tmp_path / "trace")
    again = build(Settings(replay=ReplaySettings(tmp_path / "trace", time_scale=2.0)))
    assert again.input_tokens.tolist() == first.input_tokens.tolist()
    spans = first.arrival_us - first.arrival_us[0] * 0
    assert again.arrival_us.tolist() == (spans * 2).tolist()


def test_prefixes_are_shared_only_on_request(tmp_path: Path) -> None:
    path = written(tmp_path / "trace", MOONCAKE)

    def shared(trace_prefixes: bool) -> list[int]:
        prompts = Prompts(build(Settings(replay=ReplaySettings(path, prefixes=trace_prefixes))))
        ids = [prompts.make(row).ids for row in range(3)]
        assert all(made is not None for made in ids)
        assert [len(made) for made in ids if made is not None] == [1100, 700, 1200]

        def common(a: np.ndarray, b: np.ndarray) -> int:
            size = min(len(a), len(b))
            return int(np.argmin(np.append(a[:size] == b[:size], False)))

        return [common(ids[0], ids[1]), common(ids[0], ids[2])]  # type: ignore[arg-type]

    assert shared(False) == [0, 0]
    assert shared(True) == [512, 1024]


SAMPLES = {
    "mooncake_conversation_head.jsonl": 6758,
    "mooncake_synthetic_head.jsonl": 40160,
    "azure_2023_code_head.csv": 4808,
    "azure_2023_conv_head.csv": 374,
}


@pytest.mark.parametrize("name", SAMPLES)
def test_real_samples(sample: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    trace = build(Settings(replay=ReplaySettings(sample(name), dejitter=True), seed=7))
    assert trace.input_tokens[0] == SAMPLES[name]
    assert len(trace) > 500
    assert (np.diff(trace.arrival_us) >= 0).all()
    trace.write(tmp_path / "trace.jsonl")
