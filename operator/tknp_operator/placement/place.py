"""Which node of the cluster is which node of the pool. Pure, and the same for any order of hosts.

    hosts -> usable -> of one product (unless mixed) -> as few NVLink domains, then rails, then
    racks, as hold N -> order, so that dual roots b and b + N/2 are apart -> N placed nodes, spares

What is placed stays: a node whose host is still usable keeps it, and each that lost its host gets
a spare or the best free slot. Only where that would put both roots of a block on one host is
everything placed anew. Refusals name the one thing that is missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tknp_operator.api.spec import Spec
from tknp_operator.placement.hosts import Host


@dataclass(frozen=True, order=True)
class Slot:
    """T GPUs of a host: the `number`th such part of it."""

    host: str
    number: int = 0


@dataclass(frozen=True)
class PlacedNode:
    """Node `index` of the pool, where it is and why."""

    index: int
    slot: Slot
    reason: str


@dataclass(frozen=True)
class Placement:
    """`nodes[n].index` is n. `spares`: slots held for lost nodes. `warnings`: what is not ideal."""

    nodes: tuple[PlacedNode, ...]
    spares: tuple[Slot, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def slots(self) -> tuple[Slot, ...]:
        return tuple(node.slot for node in self.nodes)


@dataclass(frozen=True)
class Refused:
    """Why nothing can be placed, and what would help."""

    missing: str
    remedy: str


def place(spec: Spec, hosts: Sequence[Host], current: Sequence[Slot] = ()) -> Placement | Refused:
    """Choose a slot for each of `spec.decode.nodes` nodes.

    `current`: slots of the pool as it runs, node 0 first; empty for a new one.
    """
    usable = {host.name: host for host in sorted(hosts, key=lambda host: host.name)
              if not host.unusable}  # fmt: skip
    count = spec.decode.nodes
    kept = {
        n: slot for n, slot in enumerate(current[:count])
        if slot.host in usable and slot.number < usable[slot.host].slots
    }  # fmt: skip
    pool = _of_one_product(spec, usable, kept)
    free = _slots(spec, pool)
    if len(free) < count:
        return _refused(spec, hosts, pool, len(free))
    chosen = _mend(spec, pool, kept, free) if kept else None
    if chosen is None:
        kept = {}
        chosen = _anew(spec, pool, free)
    if spec.decode.copies == 2 and (n := _shares_host(chosen)) is not None:
        return Refused(
            f"hosts for dual roots: nodes {n} and {n + count // 2} would both be on "
            f"{chosen[n].host}", "add a host, or set decode.copies to 1",
        )  # fmt: skip
    spares = _spares(spec, pool, chosen, free)
    nodes = tuple(
        PlacedNode(n, slot, _reason(spec, pool, n, chosen, stays=kept.get(n) == slot))
        for n, slot in enumerate(chosen)
    )
    return Placement(nodes, spares, tuple(_warnings(spec, pool, chosen, spares)))


def _of_one_product(spec: Spec, usable: dict[str, Host], kept: dict[int, Slot]) -> dict[str, Host]:
    """Hosts of the product that most kept nodes have, else of the scarcest that suffices."""
    if spec.decode.allow_mixed_products or not usable:
        return usable
    room = Counter[str]()
    for host in usable.values():
        room[host.product] += host.slots
    stays = Counter(usable[slot.host].product for slot in kept.values())
    enough = {name: slots for name, slots in room.items() if slots >= spec.decode.nodes} or room
    best = min(enough, key=lambda name: (
        -stays[name], room[name] if enough is not room else -room[name], name
    ))  # fmt: skip
    return {name: host for name, host in usable.items() if host.product == best}


def _slots(spec: Spec, pool: dict[str, Host]) -> list[Slot]:
    """All of them, one of each host before the second of any."""
    most = max((host.slots for host in pool.values()), default=0)
    if spec.decode.device == "cpu" and pool:  # as many as are needed, evenly
        most = -(-(spec.decode.nodes + spec.decode.spare_nodes) // len(pool))
    return [
        Slot(name, number) for number in range(most) for name, host in pool.items()
        if number < host.slots
    ]  # fmt: skip


def _anew(spec: Spec, pool: dict[str, Host], free: list[Slot]) -> list[Slot]:
    """N slots of as few domains as hold them, in an order that keeps dual roots apart."""
    count = spec.decode.nodes
    offered = free
    if spec.decode.copies == 2:  # no host should hold both roots of a block, and no rack
        by_rack = {name: host.rack or name for name, host in pool.items()}
        for key in (by_rack, {name: name for name in pool}):
            offered = _at_most(free, count // 2, key)
            if len(offered) >= count:
                break
        else:
            offered = free
    groups: dict[tuple[str, str], list[Slot]] = {}
    for slot in offered:
        groups.setdefault(_domain(spec, pool[slot.host]), []).append(slot)
    wanted = count + spec.decode.spare_nodes
    for size in (wanted, count):  # one domain: the smallest that is enough
        enough = [group for group in groups.values() if len(group) >= size]
        if enough:
            chosen = min(enough, key=lambda group: (len(group), group[0]))
            return _apart(spec, pool, _packed(spec, chosen, count))
    ordered = sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
    return _apart(spec, pool, [slot for _, group in ordered for slot in group][:count])


def _at_most(slots: Sequence[Slot], limit: int, key: Mapping[str, str]) -> list[Slot]:
    """`slots`, at most `limit` of each value that `key` has for their hosts."""
    taken = Counter[str]()
    result = []
    for slot in slots:
        if taken[key[slot.host]] < limit:
            taken[key[slot.host]] += 1
            result.append(slot)
    return result


def _packed(spec: Spec, slots: list[Slot], count: int) -> list[Slot]:
    """`count` of `slots`: whole hosts of GPUs first, so that few hosts are half used."""
    if spec.decode.device == "cpu":
        return slots[:count]
    per_host = Counter(slot.host for slot in slots)
    return sorted(slots, key=lambda slot: (-per_host[slot.host], slot))[:count]


def _apart(spec: Spec, pool: dict[str, Host], slots: list[Slot]) -> list[Slot]:
    """Rack by rack and host by host, largest first: then half a turn away is another one, unless
    one rack (or host) has more than half of all."""
    if spec.decode.copies != 2:
        return sorted(slots)
    racks = Counter(pool[slot.host].rack for slot in slots)
    per_host = Counter(slot.host for slot in slots)
    return sorted(slots, key=lambda slot: (
        -racks[pool[slot.host].rack], pool[slot.host].rack, -per_host[slot.host], slot
    ))  # fmt: skip


def _mend(
    spec: Spec, pool: dict[str, Host], kept: dict[int, Slot], free: Sequence[Slot]
) -> list[Slot] | None:
    """What is kept where it is, the rest filled; None where dual roots can't be apart so."""
    count = spec.decode.nodes
    kept = {n: slot for n, slot in kept.items() if slot.host in pool}
    taken = set(kept.values())
    left = [slot for slot in free if slot not in taken]
    chosen: list[Slot | None] = [kept.get(n) for n in range(count)]
    domains = Counter(_domain(spec, pool[slot.host]) for slot in kept.values())
    for n in range(count):
        if chosen[n] is not None:
            continue
        pair = chosen[(n + count // 2) % count] if spec.decode.copies == 2 else None
        candidates = [slot for slot in left if pair is None or slot.host != pair.host]
        if not candidates:
            return None
        best = min(candidates, key=lambda slot: (
            pair is not None and _same_rack(pool, slot, pair),
            -domains[_domain(spec, pool[slot.host])], slot,
        ))  # fmt: skip
        chosen[n] = best
        left.remove(best)
    result = [slot for slot in chosen if slot is not None]
    apart = spec.decode.copies != 2 or _shares_host(result) is None
    return result if apart else None


def _spares(
    spec: Spec, pool: dict[str, Host], chosen: Sequence[Slot], free: Iterable[Slot]
) -> tuple[Slot, ...]:
    """Slots for lost nodes: on hosts that hold none, and in the pool's domains, before others."""
    taken, hosts = set(chosen), {slot.host for slot in chosen}
    domains = {_domain(spec, pool[slot.host]) for slot in chosen}
    left = sorted((slot for slot in free if slot not in taken), key=lambda slot: (
        slot.host in hosts, _domain(spec, pool[slot.host]) not in domains, slot
    ))  # fmt: skip
    return tuple(left[: spec.decode.spare_nodes])


def _domain(spec: Spec, host: Host) -> tuple[str, str]:
    """What nodes of a pool should share: an NVLink domain, else a rail, else a rack.

    Dual roots want two racks, so there a rack is nothing to share.
    """
    rack = "" if spec.decode.copies == 2 else host.rack
    for kind, value in (("NVLink domain", host.domain), ("rail", host.rail), ("rack", rack)):
        if value:
            return kind, value
    return "", ""


def _same_rack(pool: dict[str, Host], a: Slot, b: Slot) -> bool:
    rack = pool[a.host].rack
    return bool(rack) and rack == pool[b.host].rack


def _shares_host(chosen: Sequence[Slot]) -> int | None:
    """The first node whose block's other root is on the same host."""
    half = len(chosen) // 2
    return next((n for n in range(half) if chosen[n].host == chosen[n + half].host), None)


def _reason(
    spec: Spec, pool: dict[str, Host], n: int, chosen: Sequence[Slot], *, stays: bool
) -> str:
    host, count = pool[chosen[n].host], len(chosen)
    kind, value = _domain(spec, host)
    words = ["stays" if stays else "chosen", f"on {host.name}"]
    if host.slots > 1 and spec.decode.device == "cuda":
        words.append(f"(part {chosen[n].number} of {host.slots})")
    with_it = sum(_domain(spec, pool[slot.host]) == (kind, value) for slot in chosen)
    reasons = [f"{kind} {value} with {with_it} of {count} nodes"] if kind else []
    if spec.decode.copies == 2:
        other = (n + count // 2) % count
        where = pool[chosen[other].host]
        apart = ("another rack" if host.rack and where.rack and host.rack != where.rack
                 else "another host")  # fmt: skip
        reasons.append(f"{apart} than node {other}, the other root of its blocks")
    return " ".join(words) + (f": {'; '.join(reasons)}" if reasons else "")


def _warnings(
    spec: Spec, pool: dict[str, Host], chosen: Sequence[Slot], spares: Sequence[Slot]
) -> Iterable[str]:
    domains = Counter(_domain(spec, pool[slot.host]) for slot in chosen)
    if len(domains) > 1:
        parts = ", ".join(f"{kind} {value}: {n}".strip() for (kind, value), n in
                          sorted(domains.items()))  # fmt: skip
        yield f"no one NVLink domain, rail or rack holds all {len(chosen)} nodes ({parts})"
    half = len(chosen) // 2
    if spec.decode.copies == 2:
        near = [n for n in range(half) if _same_rack(pool, chosen[n], chosen[n + half])]
        if near:
            yield f"dual roots {near[0]} and {near[0] + half} share a rack"
    if len(spares) < spec.decode.spare_nodes:
        yield f"{len(spares)} of {spec.decode.spare_nodes} spare nodes are there"


def _refused(spec: Spec, hosts: Sequence[Host], pool: dict[str, Host], room: int) -> Refused:
    decode = spec.decode
    what = (f"{decode.nodes} slots of {decode.tensor_parallel} GPUs" if decode.device == "cuda"
            else "a usable host")  # fmt: skip
    why = Counter(host.unusable for host in hosts if host.unusable)
    reasons = [f"{n} host{'s' * (n > 1)} {reason}" for reason, n in
               sorted(why.items(), key=lambda item: (-item[1], item[0]))]  # fmt: skip
    others = sorted({h.product for h in hosts if not h.unusable} - {h.product for h in
                                                                    pool.values()})  # fmt: skip
    if others:
        reasons.append(f"{', '.join(others)} may not be mixed in")
    seen = f"; {'; '.join(reasons)}" if reasons else ""
    remedy = f"add hosts, lower decode.nodes to {room}" if room else "add or free hosts"
    if others:
        remedy += ", or set decode.allowMixedProducts"
    return Refused(f"{what}: {room} found{seen}", remedy)
