"""Advancing and turning rows gives what building them anew does."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tknp.attention.base import DecodeRows
from tknp.engine.owned import OwnedRow, OwnedRows
from tknp.errors import ProtocolError
from tknp.layout.shares import Shares

CPU = torch.device("cpu")


def row(slot: int, shares: Shares, shard: int, position: int) -> OwnedRow:
    length = shares.length(shard, position + 1)
    return OwnedRow(slot, position, length, shares.appender(position) == shard)


def same(a: DecodeRows, b: DecodeRows) -> bool:
    return all(
        torch.equal(getattr(a, name), getattr(b, name))
        for name in ("block_tables", "positions", "lengths", "append")
    )


@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 9), st.integers(1, 4)), min_size=1,
             max_size=4),
    st.integers(0, 2),
)  # fmt: skip
def test_rows_advance_and_turn(requests: list[tuple[int, int, int]], shard: int) -> None:
    rows = OwnedRows(CPU)
    shares = {}
    for slot, (width, prompt, interleave) in enumerate(requests):
        shares[slot] = Shares(tuple(range(width)), prompt, interleave)
        rows.admit(slot, range(1, 2 + slot))
    kept = {slot: min(shard, len(s.owners) - 1) for slot, s in shares.items()}
    at = {slot: s.prompt for slot, s in shares.items()}

    def now() -> list[OwnedRow]:
        return [row(slot, shares[slot], kept[slot], at[slot]) for slot in shares]

    rows.build(now())
    for _ in range(9):
        before = {slot: shares[slot].appender(at[slot]) for slot in shares}
        at = {slot: position + 1 for slot, position in at.items()}
        rows.advance()
        turned = [s for s in shares if shares[s].appender(at[s]) != before[s]]
        rows.turn([(slot, now()[slot]) for slot in turned])
        fresh = OwnedRows(CPU)
        for slot in shares:
            fresh.admit(slot, range(1, 2 + slot))
        fresh.build(now())
        assert same(rows.rows, fresh.rows)


def test_a_run_of_rows_advances_with_all() -> None:
    rows = OwnedRows(CPU)
    for slot in range(3):
        rows.admit(slot, [slot + 1])
    rows.build([OwnedRow(slot, 4, 5, True) for slot in range(3)])
    part = rows.between(1, 3)
    rows.advance()
    assert part.positions.tolist() == [5, 5]
    assert part.block_tables.tolist() == [[2], [3]]
    assert rows.between(0, 3) is rows.rows


def test_an_owner_without_pages_is_refused() -> None:
    with pytest.raises(ProtocolError, match="slot 3 is admitted without pages"):
        OwnedRows(CPU).admit(3, [])
