"""What a pool can take, and the refusal of what it never could."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from tknp.coordinator.division import Division
from tknp.errors import InvalidValue


@dataclass(frozen=True)
class Limits:
    """`pages`: that each node can give to requests. `division`: how nodes divide a request.

    `max_prompt_tokens`: what every prefill replica can hold; a request that has to be computed
    again comes there with all it has. `max_batch`: requests of one stream from placement to their
    end. `max_queue`: that wait. `reserve_ratio`, `hold_until`: see PoolConfig.
    """

    pages: tuple[int, ...]
    division: Division
    max_batch: int
    max_queue: int
    max_model_len: int
    max_prompt_tokens: int
    eos_ids: frozenset[int]
    reserve_ratio: float = 1.0
    hold_until: int = 0

    @cached_property
    def longest(self) -> int:
        """Most tokens, prompt plus output, that a request may have."""
        most = min(self.max_model_len, self.max_prompt_tokens + 1)
        if self._fits(most - 1, 1) and self._fits(1, most - 1):
            return most
        return _most(lambda total: self._fits(total - 1, 1) and self._fits(1, total - 1), most)

    def output_tokens(self, prompt_tokens: int, max_tokens: int | None) -> int:
        """Output limit of a request; None asks for all there is room for.

        Raises InvalidValue naming the limit if the pool could never hold the request.
        """
        if prompt_tokens < 1:
            raise InvalidValue("prompt", "", "must have at least one token")
        room, limit = self._room(prompt_tokens)
        if room < 1:
            longest = min(self.max_model_len - 1, self.max_prompt_tokens)
            most = _most(lambda tokens: self._fits(tokens, 1), longest)
            raise InvalidValue(
                "prompt", f"{prompt_tokens} tokens", f"at most {most}, and one of output: {limit}"
            )
        if max_tokens is not None and max_tokens > room:
            raise InvalidValue(
                "max_tokens", max_tokens,
                f"at most {room} after a prompt of {prompt_tokens} tokens: {limit}",
            )  # fmt: skip
        return room if max_tokens is None else max_tokens

    def _room(self, prompt_tokens: int) -> tuple[int, str]:
        """Most output tokens after `prompt_tokens`, and what limits them."""
        room = self.max_model_len - prompt_tokens
        limit = f"the longest context is max_model_len={self.max_model_len}"
        prefill = self.max_prompt_tokens + 1 - prompt_tokens
        if prefill < room:
            room = prefill
            limit = f"the KV of a prefill replica holds {self.max_prompt_tokens} tokens"
        if room > 0 and not self._fits(prompt_tokens, room):
            room = _most(lambda tokens: self._fits(prompt_tokens, tokens), room)
            limit = self.division.names_capacity(self.pages)
        return room, limit

    def _fits(self, prompt_tokens: int, output_tokens: int) -> bool:
        total = prompt_tokens + output_tokens
        return self.division.fewest_owners(self.pages, prompt_tokens, total) is not None


def _most(fits: Callable[[int], bool], most: int) -> int:
    """Largest of 0..most that `fits`, which all below it do."""
    return bisect_left(range(1, most + 1), True, key=lambda n: not fits(n))
