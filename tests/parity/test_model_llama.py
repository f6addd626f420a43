"""Dense, RoPE and weights against transformers' Llama, with the plainest attention between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from tknp.model.checkpoint import Checkpoint, open_checkpoint
from tknp.model.config import ModelConfig
from tknp.model.dense import TorchDense
from tknp.model.rope import apply_rope, rope_table
from tknp.model.shard import Shard, legal_tp

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SHAPES = [
    pytest.param({"q_heads": 4, "kv_heads": 2}, id="gqa-untied"),
    pytest.param({"q_heads": 4, "kv_heads": 4, "tied": True}, id="mha-tied"),
    pytest.param({"q_heads": 4, "kv_heads": 1}, id="mqa-untied"),
    pytest.param({"q_heads": 6, "kv_heads": 3, "head_dim": 8, "tied": True}, id="three-kv-tied"),
    pytest.param({"hidden": 48, "head_dim": 16, "sharded": True}, id="narrow-hidden-sharded"),
    pytest.param({"rope_parameters": LLAMA3_ROPE}, id="llama3-rope"),
]
ROUNDING = 0.005  # of a logit in float32: a closer pair could change places elsewhere


def attend(config: ModelConfig, ranks: Sequence[Shard], rows: Sequence[Tensor]) -> list[Tensor]:
    """Causal attention of one sequence over each rank's projected rows, token by token order."""
    cos, sin = rope_table(config, torch.arange(len(rows[0])))
    outputs = []
    for shard, qkv in zip(ranks, rows, strict=True):
        n, dh = len(qkv), config.head_dim
        q, k, v = qkv.split([shard.q_width, shard.kv_width, shard.kv_width], dim=1)
        q = apply_rope(q.view(n, -1, dh), cos, sin)
        k = apply_rope(k.view(n, -1, dh), cos, sin)
        group = q.shape[1] // k.shape[1]
        k = k.repeat_interleave(group, dim=1)
        v = v.reshape(n, -1, dh).repeat_interleave(group, dim=1)
        scores = torch.einsum("ihd,jhd->hij", q.float(), k.float()) / dh**0.5
        scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)
        out = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v.float())
        outputs.append(out.reshape(n, -1).to(qkv.dtype))
    return outputs


def logits(checkpoint: Checkpoint, ids: Tensor, dtype: torch.dtype, tp: int = 1) -> Tensor:
    """Logits of one sequence from Dense shards of TP degree `tp`, reduced in rank order."""
    config = checkpoint.config
    shards = [Shard(config, 0, config.layers, True, True, tp, rank) for rank in range(tp)]
    ranks = [TorchDense(checkpoint.load(shard, dtype)) for shard in shards]
    x = sum((rank.embed(ids) for rank in ranks), torch.zeros(()))
    for layer in range(config.layers):
        attention = attend(config, shards, [rank.project(layer, x) for rank in ranks])
        if tp == 1:
            x = ranks[0].finish(layer, x, attention[0])
            continue
        for rank, rows in zip(ranks, attention, strict=True):
            x = x + rank.output(layer, rows).float()
        partial = [rank.mlp(layer, x).float() for rank in ranks]
        x = x + sum(partial, torch.zeros(()))
    return torch.cat([rank.head(x) for rank in ranks], dim=1)


def sequence(config: ModelConfig, length: int = 48) -> Tensor:
    return torch.randint(config.vocab_size, (length,), generator=torch.Generator().manual_seed(7))


@torch.inference_mode()
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_equal_transformers(
    random_checkpoint: Callable[..., Path], shape: dict[str, object]
) -> None:
    path = random_checkpoint(**shape)
    checkpoint = open_checkpoint(path)
    ids = sequence(checkpoint.config)
    oracle = LlamaForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    torch.testing.assert_close(
        logits(checkpoint, ids, torch.float32), oracle(ids[None]).logits[0], rtol=1e-4, atol=2e-4
    )


@torch.inference_mode()
@pytest.mark.parametrize("shape", SHAPES)
def test_tp_slices_sum_to_the_whole(
    random_checkpoint: Callable[..., Path], shape: dict[str, object]
) -> None:
    checkpoint = open_checkpoint(random_checkpoint(**shape))
    ids = sequence(checkpoint.config, 12)
    whole = logits(checkpoint, ids, torch.float32)
    degrees = [tp for tp in legal_tp(checkpoint.config) if tp > 1]
    assert degrees
    for tp in degrees:
        sliced = logits(checkpoint, ids, torch.float32, tp)
        torch.testing.assert_close(sliced, whole, rtol=1e-4, atol=2e-4)


@torch.inference_mode()
@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 0.06), (torch.float16, 0.01)])
def test_low_precision_logits_stay_close(
    random_checkpoint: Callable[..., Path], dtype: torch.dtype, bound: float
) -> None:
    # Weights of ordinary scale: the suite's default, chosen for lively text, amplifies rounding.
    checkpoint = open_checkpoint(random_checkpoint(std=0.08))
    ids = sequence(checkpoint.config)
    exact = logits(checkpoint, ids, torch.float32)
    error = (logits(checkpoint, ids, dtype) - exact).norm() / exact.norm()
    assert 0 < error < bound


@torch.inference_mode()
def test_greedy_text_of_the_random_checkpoint_is_not_degenerate(
    random_checkpoint: Callable[..., Path],
) -> None:
    oracle = LlamaForCausalLM.from_pretrained(random_checkpoint(), dtype=torch.float32)
    ids = oracle.generate(
        torch.tensor([[1, 2, 3]]), max_new_tokens=48, min_new_tokens=48, do_sample=False
    )[0, 3:]
    assert len(set(ids.tolist())) > 16


@torch.inference_mode()
def test_smollm2_equals_transformers(smollm2_oracle: LlamaForCausalLM) -> None:
    checkpoint = open_checkpoint("smollm2")
    ids = sequence(checkpoint.config, 24)
    expected = smollm2_oracle(ids[None]).logits[0]
    for tp in (1, 3):
        torch.testing.assert_close(
            logits(checkpoint, ids, torch.float32, tp), expected, rtol=1e-3, atol=2e-3
        )


@torch.inference_mode()
def test_recorded_ids_are_those_of_the_highest_logits(
    smollm2_oracle: LlamaForCausalLM, smollm2_greedy: Sequence[tuple[list[int], list[int]]]
) -> None:
    """Given the prompt and the ids before it, every id is the one of the highest logit.

    So, by induction, greedy decoding gives them all; one pass takes a tenth of the time of forty.
    A prompt whose two best ids are so close that rounding could swap them would be a poor one.
    """
    for prompt, ids in smollm2_greedy:
        given = torch.tensor([prompt + ids[:-1]])
        best = smollm2_oracle(given, logits_to_keep=len(ids)).logits[0].topk(2)
        assert best.indices[:, 0].tolist() == ids, prompt
        assert (best.values[:, 0] - best.values[:, 1]).min() > ROUNDING, prompt
