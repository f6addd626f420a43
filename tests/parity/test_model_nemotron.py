"""Nemotron-4 against transformers' implementation: prefill, decode over pages, whole pools."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import NemotronForCausalLM

from tknp.attention.base import DecodeRows
from tknp.engine.backend import Backend, KernelAttentionBackend, choose_backend
from tknp.kernels.library import available
from tknp.kv.storage import KvStorage
from tknp.local import InProcessPool
from tknp.model.checkpoint import open_checkpoint
from tknp.model.shard import Shard, legal_tp

LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0}
SHAPES = [
    pytest.param({}, id="half"),
    pytest.param({"kv_heads": 1, "rope_parameters": {**LINEAR, "partial_rotary_factor": 0.25}},
                 id="quarter-linear-mqa"),
    pytest.param({"kv_heads": 4, "partial_rotary_factor": 1.0, "tied": True}, id="whole-mha-tied"),
    pytest.param({"hidden": 48, "sharded": True, "layers": 2}, id="narrow-hidden-sharded"),
]  # fmt: skip
PAGE_TOKENS, PROMPT, LENGTH = 16, 37, 45


@torch.inference_mode()
def logits(path: Path, ids: Tensor, dtype: torch.dtype, tp: int = 1) -> tuple[Tensor, Backend]:
    """Logits of every token: PROMPT tokens prefilled in two chunks, the others decoded."""
    checkpoint = open_checkpoint(path)
    config = checkpoint.config
    shards = [Shard(config, 0, config.layers, True, True, tp, t) for t in range(tp)]
    backends = [
        choose_backend(shard, page_size=PAGE_TOKENS, max_positions=64, dtype=dtype,
                       device=torch.device("cpu"))
        for shard in shards
    ]  # fmt: skip
    ranks = [b.dense(checkpoint.load(s, dtype)) for b, s in zip(backends, shards, strict=True)]
    heads = [len(shard.kv_heads) for shard in shards]
    kv = [KvStorage(config.layers, 8, h, PAGE_TOKENS, config.head_dim, dtype) for h in heads]
    table = torch.tensor([5, 2, 7], dtype=torch.int32)

    def chunk(start: int, stop: int) -> list[Callable[..., Tensor]]:
        if stop <= PROMPT:
            prefills = [b.prefill_attention() for b in backends]
            return [lambda qkv, *kv, p=p: p.attend(qkv, start, table, *kv) for p in prefills]
        at = torch.tensor([start], dtype=torch.int32)
        rows = DecodeRows(table[None], at, at + 1, torch.tensor([True]))
        decodes = [b.decode_attention() for b in backends]
        plans = [decode.plan(rows) for decode in decodes]
        return [
            lambda qkv, *kv, d=d, p=p: d.attend(p, qkv, *kv)[0]
            for d, p in zip(decodes, plans, strict=True)
        ]

    found = []
    for start, stop in [(0, 20), (20, PROMPT), *((i, i + 1) for i in range(PROMPT, len(ids)))]:
        attend = chunk(start, stop)
        x = sum((rank.embed(ids[start:stop]) for rank in ranks), torch.zeros(()))
        for layer in range(config.layers):
            attention = [
                a(rank.project(layer, x), *pages.layer(layer))
                for a, rank, pages in zip(attend, ranks, kv, strict=True)
            ]
            if tp == 1:
                x = ranks[0].finish(layer, x, attention[0])
                continue
            outputs = [r.output(layer, a) for r, a in zip(ranks, attention, strict=True)]
            x = x + torch.stack(outputs).sum(0)
            x = x + torch.stack([rank.mlp(layer, x) for rank in ranks]).sum(0)
        found.append(torch.cat([rank.head(x) for rank in ranks], 1))
    return torch.cat(found), backends[0]


def sequence() -> Tensor:
    return torch.randint(261, (LENGTH,), generator=torch.Generator().manual_seed(7))


@torch.inference_mode()
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_equal_transformers(
    random_checkpoint: Callable[..., Path], shape: dict[str, Any]
) -> None:
    path = random_checkpoint(family="nemotron", **shape)
    oracle = NemotronForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    expected = oracle(sequence()[None]).logits[0]
    for tp in legal_tp(open_checkpoint(path).config):
        found, _ = logits(path, sequence(), torch.float32, tp)
        # Squared ReLU reaches far: the tolerance is of the largest logit.
        assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


@torch.inference_mode()
def test_kernels_attend_to_partly_rotated_heads(random_checkpoint: Callable[..., Path]) -> None:
    """bfloat16 on a CPU: attention by the kernels, what they don't have by torch."""
    status = available()
    if not status:
        pytest.skip(status.reason)
    path = random_checkpoint(family="nemotron", std=0.08)
    oracle = NemotronForCausalLM.from_pretrained(path, dtype=torch.float32)
    found, backend = logits(path, sequence(), torch.bfloat16)
    assert isinstance(backend, KernelAttentionBackend)
    expected = oracle(sequence()[None]).logits[0]
    assert (found - expected).norm() < 0.06 * expected.norm()


async def test_a_pool_equals_transformers(
    make_pool: Callable[..., Any],
    random_checkpoint: Callable[..., Path],
    random_greedy: Callable[[Path], Any],
    generate: Callable[..., Any],
) -> None:
    path = random_checkpoint(
        family="nemotron", layers=4, rope_parameters={**LINEAR, "partial_rotary_factor": 0.5}
    )
    pool = make_pool(
        path, nodes=2, tp=2, page_size=16, prefill_chunk=24, kv_memory_bytes="512KiB",
        kv_transfer="grpc",
    )  # fmt: skip
    dice = random.Random(4)
    lengths = [1, 15, 16, 17, 40]
    jobs = [([dice.randrange(256) for _ in range(n)], dice.randint(1, 30)) for n in lengths]
    async with InProcessPool(pool):
        found = await generate(pool.config.coordinator, jobs)
    assert found == random_greedy(path).all(jobs)
