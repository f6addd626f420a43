"""Deployments as far as a gateway needs them: pods of the present template, new before old."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from kubernetes import client

from .names import ready

_HASH = "pod-template-hash"


def keep(api: client.ApiClient) -> None:
    """One round over all Deployments: make what is missing, delete what is no longer needed."""
    apps, core, plain = client.AppsV1Api(api), client.CoreV1Api(api), api.sanitize_for_serialization
    for deployment in plain(apps.list_deployment_for_all_namespaces())["items"]:
        metadata, spec = deployment["metadata"], deployment["spec"]
        if "deletionTimestamp" in metadata:
            continue
        text = json.dumps(spec["template"], sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:10]
        selector = ",".join(f"{k}={v}" for k, v in spec["selector"]["matchLabels"].items())
        listed = core.list_namespaced_pod(metadata["namespace"], label_selector=selector)
        pods = [p for p in plain(listed)["items"] if "deletionTimestamp" not in p["metadata"]]
        new = [p for p in pods if p["metadata"]["labels"].get(_HASH) == digest]
        old = [p for p in pods if p not in new]
        wanted = spec["replicas"]
        for _ in range(wanted - len(new)):
            core.create_namespaced_pod(metadata["namespace"], _pod(deployment, digest))
        surplus = new[wanted:] + (old if sum(map(ready, new)) >= wanted else [])
        for pod in surplus:
            core.delete_namespaced_pod(pod["metadata"]["name"], metadata["namespace"])
        told = {"replicas": len(pods), "readyReplicas": sum(map(ready, pods)),
                "availableReplicas": sum(map(ready, pods)), "updatedReplicas": len(new),
                "observedGeneration": metadata["generation"]}  # fmt: skip
        if {k: (deployment.get("status") or {}).get(k) for k in told} != told:
            apps.patch_namespaced_deployment_status(
                metadata["name"], metadata["namespace"], {"status": told}
            )


def _pod(deployment: dict[str, Any], digest: str) -> dict[str, Any]:
    template, metadata = deployment["spec"]["template"], deployment["metadata"]
    owner = {"apiVersion": "apps/v1", "kind": "Deployment", "name": metadata["name"],
             "uid": metadata["uid"], "controller": True}  # fmt: skip
    labels = {**template["metadata"]["labels"], _HASH: digest}
    return {"metadata": {"generateName": f"{metadata['name']}-", "labels": labels,
                         "ownerReferences": [owner]},
            "spec": template["spec"]}  # fmt: skip
