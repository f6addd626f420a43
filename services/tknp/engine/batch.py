"""The running batch of one stream, as every rank knows it. Pure.

Each rank applies the same numbered deltas and derives the same rows from them, so ranks never
branch on local state. A delta that doesn't fit (epoch, stream, step, slot, owners) raises
ProtocolError or InvalidValue before anything changes.

    Delta.ends      slots whose requests leave
    Delta.grows     running requests that get pages, or a further owner
    Delta.admits    requests that join

A request of several owners changes its appender on its own, every few generated tokens: that, too,
follows from positions, which all ranks know.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tknp.errors import InvalidValue, ProtocolError
from tknp.kv.holding import Key
from tknp.layout.layout import Layout
from tknp.layout.rows import Group, arrange, fixed_groups
from tknp.layout.shares import Shares
from tknp.sampling.params import SamplingParams


@dataclass(frozen=True)
class Admit:
    """A request joins: `token`, sampled by prefill, is fed at `position`.

    `owners`: nodes that keep its KV. `shares`: which tokens each of them keeps; where owners divide
    layers or heads instead (pp, tp) it names the first, and what it says holds for all.
    `prompt` and `generated` serve penalties and may be empty without them; `generated` ends with
    `token`, `generated_count` is its length. `pages` are the pages of the node that runs the step,
    in order of its tokens: filled in at every owner, each its own.
    """

    slot: int
    key: Key
    owners: tuple[int, ...]
    shares: Shares
    position: int
    token: int
    sampling: SamplingParams
    prompt: tuple[int, ...] = ()
    generated: tuple[int, ...] = ()
    generated_count: int = 1
    pages: tuple[int, ...] = ()


@dataclass(frozen=True)
class Grow:
    """The request in `slot` is divided by `shares` from this step on.

    Its owners stay and may get company; tokens that are stored stay where they are. `pages` as in
    Admit: all that the node holds now.
    """

    slot: int
    shares: Shares
    pages: tuple[int, ...] = ()


@dataclass(frozen=True)
class Delta:
    """What changes before step `step` of `stream`: slots end, then requests grow, then join."""

    epoch: int
    stream: int
    step: int
    ends: tuple[int, ...] = ()
    admits: tuple[Admit, ...] = ()
    grows: tuple[Grow, ...] = ()


@dataclass
class Row:
    """One running request: its next token is fed at `position`, stored at node `appender`."""

    admit: Admit
    owners: tuple[int, ...]
    shares: Shares
    position: int
    appender: int

    @classmethod
    def of(cls, admit: Admit) -> Row:
        shares = admit.shares
        return cls(admit, admit.owners, shares, admit.position, shares.owner_at(admit.position))

    @property
    def wide(self) -> bool:
        """Whether several owners divide its tokens."""
        return len(self.shares.owners) > 1


@dataclass
class Batch:
    """Rows of stream `stream` of `layout`, at most `max_rows`.

    `order`: slots as their rows stand in a step. `groups`: runs of them with equal owners.
    `turned`: slots of rows that have another appender than in the step before.
    """

    epoch: int
    layout: Layout
    max_rows: int
    stream: int = 0
    next_step: int = 0
    rows: dict[int, Row] = field(default_factory=dict)
    order: tuple[int, ...] = ()
    groups: tuple[Group, ...] = ()
    turned: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self._wide: dict[int, Row] = {}
        self._arrange()

    def apply(self, delta: Delta) -> bool:
        """Apply `delta`; True if rows, their order or their owners differ from before."""
        self._check(delta)
        for slot in delta.ends:
            del self.rows[slot]
        for grow in delta.grows:
            row = self.rows[grow.slot]
            row.shares = grow.shares
            if self.layout.divides == "tokens":
                row.owners = grow.shares.owners
        for admit in delta.admits:
            self.rows[admit.slot] = Row.of(admit)
        self.next_step += 1
        changed = bool(delta.ends or delta.admits or delta.grows)
        if changed:
            self._wide = {slot: row for slot, row in self.rows.items() if row.wide}
            self.turned = ()
        if self._wide:
            self._take_turns()
        # Where the layout alone says who owns what, an appender's turn moves no row.
        if changed or (self.turned and not fixed_groups(self.layout)):
            self._arrange()
            return True
        return False

    def advance(self) -> None:
        """Every row has its token appended: the next one stands one position further."""
        for row in self.rows.values():
            row.position += 1

    def _take_turns(self) -> None:
        turned = []
        for slot, row in self._wide.items():
            appender = row.shares.owner_at(row.position)
            if appender != row.appender:
                row.appender = appender
                turned.append(slot)
        self.turned = tuple(turned)

    def _arrange(self) -> None:
        rows = {slot: (row.owners, row.appender) for slot, row in self.rows.items()}
        self.order, self.groups = arrange(self.layout, rows)

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
        for grow in delta.grows:
            if grow.slot not in taken:
                raise ProtocolError(f"step {delta.step} grows slot {grow.slot}: not running")
            self._check_grow(self.rows[grow.slot], grow.shares)
        for admit in delta.admits:
            if admit.slot in taken or not 0 <= admit.slot < self.max_rows:
                raise ProtocolError(f"step {delta.step} admits into slot {admit.slot}: not free")
            self._check_owners(admit.owners, admit.shares)
            if admit.position < admit.shares.prompt:
                remedy = f"the prompt has {admit.shares.prompt} tokens"
                raise InvalidValue("position", admit.position, remedy)
            taken = taken | {admit.slot}

    def _check_grow(self, row: Row, shares: Shares) -> None:
        old = row.shares
        kept = (
            shares.owners[: len(old.owners)], shares.phases[: len(old.phases)],
            shares.prompt, shares.interleave, shares.unit,
        )  # fmt: skip
        if kept != (old.owners, old.phases, old.prompt, old.interleave, old.unit):
            raise ProtocolError(
                f"slot {row.admit.slot} grows from owners {old.owners} to {shares.owners}: what is "
                "stored stays, owners are added behind"
            )
        owners = shares.owners if self.layout.divides == "tokens" else row.owners
        self._check_owners(owners, shares)

    def _check_owners(self, owners: tuple[int, ...], shares: Shares) -> None:
        legal = self.layout.owners[self.stream]
        if not owners or len(set(owners)) != len(owners) or not set(owners) <= set(legal):
            remedy = f"stream {self.stream} keeps KV on nodes {legal}, each once"
            raise InvalidValue("owners", owners, remedy)
        divided = owners if self.layout.divides == "tokens" else owners[:1]
        if shares.owners != divided:
            remedy = f"must be {divided} where owners divide {self.layout.divides}"
            raise InvalidValue("shares.owners", shares.owners, remedy)
