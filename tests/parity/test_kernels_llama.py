"""A whole model on the CPU kernels against transformers' Llama in float32."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tknp.attention.base import AttentionShape, DecodeRows
from tknp.kernels.decode import KernelDecodeAttention
from tknp.kernels.dense import KernelDense
from tknp.kernels.library import available
from tknp.kernels.prefill import KernelPrefillAttention
from tknp.kv.storage import KvStorage
from tknp.model.checkpoint import open_checkpoint
from tknp.model.rope import rope_table
from tknp.model.shard import Shard

PROMPT, LENGTH = 37, 45
PAGE_TOKENS = 16


@pytest.fixture
def oracle() -> LlamaForCausalLM:
    status = available()
    if not status:
        pytest.skip(status.reason)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=515, hidden_size=144, intermediate_size=200, num_hidden_layers=3,
        num_attention_heads=6, num_key_value_heads=2, head_dim=32, max_position_embeddings=128,
        initializer_range=0.08,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(torch.bfloat16).float().eval()


@torch.inference_mode()
def test_prefill_and_decode_logits(oracle, tmp_path) -> None:
    oracle.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    config = checkpoint.config
    shard = Shard(config, 0, config.layers, embedding=True, head=True)
    dense = KernelDense(checkpoint.load(shard, torch.bfloat16))
    shape = AttentionShape.of(shard, PAGE_TOKENS)
    rope = rope_table(config, torch.arange(config.max_position))
    prefill, decode = KernelPrefillAttention(shape, rope), KernelDecodeAttention(shape, rope)
    kv = KvStorage(config.layers, 8, shape.kv_heads, PAGE_TOKENS, shape.head_dim, torch.bfloat16)
    table = torch.tensor([5, 2, 7], dtype=torch.int32)

    ids = torch.randint(config.vocab_size, (LENGTH,))
    x = dense.embed(ids[:PROMPT])
    for layer in range(config.layers):
        qkv = dense.project(layer, x)
        x = dense.finish(layer, x, prefill.attend(qkv, 0, table, *kv.layer(layer)))
    logits = [dense.head(x)]
    for position in range(PROMPT, LENGTH):
        at = torch.tensor([position], dtype=torch.int32)
        plan = decode.plan(DecodeRows(table[None], at, at + 1, torch.tensor([True])))
        x = dense.embed(ids[position : position + 1])
        for layer in range(config.layers):
            qkv = dense.project(layer, x)
            x = dense.finish(layer, x, decode.attend(plan, qkv, *kv.layer(layer))[0])
        logits.append(dense.head(x))

    expected = oracle(ids[None]).logits[0]
    difference = (torch.cat(logits) - expected).abs().max()
    assert difference < 0.02 * expected.abs().max()
