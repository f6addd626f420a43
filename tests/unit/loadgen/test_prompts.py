"""Prompts: exact lengths, distinct, repeatable, and different in warm-up."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from tknp_loadgen.errors import FileError, InputError
from tknp_loadgen.trace.build import PromptSettings, Settings, build
from tknp_loadgen.trace.format import read_trace
from tknp_loadgen.trace.lengths import Lengths
from tknp_loadgen.trace.prompts import Prompts

MIXED = Lengths("lognormal", input_tokens=200, sigma=0.3)
PATTERN = "Once upon a time there lived a number {}. It was happy, and it told {} others so.\n"


def text_file(path: Path) -> Path:
    path.write_text("".join(PATTERN.format(i, i * i) for i in range(3000)))
    return path


def test_ids_are_exact_distinct_and_in_range() -> None:
    trace = build(Settings(lengths=MIXED, prompts=PromptSettings(ids=(5, 260)), num_prompts=40))
    prompts = Prompts(trace)
    made = [prompts.make(row).ids for row in range(40)]
    assert [len(ids) for ids in made if ids is not None] == trace.input_tokens.tolist()
    assert len({ids.tobytes() for ids in made if ids is not None}) == 40
    joined = np.concatenate([ids for ids in made if ids is not None])
    assert (joined.min(), joined.max()) == (5, 260)
    assert joined.dtype.str == "<u4"


@pytest.mark.parametrize("kind", ["text", "needle", "file"])
@pytest.mark.parametrize("tokenizer", ["byte_tokenizer", "word_tokenizer"])
def test_text_has_exactly_as_many_tokens_as_it_should(
    kind: str, tokenizer: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """In a peer 92% of prompts had another length than asked for."""
    path: Path = request.getfixturevalue(tokenizer)
    source = text_file(tmp_path / "text.txt")
    settings = PromptSettings(kind, tokenizer=str(path), text_file=source)
    lengths = Lengths("lognormal", input_tokens=300, sigma=0.2)
    trace = build(Settings(lengths=lengths, prompts=settings, num_prompts=40, seed=7))
    trace.write(tmp_path / "trace.jsonl")
    prompts = Prompts(read_trace(tmp_path / "trace.jsonl"), source)
    texts = [prompts.make(row).text or "" for row in range(40)]
    count = Tokenizer.from_file(str(path)).encode
    assert [len(count(text).ids) for text in texts] == trace.input_tokens.tolist()
    assert len(set(texts)) == 40


def test_a_needle_task_has_a_checkable_answer(byte_tokenizer: Path) -> None:
    settings = PromptSettings("needle", tokenizer=str(byte_tokenizer))
    trace = build(Settings(lengths=Lengths(input_tokens=900), prompts=settings, num_prompts=9))
    prompts = Prompts(trace)
    made = [prompts.make(row) for row in range(9)]
    for prompt in made:
        assert prompt.answer
        assert prompt.text
        assert prompt.text.count(prompt.answer) == 1
        assert prompt.text.endswith(" is")
    depths = {(prompt.text or "").index(prompt.answer or "") for prompt in made}
    assert len(depths) == 9


def test_warm_up_says_something_else(byte_tokenizer: Path, tmp_path: Path) -> None:
    """A peer warms up with the very prompts that it measures."""
    source = text_file(tmp_path / "text.txt")
    for kind in ("ids", "text", "needle", "file"):
        settings = PromptSettings(kind, tokenizer=str(byte_tokenizer), text_file=source)
        lengths = Lengths(input_tokens=300)
        prompts = Prompts(build(Settings(lengths=lengths, prompts=settings, num_prompts=4)), source)

        def starts(made: list[object]) -> set[str]:
            return {str(item)[:60] for item in made}

        measured = starts([prompts.make(n) for n in range(4)])
        assert not measured & starts([prompts.warm_up(n) for n in range(4)])


def test_seeds_give_different_prompts() -> None:
    """A fixed seed in a peer made every second run hit the prefix cache."""
    first, second = (
        Prompts(build(Settings(num_prompts=3, seed=seed))).make(0).ids for seed in (1, 2)
    )
    assert first is not None
    assert second is not None
    assert (first == second).mean() < 0.05


def test_groups_share_their_prefix_and_nothing_else() -> None:
    settings = PromptSettings(prefix_groups=2, prefix_ratio=0.25)
    trace = build(Settings(lengths=Lengths(input_tokens=100), prompts=settings, num_prompts=20))
    prompts = Prompts(trace)
    groups: dict[int, set[bytes]] = {0: set(), 1: set()}
    tails = set()
    for row in range(20):
        ids = prompts.make(row).ids
        assert ids is not None
        groups[trace.extra(row)["prefix_group"]].add(ids[:25].tobytes())
        tails.add(ids[25:].tobytes())
    assert [len(heads) for heads in groups.values()] == [1, 1]
    assert len(tails) == 20


def test_a_changed_text_file_is_noticed(byte_tokenizer: Path, tmp_path: Path) -> None:
    source = text_file(tmp_path / "text.txt")
    settings = PromptSettings("file", tokenizer=str(byte_tokenizer), text_file=source)
    trace = build(Settings(lengths=Lengths(input_tokens=50), prompts=settings, num_prompts=3))
    source.write_text("something else")
    with pytest.raises(FileError, match="not the file"):
        Prompts(trace, source)
    with pytest.raises(InputError, match="text_file"):
        Prompts(trace)


@pytest.mark.parametrize(
    "wrong",
    [
        {"ids": (9, 3)}, {"kind": "text"}, {"kind": "file", "tokenizer": "x"},
        {"prefix_groups": -1}, {"prefix_ratio": 1.5},
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InputError):
        PromptSettings(**wrong)  # type: ignore[arg-type]


def test_what_cannot_be_fitted_is_refused(byte_tokenizer: Path, tmp_path: Path) -> None:
    for kind, tokens in (("needle", 20), ("file", 10_000_000), ("text", 1)):
        settings = PromptSettings(
            kind, tokenizer=str(byte_tokenizer), text_file=text_file(tmp_path / "text.txt")
        )
        with pytest.raises((InputError, FileError)):
            build(Settings(lengths=Lengths(input_tokens=tokens), prompts=settings, num_prompts=1))
    with pytest.raises(InputError, match="can't be read"):
        build(Settings(prompts=PromptSettings("text", tokenizer="none.json"), num_prompts=1))
