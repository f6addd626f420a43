"""The messages of a run of layers, moved by the code that computes them.

    prepare(ops)   a Part for each message of a layer, all through
    csrc/layers.h  begins parts, and moves them while it computes
    rest()         what is left: where it had to give up waiting, or behind the last layer

What is left goes to the lane, whose exchanges know deadlines and lost peers: a wait ends as that of
an operation run by itself does, with the same error, a few milliseconds later at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tknp.errors import ProtocolError
from tknp.kernels.library import Part
from tknp.kernels.mailbox import NativeLane
from tknp.layout.program import Op, Transfer
from tknp.transport.base import Transport, Work
from tknp.transport.ring import code_of, framing_bytes
from tknp.transport.shared_memory import SharedMemoryTransport

MOVES = ("qkv", "attention")
"""What may be sent straight from, and received straight into, where layers work on it."""


@dataclass(frozen=True)
class Mailbox:
    """One stream of a transport whose messages compiled code can move."""

    transport: SharedMemoryTransport
    lane: NativeLane
    stream: int

    @classmethod
    def of(cls, transport: Transport, stream: int) -> Mailbox | None:
        """None where messages travel otherwise, or in Python."""
        if not isinstance(transport, SharedMemoryTransport):
            return None
        lane = transport.lane(stream)
        return cls(transport, lane, stream) if isinstance(lane, NativeLane) else None


class Messages:
    """Of one layer, at one rank, the same in all layers of a run.

    `parts`: as the kernels take them. `ends`: of each operation, where its messages stop among
    them. `rows`: where each kind of message is kept, [rows of the batch, its width].
    """

    def __init__(self, mailbox: Mailbox | None, ops: Sequence[Op], rows: dict[str, Tensor]) -> None:
        self._mailbox = mailbox
        self._tensors: list[Tensor] = []
        self._received: list[bool] = []
        self._node_local = self._cross_node = self._framing = 0
        self.ends: list[int] = []
        parts: list[Part] = []
        for op in ops:
            for transfer in (*op.sends, *op.recvs):
                if mailbox is None:
                    raise ProtocolError(f"nothing here moves messages of {op.kind} in a run")
                parts.append(self._part(mailbox, transfer, rows[transfer.what]))
            self.ends.append(len(parts))
        self.parts = (Part * len(parts))(*parts)

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def lane(self) -> int | None:
        """Address of the lane that moves them; None if there are none."""
        return self._mailbox.lane.address if self._mailbox is not None and len(self) else None

    def count(self, layers: int) -> None:
        """Count what was sent in `layers` layers."""
        if self._mailbox is not None and self._framing:
            sent = self._node_local, self._cross_node, self._framing
            self._mailbox.transport.count(*(layers * nbytes for nbytes in sent))

    def rest(self) -> list[Work]:
        """What has begun and is not through: what is received, then what is sent.

        Raises Unavailable if this rank takes no part any more.
        """
        if self._mailbox is None:
            return []
        works = []
        for received in (True, False):
            left = [
                (part, tensor)
                for part, tensor, is_received in zip(
                    self.parts, self._tensors, self._received, strict=True
                )
                if is_received is received and part.moved != part.size
            ]
            if left:
                taken = self._mailbox.lane.take_over(left)
                works.append(self._mailbox.transport.under_way(*taken, self._mailbox.stream))
                for part, _ in left:
                    part.moved = part.size
        return works

    def _part(self, mailbox: Mailbox, transfer: Transfer, rows: Tensor) -> Part:
        tensor = rows[transfer.start : transfer.stop]
        sends = transfer.src == mailbox.transport.rank
        peer = transfer.dst if sends else transfer.src
        self._tensors.append(tensor)
        self._received.append(not sends)
        if sends:
            self._framing += framing_bytes(tensor.nbytes)
            if transfer.src.node == transfer.dst.node:
                self._node_local += tensor.nbytes
            else:
                self._cross_node += tensor.nbytes
        end = mailbox.lane.end(peer, sends=sends)
        code = code_of(torch.bfloat16)
        return Part(end, tensor.data_ptr(), tensor.nbytes, code, tensor.nbytes)
