"""How full an owner is. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class NodeLoad:
    """`pages`: that node n can give to requests. `used`: of them, reserved or live."""

    pages: int
    used: int

    @property
    def free(self) -> int:
        return self.pages - self.used
