import dataclasses
import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from tknp.errors import InvalidValue
from tknp.sampling import sampler as sampler_module
from tknp.sampling.history import RowState
from tknp.sampling.params import MAX_SEED, SamplingParams
from tknp.sampling.random import uniform
from tknp.sampling.sampler import FAILED, LogitsError, RowLogprobs, Sampled, Sampler

VOCAB = 500
EOS = 3
PROMPT = [5, 9, 11, 5]
OUTPUT = [9, 20, 20]

VARIETY = [
    SamplingParams(),
    SamplingParams(logprobs=3),
    SamplingParams(temperature=1.0, seed=MAX_SEED, logprobs=0),
    SamplingParams(temperature=0.3, seed=1, top_p=0.8),
    SamplingParams(temperature=100.0, seed=2),
    SamplingParams(temperature=1.5, seed=3, top_k=40, min_p=0.02, logprobs=20),
    SamplingParams(repetition_penalty=1.4, presence_penalty=0.5),
    SamplingParams(temperature=0.9, seed=4, frequency_penalty=-1.0, repetition_penalty=0.8),
    SamplingParams(logit_bias=((7, 100.0), (8, -100.0))),
    SamplingParams(temperature=1.0, seed=5, min_tokens=10, logit_bias=((EOS, 100.0),)),
]


def state(params: SamplingParams) -> RowState:
    return RowState.at(params, VOCAB, PROMPT, OUTPUT)


def logits_of(rows: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, VOCAB, generator=generator) * 3


@pytest.fixture
def sampler() -> Sampler:
    return Sampler(VOCAB, [EOS])


@pytest.fixture
def one(sampler: Sampler) -> Callable[..., int]:
    """Sample one row."""

    def sample(logits: torch.Tensor, **params: object) -> int:
        result = sampler.sample(logits[None], [state(SamplingParams(**params))])
        assert not result.errors
        return result.tokens[0]

    return sample


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_no_rows(sampler: Sampler) -> None:
    assert sampler.sample(torch.empty(0, VOCAB), []) == Sampled([], [], {})


def test_greedy_is_the_first_maximum(sampler: Sampler) -> None:
    logits = logits_of(6)
    logits[2, [40, 17, 300]] = 50.0
    result = sampler.sample(logits, [state(SamplingParams())] * 6)
    assert result.tokens == [17 if i == 2 else int(logits[i].argmax()) for i in range(6)]
    assert result.logprobs == [None] * 6


@pytest.mark.parametrize("temperature", [1e-300, 1e-6, 0.001, 1.0, 100.0])
def test_top_k_of_one_equals_greedy(one: Callable[..., int], temperature: float) -> None:
    logits = logits_of(1)[0]
    logits[[450, 33]] = 30.0
    for seed in range(20):
        assert one(logits, temperature=temperature, top_k=1, seed=seed) == 33


def test_the_coldest_temperature_draws_a_likeliest_token(one: Callable[..., int]) -> None:
    logits = logits_of(1)[0]
    logits[[450, 33]] = 30.0
    drawn = {one(logits, temperature=1e-300, seed=seed) for seed in range(40)}
    assert drawn == {33, 450}


def test_a_row_depends_on_no_other_row(
    sampler: Sampler, threads: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    params = [dataclasses.replace(p, seed=p.seed ^ k) for k in range(6) for p in VARIETY]
    logits = logits_of(len(params))
    alone = [sampler.sample(row[None], [state(p)]) for row, p in zip(logits, params, strict=True)]
    order = np.random.default_rng(1).permutation(len(params)).tolist()
    for thread_count, chunk in ((1, 2**21), (2, 2**21), (2, 3 * VOCAB), (1, 1)):
        threads(thread_count)
        monkeypatch.setattr(sampler_module, "CHUNK_ELEMENTS", chunk)
        together = sampler.sample(logits[order], [state(params[i]) for i in order])
        assert together.tokens == [alone[i].tokens[0] for i in order]
        assert together.logprobs == [alone[i].logprobs[0] for i in order]


def test_draws_leave_the_global_generator_and_the_logits_alone(sampler: Sampler) -> None:
    logits = logits_of(len(VARIETY))
    before, generator = logits.clone(), torch.get_rng_state()
    first = sampler.sample(logits, [state(p) for p in VARIETY])
    assert torch.equal(torch.get_rng_state(), generator)
    assert torch.equal(logits, before)
    torch.manual_seed(99)
    assert sampler.sample(logits, [state(p) for p in VARIETY]) == first


def test_the_draw_is_keyed_by_seed_and_position(sampler: Sampler) -> None:
    flat = torch.zeros(1, VOCAB)
    for seed, position in ((0, 0), (1, 0), (1, 77), (MAX_SEED, 77), (MAX_SEED, 2**31)):
        row = RowState(SamplingParams(temperature=1.0, seed=seed), position)
        # Equal logits: the inverse CDF is the uniform number itself, in id order.
        assert sampler.sample(flat, [row]).tokens == [int(uniform(seed, position) * VOCAB)]


@pytest.mark.parametrize(
    ("changes", "support"),
    [({}, 12), ({"temperature": 2.0}, 12), ({"top_k": 5}, 5), ({"top_p": 0.9}, None)],
)
def test_frequencies_follow_the_distribution(
    changes: dict[str, float], support: int | None
) -> None:
    n = 4000
    logits = torch.linspace(2.0, -1.0, 12)[torch.tensor([3, 7, 0, 11, 5, 1, 9, 2, 8, 4, 10, 6])]
    params = SamplingParams(**{"temperature": 1.0, "seed": 2024, **changes})
    rows = [RowState(params, position) for position in range(n)]
    drawn = Sampler(12, []).sample(logits.expand(n, 12), rows).tokens
    p = np.exp(logits.numpy().astype(np.float64) / params.temperature)
    p /= p.sum()
    order = np.argsort(-p)
    if support is None:
        support = int((np.cumsum(p[order]) < params.top_p).sum()) + 1
    p[order[support:]] = 0.0
    p /= p.sum()
    counts = np.bincount(drawn, minlength=12)
    assert counts[p == 0].sum() == 0
    expected = (p * n)[p > 0]
    chi_square = ((counts[p > 0] - expected) ** 2 / expected).sum()
    freedom = support - 1
    # 0.999 quantile of chi-square by Wilson and Hilferty (1931).
    assert chi_square < freedom * (1 - 2 / (9 * freedom) + 3.09 * (2 / (9 * freedom)) ** 0.5) ** 3


def test_bias_and_masks(one: Callable[..., int], sampler: Sampler) -> None:
    logits = logits_of(1)[0]
    logits[[EOS, 8]] = torch.tensor([40.0, 30.0])
    third = int(logits.index_fill(0, torch.tensor([EOS, 8]), -math.inf).argmax())
    assert one(logits) == EOS
    assert one(logits, logit_bias=((EOS, -20.0),)) == 8
    assert one(logits, logit_bias=((EOS, -20.0), (8, -100.0), (77, 100.0))) == 77
    # Three tokens are out: the fourth may still not end the request, the fifth may.
    assert one(logits, min_tokens=4) == 8
    assert one(logits, min_tokens=3) == EOS
    assert one(logits, min_tokens=4, stop_token_ids=(8,)) == third
    assert one(logits, min_tokens=4, ignore_eos=True) == EOS
    assert one(logits, min_tokens=4, ignore_eos=True, stop_token_ids=(EOS,)) == 8
    assert one(logits, min_tokens=4, logit_bias=((EOS, 100.0),)) == 8
    bare = Sampler(VOCAB, [])
    assert bare.sample(logits[None], [state(SamplingParams(min_tokens=4))]).tokens == [EOS]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_unusable_logits_fail_their_row_only(sampler: Sampler, bad: float) -> None:
    logits = logits_of(len(VARIETY))
    clean = sampler.sample(logits, [state(p) for p in VARIETY])
    for broken in range(len(VARIETY)):
        dirty = logits.clone()
        dirty[broken, 123] = bad
        result = sampler.sample(dirty, [state(p) for p in VARIETY])
        assert list(result.errors) == [broken]
        assert isinstance(result.errors[broken], LogitsError)
        assert str(bad) in str(result.errors[broken])
        assert result.tokens[broken] == FAILED
        assert result.logprobs[broken] is None
        for i in set(range(len(VARIETY))) - {broken}:
            assert result.tokens[i] == clean.tokens[i]
            assert result.logprobs[i] == clean.logprobs[i]


def test_a_row_whose_every_token_is_masked_fails_alone() -> None:
    rows = [
        RowState(SamplingParams(temperature=1.0, min_tokens=1, stop_token_ids=(0, 1)), 4),
        RowState(SamplingParams(temperature=1.0, min_tokens=1), 4),
    ]
    result = Sampler(3, [2]).sample(torch.zeros(2, 3), rows)
    assert result.tokens[0] == FAILED
    assert result.tokens[1] in (0, 1)
    assert list(result.errors) == [0]
    assert "lower min_tokens" in str(result.errors[0])
    none_finite = Sampler(3, [2]).sample(
        torch.full((1, 3), -math.inf), [RowState(SamplingParams(), 4)]
    )
    assert "peak at -inf" in str(none_finite.errors[0])


def test_logprobs_are_those_of_the_model(sampler: Sampler) -> None:
    logits = logits_of(1)
    logits[0, [30, 200]] = 9.5
    logits[0, 50:] = logits[0, 50:].where(logits[0, 50:] == 9.5, -math.inf)
    expected = logits.double().log_softmax(-1)[0]
    params = SamplingParams(
        temperature=0.5, seed=8, logit_bias=((30, 100.0),), repetition_penalty=1.5, logprobs=4
    )
    result = sampler.sample(logits, [state(params)])
    assert result.tokens == [30]
    entry = result.logprobs[0]
    assert isinstance(entry, RowLogprobs)
    assert entry.chosen == pytest.approx(expected[30].item(), abs=1e-5)
    assert [token for token, _ in entry.top][:2] == [30, 200]
    assert len(entry.top) == 4
    for token, value in entry.top:
        assert value == pytest.approx(expected[token].item(), abs=1e-5)
    assert list(entry.top) == sorted(entry.top, key=lambda pair: (-pair[1], pair[0]))


def test_alternatives_stop_at_the_vocabulary_and_at_probability_zero() -> None:
    logits = torch.tensor([[0.0, -math.inf, 1.0]])
    result = Sampler(3, []).sample(logits, [RowState(SamplingParams(logprobs=20), 1)])
    assert result.logprobs[0] is not None
    assert [token for token, _ in result.logprobs[0].top] == [2, 0]


def test_shapes_and_dtype_are_checked(sampler: Sampler) -> None:
    row = state(SamplingParams())
    with pytest.raises(InvalidValue, match=r"must be \(rows, vocabulary\) = \(2, 500\)"):
        sampler.sample(torch.zeros(1, VOCAB), [row, row])
    with pytest.raises(InvalidValue, match=r"logits\.dtype=torch\.bfloat16"):
        sampler.sample(torch.zeros(1, VOCAB, dtype=torch.bfloat16), [row])
