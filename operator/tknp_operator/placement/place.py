"""Which node of the cluster is which node of the pool. Pure, and the same for any order of hosts.

    hosts -> usable -> of one product (unless mixed) -> slots of T GPUs (`ground`)
          -> a slot for each node, those that are placed first (`choose`) -> reasons (`explain`)

What is placed stays: a node whose host is still usable keeps it, and each that lost its host gets
a spare or the best free slot. A node on a cordoned host leaves it when there is another place for
it; otherwise it stays as long as nothing else has to change, since the pods of a new epoch could
not come back there. Refusals name the one thing that is missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from tknp_operator.api.spec import Spec
from tknp_operator.placement.choose import anew, meeting, mend, spares
from tknp_operator.placement.explain import reasons, shortage, warnings
from tknp_operator.placement.ground import Ground, Slot, slots
from tknp_operator.placement.hosts import Host

__all__ = ["PlacedNode", "Placement", "Refused", "Slot", "place"]

MEMORY_RATIO = 0.9  # of a GPU for weights and KV cache; the rest is the runtime's and activations'


@dataclass(frozen=True)
class PlacedNode:
    """Node `index` of the pool, where it is and why.

    `memory_bytes`: weights plus KV on each rank, where GPUs of a mixed pool differ, so that blocks
    are cut for equal KV budgets; None: all are alike.
    """

    index: int
    slot: Slot
    reason: str
    memory_bytes: int | None = None


@dataclass(frozen=True)
class Placement:
    """`nodes[n].index` is n. `spares`: slots held for lost nodes. `warnings`: what is not ideal."""

    nodes: tuple[PlacedNode, ...]
    spares: tuple[Slot, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def slots(self) -> tuple[Slot, ...]:
        return tuple(node.slot for node in self.nodes)

    @property
    def memories(self) -> tuple[int, ...] | None:
        """`memory_bytes` of each node, or None."""
        known = tuple(node.memory_bytes for node in self.nodes if node.memory_bytes is not None)
        return known if len(known) == len(self.nodes) else None


@dataclass(frozen=True)
class Refused:
    """Why nothing can be placed, and what would help."""

    missing: str
    remedy: str


def place(
    spec: Spec, hosts: Sequence[Host], current: Sequence[Slot] = (), taken: Collection[Slot] = ()
) -> Placement | Refused:
    """Choose a slot for each of `spec.decode.nodes` nodes.

    `current`: slots of the pool as it runs, node 0 first; empty for a new one. `taken`: those of
    another one, beside which it is.
    """
    ordered = sorted(hosts, key=lambda host: host.name)
    found = _place(spec, ordered, current, taken, {"yes"})
    if isinstance(found, Refused) and current:
        stayed = _place(spec, ordered, current, taken, {"yes", "until replaced"})
        if isinstance(stayed, Placement) and stayed.slots == tuple(current):
            return stayed
    return found


def _place(
    spec: Spec,
    hosts: Sequence[Host],
    current: Sequence[Slot],
    taken: Collection[Slot],
    stays: set[str],
) -> Placement | Refused:
    count = spec.decode.nodes
    usable = {host.name: host for host in hosts if not host.unusable or host.stays in stays}
    kept = {
        n: slot for n, slot in enumerate(current[:count])
        if slot.host in usable and slot.number < usable[slot.host].slots
        and slot not in current[:n]
    }  # fmt: skip
    ground = _ground(spec, usable, kept, taken)
    kept = {n: slot for n, slot in kept.items() if slot.host in ground.hosts}
    while (n := meeting(ground, kept)) is not None:  # it had one copy before
        del kept[ground.pairs[n]]
    room = len({*ground.free, *kept.values()})
    if room < count:
        return Refused(*shortage(spec, hosts, ground, room))
    chosen = (mend(ground, kept) if kept else None) or anew(ground)
    if (n := meeting(ground, dict(enumerate(chosen)))) is not None:
        return Refused(
            f"hosts for dual roots: nodes {n} and {ground.pairs[n]} would both be on "
            f"{chosen[n].host}", "add a host, or set decode.copies to 1",
        )  # fmt: skip
    held = spares(ground, chosen)
    same = {n for n, slot in enumerate(current[:count]) if chosen[n] == slot}
    memories = _memories(ground, chosen)
    nodes = tuple(
        PlacedNode(n, slot, reason, memories[n] if memories else None)
        for n, (slot, reason) in enumerate(
            zip(chosen, reasons(ground, chosen, same), strict=True)
        )
    )  # fmt: skip
    return Placement(nodes, held, tuple(warnings(ground, chosen, held)))


def _ground(
    spec: Spec, usable: Mapping[str, Host], kept: Mapping[int, Slot], taken: Collection[Slot]
) -> Ground:
    """Hosts of one product: of those that suffice that of most kept nodes, else the scarcest."""

    def ground(hosts: Mapping[str, Host]) -> Ground:
        offered = {name: host for name, host in hosts.items() if not host.unusable}
        return Ground(spec, hosts, slots(spec, offered, taken))

    if spec.decode.allow_mixed_products or not usable:
        return ground(usable)
    half = max(spec.decode.roots // 2, 1) if spec.decode.copies == 2 else spec.decode.nodes
    room, apart = Counter[str](), Counter[str]()  # nodes that fit, and roots, half on one host
    stays = Counter(usable[slot.host].product for slot in kept.values())
    on = Counter(slot.host for slot in kept.values())
    away = Counter(slot.host for slot in taken)
    for host in usable.values():
        fit = on[host.name] if host.unusable else max(host.slots - away[host.name], 0)
        room[host.product] += fit
        apart[host.product] += min(fit, half)

    def suffices(product: str) -> bool:
        roots = spec.decode.roots if spec.decode.copies == 2 else 0
        return room[product] >= spec.decode.nodes and apart[product] >= roots

    best = min(room, key=lambda name: (
        not suffices(name), -stays[name], room[name] if suffices(name) else -room[name], name
    ))  # fmt: skip
    return ground({name: host for name, host in usable.items() if host.product == best})


def _memories(ground: Ground, chosen: Sequence[Slot]) -> tuple[int, ...] | None:
    """Weights plus KV on each rank of each node, where GPUs differ and nobody gave a KV memory."""
    sizes = [ground.hosts[slot.host].memory_bytes for slot in chosen]
    if len(set(sizes)) == 1 or not all(sizes) or ground.spec.decode.kv_memory is not None:
        return None
    return tuple(int(size * MEMORY_RATIO) for size in sizes)
