"""Ranks on GPUs, by NCCL.

Each stream has communicators of its own, one over the pool and one over the node's TP ranks:
NCCL runs what shares a communicator one after the other, in an order that all its ranks must
share. They are set up while connecting, which all ranks do together.

Waiting orders the current CUDA stream behind the exchange; the host goes on. So a deadline can't
pass in `wait`: torch's NCCL watchdog notices it after `timeout_s`, aborts the communicators and
ends the process, which its supervisor starts anew for the next epoch. A CUDA graph can hold
exchanges for the same reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import (  # type: ignore[attr-defined]
    AllreduceOptions,
    PrefixStore,
    ProcessGroupNCCL,
    Store,
)

from tknp.errors import InvalidValue, Unavailable
from tknp.layout.rank import Rank
from tknp.transport.base import Message, Scope, Work
from tknp.transport.point_to_point import PointToPointTransport


class NcclTransport(PointToPointTransport):
    """Transport over one pair of communicators (pool, node) a stream."""

    def __init__(
        self,
        rank: Rank,
        nodes: int,
        tp: int,
        *,
        store: Store,
        timeout_s: float,
        device: torch.device,
        streams: int,
    ) -> None:
        super().__init__(rank, nodes, tp, timeout_s)
        self._broken: str | None = None
        self._pools: list[Any] = []
        self._nodes_groups: list[Any] = []
        index, size = rank.index(tp), nodes * tp
        for stream in range(streams if size > 1 else 0):
            self._pools.append(
                _communicator(PrefixStore(f"pool/{stream}", store), index, size, timeout_s, device)
            )
            if tp > 1:
                prefix = PrefixStore(f"node/{rank.node}/{stream}", store)
                self._nodes_groups.append(_communicator(prefix, rank.t, tp, timeout_s, device))

    def _start(
        self, sends: Sequence[Message], recvs: Sequence[Message], stream: int, operation: str
    ) -> Work:
        group = self._of_stream(self._pools, stream)
        # Ungrouped, each message would start a kernel, and two ranks that send first would wait
        # for each other.
        group._start_coalescing()
        for peer, tensor in recvs:
            group.recv([tensor], peer.index(self._tp), 0)
        for peer, tensor in sends:
            group.send([tensor], peer.index(self._tp), 0)
        return _NcclExchange(group._end_coalescing())

    def _sum(self, tensor: Tensor, stream: int, scope: Scope) -> Work:
        groups = self._nodes_groups if scope == "node" else self._pools
        group = self._of_stream(groups, stream)
        return _NcclExchange(group.allreduce([tensor], AllreduceOptions()))

    def _of_stream(self, groups: list[Any], stream: int) -> Any:
        if self._broken is not None:
            raise Unavailable(self._broken)
        if not 0 <= stream < len(groups):
            raise InvalidValue("stream", stream, f"connected with streams={len(groups)}")
        return groups[stream]

    def abort(self, reason: str) -> None:
        if self._broken is None:
            self._broken = reason
            for group in self._pools + self._nodes_groups:
                group.abort()

    def close(self) -> None:
        self.abort("closed")


class _NcclExchange:
    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            raise Unavailable(f"NCCL: {str(error).splitlines()[0]}") from error

    def done(self) -> bool:
        return True


def _communicator(
    store: Store, index: int, size: int, timeout_s: float, device: torch.device
) -> Any:
    # The typed stub lacks the messages of a group: Any.
    group: Any = ProcessGroupNCCL
    options = group.Options()
    options._timeout = timedelta(seconds=timeout_s)
    communicator = group(store, index, size, options)
    # A communicator that its first exchange sets up would wait for ranks that have no part in it.
    communicator.eager_connect_single_device(device)
    return communicator
