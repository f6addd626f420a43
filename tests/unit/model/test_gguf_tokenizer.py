from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tknp.errors import CheckpointError
from tknp.model.checkpoint import open_checkpoint
from tknp.model.tokenizer import Tokenizer, load_tokenizer

WriteGguf = Callable[..., Any]
NORMAL, CONTROL, USER_DEFINED, BYTE = 1, 3, 4, 6
LETTERS = bytes_to_unicode()


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return load_tokenizer(open_checkpoint("smollm2"))


def byte_level_keys(pre: str = "gpt-2", **more: object) -> dict[str, object]:
    """A vocabulary of a few letters, merges that join digits and spaces, two added tokens."""
    letters = [LETTERS[b] for b in b"ab 12'"] + ["12", "122", "ĠĠ", "aa"]
    tokens = ["<unk>", "<s>", "</s>", "<|end|>", "<think>", *letters]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL] * 4 + [USER_DEFINED] + [NORMAL] * len(letters),
        "tokenizer.ggml.merges": ["1 2", "12 2", "Ġ Ġ"],
        "tokenizer.ggml.unknown_token_id": 0,
        **{f"tokenizer.{key.replace('__', '.')}": value for key, value in more.items()},
    }


def pieces(write_gguf: WriteGguf, keys: dict[str, object], text: str) -> list[str]:
    tokenizer = load_tokenizer(open_checkpoint(write_gguf(metadata=keys).path))
    tokens = keys["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    return [tokens[i] for i in tokenizer.encode(text)]


def test_smollm2_chat_is_the_published_one(smollm2: Tokenizer) -> None:
    ids = smollm2.chat([{"role": "user", "content": "hi"}])
    system = "system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    assert smollm2.decode(ids) == f"{system}\nuser\nhi\nassistant\n"
    assert ids[:3] == [1, 9690, 198]
    assert ids.count(1) == 3
    assert ids.count(2) == 2
    assert smollm2.eos_ids == (2,)
    assert smollm2.special_ids == set(range(17))


def test_smollm2_digits_stand_alone(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("a  2024")
    # Two spaces are one piece: without the digits cut off first, GPT-2's rule leaves one to "2".
    assert [smollm2.decode([i]) for i in ids] == ["a", "  ", "2", "0", "2", "4"]


def test_smollm2_stream_joins_to_the_text(smollm2: Tokenizer) -> None:
    text = "In 2024, héllo 世界 👩\u200d👩\u200d👧 ½² \n\n\tdef f(x): return x"
    ids = smollm2.encode(text)
    stream = smollm2.stream()
    parts = [*(stream.push(i) for i in ids), stream.flush()]
    assert "".join(parts) == smollm2.decode(ids) == text
    assert not any("\ufffd" in part for part in parts)


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "a 1222", ["a", "Ġ", "122", "2"]),
        ("gpt-2", "a  122", ["a", "Ġ", "Ġ", "122"]),
        ("smollm", "a  122", ["a", "ĠĠ", "1", "2", "2"]),
        ("qwen2", "a  122", ["a", "Ġ", "Ġ", "1", "2", "2"]),
        ("llama-bpe", "1221", ["122", "1"]),
        ("gpt-2", "aa", ["a", "a"]),
        ("llama-bpe", "aa", ["aa"]),
    ],
)
def test_text_is_cut_as_the_vocabulary_was_learnt(
    write_gguf: WriteGguf, pre: str, text: str, expected: list[str]
) -> None:
    keys = byte_level_keys(pre, ggml__add_bos_token=False)
    assert pieces(write_gguf, keys, text) == expected


def test_added_tokens_stay_whole_and_only_control_ones_are_special(write_gguf: WriteGguf) -> None:
    keys = byte_level_keys()
    assert pieces(write_gguf, keys, "a<|end|><think>b") == ["a", "<|end|>", "<think>", "b"]
    tokenizer = load_tokenizer(open_checkpoint(write_gguf(metadata=keys).path))
    assert tokenizer.special_ids == {0, 1, 2, 3}
    assert tokenizer.decode([1, 5, 3, 4]) == "a<think>"
    assert tokenizer.eos_ids == (2, 3)


@pytest.mark.parametrize(
    ("pre", "declared", "expected"),
    [("gpt-2", None, False), ("gpt-2", True, True), ("llama-bpe", None, True),
     ("llama-bpe", False, False)],
)  # fmt: skip
def test_bos_is_added_as_declared(
    write_gguf: WriteGguf, pre: str, declared: bool | None, expected: bool
) -> None:
    keys = byte_level_keys(pre, ggml__add_bos_token=declared)
    tokenizer = load_tokenizer(open_checkpoint(write_gguf(metadata=keys).path))
    assert (tokenizer.encode("a")[0] == 1) == expected
    assert tokenizer.encode("a", add_special_tokens=False) == [5]


def test_sentencepiece_falls_back_to_bytes(write_gguf: WriteGguf) -> None:
    byte_tokens = [f"<0x{b:02X}>" for b in b"\n\xc3\xa9"]
    words = ["▁", "h", "i", "hi", "▁hi"]
    keys = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *byte_tokens, *words],
        "tokenizer.ggml.token_type": [2, CONTROL, CONTROL, BYTE, BYTE, BYTE] + [NORMAL] * 5,
        "tokenizer.ggml.scores": [0.0] * 6 + [-3.0, -4.0, -5.0, -1.0, -2.0],
        "tokenizer.ggml.unknown_token_id": 0,
    }
    assert pieces(write_gguf, keys, "hi hi") == ["<s>", "▁hi", "▁hi"]
    assert pieces(write_gguf, keys, "hié\n") == ["<s>", "▁hi", *byte_tokens[1:], byte_tokens[0]]
    tokenizer = load_tokenizer(open_checkpoint(write_gguf(metadata=keys).path))
    assert tokenizer.decode(tokenizer.encode("hi hi é")) == "hi hi é"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ggml__model": "bert"}, ["tokenizer.ggml.model='bert'", "gpt2"]),
        ({"ggml__pre": "deepseek-llm"}, ["tokenizer.ggml.pre='deepseek-llm'", "smollm"]),
        ({"ggml__pre": None}, ["tokenizer.ggml.pre=None"]),
        ({"ggml__tokens": None}, ["tokenizer.ggml.tokens is missing"]),
        ({"ggml__merges": None}, ["tokenizer.ggml.merges is missing"]),
        ({"ggml__model": "llama", "ggml__merges": None}, ["tokenizer.ggml.scores is missing"]),
        ({"ggml__model": "llama", "ggml__add_space_prefix": False}, ["add_space_prefix=false"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_unknown_kinds_are_refused_by_name(
    write_gguf: WriteGguf, change: dict[str, object], words: list[str]
) -> None:
    checkpoint = open_checkpoint(write_gguf(metadata=byte_level_keys(**change)).path)
    with pytest.raises(CheckpointError) as caught:
        load_tokenizer(checkpoint)
    for word in ["model.gguf", *words]:
        assert word in str(caught.value)
