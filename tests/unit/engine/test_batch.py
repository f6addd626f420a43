from __future__ import annotations

import pytest

from tknp.engine.batch import Admit, Batch, Delta, Grow
from tknp.errors import InvalidValue, ProtocolError, TknpError
from tknp.kv.holding import Key
from tknp.layout.layout import Layout, NodeSpec, make_layout
from tknp.layout.rows import Group
from tknp.layout.shares import Phase, Shares
from tknp.layout.strategy import Strategy
from tknp.model.config import ModelConfig
from tknp.sampling.params import SamplingParams

MODEL = ModelConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, layers=3, q_heads=6, kv_heads=3,
    head_dim=8, max_position=64, norm_eps=1e-5, rope_theta=1e4, tied_embeddings=False,
    bos_id=0, eos_ids=(1,),
)  # fmt: skip


def layout(strategy: str = "tknp", nodes: int = 3) -> Layout:
    return make_layout(MODEL, "float32", 1, [NodeSpec(1)] * nodes, strategy=Strategy(strategy))


def admit(slot: int, owners: tuple[int, ...], position: int = 6, **shares: object) -> Admit:
    divided = Shares(owners, position, **{"interleave": 2, **shares})  # type: ignore[arg-type]
    key = Key(str(slot), 1)
    return Admit(slot, key, owners, divided, position, 5, SamplingParams(max_tokens=9))


def test_narrow_rows_stand_by_owner_and_wide_ones_behind() -> None:
    batch = Batch(1, layout(), 8)
    admits = (admit(0, (2,)), admit(1, (0, 1)), admit(2, (0,)), admit(3, (2,)))
    assert batch.apply(Delta(1, 0, 0, admits=admits))
    assert batch.order == (2, 0, 3, 1)
    assert batch.groups == (Group((0,), 0, 1), Group((2,), 2, 2), Group((0, 1), 0, 1))


def test_appenders_take_turns_without_a_message() -> None:
    batch = Batch(1, layout(), 8)
    batch.apply(Delta(1, 0, 0, admits=(admit(0, (1, 0)), admit(1, (2,)))))
    appenders = []
    for step in range(1, 7):
        batch.advance()
        changed = batch.apply(Delta(1, 0, step))
        appenders.append(batch.groups[-1].appender)
        assert changed == bool(batch.turned) == (step % 2 == 0)
    assert appenders == [1, 0, 0, 1, 1, 0]


def test_where_the_layout_says_who_owns_a_turn_moves_no_row() -> None:
    batch = Batch(1, layout("helix"), 8)
    batch.apply(Delta(1, 0, 0, admits=(admit(1, (0, 1, 2)), admit(0, (0, 1, 2), 3))))
    assert batch.order == (0, 1)
    groups = batch.groups
    batch.advance()
    assert not batch.apply(Delta(1, 0, 1))
    assert batch.turned == ()
    batch.advance()
    assert not batch.apply(Delta(1, 0, 2))
    assert batch.turned == (1, 0)
    assert batch.groups == groups


def test_growth_adds_owners_behind_those_there_are() -> None:
    batch = Batch(1, layout(), 8)
    one = admit(0, (1,))
    batch.apply(Delta(1, 0, 0, admits=(one,)))
    grown = one.shares.grown((2,), 6, (1,))
    assert batch.apply(Delta(1, 0, 1, grows=(Grow(0, grown, pages=(4,)),)))
    assert batch.groups == (Group((1, 2), 2, 1),)
    assert batch.rows[0].shares == grown


def test_the_owners_of_a_pipeline_stay_when_a_request_grows() -> None:
    batch = Batch(1, layout("pp"), 8)
    one = Shares((0,), 6)
    batch.apply(
        Delta(1, 0, 0, admits=(Admit(0, Key("a", 1), (0, 1, 2), one, 6, 5, SamplingParams()),))
    )
    batch.apply(Delta(1, 0, 1, grows=(Grow(0, one),)))
    assert batch.rows[0].owners == (0, 1, 2)


def divided(shares: Shares, position: int) -> Delta:
    request = Admit(1, Key("b", 1), (1,), shares, position, 5, SamplingParams())
    return Delta(1, 0, 1, admits=(request,))


WRONG = {
    "stream": (Delta(1, 1, 1), ProtocolError, "epoch, stream, step"),
    "not running": (Delta(1, 0, 1, ends=(3,)), ProtocolError, "not all running"),
    "ended twice": (Delta(1, 0, 1, ends=(0, 0)), ProtocolError, "not all running"),
    "taken": (Delta(1, 0, 1, admits=(admit(0, (1,)),)), ProtocolError, "slot 0: not free"),
    "slot": (Delta(1, 0, 1, admits=(admit(8, (1,)),)), ProtocolError, "slot 8: not free"),
    "node": (Delta(1, 0, 1, admits=(admit(1, (3,)),)), InvalidValue, r"owners=\(3,\)"),
    "grows what ends": (
        Delta(1, 0, 1, ends=(0,), grows=(Grow(0, Shares((1,), 6, 2)),)),
        ProtocolError, "grows slot 0: not running",
    ),
    "migrates": (Delta(1, 0, 1, grows=(Grow(0, Shares((2,), 6, 2)),)), ProtocolError, "stays"),
    "recut": (Delta(1, 0, 1, grows=(Grow(0, Shares((1, 2), 5, 2)),)), ProtocolError, "stays"),
    "grows off the pool": (
        Delta(1, 0, 1, grows=(Grow(0, Shares((1, 3), 6, 2, phases=(Phase(6, (0,)),))),)),
        InvalidValue, r"owners=\(1, 3\)",
    ),
    "inside the prompt": (divided(Shares((1,), 9), 8), InvalidValue, "position=8"),
    "divided otherwise": (divided(Shares((2,), 6), 6), InvalidValue, r"shares.owners=\(2,\)"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_delta_that_does_not_fit_changes_nothing(case: str) -> None:
    delta, error, message = WRONG[case]
    batch = Batch(1, layout(), 8)
    batch.apply(Delta(1, 0, 0, admits=(admit(0, (1,)),)))
    before = (dict(batch.rows), batch.order, batch.groups, batch.next_step)
    assert issubclass(error, TknpError)
    with pytest.raises(error, match=message):
        batch.apply(delta)
    assert (batch.rows, batch.order, batch.groups, batch.next_step) == before
