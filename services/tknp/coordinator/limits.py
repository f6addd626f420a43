"""What a pool can take, and the refusal of what it never could."""

from __future__ import annotations

from dataclasses import dataclass

from tknp.errors import InvalidValue


@dataclass(frozen=True)
class Limits:
    """`pages`: that each node can give to requests. `max_prompt_tokens`: what every prefill
    replica can hold. `max_batch`: requests from placement to their end. `max_queue`: that wait.
    `hold_until`: see PoolConfig.
    """

    pages: tuple[int, ...]
    page_size: int
    max_batch: int
    max_queue: int
    max_model_len: int
    max_prompt_tokens: int
    eos_ids: frozenset[int]
    hold_until: int = 0

    @property
    def longest(self) -> int:
        """Most tokens, prompt plus output, that a request may have."""
        return min(self.max_model_len, self._node_tokens)

    def output_tokens(self, prompt_tokens: int, max_tokens: int | None) -> int:
        """Output limit of a request; None asks for all there is room for.

        Raises InvalidValue naming the limit if no node could ever hold the request.
        """
        if prompt_tokens < 1:
            raise InvalidValue("prompt", "", "must have at least one token")
        room, limit = self.longest - prompt_tokens, self._names_longest
        if room < 1:
            raise InvalidValue(
                "prompt", f"{prompt_tokens} tokens",
                f"at most {self.longest - 1}, and one of output: {limit}",
            )  # fmt: skip
        if prompt_tokens > self.max_prompt_tokens:
            raise InvalidValue(
                "prompt", f"{prompt_tokens} tokens",
                f"at most {self.max_prompt_tokens}: the KV of a prefill replica holds no more",
            )  # fmt: skip
        if max_tokens is not None and max_tokens > room:
            raise InvalidValue(
                "max_tokens", max_tokens,
                f"at most {room} after a prompt of {prompt_tokens} tokens: {limit}",
            )  # fmt: skip
        return room if max_tokens is None else max_tokens

    @property
    def _node_tokens(self) -> int:
        return max(self.pages) * self.page_size

    @property
    def _names_longest(self) -> str:
        if self.max_model_len <= self._node_tokens:
            return f"the longest context is max_model_len={self.max_model_len}"
        return f"the KV pages of one node hold {self._node_tokens} tokens"
