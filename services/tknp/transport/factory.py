"""Which data plane joins a set of ranks.

auto           NCCL on CUDA; on CPU shared memory where every rank is on loopback, else gloo
distributed    NCCL on CUDA, gloo on CPU
shared_memory  CPU processes of one host
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Sequence

import torch

from tknp.config import DataPlane
from tknp.errors import InvalidValue
from tknp.layout.rank import Rank
from tknp.transport import distributed, shared_memory
from tknp.transport.base import Transport
from tknp.transport.lane import LaneFactory, PythonLane
from tknp.transport.local import LocalHub


def join(
    rank: Rank,
    nodes: int,
    tp: int,
    *,
    kind: DataPlane,
    addresses: Sequence[str],
    meeting: str,
    epoch: int,
    timeout_s: float,
    device: torch.device,
    interface: str = "",
    streams: int = 1,
    choose_lanes: Callable[[], LaneFactory] | None = None,
) -> Transport:
    """Join the ranks at `addresses` (HOST:PORT of their services) and return once all have come.

    `meeting`: HOST:PORT of rank (0, 0) that names this set of ranks and, where they are on several
    hosts, is where they meet. Messages travel on streams 0 to `streams` - 1. `choose_lanes` is
    asked for what moves messages if that is shared memory; None: Python. A single rank joins
    nobody. Raises as the transports' `connect` do.
    """
    if nodes * tp == 1:
        return LocalHub(1, 1, timeout_s).transport(rank)
    if kind == "shared_memory" and device.type != "cpu":
        raise InvalidValue("transport", kind, f"ranks on {device} use distributed")
    local = all(_loopback(address) for address in addresses)
    if kind == "shared_memory" or (kind == "auto" and device.type == "cpu" and local):
        name = re.sub(r"[^A-Za-z0-9]", "-", meeting)
        return shared_memory.connect(
            rank, nodes, tp, pool=name, epoch=epoch, timeout_s=timeout_s, streams=streams,
            lanes=choose_lanes() if choose_lanes else PythonLane,
        )  # fmt: skip
    return distributed.connect(
        rank, nodes, tp,
        backend="gloo" if device.type == "cpu" else "nccl", store_address=meeting, epoch=epoch,
        timeout_s=timeout_s, device=device, interface=interface or None, streams=streams,
    )  # fmt: skip


def _loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
