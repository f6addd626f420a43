"""Lengths: the paper's statistics, scaling, distributions, files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tknp_loadgen.errors import FileError, InputError
from tknp_loadgen.trace.lengths import Lengths, read_lengths

PAPER = {
    "min": 8223, "max": 126848, "mean": 32898, "median": 19048, "sd": 28496, "above_64k": 0.125,
    "tokens_above_64k": 0.361, "tokens_longest_quarter": 0.572,
}  # fmt: skip


def statistics(lengths: np.ndarray) -> dict[str, float]:
    ordered, total = np.sort(lengths), lengths.sum()
    return {
        "min": ordered[0], "max": ordered[-1], "mean": lengths.mean(),
        "median": np.median(lengths), "sd": lengths.std(),
        "above_64k": (lengths > 65536).mean(),
        "tokens_above_64k": lengths[lengths > 65536].sum() / total,
        "tokens_longest_quarter": ordered[-(len(lengths) // 4) :].sum() / total,
    }  # fmt: skip


@pytest.mark.parametrize("count", [128, 256, 384, 1280])
def test_the_mixed_workload_has_the_papers_statistics(count: int) -> None:
    inputs, outputs = Lengths("paper-mixed").draw(count, 7)
    assert statistics(inputs) == pytest.approx(PAPER, rel=1e-3)
    assert set(outputs.tolist()) == {1024}
    assert inputs.tolist() != sorted(inputs.tolist())


def test_only_multiples_of_128_are_mixed() -> None:
    with pytest.raises(InputError, match="such as 128"):
        Lengths("paper-mixed").draw(100, 7)


def test_scaling_keeps_the_shape() -> None:
    full, _ = Lengths("paper-mixed").draw(128, 7)
    small, outputs = Lengths("paper-mixed", scale=1 / 64, output_tokens=32).draw(128, 7)
    assert np.abs(small - full / 64).max() <= 0.5
    assert outputs.max() == 32
    assert Lengths("fixed", input_tokens=10, scale=1e-6).draw(3, 0)[0].tolist() == [1, 1, 1]


def test_prompts_are_cut_to_fit_with_their_answer() -> None:
    inputs, outputs = Lengths("paper-mixed", max_tokens=32768).draw(128, 7)
    assert (inputs + outputs).max() == 32768
    with pytest.raises(InputError, match="output-tokens"):
        Lengths("fixed", output_tokens=64, max_tokens=64).draw(1, 0)


def test_lognormal() -> None:
    inputs, outputs = Lengths(
        "lognormal", input_tokens=1000, output_tokens=200, sigma=0.5
    ).draw(20_000, 7)  # fmt: skip
    assert np.median(inputs) == pytest.approx(1000, rel=0.03)
    assert np.median(outputs) == pytest.approx(200, rel=0.03)
    assert np.log(inputs).std() == pytest.approx(0.5, rel=0.03)
    assert abs(np.corrcoef(inputs, outputs)[0, 1]) < 0.03


def test_empirical(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("num_prefill_tokens,num_decode_tokens,pd_ratio\n10,1,10\n20,2,10\n")
    inputs, outputs = Lengths("empirical", path=path).draw(1000, 7)
    assert (inputs == outputs * 10).all()
    assert (inputs == 10).mean() == pytest.approx(0.5, abs=0.06)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a,b\n1,2\n", r"csv:1: has columns"),
        ("input_tokens,output_tokens\n1,2\n5,none\n", r"csv:3: 'none' is not a number"),
        ("input_tokens,output_tokens\n0,2\n", r"csv:2: 0 is not"),
        ("input_tokens,output_tokens\n3\n", r"csv:2: None is not"),
        ("input_tokens,output_tokens\n", r"csv:2: has no rows"),
    ],
)
def test_bad_length_files_are_refused(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text(text)
    with pytest.raises(FileError, match=reason):
        read_lengths(path)


@pytest.mark.parametrize(
    "wrong",
    [{"kind": "long"}, {"kind": "empirical"}, {"scale": 0}, {"output_tokens": 0}],
)
def test_what_makes_no_sense_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InputError):
        Lengths(**wrong)  # type: ignore[arg-type]


def test_vidurs_lengths(sample: object) -> None:
    inputs, outputs = read_lengths(sample("vidur_arxiv_summarization_lengths_head.csv"))  # type: ignore[operator]
    assert (inputs[0], outputs[0]) == (3772, 54)
    assert len(inputs) > 1000
