"""Prefill programs: a chunk passes every layer on every rank; only a prompt's last row is drawn."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tknp.layout.prefill import derive_chunk, replica_layout
from tknp.layout.program import Kind, Program
from tknp.layout.rank import Rank


def _programs(config: Any, tokens: int, tp: int, *, last: bool) -> dict[Rank, Program]:
    layout = replica_layout(config, "float32", tp)
    return {Rank(0, t): derive_chunk(layout, tokens, t, last=last) for t in range(tp)}


@settings(max_examples=30)
@given(
    tokens=st.integers(1, 600),
    tp=st.sampled_from([1, 3]),
    last=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_no_schedule_of_a_chunk_deadlocks(
    tokens: int, tp: int, last: bool, seed: int, simulator: Any, smollm2: Any
) -> None:
    programs = _programs(replace(smollm2, layers=3), tokens, tp, last=last)
    lanes = simulator.separate([programs])
    assert set(simulator(lanes, tp, simulator.random_delays(seed)).run()) == {0}


@pytest.mark.parametrize("tp", [1, 3])
def test_chunk_passes_every_layer_on_every_rank_without_leaving_the_node(
    tp: int, smollm2: Any
) -> None:
    for program in _programs(smollm2, 512, tp, last=False).values():
        for kind in (Kind.PROJECT, Kind.ATTEND):
            assert [op.layer for op in program if op.kind is kind] == list(range(30))
        assert {(op.start, op.stop) for op in program} == {(0, 512)}
        assert not any(op.sends or op.recvs for op in program)
        assert Kind.SAMPLE not in {op.kind for op in program}


@pytest.mark.parametrize("tp", [1, 3])
def test_last_chunk_samples_its_last_row(tp: int, smollm2: Any) -> None:
    chunk = _programs(smollm2, 512, tp, last=False)
    for rank, program in _programs(smollm2, 512, tp, last=True).items():
        whole = len(chunk[rank])
        assert program[:whole] == chunk[rank]
        assert program[whole - 1].kind is Kind.ATTEND
        *rest, sample = program[whole:]
        assert {(op.layer, op.start, op.stop) for op in rest} == {(29, 511, 512)}
        assert {op.operand_bytes for op in rest} <= {0, smollm2.hidden_size * 4}
        assert (sample.kind, sample.start, sample.stop) == (Kind.SAMPLE, 511, 512)
        parts = sample.recvs if rank.t == 0 else sample.sends
        assert [(t.src.t, t.dst.t, t.start, t.stop) for t in parts] == (
            [(t, 0, 511, 512) for t in range(1, tp)] if rank.t == 0 else [(rank.t, 0, 511, 512)]
        )
