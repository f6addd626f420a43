"""The sampler against transformers' logits processors and against a plain NumPy sampler."""

import itertools

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tknp.sampling.history import RowState
from tknp.sampling.params import SamplingParams
from tknp.sampling.random import uniform
from tknp.sampling.sampler import Sampler

Doubles = npt.NDArray[np.float64]

VOCAB = 60
EOS = 2
SLACK = 3e-6  # the sampler computes weights in float32, the reference in float64

token_ids = st.integers(0, VOCAB - 1)
params_of_all_kinds = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-3, 0.4, 1.0, 1.7, 30.0]),
    top_k=st.sampled_from([0, 0, 1, 5, 59, 60, 61]),
    top_p=st.sampled_from([1.0, 1.0, 0.95, 0.6, 0.05]),
    min_p=st.sampled_from([0.0, 0.0, 0.03, 0.4]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    presence_penalty=st.sampled_from([0.0, 1.5, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.7, -0.3]),
    logit_bias=st.dictionaries(token_ids, st.floats(-5, 5, width=32), max_size=5).map(
        lambda d: tuple(d.items())
    ),
    seed=st.integers(0, 2**64 - 1),
    max_tokens=st.just(100),
    min_tokens=st.integers(0, 6),
    ignore_eos=st.booleans(),
    stop_token_ids=st.lists(token_ids, max_size=3).map(tuple),
)


def altered(logits: Doubles, p: SamplingParams, prompt: list[int], output: list[int]) -> Doubles:
    x = logits.copy()
    for token in range(VOCAB):
        if token in prompt or token in output:
            factor = p.repetition_penalty
            x[token] = x[token] / factor if x[token] > 0 else x[token] * factor
        count = output.count(token)
        x[token] -= p.frequency_penalty * count + p.presence_penalty * (count > 0)
        x[token] += dict(p.logit_bias).get(token, 0.0)
        ends = token in p.stop_token_ids or (token == EOS and not p.ignore_eos)
        if ends and len(output) < p.min_tokens:
            x[token] = -np.inf
    return x


def drawn(x: Doubles, p: SamplingParams, top_p: float, min_p: float, u: float) -> int:
    order = sorted(range(VOCAB), key=lambda t: (-x[t], t))
    if p.temperature == 0.0:
        return order[0]
    weights = np.exp((x[order] - x[order[0]]) / p.temperature)
    if p.top_k:
        weights[p.top_k :] = 0.0
    probabilities = weights / weights.sum()
    before = np.cumsum(probabilities) - probabilities
    weights[(before >= top_p) & (top_p < 1.0)] = 0.0
    weights[weights < min_p] = 0.0
    cumulative = np.cumsum(weights)
    return order[int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))]


@settings(deadline=None, max_examples=150)
@given(
    params_of_all_kinds,
    st.lists(token_ids, max_size=12),
    st.lists(token_ids, max_size=8),
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.5, 4.0]),
)
def test_equals_a_plain_sampler(
    p: SamplingParams, prompt: list[int], output: list[int], seed: int, spread: float
) -> None:
    logits = (np.random.default_rng(seed).standard_normal(VOCAB) * spread).astype(np.float32)
    row = RowState.at(p, VOCAB, prompt, output)
    result = Sampler(VOCAB, [EOS]).sample(torch.from_numpy(logits)[None], [row])
    x = altered(logits.astype(np.float64), p, prompt, output)
    u = uniform(p.seed, len(prompt) + len(output))
    accepted = {
        drawn(x, p, p.top_p + a * (p.top_p < 1), p.min_p + b * (p.min_p > 0), u + c)
        for a, b, c in itertools.product((-SLACK, 0.0, SLACK), repeat=3)
        if 0.0 < u + c < 1.0
    }
    assert result.errors == {}
    assert result.tokens[0] in accepted


def support(p: SamplingParams, logits: torch.Tensor, context: list[int]) -> set[int]:
    """Ids that the sampler ever draws."""
    rows = [RowState.at(p, VOCAB, context) for _ in range(1500)]
    for position, row in enumerate(rows):
        row.position = position
    return set(Sampler(VOCAB, []).sample(logits.expand(len(rows), VOCAB), rows).tokens)


def test_limits_keep_the_tokens_that_transformers_keeps() -> None:
    generator = torch.Generator().manual_seed(5)
    for top_k, top_p, min_p, temperature in (
        (7, 1.0, 0.0, 3.0),
        (0, 0.7, 0.0, 1.0),
        (0, 1.0, 0.2, 1.3),
        (12, 0.8, 0.0, 1.5),
        (20, 0.9, 0.15, 2.0),
    ):
        logits = torch.randn(1, VOCAB, generator=generator) * 2
        context = [3, 9, 14, 50, 9]
        theirs = LogitsProcessorList(
            [RepetitionPenaltyLogitsProcessor(1.3), TemperatureLogitsWarper(temperature)]
        )
        if top_k:
            theirs.append(TopKLogitsWarper(top_k))
        if top_p < 1:
            theirs.append(TopPLogitsWarper(top_p))
        if min_p:
            theirs.append(MinPLogitsWarper(min_p))
        scores = theirs(torch.tensor([context]), logits.clone())
        kept = scores[0].isfinite().nonzero()[:, 0].tolist()
        assert scores.softmax(-1)[0, kept].min() > 0.008, "1500 draws must reach every token"
        params = SamplingParams(temperature, top_k, top_p, min_p, repetition_penalty=1.3, seed=11)
        assert support(params, logits, context) == set(kept)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(token_ids, min_size=1, max_size=20),
    st.sampled_from([0.5, 1.2, 3.0]),
    st.integers(0, 2**32 - 1),
)
def test_repetition_penalty_equals_transformers(
    context: list[int], penalty: float, seed: int
) -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed)) * 4
    scores = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([context]), logits.clone())
    row = RowState.at(SamplingParams(repetition_penalty=penalty), VOCAB, context)
    assert Sampler(VOCAB, []).sample(logits, [row]).tokens == [int(scores.argmax())]
