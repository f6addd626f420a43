"""What the sampler remembers of one request between steps.

Life cycle: the engine thread builds a RowState when a request is admitted (or replayed), passes it
to the sampler each step, calls `advance` with the token that was drawn, and drops it when the
request ends. One thread owns it; nothing here locks. No torch.

Penalties touch only ids that occurred, so History keeps distinct ids and their counts up to date
token by token; no step walks the whole context.

    prompt  5 9 5 7   ->  seen  5 7 9        output ids  -      counts  -
    output  9 4 9     ->  seen  5 7 9 4      output ids  9 4    counts  2 1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tknp.errors import InvalidValue
from tknp.sampling.params import SamplingParams

if TYPE_CHECKING:
    from tknp.sampling.grammar import Grammars, Matcher

Int64Array = npt.NDArray[np.int64]


class History:
    """Distinct token ids of a prompt and of the output so far.

    Raises InvalidValue for an id outside [0, vocab_size).
    """

    __slots__ = ("_counts", "_output", "_prompt", "_seen", "_slots", "_vocab_size")

    def __init__(self, vocab_size: int, prompt: Sequence[int], output: Sequence[int] = ()) -> None:
        self._vocab_size = vocab_size
        self._prompt: Int64Array = np.unique(np.asarray(prompt, dtype=np.int64))
        if self._prompt.size:
            self._check("prompt", int(self._prompt[0]))
            self._check("prompt", int(self._prompt[-1]))
        self._seen = _Growing(self._prompt)
        self._output = _Growing()
        self._counts = _Growing()
        self._slots: dict[int, int] = {}
        for token in output:
            self.append(token)

    @property
    def seen(self) -> Int64Array:
        """Distinct ids of prompt and output. A view, valid until the next `append`."""
        return self._seen.view

    @property
    def output_ids(self) -> Int64Array:
        """Distinct ids of the output, by first occurrence. A view, as `seen`."""
        return self._output.view

    @property
    def output_counts(self) -> Int64Array:
        """How often each of `output_ids` occurs in the output. A view, as `seen`."""
        return self._counts.view

    def append(self, token: int) -> None:
        """Add one output token."""
        slot = self._slots.get(token)
        if slot is not None:
            self._counts.view[slot] += 1
            return
        self._check("token", token)
        self._slots[token] = self._output.append(token)
        self._counts.append(1)
        if not self._in_prompt(token):
            self._seen.append(token)

    def _in_prompt(self, token: int) -> bool:
        at = int(self._prompt.searchsorted(token))
        return at < self._prompt.size and int(self._prompt[at]) == token

    def _check(self, field: str, token: int) -> None:
        if not 0 <= token < self._vocab_size:
            raise InvalidValue(field, token, f"must be a token id, 0 to {self._vocab_size - 1}")


class _Growing:
    """An int64 array that doubles when full."""

    __slots__ = ("_buffer", "_size")

    def __init__(self, initial: Int64Array | None = None) -> None:
        size = 0 if initial is None else initial.size
        self._buffer: Int64Array = np.empty(size + 16, dtype=np.int64)
        self._size = size
        if initial is not None:
            self._buffer[:size] = initial

    @property
    def view(self) -> Int64Array:
        return self._buffer[: self._size]

    def append(self, value: int) -> int:
        """Add `value`; return its index."""
        if self._size == self._buffer.size:
            self._buffer = np.concatenate([self._buffer, np.empty_like(self._buffer)])
        self._buffer[self._size] = value
        self._size += 1
        return self._size - 1


@dataclass(slots=True)
class RowState:
    """One row of the sampler's batch.

    `position` is the absolute position of the token about to be drawn (len(prompt) for the first
    one); the draw is keyed by (params.seed, position). `generated` counts the output tokens so far.
    `history` may be None where `params.needs_history` is false, and `grammar` where there is no
    `params.json_schema`. Owned by the engine thread.
    """

    params: SamplingParams
    position: int
    generated: int = 0
    history: History | None = None
    grammar: Matcher | None = None

    def __post_init__(self) -> None:
        if self.params.needs_history and self.history is None:
            raise InvalidValue("history", None, "must be given when a penalty is on")
        if self.params.json_schema and self.grammar is None:
            raise InvalidValue("grammar", None, "must be given with json_schema")

    @classmethod
    def at(
        cls,
        params: SamplingParams,
        vocab_size: int,
        prompt: Sequence[int],
        output: Sequence[int] = (),
        grammars: Grammars | None = None,
    ) -> RowState:
        """State before the token that follows `prompt` and `output`.

        `output` is empty at prefill, the first token at admission to decode, and all journalled
        tokens at a replay. `grammars` may be None without a schema.
        """
        history = History(vocab_size, prompt, output) if params.needs_history else None
        grammar = None
        if params.json_schema and grammars is not None:
            grammar = grammars.matcher(params.json_schema, output)
        return cls(params, len(prompt) + len(output), len(output), history, grammar)

    @property
    def below_min_tokens(self) -> bool:
        return self.generated < self.params.min_tokens

    @property
    def takes_argmax(self) -> bool:
        """The next token is the argmax of the model's logits: `plain`, as far as this step goes."""
        return self.params.greedy and not self.params.shifts_logits and not self.below_min_tokens

    def advance(self, token: int) -> None:
        """Record that `token` was drawn at `position`."""
        self.position += 1
        self.generated += 1
        if self.history is not None:
            self.history.append(token)
        if self.grammar is not None:
            self.grammar.advance(token)
