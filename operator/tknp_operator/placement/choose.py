"""Which slots a pool takes: all of them for a new one, those of lost nodes for one that runs.

anew   one NVLink domain, else one rail, else one rack that holds all, the smallest that does;
       else as few domains as possible. Dual roots b and b + N/2 are then half a turn apart in
       an order by rack and host, so that they differ where no rack (host) has more than half.
mend   nobody moves but those who lost their host, unless both roots of a block would meet on
       one host: then one other node makes way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from tknp_operator.placement.ground import Ground, Slot


def anew(ground: Ground) -> list[Slot]:
    """A slot for each node of the pool. There are at least as many free ones as nodes."""
    count, roots = ground.spec.decode.nodes, list(ground.pairs)
    if not roots:
        return sorted(_near(ground, ground.free, count))
    rooted = _apart(ground, _near(ground, _halved(ground, len(roots)), len(roots)))
    rest = _remaining(ground, rooted, set(rooted))[: count - len(roots)]
    chosen = dict(zip(roots, rooted, strict=True))
    others = iter(rest)
    return [chosen[n] if n in chosen else next(others) for n in range(count)]


def mend(ground: Ground, kept: Mapping[int, Slot]) -> list[Slot] | None:
    """What is kept where it is, the rest filled; None where dual roots can't be apart so.

    There are enough free slots beside those of `kept`.
    """
    chosen = dict(kept)
    left = _remaining(ground, list(kept.values()), set(kept.values()))
    for n in range(ground.spec.decode.nodes):
        if n not in chosen and not _fill(ground, chosen, left, n):
            return None
    return [chosen[n] for n in range(len(chosen))]


def spares(ground: Ground, chosen: Sequence[Slot]) -> tuple[Slot, ...]:
    """Slots for lost nodes, in the order in which they would be taken."""
    left = _remaining(ground, chosen, set(chosen))
    return tuple(left[: ground.spec.decode.spare_nodes])


def meeting(ground: Ground, chosen: Mapping[int, Slot]) -> int | None:
    """The first node that is on one host with the other root of its blocks."""
    return next((n for n, other in ground.pairs.items() if n < other and n in chosen
                 and other in chosen and chosen[n].host == chosen[other].host), None)  # fmt: skip


def _remaining(ground: Ground, near: Sequence[Slot], taken: set[Slot]) -> list[Slot]:
    """Free slots: of domains that have most of `near` first, then of hosts that have none of it."""
    domains = Counter(ground.shared(slot) for slot in near)
    hosts = {slot.host for slot in near}
    return sorted((slot for slot in ground.free if slot not in taken), key=lambda slot: (
        -domains[ground.shared(slot)], slot.host in hosts, slot
    ))  # fmt: skip


def _fill(ground: Ground, chosen: dict[int, Slot], left: list[Slot], n: int) -> bool:
    """Give node `n` the first of `left` that is in another rack, or on another host, than its pair.

    Where all are on the pair's host, a node whose own pair is elsewhere goes there, and `n` takes
    its place: rather one that has been filled just now (later in `chosen`) than one that runs.
    """
    pair = chosen.get(ground.pairs.get(n, -1))
    if pair is None:
        chosen[n] = left.pop(0)
        return True
    near = None
    for i, slot in enumerate(left):
        if slot.host != pair.host:
            if not ground.same_rack(slot, pair):
                chosen[n] = left.pop(i)
                return True
            near = i if near is None else near
    if near is not None:
        chosen[n] = left.pop(near)
        return True
    for other, slot in reversed(chosen.items()):
        theirs = chosen.get(ground.pairs.get(other, -1))
        if slot.host != pair.host and (theirs is None or theirs.host != pair.host):
            chosen[n], chosen[other] = slot, left.pop(0)
            return True
    return False


def _near(ground: Ground, offered: Sequence[Slot], count: int) -> list[Slot]:
    """`count` of `offered` in as few and as fast networks as possible."""
    wanted = count + ground.spec.decode.spare_nodes
    for kind in ("NVLink domain", "rail", "rack"):
        groups: dict[str, list[Slot]] = {}
        for slot in offered:
            if value := ground.places(slot)[kind]:
                groups.setdefault(value, []).append(slot)
        for size in (wanted, count):
            enough = [group for group in groups.values() if len(group) >= size]
            if enough:
                return _packed(ground, min(enough, key=lambda group: (len(group), min(group))))[
                    :count
                ]
    return _packed(ground, offered)[:count]


def _packed(ground: Ground, slots: Sequence[Slot]) -> list[Slot]:
    """`slots` by domain, the largest first; in it whole hosts of GPUs first, so that few hosts are
    half used. Without GPUs in the order they have: evenly over hosts."""
    if ground.spec.decode.device == "cpu":
        return list(slots)
    domains = Counter(ground.shared(slot) for slot in slots)
    hosts = Counter(slot.host for slot in slots)
    return sorted(slots, key=lambda slot: (
        -domains[ground.shared(slot)], ground.shared(slot), -hosts[slot.host], slot
    ))  # fmt: skip


def _halved(ground: Ground, roots: int) -> Sequence[Slot]:
    """Free slots, at most half as many as there are roots in one rack, or else on one host."""
    racks = {name: host.rack or name for name, host in ground.hosts.items()}
    names: tuple[Callable[[Slot], str], ...] = (
        lambda slot: racks[slot.host], lambda slot: slot.host
    )  # fmt: skip
    ordered = _packed(ground, ground.free)
    for name in names:
        offered = _at_most(ordered, roots // 2, name)
        if len(offered) >= roots:
            return offered
    return ordered


def _at_most(slots: Iterable[Slot], limit: int, name: Callable[[Slot], str]) -> list[Slot]:
    """`slots`, at most `limit` of each name."""
    taken = Counter[str]()
    result = []
    for slot in slots:
        if taken[name(slot)] < limit:
            taken[name(slot)] += 1
            result.append(slot)
    return result


def _apart(ground: Ground, slots: Sequence[Slot]) -> list[Slot]:
    """Rack by rack and host by host: half a turn away is then another one of each."""
    racks = Counter(ground.hosts[slot.host].rack for slot in slots)
    hosts = Counter(slot.host for slot in slots)
    return sorted(slots, key=lambda slot: (
        -racks[ground.hosts[slot.host].rack], ground.hosts[slot.host].rack, -hosts[slot.host], slot
    ))  # fmt: skip
