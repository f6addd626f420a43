"""Ranks as processes of one or many hosts, on torch.distributed's backends.

    connect:  meet in the store of rank (0, 0)  ->  one group of all ranks  ->  Transport

The default process group of torch is neither used nor touched: it exists once a process, while a
process here lives through several epochs, whose transports may overlap while one closes.
"""

from __future__ import annotations

from typing import Literal

import torch

from tknp.errors import InvalidValue
from tknp.layout.rank import Rank
from tknp.transport.base import Transport
from tknp.transport.gloo import GlooTransport
from tknp.transport.point_to_point import check_rank
from tknp.transport.rendezvous import meet


def connect(
    rank: Rank,
    nodes: int,
    tp: int,
    *,
    backend: Literal["gloo", "nccl"],
    store_address: str,
    epoch: int,
    timeout_s: float,
    device: torch.device,
    interface: str | None = None,
    rendezvous_timeout_s: float = 300.0,
    streams: int = 1,
) -> Transport:
    """Join the pool of `epoch` and return once every rank of it has.

    Args:
        backend: gloo moves CPU tensors, nccl CUDA tensors.
        store_address: `host:port` of rank (0, 0), which listens there.
        epoch: never used before by a pool at this address.
        timeout_s: allowed for each exchange.
        device: where this rank's tensors live.
        interface: network interface of gloo's connections (`lo` for one host); None: gloo's
            choice. NCCL has NCCL_SOCKET_IFNAME.
        rendezvous_timeout_s: allowed for all ranks to come; they load weights at their own speed.
        streams: NCCL only: streams 0 to `streams` - 1 get communicators of their own.

    Raises:
        DeadlineExceeded: names the ranks that did not come.
        InvalidValue, Unavailable: as `meet` and the backend's transport.
    """
    check_rank("rank", rank, nodes, tp)
    if (backend == "nccl") != (device.type == "cuda"):
        raise InvalidValue("backend", backend, f"does not move tensors on {device}")
    store = meet(
        rank, nodes, tp, store_address=store_address, epoch=epoch, timeout_s=rendezvous_timeout_s
    )
    if backend == "gloo":
        return GlooTransport(
            rank, nodes, tp, store=store, timeout_s=timeout_s,
            rendezvous_timeout_s=rendezvous_timeout_s, interface=interface,
        )  # fmt: skip
    # Only CUDA builds of torch have what it imports.
    from tknp.transport.nccl import NcclTransport

    return NcclTransport(
        rank, nodes, tp, store=store, timeout_s=timeout_s, device=device, streams=streams
    )
