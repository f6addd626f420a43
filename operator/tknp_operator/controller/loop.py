"""See the package."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from tknp.errors import InvalidValue, TknpError
from tknp_operator.api.service import Service, parse
from tknp_operator.api.spec import Spec
from tknp_operator.api.status import condition
from tknp_operator.build.names import PAUSED, POOL
from tknp_operator.cluster.client import Api
from tknp_operator.cluster.execute import execute
from tknp_operator.cluster.kinds import KINDS, NODE, OPTIONAL, OWNED, POD, SERVICE, Kind
from tknp_operator.cluster.mirror import Mirror
from tknp_operator.controller.metrics import Metrics
from tknp_operator.placement.hosts import GPU
from tknp_operator.plan import Observed, of_service, plan
from tknp_operator.plan.observed import annotation
from tknp_operator.plan.steps import SetStatus

log = logging.getLogger(__name__)
Key = tuple[str, str]
RESYNC_S, SETTLE_S, LONGEST_RETRY_S, SYNC_S = 60.0, 0.2, 60.0, 60.0


class Controller:
    """`namespace`: the only one that is looked at; None: all."""

    def __init__(
        self, api: Api, namespace: str | None, metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._api, self._metrics, self._clock = api, metrics, clock
        self._due: dict[Key, float] = {}
        self._failures: dict[Key, tuple[int, str]] = {}
        self._wake = threading.Condition()
        self._namespace = namespace
        self._served: tuple[Kind, ...] = ()
        self._mirrors = {kind.name: self._mirror(kind) for kind in (SERVICE, NODE, *OWNED)}

    def _mirror(self, kind: Kind) -> Mirror:
        where, selector = self._namespace if kind.namespaced else None, POOL if kind.ours else ""
        return Mirror(self._api, kind, where, selector, self._changed)

    @property
    def synced(self) -> bool:
        """Whether every kind has been listed once."""
        return all(mirror.synced.is_set() for mirror in self._mirrors.values())

    def start(self) -> None:
        """Begin to follow the cluster, without acting. Raises Refusal or Unreachable."""
        self._served = tuple(k for k in OPTIONAL if k.plural in self._api.served(k.prefix))
        self._mirrors |= {kind.name: self._mirror(kind) for kind in self._served}
        for mirror in self._mirrors.values():
            mirror.start()

    def run(self, stop: threading.Event) -> None:
        """Act until `stop`."""
        for mirror in self._mirrors.values():
            while not mirror.synced.wait(1.0):
                if stop.is_set():
                    return
        self._metrics.leading.set(1)
        self._all_due()
        while not stop.is_set():
            key = self._next()
            if key is not None:
                self._round(key)
        self._metrics.leading.set(0)

    def _next(self) -> Key | None:
        """A service whose time has come; waits for at most a second."""
        with self._wake:
            now = self._clock()
            if self._due:
                key = min(self._due, key=lambda k: self._due[k])
                if self._due[key] <= now:
                    del self._due[key]
                    return key
                self._wake.wait(min(self._due[key] - now, 1.0))
            else:
                self._wake.wait(1.0)
        return None

    def _mark(self, key: Key, after_s: float = 0.0) -> None:
        with self._wake:
            at = self._clock() + after_s
            self._due[key] = min(at, self._due.get(key, at))
            self._wake.notify()

    def _all_due(self) -> None:
        for obj in self._mirrors[SERVICE.name].snapshot():
            self._mark((obj["metadata"]["namespace"], obj["metadata"]["name"]))

    def _changed(self, obj: Mapping[str, Any]) -> None:
        meta = obj["metadata"]
        pool = (meta.get("labels") or {}).get(POOL)
        if obj["kind"] == SERVICE.name:
            self._mark((meta["namespace"], meta["name"]))
        elif pool:
            self._mark((meta["namespace"], pool), SETTLE_S)
        elif obj["kind"] == NODE.name or (obj["kind"] == POD.name and _gpus(obj)):
            self._all_due()

    def _round(self, key: Key) -> None:
        obj = self._mirrors[SERVICE.name].get(*key)
        if obj is None:
            self._failures.pop(key, None)
            for gauge in (self._metrics.epoch, self._metrics.ready):
                gauge.remove(*key)
            return
        if annotation(obj, PAUSED) == "true":
            return  # until it changes
        began, again_s, result = self._clock(), RESYNC_S, "done"
        try:
            again_s = self._reconcile(obj, datetime.now(UTC))
            self._failures.pop(key, None)
        except TknpError as error:
            tries = self._failures.get(key, (0, ""))[0] + 1
            self._failures[key] = tries, str(error)
            again_s, result = min(2.0 ** (tries - 1), LONGEST_RETRY_S), "failed"
            log.warning("%s/%s: try %d failed: %s", *key, tries, error)
            self._tell(obj, error)
        except Exception:  # an object that nobody foresaw must not stop the others
            log.exception("%s/%s: the round failed", *key)
            again_s, result = LONGEST_RETRY_S, "failed"
        self._metrics.rounds.labels(result).inc()
        self._metrics.seconds.observe(self._clock() - began)
        self._mark(key, again_s)

    def _reconcile(self, obj: Mapping[str, Any], now: datetime) -> float:
        """Seconds until the next round, if nothing happens before."""
        service = _read(obj)
        made = plan(service, self._observed(service), now)
        for step in made.steps:
            execute(self._api, service, step, now)
            self._metrics.steps.labels(type(step).__name__.lower()).inc()
            if isinstance(step, SetStatus):
                service = replace(service, prior=step.status)
        key = service.namespace, service.name
        self._metrics.epoch.labels(*key).set(int(service.prior.get("epoch") or 0))
        ready = any(c["type"] == "Ready" and c["status"] == "True"
                    for c in service.prior.get("conditions") or ())  # fmt: skip
        self._metrics.ready.labels(*key).set(ready)
        return RESYNC_S if made.again_s is None else min(made.again_s, RESYNC_S)

    def _observed(self, service: Service) -> Observed:
        objects = {
            kind.name: [
                obj for obj in self._mirrors[kind.name].snapshot()
                if obj["metadata"].get("namespace") == service.namespace
            ]
            for kind in (*OWNED, *self._served)
        }  # fmt: skip
        nodes = self._mirrors[NODE.name].snapshot()
        pods = self._mirrors[POD.name].snapshot()
        found = of_service(service, objects)
        if name := service.spec.security.internal_tls_secret:
            found["Secret"] += self._secret(service.namespace, name)
        return Observed(found, nodes, used_gpus(pods, service),
                        frozenset(kind.name for kind in self._served))  # fmt: skip

    def _secret(self, namespace: str, name: str) -> list[dict[str, Any]]:
        """A Secret of a user's, which no mirror follows; none if it is not there."""
        query = {"fieldSelector": f"metadata.name={name}"}
        found = self._api.request("GET", KINDS["Secret"].path(namespace), query)
        return list(found.get("items") or ())

    def _tell(self, obj: Mapping[str, Any], error: TknpError) -> None:
        """Put into the status why a round failed; nothing more can be done where that fails too."""
        meta, status = obj["metadata"], dict(obj.get("status") or {})
        prior = status.get("conditions") or []
        stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        invalid = isinstance(error, InvalidValue)
        kind, reason = ("Ready", "Invalid") if invalid else ("Degraded", "Retrying")
        told = condition(prior, kind, not invalid, reason, str(error),  # type: ignore[arg-type]
                         meta.get("generation", 1), stamp)  # fmt: skip
        status["conditions"] = [*(c for c in prior if c["type"] != kind), told]
        if status["conditions"] == prior:
            return
        try:
            self._api.merge(SERVICE, meta["namespace"], meta["name"], {"status": status}, "status")
        except TknpError as worse:
            log.warning("the status of %s can't be written: %s", meta["name"], worse)


def _read(obj: Mapping[str, Any]) -> Service:
    """The service; one that is being deleted must go even if its specification is invalid."""
    try:
        return parse(obj)
    except InvalidValue:
        meta = obj["metadata"]
        if "deletionTimestamp" not in meta:
            raise
        return Service(
            meta["name"], meta["namespace"], meta["uid"], meta.get("generation", 1), True,
            tuple(meta.get("finalizers", ())), Spec.model_construct(), obj.get("status") or {},
        )  # fmt: skip


def used_gpus(pods: Sequence[Mapping[str, Any]], service: Service) -> dict[str, int]:
    """GPUs on each node that pods of others have, or are pinned to a node to get."""
    used: dict[str, int] = {}
    for pod in pods:
        meta = pod["metadata"]
        ours = (meta["namespace"] == service.namespace
                and (meta.get("labels") or {}).get(POOL) == service.name)  # fmt: skip
        phase = (pod.get("status") or {}).get("phase")
        host = pod["spec"].get("nodeName") or _pinned(pod)
        if host and not ours and phase not in ("Succeeded", "Failed"):
            used[host] = used.get(host, 0) + _gpus(pod)
    return used


def _gpus(pod: Mapping[str, Any]) -> int:
    total = 0
    for container in pod["spec"].get("containers") or ():
        limits = (container.get("resources") or {}).get("limits") or {}
        total += int(limits.get(GPU, 0))
    return total


def _pinned(pod: Mapping[str, Any]) -> str:
    """The one node that a pod of ours may go to."""
    affinity = (pod["spec"].get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    for term in required.get("nodeSelectorTerms") or ():
        for field in term.get("matchFields") or ():
            if field["key"] == "metadata.name" and len(field["values"]) == 1:
                return str(field["values"][0])
    return ""
