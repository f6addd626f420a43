"""Rows that one rank owns, as the tensors attention reads."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tknp.attention.base import DecodeRows
from tknp.errors import ProtocolError


class OwnedRows:
    """Block tables of a rank's slots; rebuilt when the batch changes, advanced when it doesn't."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tables: dict[int, torch.Tensor] = {}
        self.build([], [])

    def admit(self, slot: int, pages: Sequence[int]) -> None:
        """The request in `slot` has its KV in `pages`."""
        if not pages:
            raise ProtocolError(f"slot {slot} is admitted without pages at its owner")
        self._tables[slot] = torch.tensor(pages, dtype=torch.int32)

    def end(self, slot: int) -> None:
        """Forget `slot`, if it was owned here."""
        self._tables.pop(slot, None)

    def build(self, slots: Sequence[int], positions: Sequence[int]) -> None:
        """Other rows than the step before: `slots`, their current tokens at `positions`."""
        tables = [self._tables[slot] for slot in slots]
        width = max((len(table) for table in tables), default=1)
        block_tables = torch.zeros(len(slots), width, dtype=torch.int32)
        for row, table in enumerate(tables):
            block_tables[row, : len(table)] = table
        at = torch.tensor(positions, dtype=torch.int32)
        append = torch.ones(len(slots), dtype=torch.bool)
        tensors = (t.to(self._device) for t in (block_tables, at, at + 1, append))
        self.rows = DecodeRows(*tensors)

    def advance(self) -> None:
        """The same rows, one token further."""
        self.rows.positions.add_(1)
        self.rows.lengths.add_(1)
