"""Limits and requests of schedulers under test."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

from tknp.coordinator.division import Division
from tknp.coordinator.limits import Limits
from tknp.coordinator.request import Request
from tknp.kv.holding import Key
from tknp.sampling.params import SamplingParams


@pytest.fixture(scope="session")
def make_limits() -> Callable[..., Limits]:
    """`make_limits(pages=(8, 8), ...)`: pages of 4 tokens, roomy otherwise; id 0 is EOS.

    One stream over all nodes, one owner a request, unless `streams`, `width`, `together`, `divides`
    or `interleave` say otherwise.
    """

    def make(pages: tuple[int, ...] = (8, 8), **values: Any) -> Limits:
        division: dict[str, Any] = {"streams": (tuple(range(len(pages))),)}
        for name in ("streams", "width", "together", "divides", "interleave"):
            if name in values:
                division[name] = values.pop(name)
        usual: dict[str, Any] = {
            "division": Division(4, **division), "max_batch": 8, "max_queue": 16,
            "max_model_len": 1000, "max_prompt_tokens": 1000, "eos_ids": frozenset({0}),
        }  # fmt: skip
        return Limits(pages, **{**usual, **values})

    return make


@pytest.fixture(scope="session")
def make_request() -> Callable[..., Request]:
    """`make_request(prompt_tokens=3, max_tokens=5, ...)`; further keywords go to Request."""
    numbers = count()

    def make(
        prompt_tokens: int = 3,
        max_tokens: int = 5,
        *,
        ignore_eos: bool = False,
        stop_token_ids: tuple[int, ...] = (),
        **values: Any,
    ) -> Request:
        params = SamplingParams(
            max_tokens=max_tokens, ignore_eos=ignore_eos, stop_token_ids=stop_token_ids
        )
        prompt = range(1, 1 + prompt_tokens)
        return Request(Key(f"request-{next(numbers)}", 0), prompt, params, 0.0, **values)

    return make
