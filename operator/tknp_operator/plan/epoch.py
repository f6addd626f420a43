"""One membership after another: why the present one ends, what ends it, what makes the next."""

from __future__ import annotations

from collections.abc import Iterable

from tknp_operator.api.service import Service
from tknp_operator.build.names import CLOSED, EPOCH, NODE, ROLE
from tknp_operator.build.network import coordinator_service, pool_budgets
from tknp_operator.build.pods import coordinator_pod, decode_pod, prefill_pod
from tknp_operator.build.pool import compatibility, pool_file_map
from tknp_operator.placement.place import Placement
from tknp_operator.plan.differ import applied, delete_pod, end, on
from tknp_operator.plan.observed import Epoch, Observed, ending, finished, label, trouble
from tknp_operator.plan.steps import Annotate, Create, Delete, Event, Step

CHANGED, RENEWED = "the specification has changed", "the pool's certificate has been renewed"
ABRUPT_S = 5  # grace of pods whose requests are over


def why_new(
    observed: Observed, current: Epoch | None, wanted: tuple[str, str], placed: Placement,
    lost: frozenset[str],
) -> str:  # fmt: skip
    """Why the present epoch can't go on; empty if it can.

    `wanted`: its compatibility hash, and digits of the certificate that pods show.
    """
    if current is None:
        return "the first epoch"
    if current.closed:
        return current.closed
    if current.compatibility != wanted[0]:
        return CHANGED
    if current.certificate and wanted[1] and current.certificate != wanted[1]:
        return RENEWED
    moved = [n for n, (old, new) in enumerate(zip(current.slots, placed.slots, strict=False))
             if old != new]  # fmt: skip
    if moved or len(current.slots) != len(placed.slots):
        return f"node {moved[0]} has lost its host" if moved else "the number of nodes has changed"
    return broken(observed, current, lost)


def broken(observed: Observed, epoch: Epoch, lost: frozenset[str]) -> str:
    """Which pod of an epoch is gone that can't be made again in it; empty: none."""
    for pod in observed.pods(epoch=epoch.number):
        if label(pod, ROLE) == "prefill":
            continue
        if on(pod, lost):
            return f"host {pod['spec']['nodeName']} of pod {pod['metadata']['name']} is lost"
        if ending(pod) or finished(pod):
            return f"pod {pod['metadata']['name']} is gone: {trouble(pod) or 'deleted or evicted'}"
    if observed.pods("coordinator", epoch.number):  # made last, so that all have been made
        seen = {label(pod, NODE) for pod in observed.pods("decode", epoch.number)}
        missing = [n for n in range(len(epoch.slots)) if str(n) not in seen]
        if missing:
            return f"the pod of node {missing[0]} is gone"
    return ""


def turn(
    service: Service, observed: Observed, known: list[Epoch], placed: Placement, why: str,
    lost: frozenset[str], steps: list[Step], certificate: str,
) -> Epoch | None:  # fmt: skip
    """End what is; begin the next epoch once no coordinator is left. The epoch that then is.

    Pods on `lost` hosts are deleted by force and not waited for: nothing reaches them any more, and
    the coordinator's Service will not select them. `certificate`: what pods of the next one show.
    """
    current = known[-1] if known else None
    if current is not None and not current.closed:
        steps.append(Annotate("ConfigMap", f"{service.name}-pool-{current.number}", CLOSED, why))
    steps += end((pod for pod in observed.pods() if on(pod, lost)), lost)
    drains = [pod for pod in observed.pods("coordinator") if not on(pod, lost)]
    if drains:
        steps += end(drains, lost)
        return current
    number = (current.number if current else int(service.prior.get("epoch") or 0)) + 1
    left = [pod for pod in observed.pods()
            if label(pod, ROLE) != "gateway" and not on(pod, lost)]  # fmt: skip
    steps += end(left, lost, ABRUPT_S)
    return begin(service, number, placed, certificate, steps)


def begin(
    service: Service, number: int, placed: Placement, certificate: str, steps: list[Step]
) -> Epoch:
    """Write an epoch down, and tell where its nodes are and why."""
    steps.append(Create(pool_file_map(service, number, placed, certificate)))
    steps += [Event("Normal", "Placed", f"node {node.index} {node.reason}")
              for node in placed.nodes]  # fmt: skip
    steps += [Event("Warning", "Placed", warning) for warning in placed.warnings]
    return Epoch(number, compatibility(service), placed.slots, certificate=certificate)


def members(
    service: Service, observed: Observed, epoch: Epoch, placed: Placement, named: Epoch
) -> Iterable[Step]:
    """Pods of the epoch; the coordinator's Service leads to `named`, which nobody may evict."""
    number = epoch.number
    wanted = [decode_pod(service, number, n, slot) for n, slot in enumerate(placed.slots)]
    wanted += [prefill_pod(service, number, p) for p in range(service.spec.prefill.replicas)]
    wanted.append(coordinator_pod(service, number))
    yield from (Create(pod) for pod in wanted
                if observed.get("Pod", pod["metadata"]["name"]) is None)  # fmt: skip
    for pod in observed.pods("prefill", number):
        index = int(label(pod, NODE) or 0)
        if not ending(pod) and (index >= service.spec.prefill.replicas or finished(pod)):
            yield delete_pod(pod)
    budgets = pool_budgets(service, named.number, len(named.slots))
    yield from applied(observed, [coordinator_service(service, named.number), *budgets])


def leftovers(
    observed: Observed, known: list[Epoch], current: Epoch, lost: frozenset[str]
) -> Iterable[Step]:
    """Pods of epochs that have ended, once none of their coordinators drains; their ConfigMaps."""
    for epoch in known:
        if epoch.number == current.number or not epoch.closed:
            continue
        pods = observed.pods(epoch=epoch.number)
        drains = [pod for pod in observed.pods("coordinator", epoch.number) if not on(pod, lost)]
        yield from end(drains or pods, lost, None if drains else ABRUPT_S)
        if not pods:
            yield from forget(observed, epoch)


def forget(observed: Observed, epoch: Epoch) -> Iterable[Step]:
    """Delete what says that an epoch has been."""
    for config_map in observed.objects.get("ConfigMap", ()):
        if label(config_map, EPOCH) == str(epoch.number):
            meta = config_map["metadata"]
            yield Delete("ConfigMap", meta["name"], meta["uid"])


def stop(observed: Observed, lost: frozenset[str]) -> Iterable[Step]:
    """End all pods, the coordinators first: these finish open requests."""
    pods = observed.pods("coordinator") or observed.pods()
    yield from end((pod for pod in pods if label(pod, ROLE) != "gateway"), lost)
