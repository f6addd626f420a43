"""The Job that copies a model from an object store once, for all pods.

It writes the completion marker last; a copy that was cut off is begun again by the Job's next pod,
and pods of the pool are made only once the Job is complete.
"""

from __future__ import annotations

from typing import Any

from tknp_operator.api.service import Service
from tknp_operator.build.names import MODEL_DIRECTORY, metadata
from tknp_operator.build.pods import UID

MARKER = ".tknp-complete"


def hydration_job(service: Service) -> dict[str, Any]:
    """Copies model.source.objectStore to its claim with `tknp hydrate`."""
    spec, store = service.spec, service.spec.model.source.object_store
    if store is None:
        raise ValueError("the model is in no object store")
    container: dict[str, Any] = {
        "name": "hydrate", "image": spec.image, "imagePullPolicy": spec.image_pull_policy,
        "command": ["tknp", "hydrate", store.uri, MODEL_DIRECTORY],
        "env": [{"name": "HOME", "value": "/tmp"}],
        "volumeMounts": [{"name": "model", "mountPath": MODEL_DIRECTORY},
                         {"name": "tmp", "mountPath": "/tmp"}],
        "securityContext": {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True,
                            "capabilities": {"drop": ["ALL"]}},
    }  # fmt: skip
    if store.secret_name:
        container["envFrom"] = [{"secretRef": {"name": store.secret_name}}]
    return {
        "apiVersion": "batch/v1", "kind": "Job",
        "metadata": metadata(service, f"{service.name}-hydrate", "hydrate"),
        "spec": {"backoffLimit": 6, "template": {"spec": {
            "restartPolicy": "Never", "automountServiceAccountToken": False,
            "securityContext": {"runAsNonRoot": True, "runAsUser": UID, "runAsGroup": UID,
                                "fsGroup": UID, "seccompProfile": {"type": "RuntimeDefault"}},
            "imagePullSecrets": [{"name": name} for name in spec.image_pull_secrets],
            "tolerations": list(spec.scheduling.tolerations),
            "containers": [container],
            "volumes": [{"name": "model", "persistentVolumeClaim": {
                            "claimName": store.claim_name}},
                        {"name": "tmp", "emptyDir": {}}],
        }}},
    }  # fmt: skip
