"""The running batch of one stream, as every rank knows it. Pure.

Each rank applies the same numbered deltas and derives the same rows from them, so ranks never
branch on local state. A delta that doesn't fit (epoch, stream, step, slot) raises ProtocolError
before anything changes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tknp.errors import InvalidValue, ProtocolError
from tknp.kv.holding import Key
from tknp.layout.owners import owner_major
from tknp.sampling.params import SamplingParams


@dataclass(frozen=True)
class Admit:
    """A request joins: `token`, sampled by prefill, is fed at `position`.

    `prompt` and `generated` serve penalties and may be empty without them; `generated` ends with
    `token`, `generated_count` is its length. `pages` is known to the owner's ranks only.
    """

    slot: int
    key: Key
    owner: int
    position: int
    token: int
    sampling: SamplingParams
    prompt: tuple[int, ...] = ()
    generated: tuple[int, ...] = ()
    generated_count: int = 1
    pages: tuple[int, ...] = ()


@dataclass(frozen=True)
class Delta:
    """What changes before step `step` of `stream`: slots that end, then requests that join."""

    epoch: int
    stream: int
    step: int
    ends: tuple[int, ...] = ()
    admits: tuple[Admit, ...] = ()


@dataclass
class Row:
    """One running request: its next token is fed at `position`."""

    admit: Admit
    position: int


@dataclass
class Batch:
    """Rows of stream `stream` over `nodes` nodes, at most `max_rows`.

    `order`: slots, owner-major. `counts`: rows of each node.
    """

    epoch: int
    stream: int
    nodes: int
    max_rows: int
    next_step: int = 0
    rows: dict[int, Row] = field(default_factory=dict)
    order: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.order, self.counts = owner_major({}, self.nodes)

    def apply(self, delta: Delta) -> bool:
        """Apply `delta`; True if the rows changed."""
        self._check(delta)
        for slot in delta.ends:
            del self.rows[slot]
        for admit in delta.admits:
            self.rows[admit.slot] = Row(admit, admit.position)
        self.next_step += 1
        changed = bool(delta.ends or delta.admits)
        if changed:
            owners = {slot: row.admit.owner for slot, row in self.rows.items()}
            self.order, self.counts = owner_major(owners, self.nodes)
        return changed

    def advance(self) -> None:
        """Every row has its token appended: the next one stands one position further."""
        for row in self.rows.values():
            row.position += 1

    def _check(self, delta: Delta) -> None:
        found = (delta.epoch, delta.stream, delta.step)
        expected = (self.epoch, self.stream, self.next_step)
        if found != expected:
            raise ProtocolError(
                "step message (epoch, stream, step) is "
                f"{found}, expected {expected}: a message was lost or the pool has changed"
            )
        ends = set(delta.ends)
        if len(ends) != len(delta.ends) or not ends <= self.rows.keys():
            raise ProtocolError(f"step {delta.step} ends slots {delta.ends}, not all running")
        taken = self.rows.keys() - ends
        for admit in delta.admits:
            if admit.slot in taken or not 0 <= admit.slot < self.max_rows:
                raise ProtocolError(f"step {delta.step} admits into slot {admit.slot}: not free")
            if not 0 <= admit.owner < self.nodes:
                raise InvalidValue("owner", admit.owner, f"the pool has {self.nodes} nodes")
            taken = taken | {admit.slot}
