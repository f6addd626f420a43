"""Words about a placement: why each node is where it is, what is not ideal, what is missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence

from tknp_operator.api.spec import Spec
from tknp_operator.placement.ground import Ground, Slot
from tknp_operator.placement.hosts import Host


def reasons(ground: Ground, chosen: Sequence[Slot], stays: Collection[int]) -> Iterator[str]:
    """One a node. `stays`: nodes that are where they were."""
    domains = Counter(ground.shared(slot) for slot in chosen)
    for n, slot in enumerate(chosen):
        host = ground.hosts[slot.host]
        words = ["stays" if n in stays else "chosen", f"on {host.name}"]
        if host.slots > 1 and ground.spec.decode.device == "cuda":
            words.append(f"(part {slot.number} of {host.slots})")
        kind, value = ground.shared(slot)
        why = [f"{kind} {value} with {domains[kind, value]} of {len(chosen)} nodes"] if kind else []
        if n in ground.pairs:
            other = ground.hosts[chosen[ground.pairs[n]].host]
            racks = host.rack and other.rack and host.rack != other.rack
            why.append(f"another {'rack' if racks else 'host'} than node {ground.pairs[n]}, "
                       "the other root of its blocks")  # fmt: skip
        yield " ".join(words) + (f": {'; '.join(why)}" if why else "")


def warnings(ground: Ground, chosen: Sequence[Slot], spares: Sequence[Slot]) -> Iterator[str]:
    """What is not ideal, but no reason to refuse."""
    domains = Counter(ground.shared(slot) for slot in chosen)
    if len(domains) > 1:
        parts = ", ".join(f"{kind} {value}: {n}" if kind else f"none: {n}"
                          for (kind, value), n in sorted(domains.items()))  # fmt: skip
        yield f"no one NVLink domain, rail or rack holds all {len(chosen)} nodes ({parts})"
    near = [(a, b) for a, b in ground.pairs.items()
            if a < b and ground.same_rack(chosen[a], chosen[b])]  # fmt: skip
    if near:
        more = f", and {len(near) - 1} other pairs" if len(near) > 1 else ""
        yield f"dual roots {near[0][0]} and {near[0][1]} share a rack{more}"
    for n, slot in enumerate(chosen):
        if unusable := ground.hosts[slot.host].unusable:
            yield f"{slot.host}, where node {n} is, {unusable}"
    asked = ground.spec.decode.spare_nodes
    if len(spares) < asked:
        yield f"{len(spares)} of {asked} spare nodes are there"


def shortage(spec: Spec, hosts: Iterable[Host], ground: Ground, room: int) -> tuple[str, str]:
    """What is missing, and the remedy, where `room` nodes could be placed."""
    decode = spec.decode
    unit = f"slots of {decode.tensor_parallel} GPUs" if decode.device == "cuda" else "slots"
    found = list(hosts)
    why = Counter(host.unusable for host in found if host.unusable)
    seen = []
    if why:
        ordered = sorted(why.items(), key=lambda item: (-item[1], item[0]))
        parts = (f"{reason} ({n} host{'s' * (n > 1)})" for reason, n in ordered)
        seen.append("no use, as it " + ", ".join(parts))
    here = {host.product for host in ground.hosts.values()}
    others = sorted({host.product for host in found if not host.unusable} - here)
    if others:
        seen.append(f"{', '.join(others)} may not be mixed in")
    missing = f"{decode.nodes} {unit}: {room} found"
    remedy = f"add hosts, lower decode.nodes to {room}" if room else "add or free hosts"
    if others:
        remedy += ", or set decode.allowMixedProducts"
    return "; ".join([missing, *seen]), remedy
