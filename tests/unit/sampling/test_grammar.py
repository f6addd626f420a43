from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
import torch

from tknp.errors import InvalidValue
from tknp.model.checkpoint import open_checkpoint
from tknp.model.tokenizer import Tokenizer, load_tokenizer
from tknp.sampling.grammar import GRAMMARS_KEPT, GrammarError, Grammars
from tknp.sampling.history import RowState
from tknp.sampling.params import MAX_SCHEMA_BYTES, SamplingParams, validate
from tknp.sampling.sampler import FAILED, Sampler

VOCAB, EOS = 261, 257
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 6},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    }
)
COSTLY = json.dumps(
    {"properties": {f"k{i}": {"pattern": f"^(a|b|c){{1,{i}}}$"} for i in range(1, 700)}}
)
HELD = SamplingParams(temperature=1.0, seed=3, max_tokens=200, json_schema=SCHEMA)


@pytest.fixture(scope="module")
def tokenizer(random_checkpoint: Callable[..., Path]) -> Tokenizer:
    return load_tokenizer(open_checkpoint(random_checkpoint()))


@pytest.fixture
def grammars(tokenizer: Tokenizer) -> Iterator[Grammars]:
    made = Grammars(lambda: tokenizer, VOCAB, [EOS])
    yield made
    made.close()


@pytest.fixture
def sampler() -> Sampler:
    return Sampler(VOCAB, [EOS])


def logits_at(position: int, row: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * row + position)
    return torch.randn(1, VOCAB, generator=generator) * 3


def ran(sampler: Sampler, state: RowState, row: int = 0, most: int = 200) -> list[int]:
    """Tokens of `state` until its end, by itself."""
    tokens: list[int] = []
    while len(tokens) < most:
        found = sampler.sample(logits_at(state.position, row), [state])
        assert not found.errors
        tokens += found.tokens
        if found.tokens[0] == EOS:
            break
        state.advance(found.tokens[0])
    return tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0, 5.0])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_random_logits_give_what_the_schema_describes(
    grammars: Grammars, sampler: Sampler, tokenizer: Tokenizer, seed: int, temperature: float
) -> None:
    params = SamplingParams(temperature=temperature, seed=seed, max_tokens=200, json_schema=SCHEMA)
    tokens = ran(sampler, RowState.at(params, VOCAB, [1], grammars=grammars), row=seed)
    assert tokens[-1] == EOS
    jsonschema.validate(json.loads(tokenizer.decode(tokens[:-1])), json.loads(SCHEMA))


def test_a_state_after_any_of_its_tokens_goes_on_alike(
    grammars: Grammars, sampler: Sampler
) -> None:
    """What decode starts from after prefill, and a replay after a loss."""
    whole = ran(sampler, RowState.at(HELD, VOCAB, [1], grammars=grammars))
    for cut in range(1, len(whole), max(1, len(whole) // 8)):
        state = RowState.at(HELD, VOCAB, [1], whole[:cut], grammars)
        assert ran(sampler, state) == whole[cut:]


def test_rows_without_a_schema_are_as_they_were_beside_one(
    grammars: Grammars, sampler: Sampler
) -> None:
    greedy, drawn = SamplingParams(logprobs=2), SamplingParams(temperature=1.0, seed=9)
    logits = torch.cat([logits_at(0, row) for row in range(3)])
    states = [RowState.at(p, VOCAB, [1], grammars=grammars) for p in (greedy, HELD, drawn)]
    together = sampler.sample(logits, states)
    for row in (0, 1, 2):
        alone = sampler.sample(logits[row : row + 1], [states[row]])
        assert together.tokens[row] == alone.tokens[0]
        assert together.logprobs[row] == alone.logprobs[0]


def test_the_row_past_its_end_is_harmless(grammars: Grammars, sampler: Sampler) -> None:
    params = SamplingParams(json_schema='{"const":1}', max_tokens=9)
    state = RowState.at(params, VOCAB, [1], [ord("1"), EOS], grammars)
    found = sampler.sample(logits_at(0), [state])
    assert found.tokens == [EOS]
    state.advance(EOS)
    assert not sampler.sample(logits_at(1), [state]).errors


def test_a_row_that_left_its_schema_fails_alone(grammars: Grammars, sampler: Sampler) -> None:
    lost = RowState.at(HELD, VOCAB, [1], [ord("x")], grammars)
    states = [lost, RowState.at(SamplingParams(), VOCAB, [1])]
    found = sampler.sample(torch.cat([logits_at(0), logits_at(0, 1)]), states)
    assert found.tokens[0] == FAILED
    assert isinstance(found.errors[0], GrammarError)
    assert list(found.errors) == [0]
    assert found.tokens[1] == int(logits_at(0, 1).argmax())


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ("{", "is not JSON"),
        ("[1]", "a schema is a JSON object"),
        ('{"type":"foo"}', "Invalid type: foo"),
        ('{"not":{"type":"string"}}', "Unimplemented keys"),
        ('{"allOf":[{"type":"string"},{"type":"integer"}]}', "Unsatisfiable"),
        ('{"$ref":"https://example.org/schema"}', "example.org"),
        (COSTLY, "too big"),
    ],
)
def test_refused_with_the_reason(grammars: Grammars, schema: str, reason: str) -> None:
    with pytest.raises(InvalidValue, match=reason) as refused:
        grammars.check(schema)
    assert refused.value.field == "json_schema"


def test_tokens_of_an_earlier_attempt_have_to_fit(grammars: Grammars) -> None:
    grammars.check(SCHEMA, list(b'{"name":'))
    with pytest.raises(InvalidValue, match="token 2 is not allowed"):
        grammars.check(SCHEMA, list(b'{"x'))


def test_a_model_without_an_end_takes_no_schema(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidValue, match="no end-of-sequence id"):
        Grammars(lambda: tokenizer, VOCAB, []).check(SCHEMA)


def test_schemas_are_read_once_and_few_are_kept(tokenizer: Tokenizer) -> None:
    loads: list[int] = []

    def load() -> Tokenizer:
        loads.append(1)
        return tokenizer

    grammars = Grammars(load, VOCAB, [EOS])
    assert not loads
    for number in range(2 * GRAMMARS_KEPT):
        grammars.check(f'{{"const":{number}}}')
    assert len(loads) == 1
    assert len(grammars._kept) == GRAMMARS_KEPT


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"ignore_eos": True}, "ignore_eos"),
        ({"min_tokens": 1}, "min_tokens"),
        ({"json_schema": " " * (MAX_SCHEMA_BYTES + 1)}, "json_schema"),
    ],
)
def test_what_a_schema_excludes(changed: dict[str, Any], field: str) -> None:
    values: dict[str, Any] = {"json_schema": SCHEMA, "max_tokens": 9, **changed}
    with pytest.raises(InvalidValue) as refused:
        validate(SamplingParams(**values), VOCAB)
    assert refused.value.field == field


def test_a_state_without_its_grammar_is_refused() -> None:
    with pytest.raises(InvalidValue, match="must be given with json_schema"):
        RowState.at(HELD, VOCAB, [1])


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
@pytest.mark.parametrize("started", [True, False])
def test_a_worker_that_is_started_before_stays_off_the_core_of_the_engine(started: bool) -> None:
    """Masks are made beside the forward, whose thread is kept on a core of its own."""
    allowed = os.sched_getaffinity(0)
    grammars = Grammars(lambda: pytest.fail("not asked for"), VOCAB, [EOS])
    found: list[set[int]] = []

    def engine() -> None:
        if started:
            grammars.start()
        os.sched_setaffinity(0, {min(allowed)})
        found.append(grammars._worker.submit(os.sched_getaffinity, 0).result())

    thread = threading.Thread(target=engine)
    thread.start()
    thread.join()
    grammars.close()
    assert found == [allowed if started else {min(allowed)}]
