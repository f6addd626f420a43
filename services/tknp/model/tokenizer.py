"""Text to ids and back, and the checkpoint's chat template.

The libraries do the work: tokenizers encodes and decodes, transformers finds the files and renders
the template in Jinja's sandbox. Both are imported by `load_tokenizer`, not before: it takes
seconds. A Tokenizer is immutable and may be shared by threads; a Detokenizer belongs to one
stream.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tknp.errors import CheckpointError, InvalidValue
from tknp.model.checkpoint import Checkpoint
from tknp.model.config import ModelConfig
from tknp.model.detokenizer import Detokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_SPACE = "\u2581"  # SentencePiece writes spaces so
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_letters() -> dict[str, int]:
    """Byte that each letter of a byte-level vocabulary stands for.

    Bytes that print stand for themselves, the others for the letters from U+0100 on, in order.
    """
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printing]
    letters = {chr(byte): byte for byte in printing}
    return letters | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_letters()


class Tokenizer:
    """Tokenizer of one checkpoint.

    `eos_ids` end a text: the checkpoint's and the tokenizer's own. `special_ids` never appear in
    decoded text. `vocab_size` counts ids with added tokens; the model's may be larger (padding).
    """

    def __init__(self, library: PreTrainedTokenizerFast, config: ModelConfig) -> None:
        self._library = library
        self._backend = library.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        own = library.eos_token_id
        ends = (*config.eos_ids, own) if isinstance(own, int) else config.eos_ids
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys(ends))
        self.bos_id: int | None = library.bos_token_id
        self.vocab_size: int = self._backend.get_vocab_size(with_added_tokens=True)
        added = self._backend.get_added_tokens_decoder()
        self.special_ids: frozenset[int] = frozenset(i for i, t in added.items() if t.special)
        self._added = frozenset(added)
        self._byte_level = "ByteLevel" in repr(self._backend.decoder)

    @property
    def has_chat_template(self) -> bool:
        return self._library.chat_template is not None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`, with the checkpoint's own prefix (such as BOS) unless told otherwise.

        Other threads run meanwhile: of the library's ways only batches let go of Python's lock. A
        text of 128K tokens takes most of a second.
        """
        batch = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = batch[0].ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` without special tokens; damaged UTF-8 becomes U+FFFD."""
        return self._backend.decode(ids, skip_special_tokens=True)

    def token_bytes(self, index: int) -> bytes:
        """Text of one id; not always whole characters. Empty for ids without a token."""
        token: str | None = self._backend.id_to_token(index)
        if token is None:
            return b""
        if index in self._added:
            return token.encode()
        if self._byte_level:
            return bytes(_BYTE_OF.get(letter, 0x3F) for letter in token)
        if (byte := _BYTE_TOKEN.fullmatch(token)) is not None:
            return bytes.fromhex(byte[1])
        return token.replace(_SPACE, " ").encode()

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Ids of a conversation of `role` and `content`, up to where the assistant answers.

        Raises InvalidValue without a template, or if the template refuses the messages.
        """
        from jinja2 import TemplateError

        if not self.has_chat_template:
            raise InvalidValue(
                "messages", len(messages), "this checkpoint has no chat template; send text instead"
            )
        for index, message in enumerate(messages):
            for key in ("role", "content"):
                if not isinstance(message.get(key), str):
                    raise InvalidValue(f"messages[{index}].{key}", message.get(key), "must be text")
        try:
            text = self._library.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise InvalidValue(
                "messages", len(messages), f"the checkpoint's chat template refuses them: {error}"
            ) from error
        return self.encode(str(text), add_special_tokens=False)

    def stream(self) -> Detokenizer:
        """A decoder for one stream of ids."""
        return Detokenizer(self.decode, self.special_ids)


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer of `checkpoint`, from the GGUF itself or the files beside the weights.

    Raises CheckpointError if there is none, if it isn't a kind that can be read faithfully, or if
    it knows ids that the model's embedding doesn't have.
    """
    library = _from_gguf(checkpoint) if checkpoint.is_gguf else _from_directory(checkpoint)
    tokenizer = Tokenizer(library, checkpoint.config)
    if tokenizer.vocab_size > checkpoint.config.vocab_size:
        raise CheckpointError(
            f"{checkpoint.path.name}: the tokenizer has {tokenizer.vocab_size} ids, the embedding "
            f"{checkpoint.config.vocab_size} rows; they belong to different models"
        )
    return tokenizer


def _from_gguf(checkpoint: Checkpoint) -> PreTrainedTokenizerFast:
    from tknp.model.gguf_tokenizer import read_gguf_tokenizer

    return read_gguf_tokenizer(checkpoint.path)


def _from_directory(checkpoint: Checkpoint) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast
    from transformers.models.auto import AutoTokenizer

    try:
        library = AutoTokenizer.from_pretrained(checkpoint.path, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{checkpoint.path} holds no tokenizer; copy tokenizer.json and tokenizer_config.json "
            f"of the model there ({type(error).__name__})"
        ) from error
    if not isinstance(library, PreTrainedTokenizerFast):
        raise CheckpointError(
            f"{checkpoint.path}: {type(library).__name__} has no tokenizer.json; save the "
            "tokenizer with transformers' fast tokenizers"
        )
    return library
