"""The tokenizer inside a GGUF file.

A GGUF stores vocabulary, merges and token types, and names the rest: `tokenizer.ggml.model` is the
algorithm, `tokenizer.ggml.pre` how text is cut before merging. transformers' own conversion cuts
kinds it doesn't know (such as `smollm`, whose digits stand alone) like GPT-2, so byte-level
vocabularies are built here and unknown kinds refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gguf.constants import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from tknp.errors import CheckpointError
from tknp.model.gguf_header import read_gguf_header

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_PREFIX = "tokenizer.ggml."
_ARRAYS = frozenset(_PREFIX + name for name in ("tokens", "scores", "token_type", "merges"))

_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_WORDS = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")

_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _words(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


_PRE: Mapping[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": lambda: _GPT2,
    "smollm": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), _GPT2]
    ),
    "llama-bpe": lambda: _words(_LLAMA3_WORDS),
    "qwen2": lambda: _words(_QWEN2_WORDS),
}


def read_gguf_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """Tokenizer of `path` with its special tokens and chat template.

    Raises CheckpointError for an algorithm or a pre-tokenizer that isn't known, naming it.
    """
    from transformers import PreTrainedTokenizerFast

    metadata = read_gguf_header(path, _ARRAYS).metadata
    tokens = _strings(path.name, metadata, "tokens")
    model, pre = metadata.get(_PREFIX + "model"), metadata.get(_PREFIX + "pre")
    if model == "gpt2":
        backend = _byte_level(path.name, metadata, tokens, pre)
        adds_bos = pre == "llama-bpe"
    elif model == "llama":
        backend = _sentencepiece(path.name, metadata, tokens)
        adds_bos = True
    else:
        raise CheckpointError(f"{path.name}: {_PREFIX}model={model!r}; expected 'gpt2' or 'llama'")
    _add_special_tokens(backend, metadata, tokens)

    def special(key: str) -> str | None:
        index = metadata.get(f"{_PREFIX}{key}_token_id")
        return tokens[index] if isinstance(index, int) and index < len(tokens) else None

    bos = special("bos")
    if metadata.get(_PREFIX + "add_bos_token", adds_bos) and bos is not None:
        bos_id = metadata[_PREFIX + "bos_token_id"]
        backend.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=None, special_tokens=[(bos, bos_id)]
        )
    else:
        backend.post_processor = None
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend,
        bos_token=bos,
        eos_token=special("eos"),
        unk_token=special("unknown"),
        pad_token=special("padding"),
        chat_template=metadata.get("tokenizer.chat_template"),
    )


def _byte_level(
    file: str, metadata: Mapping[str, object], tokens: list[str], pre: object
) -> Tokenizer:
    if pre not in _PRE:
        known = ", ".join(sorted(_PRE))
        raise CheckpointError(f"{file}: {_PREFIX}pre={pre!r}; expected one of {known}")
    pairs = (merge.partition(" ") for merge in _strings(file, metadata, "merges"))
    merges = [(left, right) for left, _, right in pairs]
    vocab = {token: index for index, token in enumerate(tokens)}
    # Llama 3's vocabulary holds words that its merges can't reach.
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    backend.pre_tokenizer = _PRE[str(pre)]()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(file: str, metadata: Mapping[str, object], tokens: list[str]) -> Tokenizer:
    """SentencePiece BPE with byte fallback, as transformers builds it from pieces and scores."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

    if metadata.get(_PREFIX + "add_space_prefix", True) is not True:
        raise CheckpointError(f"{file}: {_PREFIX}add_space_prefix=false; expected true")
    fields: dict[str, Any] = {
        "tokenizer_type": "llama",
        "tokens": tokens,
        "scores": metadata.get(_PREFIX + "scores"),
        "token_type": metadata.get(_PREFIX + "token_type"),
    }
    if _PREFIX + "merges" in metadata:
        fields["merges"] = _strings(file, metadata, "merges")
    elif fields["scores"] is None:
        raise CheckpointError(f"{file}: {_PREFIX}scores is missing")
    backend: Tokenizer = convert_gguf_tokenizer("llama", fields)[0]
    return backend


def _add_special_tokens(
    backend: Tokenizer, metadata: Mapping[str, object], tokens: list[str]
) -> None:
    """Keep control and user-defined tokens whole; only control tokens are special."""
    kinds = metadata.get(_PREFIX + "token_type")
    for token, kind in zip(tokens, kinds if isinstance(kinds, list) else [], strict=False):
        if kind in (TokenType.CONTROL, TokenType.USER_DEFINED):
            special = kind == TokenType.CONTROL
            added = AddedToken(token, special=special, normalized=False)
            (backend.add_special_tokens if special else backend.add_tokens)([added])


def _strings(file: str, metadata: Mapping[str, object], name: str) -> list[str]:
    values = metadata.get(_PREFIX + name)
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise CheckpointError(f"{file}: {_PREFIX}{name} is missing; expected an array of strings")
    return values
