import dataclasses
import math

import pytest

from tknp.errors import InvalidValue
from tknp.sampling.params import (
    MAX_LOGIT_BIAS_ENTRIES,
    MAX_SCHEMA_BYTES,
    MAX_SEED,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
    validate,
)

VOCAB = 100


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 100},
        {"temperature": 1e-300},
        {"top_k": 10**9},
        {"top_p": 1},
        {"top_p": 1e-9},
        {"min_p": 1.0},
        {"repetition_penalty": 0.01},
        {"repetition_penalty": 100.0},
        {"presence_penalty": -2.0, "frequency_penalty": 2.0},
        {"logit_bias": ((0, -100.0), (VOCAB - 1, 100))},
        {"logprobs": 0},
        {"logprobs": 20},
        {"seed": MAX_SEED},
        {"max_tokens": 3, "min_tokens": 3},
        {"stop_token_ids": (0, VOCAB - 1)},
    ],
)
def test_legal_values_pass_unchanged(changes: dict[str, object]) -> None:
    params = SamplingParams(**changes)
    assert validate(params, VOCAB) is params


NUMBERS = {
    "temperature": (-0.1, 100.5, "must be 0 (greedy) or above 0 up to 100"),
    "top_p": (0.0, 1.01, "must be above 0 up to 1 (off)"),
    "min_p": (-0.01, 1.01, "must be 0 (off) to 1"),
    "repetition_penalty": (0.0, 100.5, "must be 0.01 to 100; 1 is off"),
    "presence_penalty": (-2.01, 2.01, "must be -2 to 2; 0 is off"),
    "frequency_penalty": (-2.01, 2.01, "must be -2 to 2; 0 is off"),
}
BAD = [
    *(
        (field, value, legal)
        for field, (low, high, legal) in NUMBERS.items()
        for value in (low, high, math.nan, math.inf, -math.inf, "1", None, True)
    ),
    ("top_k", -1, "must be 0 (off) or a number of tokens, at least 1"),
    ("top_k", 1.5, "must be an integer: 0 (off) or a number of tokens, at least 1"),
    ("seed", -1, "must be an unsigned 64-bit integer, 0 to 2**64 - 1"),
    ("seed", 2**64, "must be an unsigned 64-bit integer, 0 to 2**64 - 1"),
    ("seed", 0.5, "must be an integer: an unsigned 64-bit integer, 0 to 2**64 - 1"),
    ("logprobs", -1, "must be 0 to 20, or None (off)"),
    ("logprobs", 21, "must be 0 to 20, or None (off)"),
    ("logprobs", True, "must be an integer: 0 to 20, or None (off)"),
    ("max_tokens", 0, "must be at least 1"),
    ("min_tokens", -1, "must be 0 to max_tokens=16"),
    ("min_tokens", 17, "must be 0 to max_tokens=16"),
    ("ignore_eos", 1, "must be true or false"),
]


@pytest.mark.parametrize(("field", "value", "legal"), BAD)
def test_an_illegal_value_is_named_with_its_range(field: str, value: object, legal: str) -> None:
    params = dataclasses.replace(SamplingParams(), **{field: value})
    with pytest.raises(InvalidValue) as caught:
        validate(params, VOCAB)
    assert str(caught.value) == f"{field}={value!r}: {legal}"


LISTS = [
    ("stop_token_ids", (5, -1), "stop_token_ids=-1: must be a token id of this model, 0 to 99"),
    ("stop_token_ids", (100,), "stop_token_ids=100: must be a token id of this model, 0 to 99"),
    (
        "stop_token_ids",
        (1,) * (MAX_STOP_TOKEN_IDS + 1),
        "len(stop_token_ids)=1025: must have at most 1024 entries",
    ),
    ("logit_bias", ((100, 1.0),), "logit_bias=100: must be a token id of this model, 0 to 99"),
    ("logit_bias", ((3, 100.5),), "logit_bias[3]=100.5: must be -100 to 100"),
    ("logit_bias", ((3, math.nan),), "logit_bias[3]=nan: must be -100 to 100"),
    ("logit_bias", ((3, 1.0), (3, 1.0)), "logit_bias=3: must name each token id once"),
    (
        "logit_bias",
        ((1, 0.0),) * (MAX_LOGIT_BIAS_ENTRIES + 1),
        "len(logit_bias)=1025: must have at most 1024 entries",
    ),
    (
        "json_schema",
        " " * (MAX_SCHEMA_BYTES + 1),
        "json_schema='32769 bytes': at most 32768 are taken",
    ),
]


@pytest.mark.parametrize(("field", "value", "message"), LISTS)
def test_an_illegal_entry_is_named(field: str, value: object, message: str) -> None:
    params = dataclasses.replace(SamplingParams(), **{field: value})
    with pytest.raises(InvalidValue) as caught:
        validate(params, VOCAB)
    assert str(caught.value) == message


def test_every_field_is_validated() -> None:
    named = {field for field, *_ in BAD} | {field for field, *_ in LISTS}
    assert named == {field.name for field in dataclasses.fields(SamplingParams)}


def test_only_unaltered_greedy_is_plain() -> None:
    assert SamplingParams(logprobs=5, max_tokens=9, stop_token_ids=(1,), top_k=5).plain
    for change in (
        {"temperature": 0.5},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
        {"logit_bias": ((1, 1.0),)},
        {"min_tokens": 1},
    ):
        assert not SamplingParams(**change).plain, change


def test_only_penalties_need_history() -> None:
    assert not SamplingParams(temperature=1.0, logit_bias=((1, 1.0),), min_tokens=2).needs_history
    for field, value in (
        ("repetition_penalty", 0.9),
        ("presence_penalty", -1.0),
        ("frequency_penalty", 1.0),
    ):
        assert SamplingParams(**{field: value}).needs_history
