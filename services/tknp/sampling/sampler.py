"""From logits to tokens: prefill's first token and every decode step of the last root.

Runs on TP rank 0, over the whole vocabulary, on the engine thread that owns the rows' states:

    logits -> repetition penalty -> frequency, presence -> logit bias -> min_tokens mask
           -> schema mask
           -> greedy: first maximum
           -> else: temperature -> top-k -> top-p -> min-p -> draw keyed by (seed, position)

Repetition counts prompt and output, frequency and presence the output only (vLLM, OpenAI). Log
probabilities come from the model's own logits, before all of this.

A row's result depends on nothing but that row: no generator state, exact reductions, and a row
whose logits are not usable fails alone. Rows that need more than the first maximum are worked on a
few at a time, which bounds the extra memory to about 40 bytes times CHUNK_ELEMENTS (80 MiB).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from tknp.errors import InvalidValue, TknpError
from tknp.sampling.draw import WEIGHT_ONE, Head, HeadTooShort, draw
from tknp.sampling.history import History, RowState
from tknp.sampling.order import descending, first_maximum
from tknp.sampling.params import SamplingParams

CHUNK_ELEMENTS: Final = 2**21

FAILED: Final = -1
"""Token of a row that has an error."""

_COLDEST = 1e-6
"""Lower temperatures are drawn at this one, where dividing float32 logits is still safe."""

_HEAD_DEPTH = 6.0
"""The first look takes tokens within e**-6 of the likeliest; most draws end there."""


class LogitsError(TknpError):
    """Logits of one row that no token can be chosen from."""


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Log probabilities of one row, float32 log-softmax of the model's logits.

    `top`: the likeliest (id, log probability), descending, ties by id; tokens of probability 0
    are left out.
    """

    chosen: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Sampled:
    """Result of one step. A row in `errors` has token FAILED and no log probabilities."""

    tokens: list[int]
    logprobs: list[RowLogprobs | None]
    errors: dict[int, TknpError]


class Sampler:
    """Chooses one token a row. Holds no state between calls.

    `eos_ids` end a request unless it says `ignore_eos`; min_tokens holds them back.
    """

    def __init__(self, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._vocab_size = vocab_size
        self._eos_ids = tuple(eos_ids)

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, rows: Sequence[RowState]) -> Sampled:
        """Choose the token at `rows[i].position` from `logits[i]`.

        logits: float32 [B, vocab_size], not changed; B may be 0. The states are read only:
        `RowState.advance` is the caller's. Raises InvalidValue if shapes don't agree.
        """
        self._check(logits, rows)
        if not rows:
            return Sampled([], [], {})
        tokens, peaks = first_maximum(logits)
        errors: dict[int, TknpError] = {}
        for i, peak in enumerate(peaks):
            if not math.isfinite(peak):
                tokens[i] = FAILED
                errors[i] = LogitsError(
                    f"logits of row {i} peak at {peak}: the model's output is not usable; "
                    "check its weights and dtype"
                )
        altered = [i for i, row in enumerate(rows) if i not in errors and not row.takes_argmax]
        for chunk in self._chunks(altered):
            self._choose(logits, rows, chunk, tokens, errors)
        logprobs: list[RowLogprobs | None] = [None] * len(rows)
        wanted = [
            i for i, r in enumerate(rows) if r.params.logprobs is not None and i not in errors
        ]
        for chunk in self._chunks(wanted):
            counts = [rows[i].params.logprobs or 0 for i in chunk]
            found = _logprobs(logits[chunk], [tokens[i] for i in chunk], counts)
            for i, entry in zip(chunk, found, strict=True):
                logprobs[i] = entry
        return Sampled(tokens, logprobs, errors)

    def _choose(
        self,
        logits: torch.Tensor,
        rows: Sequence[RowState],
        chunk: list[int],
        tokens: list[int],
        errors: dict[int, TknpError],
    ) -> None:
        """Set the token or the error of each row in `chunk`."""
        altered = logits[chunk]
        for x, i in zip(altered, chunk, strict=True):
            try:
                self._alter(x, rows[i])
            except TknpError as error:
                errors[i] = error
        maxima, peaks = first_maximum(altered)
        drawn: list[int] = []
        for at, i in enumerate(chunk):
            tokens[i] = maxima[at]
            if i in errors:
                tokens[i] = FAILED
            elif not math.isfinite(peaks[at]):
                tokens[i] = FAILED
                errors[i] = LogitsError(
                    f"row {i} has no token left: every one is masked; lower min_tokens, shorten "
                    "stop_token_ids or widen json_schema"
                )
            elif not rows[i].params.greedy:
                drawn.append(at)
        if drawn:
            states = [rows[chunk[at]] for at in drawn]
            heights = [peaks[at] for at in drawn]
            x = altered if len(drawn) == len(chunk) else altered[drawn]
            for at, token in zip(drawn, _draw_rows(x, heights, states), strict=True):
                tokens[chunk[at]] = token

    def _alter(self, x: torch.Tensor, row: RowState) -> None:
        """Apply to the logits x [V] of one row, in place, all that comes before temperature."""
        if row.history is not None:
            _penalize(x, row.params, row.history)
        if row.params.logit_bias:
            ids, biases = zip(*row.params.logit_bias, strict=True)
            x[list(ids)] += x.new_tensor(biases)
        if row.below_min_tokens and (ends := self._ends(row.params)):
            x[list(ends)] = -math.inf
        if row.grammar is not None:
            x[torch.from_numpy(row.grammar.forbidden()).to(x.device)] = -math.inf

    def _ends(self, params: SamplingParams) -> tuple[int, ...]:
        """Token ids that would end the request."""
        return params.stop_token_ids + (() if params.ignore_eos else self._eos_ids)

    def _chunks(self, rows: list[int]) -> Iterator[list[int]]:
        size = max(1, CHUNK_ELEMENTS // self._vocab_size)
        return (rows[i : i + size] for i in range(0, len(rows), size))

    def _check(self, logits: torch.Tensor, rows: Sequence[RowState]) -> None:
        wanted = (len(rows), self._vocab_size)
        if tuple(logits.shape) != wanted:
            raise InvalidValue(
                "logits.shape", tuple(logits.shape), f"must be (rows, vocabulary) = {wanted}"
            )
        if logits.dtype != torch.float32:
            raise InvalidValue("logits.dtype", logits.dtype, "must be torch.float32")


def _penalize(x: torch.Tensor, params: SamplingParams, history: History) -> None:
    """Penalties on the logits x [V], in place, at the ids seen."""
    if params.repetition_penalty != 1.0:
        seen = torch.from_numpy(history.seen).to(x.device)
        at = x[seen]
        x[seen] = torch.where(
            at > 0, at / params.repetition_penalty, at * params.repetition_penalty
        )
    if params.frequency_penalty != 0.0 or params.presence_penalty != 0.0:
        ids = torch.from_numpy(history.output_ids).to(x.device)
        counts = torch.from_numpy(history.output_counts).to(x.device, x.dtype)
        x[ids] -= params.frequency_penalty * counts + params.presence_penalty


def _draw_rows(x: torch.Tensor, peaks: list[float], rows: list[RowState]) -> list[int]:
    """One drawn token a row from altered logits x [B, V] with maxima `peaks`."""
    peak = x.new_tensor(peaks)[:, None]
    temperature = x.new_tensor([max(r.params.temperature, _COLDEST) for r in rows])[:, None]
    weights = (x - peak).div_(temperature).exp_().mul_(WEIGHT_ONE).long()
    totals = weights.sum(dim=-1).tolist()
    tokens = [FAILED] * len(rows)
    short: list[int] = []
    floor = torch.minimum(peak - _HEAD_DEPTH * temperature, _kth(x, rows))
    heads = descending(x >= floor, x, weights)
    for i, (ids, at) in enumerate(heads):
        head = Head(ids, at, totals[i], complete=False)
        try:
            tokens[i] = draw(head, rows[i].params, rows[i].position)
        except HeadTooShort:
            short.append(i)
    if short:
        whole = descending(weights[short] > 0, x[short], weights[short])
        for i, (ids, at) in zip(short, whole, strict=True):
            head = Head(ids, at, totals[i], complete=True)
            tokens[i] = draw(head, rows[i].params, rows[i].position)
    return tokens


def _kth(x: torch.Tensor, rows: list[RowState]) -> torch.Tensor:
    """The top_k-th largest logit of each row, [B, 1]; infinite where top-k is off."""
    ks = [min(r.params.top_k, x.shape[1]) for r in rows]
    if not any(ks):
        return x.new_full((len(rows), 1), math.inf)
    largest = x.topk(max(ks), dim=-1).values
    at = torch.tensor(ks, device=x.device)[:, None]
    return largest.gather(1, (at - 1).clamp(min=0)).where(at > 0, math.inf)


def _logprobs(raw: torch.Tensor, tokens: list[int], counts: list[int]) -> list[RowLogprobs]:
    """Log probability of `tokens` [B] and of the counts[i] likeliest, from raw logits [B, V]."""
    table = raw.log_softmax(dim=-1)
    chosen = table.gather(1, torch.tensor(tokens, device=raw.device)[:, None])[:, 0].tolist()
    most = min(max(counts), raw.shape[1])
    if most == 0:
        return [RowLogprobs(value, ()) for value in chosen]
    least = raw.topk(most, dim=-1).values[:, -1:]
    top = descending((raw >= least) & raw.isfinite(), raw, table)
    return [
        RowLogprobs(value, tuple(zip(ids[:n].tolist(), at[:n].tolist(), strict=True)))
        for value, n, (ids, at) in zip(chosen, counts, top, strict=True)
    ]
