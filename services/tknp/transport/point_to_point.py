"""What every transport shares: checks, byte counts, and the collectives built of messages.

Collectives are one grouped exchange each. For the few ranks of a CPU node that is one round trip,
where a ring or tree takes several, and the sum is free to follow rank order.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from tknp.errors import InvalidValue
from tknp.layout.rank import Rank
from tknp.transport.base import Message, Scope, Traffic, Work


class Done:
    """An exchange with nothing to exchange."""

    def wait(self) -> None:
        return None

    def done(self) -> bool:
        return True


DONE = Done()


class Sum:
    """An all-reduce under way: `parts` of all ranks, in rank order, arrive by `exchange`."""

    def __init__(self, exchange: Work, tensor: Tensor, parts: Sequence[Tensor]) -> None:
        self._exchange = exchange
        self._tensor = tensor
        self._parts = parts

    def done(self) -> bool:
        return self._exchange.done()

    def wait(self) -> None:
        self._exchange.wait()
        if not self._parts:
            return
        # In float32 `total` is part 0 itself: either scratch, or `tensor`, which no later part is.
        total = self._parts[0].float()
        for part in self._parts[1:]:
            total += part
        if total is not self._tensor:
            self._tensor.copy_(total)
        self._parts = ()


class PointToPointTransport(ABC):
    """Implements Transport on one primitive, `_start`."""

    def __init__(self, rank: Rank, nodes: int, tp: int, timeout_s: float) -> None:
        check_rank("rank", rank, nodes, tp)
        if timeout_s <= 0:
            raise InvalidValue("timeout_s", timeout_s, "must be above 0: every wait has a deadline")
        self.rank = rank
        self.sent_bytes = Traffic()
        self._nodes = nodes
        self._tp = tp
        self._timeout_s = timeout_s
        self._count_lock = threading.Lock()
        self._tp_peers = [Rank(rank.node, t) for t in range(tp) if t != rank.t]
        self._scopes: dict[Scope, list[Rank]] = {
            "node": [Rank(rank.node, t) for t in range(tp)],
            "pool": [Rank(n, t) for n in range(nodes) for t in range(tp)],
        }

    @abstractmethod
    def _start(
        self, sends: Sequence[Message], recvs: Sequence[Message], stream: int, operation: str
    ) -> Work:
        """Start an exchange of checked, non-empty messages; `operation` names it in errors."""

    @abstractmethod
    def abort(self, reason: str) -> None: ...

    @abstractmethod
    def close(self) -> None: ...

    def post(self, sends: Sequence[Message], recvs: Sequence[Message], *, stream: int) -> Work:
        outgoing = [m for m in sends if self._moves("sends", m)]
        incoming = [m for m in recvs if self._moves("recvs", m)]
        if not outgoing and not incoming:
            return DONE
        work = self._start(outgoing, incoming, stream, "exchange")
        if outgoing:
            node_local = sum(t.nbytes for peer, t in outgoing if peer.node == self.rank.node)
            self.count(node_local, sum(t.nbytes for _, t in outgoing) - node_local)
        return work

    def count(self, node_local: int, cross_node: int, framing: int = 0) -> None:
        """Add to `sent_bytes`."""
        with self._count_lock:
            self.sent_bytes.node_local += node_local
            self.sent_bytes.cross_node += cross_node
            self.sent_bytes.framing += framing

    def all_reduce(self, tensor: Tensor, *, stream: int, scope: Scope = "node") -> Work:
        ranks = self._scopes[scope]
        if len(ranks) == 1 or not self._moves_collective(tensor):
            return DONE
        if not tensor.is_floating_point():
            raise InvalidValue("tensor.dtype", tensor.dtype, "sums are taken in float32")
        work = self._sum(tensor, stream, scope)
        self._count_collective(tensor)
        return work

    def _sum(self, tensor: Tensor, stream: int, scope: Scope) -> Work:
        ranks = self._scopes[scope]
        parts = [tensor if rank == self.rank else torch.empty_like(tensor) for rank in ranks]
        others = [(r, part) for r, part in zip(ranks, parts, strict=True) if r != self.rank]
        sends = [(peer, tensor) for peer, _ in others]
        return Sum(self._start(sends, others, stream, "all_reduce"), tensor, parts)

    def gather(self, tensor: Tensor, widths: Sequence[int], *, stream: int) -> list[Tensor] | None:
        if len(widths) != self._tp or widths[self.rank.t] != tensor.shape[-1]:
            raise InvalidValue(
                "widths", tuple(widths),
                f"needs {self._tp} entries, {tensor.shape[-1]} for TP rank {self.rank.t}",
            )  # fmt: skip
        root = Rank(self.rank.node, 0)
        if self.rank != root:
            if self._moves_collective(tensor):
                self._start([(root, tensor)], [], stream, "gather").wait()
                self._count_collective(tensor)
            return None
        slices = [tensor] + [tensor.new_empty(*tensor.shape[:-1], w) for w in widths[1:]]
        recvs = [(peer, slices[peer.t]) for peer in self._tp_peers if slices[peer.t].numel()]
        if recvs:
            self._start([], recvs, stream, "gather").wait()
        return slices

    def broadcast(self, tensor: Tensor, *, stream: int) -> None:
        if self._tp == 1 or not self._moves_collective(tensor):
            return
        if self.rank.t == 0:
            sends = [(peer, tensor) for peer in self._tp_peers]
            self._start(sends, [], stream, "broadcast").wait()
            self._count_collective(tensor)
        else:
            self._start([], [(Rank(self.rank.node, 0), tensor)], stream, "broadcast").wait()

    def _moves(self, field: str, message: Message) -> bool:
        peer, tensor = message
        if peer == self.rank:
            raise InvalidValue(field, str(peer), "a rank copies to itself without a transport")
        check_rank(field, peer, self._nodes, self._tp)
        return self._moves_collective(tensor)

    @staticmethod
    def _moves_collective(tensor: Tensor) -> bool:
        """Whether `tensor` has bytes to move; refuses what can't be moved as one run of bytes."""
        if not tensor.is_contiguous():
            raise InvalidValue(
                "tensor", f"shape {tuple(tensor.shape)}, stride {tensor.stride()}",
                "must be contiguous; slice rows, not columns",
            )  # fmt: skip
        return tensor.numel() > 0

    def _count_collective(self, tensor: Tensor) -> None:
        with self._count_lock:
            self.sent_bytes.collective += tensor.nbytes


def check_rank(field: str, rank: Rank, nodes: int, tp: int) -> None:
    """Raise InvalidValue naming `field` unless `rank` lies in a pool of `nodes` x `tp`."""
    if not (0 <= rank.node < nodes and 0 <= rank.t < tp):
        raise InvalidValue(field, str(rank), f"the pool has {nodes} nodes of {tp} ranks")


def describe(operation: str, stream: int, sends: Sequence[Rank], recvs: Sequence[Rank]) -> str:
    """An exchange and the peers it lacks, for errors."""
    parts = []
    if sends:
        parts.append("send to " + ", ".join(map(str, sends)))
    if recvs:
        parts.append("receive from " + ", ".join(map(str, recvs)))
    return f"{operation} on stream {stream}: " + "; ".join(parts)
