from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tknp.errors import CheckpointError, InvalidValue
from tknp.model.checkpoint import open_checkpoint
from tknp.model.tokenizer import Tokenizer, load_tokenizer

RandomCheckpoint = Callable[..., Path]
BOS, EOS, UNKNOWN = 256, 257, 258


@pytest.fixture
def tokenizer(random_checkpoint: RandomCheckpoint) -> Tokenizer:
    return load_tokenizer(open_checkpoint(random_checkpoint()))


@pytest.fixture
def copy(random_checkpoint: RandomCheckpoint, tmp_path: Path) -> Path:
    return Path(shutil.copytree(random_checkpoint(), tmp_path / "model"))


def test_ids_and_text(tokenizer: Tokenizer) -> None:
    text = "héllo 世界 12"
    ids = tokenizer.encode(text)
    assert ids == list(text.encode())
    assert tokenizer.decode([BOS, *ids, EOS]) == text
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.vocab_size) == (BOS, (EOS,), 259)
    assert tokenizer.special_ids == {BOS, EOS, UNKNOWN}


def test_ids_beyond_the_tokenizer_have_no_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([104, 260, 105]) == "hi"


def test_chat_renders_the_checkpoints_template(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.chat(messages) == [BOS, *b"user: hi", EOS, *b"assistant: "]


@pytest.mark.parametrize(
    ("messages", "field"),
    [([{"role": "user"}], "content"), ([{"role": 3, "content": "hi"}], r"messages\[0\]\.role")],
)
def test_malformed_messages_are_refused(
    tokenizer: Tokenizer, messages: list[dict[str, str]], field: str
) -> None:
    with pytest.raises(InvalidValue, match=field):
        tokenizer.chat(messages)


def with_template(directory: Path, template: str | None) -> Tokenizer:
    (directory / "chat_template.jinja").unlink()
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return load_tokenizer(open_checkpoint(directory))


def test_chat_without_a_template_says_to_send_text(copy: Path) -> None:
    tokenizer = with_template(copy, None)
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidValue, match="no chat template; send text instead"):
        tokenizer.chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[9].content.upper() }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{% if %}",
    ],
    ids=["raises", "undefined", "escapes-the-sandbox", "syntax"],
)
def test_a_template_that_fails_is_the_requests_error(copy: Path, template: str) -> None:
    tokenizer = with_template(copy, template)
    with pytest.raises(InvalidValue, match="chat template refuses them"):
        tokenizer.chat([{"role": "user", "content": "hi"}])


def test_stored_truncation_is_lifted(copy: Path) -> None:
    file = copy / "tokenizer.json"
    raw = json.loads(file.read_text())
    raw["truncation"] = {
        "direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0,
    }  # fmt: skip
    file.write_text(json.dumps(raw))
    assert len(load_tokenizer(open_checkpoint(copy)).encode("a" * 100)) == 100


def test_missing_tokenizer_is_refused(copy: Path) -> None:
    for file in copy.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(CheckpointError, match=r"copy tokenizer\.json"):
        load_tokenizer(open_checkpoint(copy))


def test_tokenizer_of_another_model_is_refused(
    random_checkpoint: RandomCheckpoint, tmp_path: Path, copy: Path
) -> None:
    small = shutil.copytree(random_checkpoint(vocab=200), tmp_path / "small")
    for file in copy.glob("tokenizer*"):
        shutil.copy(file, small)
    with pytest.raises(CheckpointError, match="259 ids, the embedding 200 rows"):
        load_tokenizer(open_checkpoint(small))


def test_other_threads_run_while_a_long_text_is_tokenized(tokenizer: Tokenizer) -> None:
    """Under Python's lock they would have a turn or two."""
    done, turns = threading.Event(), 0

    def take_turns() -> None:
        nonlocal turns
        while not done.wait(0.0005):
            turns += 1

    beside = threading.Thread(target=take_turns)
    beside.start()
    try:
        assert len(tokenizer.encode("the river of thought " * 20_000)) > 20_000
    finally:
        done.set()
        beside.join()
    assert turns > 10
