"""What a client may ask of the sampler. Pure: no torch.

    client -> gateway -> validate() once -> SamplingParams in the journal, unchanged -> sampler

`validate` is the only gate: code behind it trusts the values. Names and ranges are those of the
OpenAI API where it has the parameter, and of vLLM where it has not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from tknp.errors import InvalidValue

MAX_LOGPROBS = 20
MAX_LOGIT_BIAS_ENTRIES = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_SEED = 2**64 - 1
MAX_SCHEMA_BYTES = 32 << 10


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are drawn and when it ends.

    temperature          0 is greedy; else logits are divided by it
    top_k                keep the k likeliest tokens; 0 is off
    top_p                keep the shortest descending list that holds this much probability
    min_p                keep tokens with at least this share of the likeliest one's probability
    repetition_penalty   > 1 makes tokens of prompt and output less likely
    presence_penalty     subtracted once from tokens of the output
    frequency_penalty    subtracted once for each occurrence in the output
    logit_bias           (token id, bias) pairs, added to the logits
    seed                 with the position it decides every draw
    logprobs             None is off; n reports the chosen token and the n likeliest
    max_tokens           output tokens at which the request ends
    min_tokens           output tokens before which no token may end the request
    ignore_eos           end-of-sequence ids do not end the request
    stop_token_ids       further ids that end the request
    json_schema          the output is JSON that this schema describes; empty is off
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    logprobs: int | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    json_schema: str = ""

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def needs_history(self) -> bool:
        """A penalty is on, so the sampler has to know the ids seen so far."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    @property
    def needs_output(self) -> bool:
        """What was generated so far decides which token may come next."""
        return self.needs_history or bool(self.json_schema)

    @property
    def shifts_logits(self) -> bool:
        """Logits change at every step. (min_tokens changes them at the first ones only.)"""
        return self.needs_output or bool(self.logit_bias)

    @property
    def plain(self) -> bool:
        """Every token is the argmax of the model's logits: nothing alters them.

        Log probabilities only read the logits, so they may be on.
        """
        return self.greedy and not self.shifts_logits and self.min_tokens == 0


def validate(params: SamplingParams, vocab_size: int) -> SamplingParams:
    """Return `params`, or raise InvalidValue naming field, value and legal range."""
    p = params
    _number("temperature", p.temperature, 0.0, 100.0, "0 (greedy) or above 0 up to 100")
    _integer("top_k", p.top_k, 0, None, "0 (off) or a number of tokens, at least 1")
    _number("top_p", p.top_p, 0.0, 1.0, "above 0 up to 1 (off)", above=True)
    _number("min_p", p.min_p, 0.0, 1.0, "0 (off) to 1")
    # Bounded on both sides, so that no legal penalty overflows a float32 logit.
    _number("repetition_penalty", p.repetition_penalty, 0.01, 100.0, "0.01 to 100; 1 is off")
    _number("presence_penalty", p.presence_penalty, -2.0, 2.0, "-2 to 2; 0 is off")
    _number("frequency_penalty", p.frequency_penalty, -2.0, 2.0, "-2 to 2; 0 is off")
    _logit_bias(p.logit_bias, vocab_size)
    _integer("seed", p.seed, 0, MAX_SEED, "an unsigned 64-bit integer, 0 to 2**64 - 1")
    if p.logprobs is not None:
        _integer("logprobs", p.logprobs, 0, MAX_LOGPROBS, f"0 to {MAX_LOGPROBS}, or None (off)")
    _integer("max_tokens", p.max_tokens, 1, None, "at least 1")
    _integer("min_tokens", p.min_tokens, 0, p.max_tokens, f"0 to max_tokens={p.max_tokens}")
    if not isinstance(p.ignore_eos, bool):
        raise InvalidValue("ignore_eos", p.ignore_eos, "must be true or false")
    _entries("stop_token_ids", len(p.stop_token_ids), MAX_STOP_TOKEN_IDS)
    _token_ids("stop_token_ids", p.stop_token_ids, vocab_size)
    if p.json_schema:
        _json_schema(p)
    return p


def check_schema_size(schema: str) -> None:
    """Raises InvalidValue for more than MAX_SCHEMA_BYTES."""
    size = len(schema.encode())
    if size > MAX_SCHEMA_BYTES:
        raise InvalidValue("json_schema", f"{size} bytes", f"at most {MAX_SCHEMA_BYTES} are taken")


def _json_schema(p: SamplingParams) -> None:
    """Whether the schema itself can be enforced is for `tknp.sampling.grammar` to say."""
    check_schema_size(p.json_schema)
    if p.ignore_eos:
        raise InvalidValue("ignore_eos", True, "must be false with json_schema, which ends")
    if p.min_tokens:
        raise InvalidValue("min_tokens", p.min_tokens, "must be 0 with json_schema, which ends")


def _number(
    field: str, value: object, low: float, high: float, legal: str, above: bool = False
) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not low <= value <= high:  # type: ignore[arg-type, operator]
        raise InvalidValue(field, value, f"must be {legal}")
    if above and value == low:
        raise InvalidValue(field, value, f"must be {legal}")


def _integer(field: str, value: object, low: int, high: int | None, legal: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidValue(field, value, f"must be an integer: {legal}")
    if value < low or (high is not None and value > high):
        raise InvalidValue(field, value, f"must be {legal}")


def _entries(field: str, count: int, limit: int) -> None:
    if count > limit:
        raise InvalidValue(f"len({field})", count, f"must have at most {limit} entries")


def _token_ids(field: str, ids: Iterable[int], vocab_size: int) -> None:
    legal = f"a token id of this model, 0 to {vocab_size - 1}"
    for token in ids:
        _integer(field, token, 0, vocab_size - 1, legal)


def _logit_bias(pairs: tuple[tuple[int, float], ...], vocab_size: int) -> None:
    _entries("logit_bias", len(pairs), MAX_LOGIT_BIAS_ENTRIES)
    _token_ids("logit_bias", (token for token, _ in pairs), vocab_size)
    seen: set[int] = set()
    for token, bias in pairs:
        if token in seen:
            raise InvalidValue("logit_bias", token, "must name each token id once")
        seen.add(token)
        _number(f"logit_bias[{token}]", bias, -100.0, 100.0, "-100 to 100")
