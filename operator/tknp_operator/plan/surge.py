"""A changed pool beside the one that serves, where hosts are free: nobody waits for it to load.

    old serves, changed spec, room beside  -> ConfigMap and pods of the next epoch; both are open
    next one is ready                      -> the coordinator's Service leads there; old is closed
    old is closed                          -> its coordinator drains, then its pods go

While both are open the Service leads to the old one, so that two memberships are never behind one
name. A next one that breaks, or that the specification overtakes, is given up, and begun again;
where no host is left for it (one of its own is lost), the old one then ends first. One that does
not get ready leaves the old one as it is. One that finds no room after all (prefill and coordinator
are placed by Kubernetes), or whose old one breaks, takes over before it is ready: the gateway holds
requests then, as it does where there is no room from the start.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from tknp_operator.api.service import Service
from tknp_operator.build.names import CLOSED
from tknp_operator.placement.hosts import Host
from tknp_operator.placement.layers import too_small
from tknp_operator.placement.place import Placement, Refused, place
from tknp_operator.plan.differ import end
from tknp_operator.plan.epoch import ABRUPT_S, CHANGED, RENEWED, broken, forget, members
from tknp_operator.plan.observed import Epoch, Observed, parse_time, ready, trouble
from tknp_operator.plan.status import Outcome
from tknp_operator.plan.steps import Annotate, Step


def still_serving(known: Sequence[Epoch]) -> Epoch | None:
    """The epoch beside which the last one has been begun; None: it is alone."""
    return next((epoch for epoch in reversed(known[:-1]) if not epoch.closed), None)


def room_beside(
    service: Service, observed: Observed, hosts: Sequence[Host], current: Epoch | None, why: str,
    lost: frozenset[str],
) -> Placement | None:  # fmt: skip
    """Where the next epoch can be while `current` serves; None: it has to end first."""
    if current is None or current.closed or why not in (CHANGED, RENEWED):
        return None
    serves = any(map(ready, observed.pods("coordinator", current.number)))
    if not (service.spec.drain.surge and serves) or broken(observed, current, lost):
        return None
    found = place(service.spec, hosts, (), current.slots)
    if isinstance(found, Refused):
        return None
    return None if found.memories and too_small(service.spec, found.memories) else found


def go_on(
    service: Service, observed: Observed, old: Epoch, current: Epoch, placed: Placement, why: str,
    lost: frozenset[str], now: datetime, steps: list[Step],
) -> Outcome:  # fmt: skip
    """One round with both. `why`: why `current` can't go on; empty if it can."""
    if why:
        return give_up(service, observed, current, why, lost, steps)
    ready_now = any(map(ready, observed.pods("coordinator", current.number)))
    early = _over(observed, old, lost) or _unschedulable(service, observed, current, now)
    if not ready_now and not early:
        steps += members(service, observed, current, placed, named=old)
        return Outcome("Surging", _progress(observed, old, current))
    done = f"epoch {current.number} takes over" + ("" if ready_now else f": {early}")
    steps += members(service, observed, current, placed, named=current)
    steps.append(Annotate("ConfigMap", f"{service.name}-pool-{old.number}", CLOSED, done))
    steps += end(observed.pods("coordinator", old.number), lost)
    return Outcome("", "") if ready_now else Outcome("Changing", done)


def give_up(
    service: Service, observed: Observed, current: Epoch, why: str, lost: frozenset[str],
    steps: list[Step],
) -> Outcome:  # fmt: skip
    """End an epoch that nobody has been served by; the one beside it goes on."""
    if not current.closed:
        name = f"{service.name}-pool-{current.number}"
        steps.append(Annotate("ConfigMap", name, CLOSED, why))
    pods = observed.pods(epoch=current.number)
    steps += end(pods, lost, ABRUPT_S)
    if not pods:
        steps += forget(observed, current)
    return Outcome("Surging", f"epoch {current.number} is given up: {why}")


def _over(observed: Observed, old: Epoch, lost: frozenset[str]) -> str:
    """Why the old epoch serves nobody any more; empty: it does."""
    if not observed.pods("coordinator", old.number):
        return f"epoch {old.number} has no coordinator"
    return broken(observed, old, lost)


def _progress(observed: Observed, old: Epoch, current: Epoch) -> str:
    pods = observed.pods(epoch=current.number)
    why = next(
        (f": {pod['metadata']['name']}: {said}" for pod in pods if (said := trouble(pod))), ""
    )
    return f"epoch {current.number} starts beside {old.number}{why}"


def _unschedulable(service: Service, observed: Observed, epoch: Epoch, now: datetime) -> str:
    """Which pod has found no place for `nodeLostSeconds`; empty: none."""
    for pod in observed.pods(epoch=epoch.number):
        for condition in (pod.get("status") or {}).get("conditions") or ():
            if condition["type"] == "PodScheduled" and condition["status"] == "False":
                since = parse_time(condition.get("lastTransitionTime", "1970-01-01T00:00:00Z"))
                if (now - since).total_seconds() >= service.spec.timeouts.node_lost_seconds:
                    return f"{pod['metadata']['name']} finds no room beside the pool that serves"
    return ""
