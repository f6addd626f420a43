"""Steps for what is not as it should be: applied again, or deleted."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from tknp_operator.build.names import APPLIED
from tknp_operator.plan.observed import Observed, annotation
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


def delete_pod(pod: Mapping[str, Any], grace_s: int | None = None) -> Delete:
    return Delete("Pod", pod["metadata"]["name"], pod["metadata"]["uid"], grace_s)


def _holds(manifest: Mapping[str, Any], seen: Mapping[str, Any] | None) -> bool:
    """Whether nobody has changed what a Service selects or a ConfigMap says."""
    if seen is None:
        return False
    if manifest["kind"] == "Service":
        return bool((seen.get("spec") or {}).get("selector") == manifest["spec"]["selector"])
    return bool(manifest["kind"] != "ConfigMap" or seen.get("data") == manifest["data"])
