"""What only the in-process transport does; the rest is in the contract suite."""

from __future__ import annotations

import pytest
import torch

from tknp.errors import DeadlineExceeded, InvalidValue, ProtocolError, Unavailable
from tknp.layout.rank import Rank
from tknp.transport.local import LocalHub

A, B = Rank(0, 0), Rank(1, 0)


def test_a_message_is_handed_over_without_a_buffer() -> None:
    """A send is under way until its receiver posts: overwriting it too early shows."""
    hub = LocalHub(2, 1, timeout_s=10)
    a, b = hub.transport(A), hub.transport(B)
    rows, got = torch.zeros(4), torch.zeros(4)
    send = a.post([(B, rows)], [], stream=0)
    rows.fill_(7)
    b.post([], [(A, got)], stream=0).wait()
    send.wait()
    assert got.tolist() == [7] * 4


def test_two_sends_before_two_receives_run_into_the_deadline() -> None:
    hub = LocalHub(2, 1, timeout_s=0.05)
    send = hub.transport(A).post([(B, torch.zeros(1))], [], stream=3)
    with pytest.raises(DeadlineExceeded, match=r"exchange on stream 3: send to \(1, 0\)"):
        send.wait()


@pytest.mark.parametrize("got", [torch.zeros(3), torch.zeros(4, dtype=torch.int32)])
def test_disagreement_on_size_or_dtype_fails_both_sides(got: torch.Tensor) -> None:
    hub = LocalHub(2, 1, timeout_s=10)
    send = hub.transport(A).post([(B, torch.zeros(4))], [], stream=0)
    receive = hub.transport(B).post([], [(A, got)], stream=0)
    for work in (send, receive):
        with pytest.raises(ProtocolError, match=r"rank \(0, 0\) sent 16 bytes"):
            work.wait()


def test_a_closed_peer_is_lost_but_what_it_gave_stays() -> None:
    hub = LocalHub(2, 1, timeout_s=10)
    a, b = hub.transport(A), hub.transport(B)
    got = torch.zeros(2)
    first = b.post([], [(A, got)], stream=0)
    a.post([(B, torch.ones(2))], [], stream=0).wait()
    second = b.post([], [(A, torch.zeros(2))], stream=0)
    a.close()
    first.wait()
    assert got.tolist() == [1, 1]
    with pytest.raises(Unavailable, match=r"rank \(0, 0\) is lost: closed"):
        second.wait()


def test_buffers_made_under_inference_mode_are_filled_by_peers_outside_it() -> None:
    hub = LocalHub(2, 1, timeout_s=10)
    with torch.inference_mode():
        got = torch.zeros(2)
        receive = hub.transport(B).post([], [(A, got)], stream=0)
    hub.transport(A).post([(B, torch.ones(2))], [], stream=0).wait()
    receive.wait()
    assert got.tolist() == [1, 1]


def test_a_pool_of_one_rank_has_collectives_of_its_own() -> None:
    only = LocalHub(1, 1, timeout_s=10).transport(Rank(0, 0))
    tensor = torch.ones(3)
    only.all_reduce(tensor, stream=0).wait()
    only.all_reduce(tensor, stream=0, scope="pool").wait()
    only.broadcast(tensor, stream=0)
    only.post([], [], stream=0).wait()
    assert tensor.tolist() == [1, 1, 1]
    gathered = only.gather(tensor, [3], stream=0)
    assert gathered is not None
    assert gathered[0] is tensor
    assert only.sent_bytes.collective == 0


@pytest.mark.parametrize(
    ("nodes", "tp", "timeout_s", "field"),
    [(0, 1, 1.0, "nodes"), (1, 0, 1.0, "tp"), (1, 1, 0.0, "timeout_s")],
)
def test_a_pool_that_cannot_be_is_refused(
    nodes: int, tp: int, timeout_s: float, field: str
) -> None:
    with pytest.raises(InvalidValue, match=field):
        LocalHub(nodes, tp, timeout_s).transport(Rank(0, 0))
