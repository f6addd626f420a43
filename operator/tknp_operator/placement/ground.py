"""What a pool is placed on: hosts of one product, and which of its nodes are roots of one block."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

from tknp_operator.api.spec import Spec
from tknp_operator.placement.hosts import Host


@dataclass(frozen=True, order=True)
class Slot:
    """T GPUs of a host: the `number`th such part of it."""

    host: str
    number: int = 0


@dataclass(frozen=True)
class Ground:
    """`hosts`: by name, those that the pool may be on. `free`: slots that a node may move to."""

    spec: Spec
    hosts: Mapping[str, Host]
    free: tuple[Slot, ...]

    @cached_property
    def pairs(self) -> Mapping[int, int]:
        """Of each root the other root of its blocks (copies 2), half a turn away."""
        decode = self.spec.decode
        if decode.copies != 2:
            return {}
        roots = [n for n in range(decode.nodes) if decode.role(n) != "attention-owner"]
        return {n: roots[(i + len(roots) // 2) % len(roots)] for i, n in enumerate(roots)}

    def shared(self, slot: Slot) -> tuple[str, str]:
        """What nodes of a pool should share: an NVLink domain, else a rail, else a rack.

        Dual roots want two racks, so there a rack is nothing to share.
        """
        return next(((kind, value) for kind, value in self.places(slot).items() if value), ("", ""))

    def places(self, slot: Slot) -> dict[str, str]:
        """What `slot` may share with others, the fastest network first; empty: not known."""
        host = self.hosts[slot.host]
        rack = "" if self.spec.decode.copies == 2 else host.rack
        return {"NVLink domain": host.domain, "rail": host.rail, "rack": rack}

    def same_rack(self, a: Slot, b: Slot) -> bool:
        rack = self.hosts[a.host].rack
        return bool(rack) and rack == self.hosts[b.host].rack


def slots(spec: Spec, hosts: Mapping[str, Host], taken: Collection[Slot] = ()) -> tuple[Slot, ...]:
    """All slots of `hosts` but those `taken`, one of each host before the second of any.

    Without GPUs as many rounds as the pool needs: its nodes are spread evenly.
    """
    needed = spec.decode.nodes + spec.decode.spare_nodes + len(taken)
    found: list[Slot] = []
    for number in range(max((host.slots for host in hosts.values()), default=0)):
        if spec.decode.device == "cpu" and len(found) >= needed:
            break
        found += [Slot(name, number) for name, host in hosts.items() if number < host.slots]
    return tuple(slot for slot in found if slot not in taken)
