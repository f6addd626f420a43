"""Between messages on the wire and the values that services work with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tknp.engine.batch import Admit, Delta, Grow
from tknp.errors import TknpError
from tknp.kv.holding import Key
from tknp.layout.blocks import Block
from tknp.layout.shares import Phase, Shares
from tknp.rpc.checks import check_name
from tknp.rpc.ids import pack_ids, unpack_ids
from tknp.sampling.params import SamplingParams
from tknp.v1 import common_pb2, step_pb2

if TYPE_CHECKING:
    from tknp.sampling.sampler import RowLogprobs


def key_to(key: Key) -> common_pb2.RequestKey:
    return common_pb2.RequestKey(request_id=key.request_id, attempt=key.attempt)


def key_from(message: common_pb2.RequestKey) -> Key:
    return Key(check_name("key.request_id", message.request_id), message.attempt)


def sampling_to(params: SamplingParams) -> common_pb2.Sampling:
    return common_pb2.Sampling(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=dict(params.logit_bias),
        seed=params.seed,
        logprobs=params.logprobs,
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        ignore_eos=params.ignore_eos,
        stop_token_ids=params.stop_token_ids,
        json_schema=params.json_schema,
    )


def sampling_from(message: common_pb2.Sampling, *, seed: int, max_tokens: int) -> SamplingParams:
    """`seed` and `max_tokens` stand in where the message leaves them unset. Not validated."""

    return SamplingParams(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p if message.HasField("top_p") else 1.0,
        min_p=message.min_p,
        repetition_penalty=(
            message.repetition_penalty if message.HasField("repetition_penalty") else 1.0
        ),
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=tuple(sorted(message.logit_bias.items())),
        seed=message.seed if message.HasField("seed") else seed,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        max_tokens=message.max_tokens if message.HasField("max_tokens") else max_tokens,
        min_tokens=message.min_tokens,
        ignore_eos=message.ignore_eos,
        stop_token_ids=tuple(message.stop_token_ids),
        json_schema=message.json_schema,
    )


def block_to(block: Block) -> common_pb2.Block:
    return common_pb2.Block(
        layer_start=block.start, layer_stop=block.stop, embedding=block.embedding, head=block.head
    )


def shares_to(shares: Shares) -> step_pb2.Shares:
    message = step_pb2.Shares(
        owners=shares.owners, prompt=shares.prompt, interleave=shares.interleave, unit=shares.unit
    )
    for phase in shares.phases:
        message.phases.add(start=phase.start, shards=phase.shards)
    return message


def shares_from(message: step_pb2.Shares) -> Shares:
    """Raises InvalidValue for shares that don't fit together."""
    phases = tuple(Phase(phase.start, tuple(phase.shards)) for phase in message.phases)
    return Shares(tuple(message.owners), message.prompt, message.interleave, phases, message.unit)


def admit_to(admit: Admit) -> step_pb2.Admit:
    return step_pb2.Admit(
        slot=admit.slot,
        key=key_to(admit.key),
        owners=admit.owners,
        shares=shares_to(admit.shares),
        position=admit.position,
        token=admit.token,
        sampling=sampling_to(admit.sampling),
        prompt_token_ids=pack_ids(admit.prompt),
        generated_token_ids=pack_ids(admit.generated),
        generated_count=admit.generated_count,
        pages=admit.pages,
    )


def admit_from(message: step_pb2.Admit) -> Admit:
    return Admit(
        slot=message.slot,
        key=key_from(message.key),
        owners=tuple(message.owners),
        shares=shares_from(message.shares),
        position=message.position,
        token=message.token,
        sampling=sampling_from(message.sampling, seed=0, max_tokens=1),
        prompt=tuple(unpack_ids("prompt_token_ids", message.prompt_token_ids)),
        generated=tuple(unpack_ids("generated_token_ids", message.generated_token_ids)),
        generated_count=message.generated_count,
        pages=tuple(message.pages),
    )


def delta_to(delta: Delta) -> step_pb2.Step:
    return step_pb2.Step(
        epoch=delta.epoch,
        stream=delta.stream,
        step=delta.step,
        ends=delta.ends,
        admits=[admit_to(a) for a in delta.admits],
        grows=[
            step_pb2.Grow(slot=g.slot, shares=shares_to(g.shares), pages=g.pages)
            for g in delta.grows
        ],
    )


def delta_from(message: step_pb2.Step) -> Delta:
    return Delta(
        epoch=message.epoch,
        stream=message.stream,
        step=message.step,
        ends=tuple(message.ends),
        admits=tuple(admit_from(a) for a in message.admits),
        grows=tuple(Grow(g.slot, shares_from(g.shares), tuple(g.pages)) for g in message.grows),
    )


def token_to(token: int, logprobs: RowLogprobs | None, error: TknpError | None) -> common_pb2.Token:
    """A drawn token, or why there is none."""
    if error is not None:
        return common_pb2.Token(error=str(error))
    message = common_pb2.Token(token_id=token)
    if logprobs is not None:
        top = [common_pb2.Alternative(token_id=i, logprob=p) for i, p in logprobs.top]
        message.logprobs.CopyFrom(common_pb2.Logprobs(chosen=logprobs.chosen, alternatives=top))
    return message
