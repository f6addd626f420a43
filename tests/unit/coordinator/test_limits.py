"""Refusals name field, value and the limit that was passed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tknp.coordinator.limits import Limits
from tknp.errors import InvalidValue

MakeLimits = Callable[..., Limits]
KV = r"the KV pages of one node hold 32 tokens"
CONTEXT = r"the longest context is max_model_len=20"


def test_unset_max_tokens_takes_what_is_left(make_limits: MakeLimits) -> None:
    assert make_limits().output_tokens(12, None) == 20
    assert make_limits(max_model_len=20).output_tokens(12, None) == 8
    assert make_limits().output_tokens(31, None) == 1
    assert make_limits().output_tokens(12, 20) == 20


@pytest.mark.parametrize(
    ("values", "prompt", "max_tokens", "field", "message"),
    [
        ({}, 0, None, "prompt", r"must have at least one token"),
        ({}, 32, None, "prompt", rf"'32 tokens': at most 31, and one of output: {KV}"),
        ({}, 12, 21, "max_tokens", rf"=21: at most 20 after a prompt of 12 tokens: {KV}"),
        ({"max_model_len": 20}, 20, 1, "prompt", rf"at most 19, and one of output: {CONTEXT}"),
        ({"max_model_len": 20}, 19, 2, "max_tokens", rf"at most 1 after .*: {CONTEXT}"),
        (
            {"max_prompt_tokens": 9},
            10,
            1,
            "prompt",
            r"at most 9, .*the KV of a prefill replica holds 9",
        ),
        # The largest node counts: nobody could take the request on the smaller one alone.
        ({"pages": (2, 5)}, 20, 1, "prompt", r"at most 19, .*one node hold 20 tokens"),
    ],
)
def test_what_no_node_could_hold(
    values: dict[str, object],
    prompt: int,
    max_tokens: int | None,
    field: str,
    message: str,
    make_limits: MakeLimits,
) -> None:
    with pytest.raises(InvalidValue, match=message) as raised:
        make_limits(**values).output_tokens(prompt, max_tokens)
    assert raised.value.field == field
