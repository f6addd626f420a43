"""What an explanation says is what the paper publishes and the programs do."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from tknp.errors import InvalidValue
from tknp.layout.program import Kind, sent_bytes
from tknp.layout.rank import Rank
from tknp.planner.folding import fold
from tknp.planner.report import as_dict
from tknp.planner.traffic import traffic

KIB, MIB = 2**10, 2**20
STRATEGIES = ["tknp", "dp", "tp", "pp", "dcp", "helix"]


def test_four_nodes_of_eight_carry_the_published_traffic(explained: Any) -> None:
    """Every fact net.*: equations (1) to (5) for Llama 3.1 405B, batch 128, four TP8 nodes."""
    found = as_dict(explained("tknp", 4))
    assert found["root_qkv_elements_per_rank"] == 128 * (128 + 2 * 8) * 128 // 8  # net.eq1
    assert found["scatter_bytes_per_owner_rank"] == 144 * KIB  # net.tknp_scatter
    assert found["gather_bytes_per_owner_rank"] == 128 * KIB  # net.tknp_gather
    assert found["layer_payload_bytes_per_rank_group"] == 816 * KIB  # net.eq3, net.eq3_val
    assert found["all_reduce_operand_bytes"] == 4 * MIB  # net.ar_operand
    assert found["gather_to_all_reduce_ratio"] == 0.03125  # net.gather_over_ar
    assert found["dcp_output_bytes_per_rank"] == 512 * KIB  # net.dcp_out
    assert found["dcp_lse_bytes_per_rank"] == 8 * KIB  # net.dcp_lse
    assert found["output_reduction_to_dcp"] == 0.75  # net.reduction, net.eq5


def test_dcp_says_the_same_of_itself(explained: Any) -> None:
    found = as_dict(explained("dcp", 4))
    assert found["partial_output_bytes_per_rank"] == found["dcp_output_bytes_per_rank"]
    assert found["lse_bytes_per_rank"] == found["dcp_lse_bytes_per_rank"]
    assert found["scatter_bytes_per_owner_rank"] is None


def test_two_copies_never_give_both_microbatches_one_root(explained: Any) -> None:
    layout = explained("tknp", 8, copies=2).layout
    assert all(len(held) == 2 for held in layout.held)
    assert all(one != other for one, other in zip(*layout.routes, strict=True))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_traffic_is_that_of_the_programs(strategy: str, explained: Any) -> None:
    step = explained(strategy, 2, model="llama-3.1-8b", batch=16).step
    for rank, moved in traffic(step).items():
        programs = [p[rank] for p in step.programs if rank in p]
        assert moved.network_bytes == sum(sent_bytes(p, cross_node=True) for p in programs)
        assert moved.link_bytes == sum(sent_bytes(p, cross_node=False) for p in programs)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_folded_programs_are_whole(strategy: str, explained: Any) -> None:
    """Unfolded again, segments have every operation of rank 0 of every node, no more."""
    step = explained(strategy, 2, model="llama-3.1-8b", batch=16).step
    layers = step.layout.config.layers
    counted = {
        (stream, rank): sum(1 for _ in program)
        for stream, programs in enumerate(step.programs)
        for rank, program in programs.items()
        if rank.t == 0
    }
    for segment in fold(step):
        for place in segment.where:
            times = place.last - place.first + 1
            assert times <= layers
            if place.t == 0:
                key = place.stream, Rank(place.node, 0)
                counted[key] -= times * len(segment.operations)
    assert set(counted.values()) == {0}


def test_rows_and_owners_are_even(explained: Any) -> None:
    step = explained("tknp", 4, batch=30, microbatches=2).step
    assert [sum(group.rows for group in groups) for groups in step.groups] == [15, 15]
    for groups in step.groups:
        assert max(g.rows for g in groups) - min(g.rows for g in groups) <= 1


def test_a_request_has_one_owner_unless_none_could_hold_it(explained: Any) -> None:
    room = explained("tknp", 4).capacity.nodes[0].tokens
    assert explained("tknp", 4, batch=4, context=room).step.width == 1
    wide = explained("tknp", 4, batch=4, context=2 * room).step
    assert wide.width == 2
    assert any(op.kind is Kind.MERGE for program in wide.programs[0].values() for op in program)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_forecast_is_a_step_of_every_stream(strategy: str, explained: Any) -> None:
    found = explained(strategy, 2, batch=16).forecast
    assert 1e-3 < found.step_s < 1
    assert found.tokens_per_s * found.step_s == pytest.approx(16)
    for shares in found.busy.values():
        assert all(0 <= share <= 1 for share in shares.values())


def test_predictions_follow_the_published_directions(explained: Any) -> None:
    """Section 5.2 and 5.3 at 32K, batch 128: q.tknp_best_high against DCP and TP, h.mb_gain."""

    def tokens_per_s(strategy: str, **options: Any) -> float:
        found = explained(strategy, 4, context=32_768, **options)
        return float(found.forecast.tokens_per_s)

    single = tokens_per_s("tknp")
    assert single > tokens_per_s("dcp") > tokens_per_s("tp")
    assert tokens_per_s("tknp", copies=2) > single
    assert tokens_per_s("tknp", microbatches=2) > single
    assert tokens_per_s("pp") > tokens_per_s("pp", microbatches=1)


def test_attention_and_mlp_cost_what_section_3_measured(explained: Any) -> None:
    """s3.attn_tp8 0.71 ms, s3.attn_b1_b128 22, within what a roofline of this size can do."""
    from tknp.planner.cost import Costs

    def attend_s(batch: int) -> float:
        found = explained("dp", 1, batch=batch, context=32_768)
        costs = Costs(found.model, found.hardware, found.layout, found.step.tokens)
        _, rank, op = next(iter(found.step.operations(Kind.ATTEND)))
        return costs.compute_s(rank, 0, op)

    times = [attend_s(batch) for batch in (1, 8, 128)]
    assert times[2] == pytest.approx(0.71e-3, rel=0.1)
    assert all(a < b for a, b in pairwise(times))


def test_impossible_pools_are_refused_with_the_remedy(explained: Any) -> None:
    with pytest.raises(InvalidValue, match="copies"):
        explained("tknp", 3, copies=2)
    with pytest.raises(InvalidValue, match="batch"):
        explained("tknp", 2, batch=0)
    with pytest.raises(InvalidValue, match="width"):
        explained("dp", 2, width=2)
