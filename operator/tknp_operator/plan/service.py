"""`plan`: one round for one service. See the package for the order of things."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from tknp.errors import InvalidValue
from tknp_operator.api.service import Service
from tknp_operator.api.spec import GROUP
from tknp_operator.build import compute_domain
from tknp_operator.build.gateway import autoscalers, gateway_deployment, keys_secret_name
from tknp_operator.build.hydrate import hydration_job
from tknp_operator.build.names import APPLIED, CLOSED, FINALIZER
from tknp_operator.build.network import (
    coordinator_service,
    disruption_budget,
    gateway_service,
    headless_service,
    network_policy,
)
from tknp_operator.build.pods import coordinator_pod, decode_pod, prefill_pod
from tknp_operator.build.pool import compatibility, membership_map, pool_file_map
from tknp_operator.build.secrets import api_keys_secret, internal_secret, renewal_due
from tknp_operator.placement.layers import layout_of
from tknp_operator.placement.place import Placement, Refused, place
from tknp_operator.plan.hosts import lost_hosts, offered
from tknp_operator.plan.observed import (
    Epoch,
    Observed,
    annotation,
    ending,
    epochs,
    finished,
    label,
    trouble,
)
from tknp_operator.plan.status import Outcome, status_of
from tknp_operator.plan.steps import (
    Annotate,
    Apply,
    Create,
    Delete,
    Event,
    Plan,
    SetFinalizers,
    SetStatus,
    Step,
)

_ABRUPT_S = 5  # grace of pods whose requests are over


def plan(service: Service, observed: Observed, now: datetime) -> Plan:
    """The next steps, and the status that says where things are."""
    if service.deleting:
        return _end(service, observed)
    if FINALIZER not in service.finalizers:
        return Plan((SetFinalizers((*service.finalizers, FINALIZER)),), 0.0)
    try:
        layout_of(service.spec)
        wanted_hash = compatibility(service)
    except InvalidValue as error:
        outcome = Outcome("Invalid", str(error))
        return _told(service, observed, now, [], outcome, None, None)
    steps: list[Step] = list(_basis(service, observed, now))
    blocked = _hydration(service, observed, steps)
    known = epochs(observed)
    current = known[-1] if known else None
    if service.spec.suspend:
        steps += _stop(service, observed, known)
        return _told(service, observed, now, steps, Outcome("Suspended", "suspend is true"),
                     None, current)  # fmt: skip
    if lacking := _lacking(service, observed):
        return _told(service, observed, now, steps, Outcome("NotPlaced", lacking), None, current)
    running_on = {slot.host for slot in current.slots} if current else set()
    hosts, again_s = offered(service.spec, observed, running_on, now)
    placed = place(service.spec, hosts, current.slots if current else ())
    if isinstance(placed, Refused):
        outcome = Outcome("NotPlaced", f"{placed.missing}: {placed.remedy}")
        steps += _gateway(service, observed)
        return _told(service, observed, now, steps, outcome, None, current, again_s)
    if blocked:
        return _told(service, observed, now, steps, Outcome("Hydrating", blocked), placed,
                     current, 30.0)  # fmt: skip
    lost = lost_hosts(service.spec, observed, now)
    why = _why_new(observed, current, wanted_hash, placed, lost)
    if why:
        outcome = Outcome("Changing", why)
        current = _turn(service, observed, known, placed, why, lost, steps)
    else:
        outcome = Outcome("", "")
    if current is not None and (not why or current not in known):
        steps += _members(service, observed, current, placed)
        steps += _leftovers(observed, known, current)
    steps += _gateway(service, observed)
    return _told(service, observed, now, steps, outcome, placed, current, again_s)


def _end(service: Service, observed: Observed) -> Plan:
    """Drain, then let go; what the service owns is collected by Kubernetes."""
    coordinators = observed.pods("coordinator")
    if coordinators:
        return Plan(tuple(_delete(pod) for pod in coordinators if not ending(pod)), 5.0)
    left = tuple(name for name in service.finalizers if name != FINALIZER)
    return Plan((SetFinalizers(left),) if left != service.finalizers else ())


def _basis(service: Service, observed: Observed, now: datetime) -> Iterable[Step]:
    """What every epoch needs and outlives it."""
    secret = observed.get("Secret", f"{service.name}-internal")
    if secret is None:
        yield Create(internal_secret(service, now))
    elif renewal_due(secret, now) and not observed.pods():
        yield Delete("Secret", secret["metadata"]["name"], secret["metadata"]["uid"])
    keys = f"{service.name}-api-keys"
    if keys_secret_name(service) == keys and observed.get("Secret", keys) is None:
        yield Create(api_keys_secret(service))
    wanted = [headless_service(service), network_policy(service)]
    wanted += [disruption_budget(service, role) for role in ("decode", "coordinator", "prefill")]
    if service.spec.topology.compute_domain and compute_domain.KIND in observed.served:
        wanted.append(compute_domain.compute_domain(service))
    yield from _applied(observed, wanted)


def _lacking(service: Service, observed: Observed) -> str:
    """What the cluster would need for this service and has not; empty: nothing."""
    if service.spec.topology.compute_domain and compute_domain.KIND not in observed.served:
        return ("the cluster serves no ComputeDomain: install NVIDIA's DRA driver and restart the "
                "operator, or set topology.computeDomain false")  # fmt: skip
    return ""


def _hydration(service: Service, observed: Observed, steps: list[Step]) -> str:
    """Adds the Job that copies the model; why pods can't start yet, empty if they can."""
    if service.spec.model.source.object_store is None:
        return ""
    job = hydration_job(service)
    seen = observed.get("Job", job["metadata"]["name"])
    if seen is None:
        steps.append(Create(job))
        return "the model is being copied"
    conditions = {c["type"] for c in (seen.get("status") or {}).get("conditions") or ()
                  if c["status"] == "True"}  # fmt: skip
    if "Complete" in conditions:
        return ""
    if "Failed" in conditions:
        return f"Job {seen['metadata']['name']} failed: look at its log, mend it, delete the Job"
    return "the model is being copied"


def _why_new(
    observed: Observed, current: Epoch | None, wanted_hash: str, placed: Placement,
    lost: frozenset[str],
) -> str:  # fmt: skip
    """Why the present epoch can't go on; empty if it can."""
    if current is None:
        return "the first epoch"
    if current.closed:
        return current.closed
    if current.compatibility != wanted_hash:
        return "the specification has changed"
    moved = [n for n, (old, new) in enumerate(zip(current.slots, placed.slots, strict=False))
             if old != new]  # fmt: skip
    if moved or len(current.slots) != len(placed.slots):
        return f"node {moved[0]} has lost its host" if moved else "the number of nodes has changed"
    pods = observed.pods(epoch=current.number)
    for pod in pods:
        if label(pod, f"{GROUP}/role") == "prefill":
            continue
        if pod["spec"].get("nodeName") in lost:
            return f"host {pod['spec']['nodeName']} of pod {pod['metadata']['name']} is lost"
        if ending(pod) or finished(pod):
            return f"pod {pod['metadata']['name']} is gone: {trouble(pod) or 'deleted or evicted'}"
    if observed.pods("coordinator", current.number):  # made last, so that all have been made
        seen = {label(pod, f"{GROUP}/node") for pod in observed.pods("decode", current.number)}
        missing = [n for n in range(len(placed.nodes)) if str(n) not in seen]
        if missing:
            return f"the pod of node {missing[0]} is gone"
    return ""


def _turn(
    service: Service, observed: Observed, known: list[Epoch], placed: Placement, why: str,
    lost: frozenset[str], steps: list[Step],
) -> Epoch | None:  # fmt: skip
    """End what is; begin the next epoch once no coordinator is left. The epoch that then is.

    Pods on `lost` hosts are deleted by force and not waited for: nothing reaches them any more, and
    the coordinator's Service will not select them.
    """
    current = known[-1] if known else None
    coordinators = observed.pods("coordinator")
    if current is not None and not current.closed:
        steps.append(Annotate("ConfigMap", f"{service.name}-pool-{current.number}", CLOSED, why))
    gone = [pod for pod in observed.pods() if pod["spec"].get("nodeName") in lost]
    steps += [_delete(pod, 0) for pod in gone]
    if any(pod not in gone for pod in coordinators):
        steps += [_delete(pod) for pod in coordinators if not ending(pod) and pod not in gone]
        return current
    number = (current.number if current else int(service.prior.get("epoch") or 0)) + 1
    steps += [_delete(pod, _ABRUPT_S) for pod in observed.pods()
              if label(pod, f"{GROUP}/role") != "gateway" and not ending(pod)
              and pod not in gone]  # fmt: skip
    steps.append(Create(pool_file_map(service, number, placed)))
    steps += [Event("Normal", "Placed", f"node {node.index} {node.reason}")
              for node in placed.nodes]  # fmt: skip
    steps += [Event("Warning", "Placed", warning) for warning in placed.warnings]
    return Epoch(number, compatibility(service), placed.slots)


def _members(
    service: Service, observed: Observed, epoch: Epoch, placed: Placement
) -> Iterable[Step]:
    """Pods of the epoch, and the name of its coordinator."""
    number = epoch.number
    wanted = [decode_pod(service, number, n, slot) for n, slot in enumerate(placed.slots)]
    wanted += [prefill_pod(service, number, p) for p in range(service.spec.prefill.replicas)]
    wanted.append(coordinator_pod(service, number))
    yield from (Create(pod) for pod in wanted
                if observed.get("Pod", pod["metadata"]["name"]) is None)  # fmt: skip
    for pod in observed.pods("prefill", number):
        index = int(label(pod, f"{GROUP}/node") or 0)
        if not ending(pod) and (index >= service.spec.prefill.replicas or finished(pod)):
            yield _delete(pod)
    yield from _applied(observed, [coordinator_service(service, number)])


def _leftovers(observed: Observed, known: list[Epoch], current: Epoch) -> Iterable[Step]:
    """Pods of other epochs, and ConfigMaps that nobody mounts any more."""
    for epoch in known:
        if epoch.number == current.number:
            continue
        pods = observed.pods(epoch=epoch.number)
        yield from (_delete(pod, _ABRUPT_S) for pod in pods if not ending(pod))
        if not pods:
            for config_map in observed.objects.get("ConfigMap", ()):
                if label(config_map, f"{GROUP}/epoch") == str(epoch.number):
                    meta = config_map["metadata"]
                    yield Delete("ConfigMap", meta["name"], meta["uid"])


def _stop(service: Service, observed: Observed, known: list[Epoch]) -> Iterable[Step]:
    coordinators = observed.pods("coordinator")
    pods = coordinators or observed.pods()
    yield from (_delete(pod) for pod in pods
                if not ending(pod) and label(pod, f"{GROUP}/role") != "gateway")  # fmt: skip


def _gateway(service: Service, observed: Observed) -> Iterable[Step]:
    gateway = service.spec.gateway
    wanted = autoscalers(service)
    if gateway.enabled:
        wanted += [gateway_service(service), gateway_deployment(service),
                   disruption_budget(service, "gateway")]  # fmt: skip
    yield from _applied(observed, wanted)
    names = {(o["kind"], o["metadata"]["name"]) for o in wanted}
    for kind, name in (("Deployment", "gateway"), ("Service", "gateway"),
                       ("PodDisruptionBudget", "gateway"),
                       ("HorizontalPodAutoscaler", "gateway"),
                       ("HorizontalPodAutoscaler", "prefill")):  # fmt: skip
        full = f"{service.name}-{name}"
        seen = observed.get(kind, full)
        if seen is not None and (kind, full) not in names and not ending(seen):
            yield Delete(kind, full, seen["metadata"]["uid"])


def _applied(observed: Observed, wanted: Iterable[dict[str, Any]]) -> Iterable[Step]:
    """Those of `wanted` that are not there as they should be."""
    for manifest in wanted:
        text = json.dumps(manifest, sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        meta = manifest["metadata"]
        seen = observed.get(manifest["kind"], meta["name"])
        noted = annotation(seen, APPLIED) if seen else None
        if noted != digest or not _holds(manifest, seen):
            annotations = {**(meta.get("annotations") or {}), APPLIED: digest}
            yield Apply({**manifest, "metadata": {**meta, "annotations": annotations}})


def _holds(manifest: Mapping[str, Any], seen: Mapping[str, Any] | None) -> bool:
    """Whether nobody has changed what a Service selects or a ConfigMap says."""
    if seen is None:
        return False
    if manifest["kind"] == "Service":
        return bool((seen.get("spec") or {}).get("selector") == manifest["spec"]["selector"])
    return bool(manifest["kind"] != "ConfigMap" or seen.get("data") == manifest["data"])


def _delete(pod: Mapping[str, Any], grace_s: int | None = None) -> Delete:
    return Delete("Pod", pod["metadata"]["name"], pod["metadata"]["uid"], grace_s)


def _told(
    service: Service, observed: Observed, now: datetime, steps: list[Step], outcome: Outcome,
    placed: Placement | None, current: Epoch | None, again_s: float | None = None,
) -> Plan:  # fmt: skip
    """`steps`, and the status if it says anything new."""
    status = status_of(service, observed, now, outcome, placed, current)
    if current is not None and placed is not None and current.slots == placed.slots:
        steps += _applied(observed, [membership_map(service, status)])
    prior = dict(service.prior)
    if status != prior:
        worse = outcome.reason in ("NotPlaced", "Invalid", "Hydrating")
        told = {c.get("message") for c in prior.get("conditions") or ()}
        if worse and outcome.message not in told:
            steps.append(Event("Warning", outcome.reason, outcome.message))
        steps.append(SetStatus(status))
    return Plan(tuple(steps), again_s)
