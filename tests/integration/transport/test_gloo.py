"""What is gloo's own: the rendezvous, and messages that don't fit. Ranks are threads here."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tknp.errors import DeadlineExceeded, InvalidValue
from tknp.layout.rank import Rank
from tknp.transport.base import Transport
from tknp.transport.distributed import connect

A, B = Rank(0, 0), Rank(1, 0)


@pytest.fixture(scope="module")
def store() -> str:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"127.0.0.1:{probe.getsockname()[1]}"


def join(
    rank: Rank, store: str, epoch: int, *, timeout_s: float = 20, patience_s: float = 20
) -> Transport:
    return connect(
        rank,
        2,
        1,
        backend="gloo",
        store_address=store,
        epoch=epoch,
        timeout_s=timeout_s,
        device=torch.device("cpu"),
        interface="lo",
        rendezvous_timeout_s=patience_s,
    )


def both(store: str, epoch: int, timeout_s: float = 20) -> list[Transport]:
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(lambda r: join(r, store, epoch, timeout_s=timeout_s), (A, B)))


def test_epochs_overlap_in_one_process(store: str) -> None:
    old = both(store, 1)
    new = both(store, 2)
    for wire in old:
        wire.close()
    got = torch.zeros(3)
    work = new[0].post([(B, torch.ones(3))], [], stream=0)
    new[1].post([], [(A, got)], stream=0).wait()
    work.wait()
    assert got.tolist() == [1, 1, 1]
    for wire in new:
        wire.close()


@pytest.mark.parametrize(("epoch", "expected"), [(3, 2), (4, 8)])
def test_another_size_than_expected_ends_in_the_deadline(
    store: str, epoch: int, expected: int
) -> None:
    a, b = both(store, epoch, timeout_s=0.3)
    got = torch.zeros(expected)
    a.post([(B, torch.ones(4))], [], stream=0)
    with pytest.raises(DeadlineExceeded, match="expects another size"):
        b.post([], [(A, got)], stream=0).wait()
    assert not got.any()
    a.close()


def test_who_does_not_come_is_named(store: str) -> None:
    with pytest.raises(DeadlineExceeded, match=r"epoch 5 .* no sign of ranks \(1, 0\)"):
        join(A, store, 5, patience_s=0.05)


def test_a_store_that_is_not_there_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        free = f"127.0.0.1:{probe.getsockname()[1]}"
    with pytest.raises(DeadlineExceeded, match=r"rank \(0, 0\) does not answer"):
        join(B, free, 1, patience_s=0.05)


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(InvalidValue, match=r"store_address.*can't listen there"):
            join(A, taken, 1)


@pytest.mark.parametrize("address", ["localhost", "localhost:port", ":29500", "localhost:70000"])
def test_an_address_must_name_host_and_port(address: str) -> None:
    with pytest.raises(InvalidValue, match="host:port"):
        join(A, address, 1)


def test_a_backend_moves_tensors_of_its_device_only(store: str) -> None:
    with pytest.raises(InvalidValue, match="backend"):
        connect(
            A, 1, 1, backend="nccl", store_address=store, epoch=1, timeout_s=1,
            device=torch.device("cpu"),
        )  # fmt: skip


def test_gloo_refuses_streams_that_its_tags_cannot_hold(store: str) -> None:
    a, b = both(store, 6)
    with pytest.raises(InvalidValue, match="streams 0 to 63"):
        a.post([(B, torch.zeros(1))], [], stream=64)
    a.close()
    b.close()
