"""`plan`: one round for one service. See the package for the order of things."""

from __future__ import annotations

from datetime import datetime

from tknp.errors import InvalidValue
from tknp_operator.api.service import Service
from tknp_operator.build.names import FINALIZER
from tknp_operator.build.pool import compatibility, membership_map
from tknp_operator.build.secrets import internal_name, shown_by
from tknp_operator.placement.layers import layout_of, too_small
from tknp_operator.placement.place import Placement, Refused, place
from tknp_operator.plan.basis import basis, hydration, lacking, shown
from tknp_operator.plan.differ import applied, end
from tknp_operator.plan.epoch import begin, broken, leftovers, members, stop, turn, why_new
from tknp_operator.plan.gateway import gateway
from tknp_operator.plan.hosts import lost_hosts, offered
from tknp_operator.plan.observed import Epoch, Observed, epochs
from tknp_operator.plan.status import Outcome, status_of
from tknp_operator.plan.steps import Event, Plan, SetFinalizers, SetStatus, Step
from tknp_operator.plan.surge import give_up, go_on, room_beside, still_serving

_SOON_S = 1.0


def plan(service: Service, observed: Observed, now: datetime) -> Plan:
    """The next steps, and the status that says where things are."""
    if service.deleting:
        return _end(service, observed, now)
    if FINALIZER not in service.finalizers:
        return Plan((SetFinalizers((*service.finalizers, FINALIZER)),))  # which makes it due again
    try:
        layout_of(service.spec)
        wanted_hash = compatibility(service)
    except InvalidValue as error:
        outcome = Outcome("Invalid", str(error))
        return _told(service, observed, now, [], outcome, None, None)
    steps: list[Step] = list(basis(service, observed, now))
    if observed.get("Secret", internal_name(service)) is None:
        return Plan(tuple(steps), _SOON_S)  # what depends on it waits until it has been seen
    secret = shown(service, observed)
    blocked = hydration(service, observed, steps)
    known = epochs(observed)
    current, lost = known[-1] if known else None, lost_hosts(service.spec, observed, now)
    if service.spec.suspend:
        steps += stop(observed, lost)
        return _told(service, observed, now, steps, Outcome("Suspended", "suspend is true"),
                     None, current)  # fmt: skip
    if missing := lacking(service, observed):
        return _told(service, observed, now, steps, Outcome("NotPlaced", missing), None, current)
    old = still_serving(known)
    running_on = {slot.host for epoch in (old, current) if epoch for slot in epoch.slots}
    hosts, again_s = offered(service.spec, observed, running_on, now)
    found = place(service.spec, hosts, current.slots if current else (), old.slots if old else ())
    placed = _fitting(service, found)
    if isinstance(placed, Refused) and old is not None and current is not None:
        why = broken(observed, current, lost) or f"it lacks {placed.missing}"
        outcome = give_up(service, observed, current, why, lost, steps)
        steps += leftovers(observed, known[:-1], old, lost)
        steps += gateway(service, observed, secret)
        return _told(service, observed, now, steps, outcome, None, old, again_s)
    if isinstance(placed, Refused):
        outcome = Outcome("NotPlaced", f"{placed.missing}: {placed.remedy}")
        steps += gateway(service, observed, secret)
        return _told(service, observed, now, steps, outcome, None, current, again_s)
    if blocked:
        return _told(service, observed, now, steps, Outcome("Hydrating", blocked), placed,
                     current, 30.0)  # fmt: skip
    certificate = shown_by(secret)
    why = why_new(observed, current, (wanted_hash, certificate), placed, lost)
    if old is not None and current is not None:
        outcome = go_on(service, observed, old, current, placed, why, lost, now, steps)
        current = old if outcome.reason == "Surging" else current
        steps += leftovers(observed, known[:-1], current, lost)
    elif current is not None and not why:
        outcome = Outcome("", "")
        steps += members(service, observed, current, placed, named=current)
        steps += leftovers(observed, known, current, lost)
    elif room := room_beside(service, observed, hosts, current, why, lost):
        outcome, current = _surge(service, observed, known, room, certificate, steps)
    else:
        outcome = Outcome("Changing", why)
        current = turn(service, observed, known, placed, why, lost, steps, certificate)
        if current is not None and current not in known:
            steps += members(service, observed, current, placed, named=current)
            steps += leftovers(observed, known, current, lost)
    steps += gateway(service, observed, secret)
    return _told(service, observed, now, steps, outcome, placed, current, again_s)


def _surge(
    service: Service, observed: Observed, known: list[Epoch], room: Placement, certificate: str,
    steps: list[Step],
) -> tuple[Outcome, Epoch]:  # fmt: skip
    """Begin the next epoch beside the present one, which goes on serving."""
    present = known[-1]
    following = begin(service, present.number + 1, room, certificate, steps)
    steps += members(service, observed, following, room, named=present)
    message = f"epoch {following.number} starts beside {present.number}"
    return Outcome("Surging", message), present


def _fitting(service: Service, placed: Placement | Refused) -> Placement | Refused:
    """`placed`, unless the model's blocks don't fit the memories of those very GPUs."""
    if isinstance(placed, Refused) or placed.memories is None:
        return placed
    why = too_small(service.spec, placed.memories)
    return Refused(f"room on these GPUs: {why}", "allow larger products only, raise "
                   "decode.tensorParallel, or add nodes") if why else placed  # fmt: skip


def _end(service: Service, observed: Observed, now: datetime) -> Plan:
    """Drain, then let go; what the service owns is collected by Kubernetes."""
    coordinators = observed.pods("coordinator")
    if coordinators:
        return Plan(tuple(end(coordinators, lost_hosts(service.spec, observed, now))), 5.0)
    left = tuple(name for name in service.finalizers if name != FINALIZER)
    return Plan((SetFinalizers(left),) if left != service.finalizers else ())


def _told(
    service: Service, observed: Observed, now: datetime, steps: list[Step], outcome: Outcome,
    placed: Placement | None, current: Epoch | None, again_s: float | None = None,
) -> Plan:  # fmt: skip
    """`steps`, and the status if it says anything new."""
    status = status_of(service, observed, now, outcome, placed, current)
    where = current.slots if current is not None and outcome.reason != "Surging" else None
    if placed is not None and where == placed.slots:
        steps += applied(observed, [membership_map(service, status)])
    prior = dict(service.prior)
    if status != prior:
        worse = outcome.reason in ("NotPlaced", "Invalid", "Hydrating")
        told = {c.get("message") for c in prior.get("conditions") or ()}
        if worse and outcome.message not in told:
            steps.append(Event("Warning", outcome.reason, outcome.message))
        steps.append(SetStatus(status))
    return Plan(tuple(steps), again_s)
