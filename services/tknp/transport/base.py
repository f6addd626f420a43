"""The data plane's interface: what a rank may ask of the wires between it and its peers.

Life cycle: one transport a rank and epoch. Construct (which rendezvouses), `post` and the
collectives for as long as the membership lasts, then `close`. A change of membership is a new
epoch and a new transport.

Messages carry no names. Between one ordered pair of ranks on one stream they arrive in the order
of posting; different streams never match or block each other. Collectives run on the same
order, so ranks must issue posts and collectives of a stream alike (invariant 3 of docs: ranks
never branch on local state).

    root      post(sends=[(owner, rows)])  .. wait before the rows are overwritten
    owner     post(recvs=[(root, rows)])   .. wait before the rows are read

A send may complete only once its receiver has posted (gloo, NCCL and the in-process transport do
so), therefore both directions of an exchange belong into one post: two ranks that wait for their
sends before they post their receives wait for each other.

Threads: one thread a stream posts and waits; `abort` and `close` may come from any thread.

Failure: a wait ends within `timeout_s` in success, DeadlineExceeded or Unavailable. A failed wait
breaks the transport: peers that wait for this rank find it lost, later calls raise Unavailable,
buffers of the failed exchange are undefined, and only a new epoch helps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from tknp.layout.rank import Rank

Message = tuple[Rank, Tensor]
Scope = Literal["node", "pool"]
"""Whom a collective joins: the TP ranks of this node, or every rank of the pool."""


@dataclass
class Traffic:
    """Bytes that one rank has sent since it connected: payload, and what messages take besides.

    `node_local` and `cross_node` count `post`, message by message. `collective` counts what the
    rank entered collectives with (its tensor, once a call; nothing where it only receives), which
    unlike wire bytes doesn't depend on the algorithm. `framing` counts what shared memory adds to
    all of these messages, see `tknp.transport.ring`; what other transports add isn't known here.
    """

    node_local: int = 0
    cross_node: int = 0
    collective: int = 0
    framing: int = 0


class Work(Protocol):
    """One exchange under way. Keep it until it has been waited for: dropping it may cancel it."""

    def wait(self) -> None:
        """Return once receive buffers are filled and send buffers may be written. Idempotent.

        On CUDA it orders the current CUDA stream behind the exchange rather than the host.

        Raises:
            DeadlineExceeded: a peer was silent for `timeout_s`; names operation and peers.
            Unavailable: a peer died or closed, or this rank was aborted.
            ProtocolError: a peer sent another size than the receive buffer has (DeadlineExceeded
                by gloo, undetected by NCCL).
        """

    def done(self) -> bool:
        """Whether `wait` would return at once; it must be called all the same.

        Moves what can be moved without waiting. Raises as `wait` does, and by the same deadline,
        which starts with the first call that finds the exchange under way. On CUDA it is always
        True: `wait` doesn't hold up the host.
        """


class Transport(Protocol):
    """Exchanges between one rank and its pool of N nodes of T ranks."""

    rank: Rank
    sent_bytes: Traffic

    def post(self, sends: Sequence[Message], recvs: Sequence[Message], *, stream: int) -> Work:
        """Start one grouped point-to-point exchange with any ranks of the pool.

        Tensors are contiguous (row slices of larger ones are) and both sides agree on dtype and
        size. Send buffers must stay untouched until `wait` has returned. Empty tensors are
        skipped, on both sides alike.

        Raises:
            InvalidValue: a peer outside the pool or this rank itself; a tensor not contiguous.
            Unavailable: the transport is aborted, broken or closed.
        """

    def all_reduce(self, tensor: Tensor, *, stream: int, scope: Scope = "node") -> Work:
        """Start to sum a floating-point `tensor` over the ranks of `scope`, in place.

        `tensor` holds the sum once `wait` has returned and must stay untouched until then. Addends
        are taken in rank order in float32 and rounded once to the tensor's dtype: equal on all
        ranks to the bit, whatever the size. NCCL uses its own order.
        """

    def gather(self, tensor: Tensor, widths: Sequence[int], *, stream: int) -> list[Tensor] | None:
        """Collect `tensor` [..., widths[t]] of each TP rank t of this node at TP rank 0.

        Returns the T slices in rank order at TP rank 0, None elsewhere. Leading dimensions agree;
        `widths` is the same on all ranks and may contain zeros.
        """

    def broadcast(self, tensor: Tensor, *, stream: int) -> None:
        """Fill `tensor` in place with that of TP rank 0 of this node."""

    def abort(self, reason: str) -> None:
        """Wake every waiter of this rank with Unavailable(reason), and let its peers find it lost.

        Thread-safe, idempotent: the first reason stays.
        """

    def close(self) -> None:
        """Release connections and memory. Peers that still wait for this rank find it lost."""
