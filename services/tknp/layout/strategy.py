"""Names of the strategies, and what of them shapes programs and ownership. Pure."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

Divides = Literal["tokens", "layers", "heads"]


class Strategy(StrEnum):
    """Ways to lay a model and its requests over a pool; `tknp.layout.strategies` has one file each.

    TKNP and DP, PP, TP, DCP as in Decode Token Parallelism, section 5.1; HELIX as in Helix
    Parallelism, section 2.
    """

    TKNP = "tknp"
    DP = "dp"
    TP = "tp"
    PP = "pp"
    DCP = "dcp"
    HELIX = "helix"
