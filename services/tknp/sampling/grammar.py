"""Output that is held to a JSON schema: which token may come next. Needs llguidance, not torch.

    admission   Grammars.check      the schema can be enforced, or it is refused with a reason
    waiting     Grammars.compile    read ahead, off the engine thread, so that no step waits for it
    joining     Grammars.matcher    one Matcher a request, from its schema and what it generated
    each step   forbidden -> draw -> advance(token) -> [worker: the next mask, beside the forward]
    end         the schema is complete: only end-of-sequence ids are left

The state follows from schema and generated ids alone, so prefill, the last root and a replay agree
on it without telling each other. Tokenizer, library and worker come with the first schema, so that
a pool that is asked for none pays nothing; `start` makes the worker's thread before, for whom it
matters which cores a thread inherits. A grammar that becomes too complex, or a schema that can't be
read after all, fails its own row (`forbidden` raises), never a step.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tknp.errors import InvalidValue, TknpError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from tknp.model.tokenizer import Tokenizer

BoolArray = npt.NDArray[np.bool_]
GRAMMARS_KEPT = 64
_SHOWN = 60
# Between two JSON tokens a model may write white space, but not for ever.
_SPACE = r"[\x20\x0A\x0D\x09]{1,20}"
# What a hostile schema may cost on one core: about 0.1 s to be read, 10 ms a mask, and in memory
# its states, 1-2 KB each. A usual one takes 0.2 ms and 0.1 ms.
_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 50_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 50_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 20_000,
    "max_items_in_row": 2_000,
    "verbose_errors": False,
}


class GrammarError(TknpError):
    """Output can't go on under its schema."""


class Grammars:
    """Schemas of one model, compiled once. May be shared by threads.

    `tokenizer` is called when the first schema comes. vocab_size: of the model. `eos_ids` end an
    output; without any no schema is taken.
    """

    def __init__(
        self, tokenizer: Callable[[], Tokenizer], vocab_size: int, eos_ids: Sequence[int]
    ) -> None:
        self._load = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = tuple(eos_ids)
        self._lock = Lock()
        self._tokenizer: LLTokenizer | None = None
        self._kept: OrderedDict[str, LLMatcher] = OrderedDict()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="grammar")  # no thread yet

    def start(self) -> None:
        """Make the worker's thread now: it may run wherever the calling one may."""
        self._worker.submit(int)

    def compile(self, schema: str) -> LLMatcher:
        """A matcher of `schema` at its start. Blocks, without the interpreter lock.

        Raises InvalidValue naming what of `schema` can't be enforced.
        """
        with self._lock:
            if (kept := self._kept.get(schema)) is not None:
                self._kept.move_to_end(schema)
                return kept.deep_copy()
        found = self._compile(schema)
        with self._lock:
            self._kept[schema] = found
            if len(self._kept) > GRAMMARS_KEPT:
                self._kept.popitem(last=False)
        return found.deep_copy()

    def check(self, schema: str, generated: Sequence[int] = ()) -> None:
        """Raises InvalidValue if `schema` can't be enforced or `generated` isn't its beginning."""
        matcher = self.compile(schema)
        fitting = matcher.validate_tokens(list(generated)) if generated else 0
        if fitting < len(generated):
            remedy = f"token {fitting} is not allowed by json_schema"
            raise InvalidValue("generated_token_ids", f"{len(generated)} ids", remedy)

    def matcher(self, schema: str, generated: Sequence[int] = ()) -> Matcher:
        """State of a request after `generated`. Returns at once; the work is the worker's."""
        return Matcher(self._worker, lambda: self.compile(schema), generated, self._vocab_size)

    def close(self) -> None:
        """Nothing is asked any more."""
        self._worker.shutdown(wait=False, cancel_futures=True)

    def _compile(self, schema: str) -> LLMatcher:
        shown = schema if len(schema) <= _SHOWN else schema[:_SHOWN] + "..."
        try:
            from llguidance import LLMatcher, LLParserLimits
        except ImportError:
            remedy = "this pool can't hold output to a schema: install llguidance (tknp[engine])"
            raise InvalidValue("json_schema", shown, remedy) from None
        if not self._eos_ids:
            remedy = "this model has no end-of-sequence id to end the output with"
            raise InvalidValue("json_schema", shown, remedy)
        try:
            parsed = json.loads(schema)
            if not isinstance(parsed, dict | bool):
                raise InvalidValue("json_schema", shown, "a schema is a JSON object")
            grammar = LLMatcher.grammar_from_json_schema(
                schema, overrides={"whitespace_pattern": _SPACE}
            )
        except (ValueError, RecursionError) as error:
            if isinstance(error, InvalidValue):
                raise
            raise InvalidValue("json_schema", shown, f"is not JSON: {error}") from None
        limits = LLParserLimits(**_LIMITS)
        found = LLMatcher(self._vocabulary(), grammar, log_level=0, limits=limits)
        if found.is_error():
            reason = found.get_error().partition("\n")[0]
            raise InvalidValue("json_schema", shown, f"can't be enforced: {reason}")
        return found

    def _vocabulary(self) -> LLTokenizer:
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = _vocabulary(self._load(), self._vocab_size, self._eos_ids)
            return self._tokenizer


class Matcher:
    """Where one request stands in its grammar. Owned by the engine thread; see the module."""

    __slots__ = ("_found", "_inner", "_next", "_start", "_vocab_size", "_worker")

    def __init__(
        self,
        worker: ThreadPoolExecutor,
        start: Callable[[], LLMatcher],
        generated: Sequence[int],
        vocab_size: int,
    ) -> None:
        self._worker = worker
        self._start = start
        self._vocab_size = vocab_size
        self._inner: LLMatcher | None = None
        self._next: Future[BoolArray] = worker.submit(self._step, tuple(generated))

    def forbidden(self) -> BoolArray:
        """Ids that may not come next, bool [vocab_size]. Raises TknpError if nobody can say."""
        return self._next.result()

    def advance(self, token: int) -> None:
        """`token` was drawn; the mask of what follows is worked out while the model computes."""
        self._next = self._worker.submit(self._step, (token,))

    def _step(self, tokens: Sequence[int]) -> BoolArray:
        """On the worker: take `tokens`, then the next mask."""
        inner = self._inner = self._inner or self._start()
        for token in tokens:
            # Past its end an output may run one more row, whose token is discarded.
            if not inner.is_stopped() and not inner.consume_token(token):
                raise GrammarError(f"token {token} is not allowed by json_schema")
        if inner.is_error():
            raise GrammarError(inner.get_error().partition("\n")[0])
        bits = np.frombuffer(inner.compute_bitmask(), dtype=np.uint8)
        if inner.is_error():
            raise GrammarError(f"json_schema: {inner.get_error().partition(chr(10))[0]}")
        allowed: BoolArray = np.unpackbits(bits, count=self._vocab_size, bitorder="little") != 0
        return ~allowed


def _vocabulary(tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> LLTokenizer:
    """The bytes of every id; the library marks what is not text by a first byte of 0xff."""
    from llguidance import LLTokenizer, TokenizerWrapper

    special = tokenizer.special_ids | set(eos_ids)
    words = []
    for index in range(vocab_size):
        text = tokenizer.token_bytes(index)
        named = text or f"<{index}>".encode()
        words.append(text if text and index not in special else b"\xff" + named)

    class Vocabulary:
        eos_token_id = eos_ids[0]
        bos_token_id = tokenizer.bos_id
        tokens = words
        special_token_ids = sorted(special)

        def __call__(self, text: str) -> list[int]:
            return tokenizer.encode(text, add_special_tokens=False)

    return LLTokenizer(
        TokenizerWrapper(Vocabulary()), eos_token=list(eos_ids), slices=LLTokenizer.json_slices()
    )
