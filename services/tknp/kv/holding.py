"""What a request holds in one page pool: key, span and state."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Key(NamedTuple):
    """Names a holding. A replay of the same request is another attempt and another holding."""

    request_id: str
    attempt: int

    def __str__(self) -> str:
        return f"{self.request_id}/{self.attempt}"


class State(StrEnum):
    """Where a page is. The diagram is in `tknp.kv.pages`."""

    FREE = "free"
    RESERVED = "reserved"
    RECEIVING = "receiving"
    LIVE = "live"
    QUARANTINED = "quarantined"


@dataclass(frozen=True)
class Span:
    """Which part of a request's KV a holding keeps: layers and tokens, each [start, stop).

    One owner for everything is all layers and tokens [0, n); pipeline parallelism holds a layer
    range, sequence sharding (DCP, Helix, width k) a token range. `layer_stop` None: to the last.
    """

    token_start: int
    token_stop: int
    layer_start: int = 0
    layer_stop: int | None = None

    @property
    def tokens(self) -> int:
        return self.token_stop - self.token_start


@dataclass(frozen=True)
class Holding:
    """The pages that `key` holds, in token order, and who else may touch them.

    `writer`: the transfer that writes (receiving) or wrote (live) these pages, else None.
    `deadline_s`: when the lease ends on the pool's clock; None once admitted.
    """

    key: Key
    span: Span
    pages: tuple[int, ...]
    state: State
    lease_s: float
    deadline_s: float | None
    writer: str | None = None

    @property
    def admitted(self) -> bool:
        return self.deadline_s is None
