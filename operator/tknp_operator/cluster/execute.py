"""Carries steps out. What has come to pass already is no error: plans are made from the past.

Nothing of somebody else's is taken over: what is in the way under a name of ours, without our owner
reference, is a refusal that says so, and stays as it is.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from datetime import datetime

from tknp_operator.api.service import Service
from tknp_operator.api.spec import GROUP, KIND, VERSION
from tknp_operator.build.names import MANAGER, POOL, owned
from tknp_operator.cluster.client import Api, Refusal
from tknp_operator.cluster.kinds import EVENT, KINDS, SERVICE
from tknp_operator.plan.steps import (
    Annotate,
    Apply,
    Create,
    Delete,
    Event,
    Manifest,
    Merge,
    SetFinalizers,
    SetStatus,
    Step,
    describe,
)

log = logging.getLogger(__name__)
_NOT_FOUND, _CONFLICT = 404, 409


def execute(api: Api, service: Service, step: Step, now: datetime) -> None:
    """Do `step` for `service`. Raises Refusal or Unreachable."""
    if not isinstance(step, SetStatus | Event):
        log.info("%s/%s: %s", service.namespace, service.name, describe(step))
    match step:
        case Apply(manifest):
            _unless(_NOT_FOUND, lambda: _ours(service, manifest, _there(api, service, manifest)))
            api.apply(manifest)
        case Create(manifest):
            _create(api, service, manifest)
        case Annotate(kind, name, key, value):
            note = {"metadata": {"annotations": {key: value}}}
            _unless(_NOT_FOUND, lambda: api.merge(KINDS[kind], service.namespace, name, note))
        case Merge(kind, name, patch):
            _unless(_NOT_FOUND, lambda: api.merge(KINDS[kind], service.namespace, name, patch))
        case Delete(kind, name, uid, grace_s):
            _unless(_NOT_FOUND, lambda: _unless(_CONFLICT, lambda: api.delete(
                KINDS[kind], service.namespace, name, uid, grace_s)))  # fmt: skip
        case SetFinalizers(finalizers):
            patch = {"metadata": {"finalizers": list(finalizers)}}
            _unless(_NOT_FOUND,
                    lambda: api.merge(SERVICE, service.namespace, service.name, patch))  # fmt: skip
        case SetStatus(status):
            told = {"status": status}
            _unless(_NOT_FOUND, lambda: api.merge(
                SERVICE, service.namespace, service.name, told, "status"))  # fmt: skip
        case Event():
            _unless(_CONFLICT, lambda: api.create(_event(service, step, now)))


def _unless(code: int, act: Callable[[], object]) -> None:
    """Call `act`; a refusal with `code` means that there is nothing left to do."""
    try:
        act()
    except Refusal as refusal:
        if refusal.code != code:
            raise


def _there(api: Api, service: Service, manifest: Manifest) -> Manifest:
    kind = KINDS[manifest["kind"]]
    found: Manifest = api.request("GET", kind.path(service.namespace, manifest["metadata"]["name"]))
    return found


def _create(api: Api, service: Service, manifest: Manifest) -> None:
    """Make it, unless it is there already, as a late cache doesn't know.

    An epoch's ConfigMap that says something else was made by a round that this one has not seen:
    pods of this round must not join it, so that the round ends here and is planned anew.
    """
    kind, name = KINDS[manifest["kind"]], manifest["metadata"]["name"]
    try:
        api.create(manifest)
    except Refusal as refusal:
        if refusal.code != _CONFLICT:
            raise
        found, _ = api.list(kind, service.namespace, f"{POOL}={service.name}")  # secrets: no get
        nothing: Manifest = {"metadata": {}}
        there = next((obj for obj in found if obj["metadata"]["name"] == name), nothing)
        _ours(service, manifest, there)
        if kind.name == "ConfigMap" and there.get("data") != manifest["data"]:
            said = f"ConfigMap {name} is of another plan: this one was made from the past"
            raise Refusal(_CONFLICT, said) from refusal


def _ours(service: Service, manifest: Manifest, there: Manifest) -> None:
    """Raises Refusal where `there` is somebody else's."""
    if not owned(service, there):
        what = f"{manifest['kind']} {manifest['metadata']['name']}"
        remedy = "delete it or give the service another name"
        raise Refusal(_CONFLICT, f"{what} exists and is not owned by this service: {remedy}")


def _event(service: Service, event: Event, now: datetime) -> dict[str, object]:
    """Its name follows from what it says, so that it is told once for one state of the object."""
    said = f"{service.uid} {service.generation} {service.prior.get('epoch')} {event}"
    stamp = now.strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "apiVersion": "v1", "kind": EVENT.name,
        "metadata": {"namespace": service.namespace,
                     "name": f"{service.name}.{hashlib.sha256(said.encode()).hexdigest()[:16]}"},
        "involvedObject": {"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, "name": service.name,
                           "namespace": service.namespace, "uid": service.uid},
        "type": event.kind, "reason": event.reason, "message": event.message[:1024],
        "firstTimestamp": stamp, "lastTimestamp": stamp, "count": 1,
        "source": {"component": MANAGER}, "reportingComponent": MANAGER,
    }  # fmt: skip
