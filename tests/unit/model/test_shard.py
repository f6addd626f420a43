from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tknp.errors import InvalidValue
from tknp.model.config import ModelConfig
from tknp.model.shard import (
    Projected,
    Shard,
    check_tp,
    embedding_parameters,
    layer_parameters,
    legal_tp,
)


def config(
    q_heads: int = 9, kv_heads: int = 3, vocab: int = 49_152, mlp: int = 1536
) -> ModelConfig:
    return ModelConfig(
        vocab_size=vocab, hidden_size=576, intermediate_size=mlp, layers=30, q_heads=q_heads,
        kv_heads=kv_heads, head_dim=64, max_position=8192,
    )  # fmt: skip


CONFIGS = st.builds(
    lambda kv, group, mlp, vocab: config(kv * group, kv, vocab, 48 * mlp),
    st.integers(1, 8), st.integers(1, 8), st.integers(1, 4), st.integers(1, 1000),
)  # fmt: skip


def test_smollm2_is_legal_at_one_and_three() -> None:
    assert legal_tp(config()) == (1, 3)
    assert check_tp("tp", config(), 3) == 3
    with pytest.raises(InvalidValue, match=r"tp=2: .*nearest is 1"):
        check_tp("tp", config(), 2)
    with pytest.raises(InvalidValue, match="nearest is 3"):
        check_tp("tp", config(), 8)


def test_kv_heads_are_shared_beyond_their_number() -> None:
    shards = [Shard(config(8, 2), 0, 1, False, False, 8, rank) for rank in range(8)]
    assert [list(s.kv_heads) for s in shards] == [[0]] * 4 + [[1]] * 4
    assert [list(s.q_heads) for s in shards] == [[i] for i in range(8)]


@given(CONFIGS)
def test_ranks_partition_heads_columns_and_vocabulary(c: ModelConfig) -> None:
    for tp in legal_tp(c):
        shards = [Shard(c, 0, c.layers, True, True, tp, rank) for rank in range(tp)]
        assert [h for s in shards for h in s.q_heads] == list(range(c.q_heads))
        assert [m for s in shards for m in s.mlp_columns] == list(range(c.intermediate_size))
        assert [v for s in shards for v in s.vocab] == list(range(c.vocab_size))
        for s in shards:
            assert {h // c.group for h in s.q_heads} == set(s.kv_heads)
        assert embedding_parameters(c, tp) == max(len(s.vocab) for s in shards) * c.hidden_size


@given(CONFIGS, st.integers(1, 4), st.sampled_from(["attention", "dense"]))
def test_dense_ranks_partition_what_follows_attention(
    c: ModelConfig, nodes: int, projected: Projected
) -> None:
    for tp in legal_tp(c):
        shards = [
            Shard(c, 0, c.layers, True, True, tp, t, nodes * tp, n * tp + t, projected)
            for n in range(nodes)
            for t in range(tp)
        ]
        assert [m for s in shards for m in s.mlp_columns] == list(range(c.intermediate_size))
        assert [v for s in shards for v in s.vocab] == list(range(c.vocab_size))
        for t in range(tp):
            alike = shards[t::tp]
            assert {s.parts for s in alike} == {nodes}
            assert [i for s in alike for i in s.output_columns] == list(range(alike[0].q_width))
            assert max(s.projected_width for s in alike) == alike[0].projected_width
            for s in alike:
                if projected == "attention":
                    assert s.projected_width == s.qkv_width
            if projected == "dense":
                assert [i for s in alike for i in s.q_columns] == list(range(s.q_width))
                assert [i for s in alike for i in s.kv_columns] == list(range(s.kv_width))


def test_impossible_dense_cuts_are_refused() -> None:
    with pytest.raises(InvalidValue, match=r"dense_tp=4: .*tp=3"):
        Shard(config(), 0, 1, False, False, 3, 0, 4)
    with pytest.raises(InvalidValue, match="dense_rank=6"):
        Shard(config(), 0, 1, False, False, 3, 0, 6, 6)


def test_layer_parameters_of_smollm2() -> None:
    assert layer_parameters(config()) == 576 * 960 + 576 * 576 + 3 * 576 * 1536 + 2 * 576
    assert 30 * layer_parameters(config()) + embedding_parameters(config()) + 576 == 134_515_008
