"""Steps for what is not as it should be: applied again, or deleted."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from tknp_operator.build.names import APPLIED
from tknp_operator.plan.observed import Object, Observed, annotation, ending
from tknp_operator.plan.steps import Apply, Delete, Step


def applied(observed: Observed, wanted: Iterable[dict[str, Any]]) -> Iterable[Step]:
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


def end(
    pods: Iterable[Object], lost: Collection[str], grace_s: int | None = None
) -> Iterable[Delete]:
    """Delete pods, once; those on `lost` hosts by force, where nobody else would end them."""
    for pod in pods:
        if on(pod, lost):
            yield delete_pod(pod, 0)
        elif not ending(pod):
            yield delete_pod(pod, grace_s)


def on(pod: Object, hosts: Collection[str]) -> bool:
    """Whether `pod` is on one of `hosts`."""
    return pod["spec"].get("nodeName") in hosts


def delete_pod(pod: Object, grace_s: int | None = None) -> Delete:
    return Delete("Pod", pod["metadata"]["name"], pod["metadata"]["uid"], grace_s)


def _holds(manifest: Mapping[str, Any], seen: Mapping[str, Any] | None) -> bool:
    """Whether nobody has changed what a Service selects or a ConfigMap says."""
    if seen is None:
        return False
    if manifest["kind"] == "Service":
        return bool((seen.get("spec") or {}).get("selector") == manifest["spec"]["selector"])
    return bool(manifest["kind"] != "ConfigMap" or seen.get("data") == manifest["data"])
