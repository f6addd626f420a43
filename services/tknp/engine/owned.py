"""Rows that one rank attends to, as the tensors attention reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from tknp.attention.base import DecodeRows
from tknp.errors import ProtocolError


class OwnedRow(NamedTuple):
    """The request in `slot`, its current token at `position`.

    `length`: tokens of it in this rank's pages, the current one included if it `appends`.
    """

    slot: int
    position: int
    length: int
    appends: bool


class OwnedRows:
    """Page tables of a rank's slots; rebuilt when the batch changes, advanced when it doesn't."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tables: dict[int, torch.Tensor] = {}
        self.build([])

    def admit(self, slot: int, pages: Sequence[int]) -> None:
        """The request in `slot` has its KV, or what is here of it, in `pages` from now on."""
        if not pages:
            raise ProtocolError(f"slot {slot} is admitted without pages at its owner")
        self._tables[slot] = torch.tensor(pages, dtype=torch.int32)

    def end(self, slot: int) -> None:
        """Forget `slot`, if it was owned here."""
        self._tables.pop(slot, None)

    def build(self, rows: Sequence[OwnedRow]) -> None:
        """Other rows than the step before."""
        tables = [self._tables[row.slot] for row in rows]
        width = max((len(table) for table in tables), default=1)
        block_tables = torch.zeros(len(rows), width, dtype=torch.int32)
        for row, table in enumerate(tables):
            block_tables[row, : len(table)] = table
        positions = torch.tensor([row.position for row in rows], dtype=torch.int32)
        lengths = torch.tensor([row.length for row in rows], dtype=torch.int32)
        appends = torch.tensor([row.appends for row in rows], dtype=torch.bool)
        tensors = (t.to(self._device) for t in (block_tables, positions, lengths, appends))
        self.rows = DecodeRows(*tensors)
        self._everyone_appends = all(row.appends for row in rows)

    def advance(self) -> None:
        """The same rows, one token further."""
        self.rows.positions.add_(1)
        self.rows.lengths.add_(1 if self._everyone_appends else self.rows.append)

    def turn(self, rows: Sequence[tuple[int, OwnedRow]]) -> None:
        """After `advance`: other appenders in a few of the rows, given with their indices."""
        for index, row in rows:
            self.rows.lengths[index] = row.length
            self.rows.append[index] = row.appends
        if rows:
            self._everyone_appends = bool(self.rows.append.all())

    def between(self, start: int, stop: int) -> DecodeRows:
        """Rows [start, stop) of those built; they advance with them."""
        if (start, stop) == (0, self.rows.rows):
            return self.rows
        each = (self.rows.block_tables, self.rows.positions, self.rows.lengths, self.rows.append)
        return DecodeRows(*(tensor[start:stop] for tensor in each))
