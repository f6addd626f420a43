"""The gateway: a Deployment whose pods run Ray Serve by themselves.

Pods find the coordinator by its Service, which always has the present epoch's, so that streams that
lose one epoch go on with the next; new requests wait meanwhile, for `holdSeconds`.
"""

from __future__ import annotations

from typing import Any

from tknp_operator.api.service import Service
from tknp_operator.build.names import (
    CA,
    COORDINATOR_PORT,
    HTTP_PORT,
    KEYS_DIRECTORY,
    SECRET_DIRECTORY,
    metadata,
)
from tknp_operator.build.pods import GRACE_S, UID
from tknp_operator.build.secrets import internal_volume

TLS_DIRECTORY = "/etc/tknp/tls"
EMPTY = (("tmp", "/tmp"), ("shm", "/dev/shm"))


def keys_secret_name(service: Service) -> str:
    return service.spec.gateway.api_keys_secret or f"{service.name}-api-keys"


def gateway_settings(service: Service) -> dict[str, Any]:
    """Settings of `tknp.gateway`. Plain HTTP inside a cluster is insecure; keys are asked for.

    A stream that has lost its pool waits for as long as one may start.
    """
    spec = service.spec
    address = f"{service.name}-coordinator.{service.namespace}.svc:{COORDINATOR_PORT}"
    settings: dict[str, Any] = {
        "pools": [address], "http_host": "0.0.0.0", "http_port": HTTP_PORT,
        "tls_ca": f"{SECRET_DIRECTORY}/ca.crt", "token_file": f"{SECRET_DIRECTORY}/api-token",
        "keys_file": f"{KEYS_DIRECTORY}/keys.yaml", "drain_s": spec.drain.seconds,
        "hold_s": spec.gateway.hold_seconds, "replay_wait_s": spec.timeouts.start_seconds,
        "max_replicas": 1,
    }  # fmt: skip
    if spec.gateway.tls_secret:
        return {**settings, "http_cert": f"{TLS_DIRECTORY}/tls.crt",
                "http_key": f"{TLS_DIRECTORY}/tls.key"}  # fmt: skip
    return {**settings, "insecure": True}


def gateway_command(service: Service) -> list[str]:
    """What a pod runs."""
    command = ["tknp", "gateway"]
    for name, value in gateway_settings(service).items():
        if name == "pools":
            command += ["--pool-target", *value]
        elif value is True:
            command.append(f"--{name}")
        else:
            command += [f"--{name.replace('_', '-')}", str(value)]
    return command


def gateway_pod(service: Service) -> dict[str, Any]:
    """Its pods, as far as it doesn't matter who starts Ray; what the container runs is to be added.

    Volumes are mounted by the only container.
    """
    spec, gateway = service.spec, service.spec.gateway
    secrets = [("keys", keys_secret_name(service), KEYS_DIRECTORY)]
    if gateway.tls_secret:
        secrets.append(("tls", gateway.tls_secret, TLS_DIRECTORY))
    mounted = [("internal", SECRET_DIRECTORY), *((name, path) for name, _, path in secrets)]
    env = [{"name": "HOME", "value": "/tmp"}]
    if spec.observability.traces_endpoint:
        env.append({"name": "OTEL_EXPORTER_OTLP_ENDPOINT",
                    "value": spec.observability.traces_endpoint})  # fmt: skip
    container = {
        "name": "gateway", "image": spec.gateway_image or spec.image,
        "imagePullPolicy": spec.image_pull_policy, "env": env,
        "resources": {k: v for k, v in gateway.resources.model_dump().items() if v},
        "securityContext": {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True,
                            "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [
            *({"name": name, "mountPath": path, "readOnly": True} for name, path in mounted),
            *({"name": name, "mountPath": path} for name, path in EMPTY),
        ],
    }  # fmt: skip
    return {
        "terminationGracePeriodSeconds": spec.drain.seconds + GRACE_S,
        "automountServiceAccountToken": False, "enableServiceLinks": False,
        "securityContext": {"runAsNonRoot": True, "runAsUser": UID, "runAsGroup": UID,
                            "fsGroup": UID, "seccompProfile": {"type": "RuntimeDefault"}},
        "imagePullSecrets": [{"name": name} for name in spec.image_pull_secrets],
        "tolerations": list(spec.scheduling.tolerations),
        "topologySpreadConstraints": [{
            "maxSkew": 1, "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": {
                "matchLabels": metadata(service, "", "gateway")["labels"]}}],
        "containers": [container],
        "volumes": [
            internal_volume(service),
            *({"name": name, "secret": {"secretName": secret, "defaultMode": 0o440}}
              for name, secret, _ in secrets),
            {"name": "tmp", "emptyDir": {}}, {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }  # fmt: skip


def gateway_deployment(service: Service, ca: str = "") -> dict[str, Any]:
    """Without `replicas` where an autoscaler sets them.

    `ca`: digits of the CA that pods trust; they read it when they start.
    """
    gateway = service.spec.gateway
    meta = metadata(service, f"{service.name}-gateway", "gateway")
    scheme = "HTTPS" if gateway.tls_secret else "HTTP"

    def probe(path: str, failures: int) -> dict[str, Any]:
        return {"httpGet": {"path": path, "port": HTTP_PORT, "scheme": scheme},
                "periodSeconds": 5, "timeoutSeconds": 3, "failureThreshold": failures}  # fmt: skip

    pod = gateway_pod(service)
    pod["containers"][0] |= {
        "command": gateway_command(service),
        "ports": [{"name": "http", "containerPort": HTTP_PORT}],
        "startupProbe": probe("/health", 60), "readinessProbe": probe("/ready", 2),
        "livenessProbe": probe("/health", 6),
    }  # fmt: skip
    inside: dict[str, Any] = {"labels": meta["labels"]}
    if ca:
        inside["annotations"] = {CA: ca}
    return {
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": meta,
        "spec": {
            **({} if gateway.autoscaling else {"replicas": gateway.replicas}),
            "strategy": {"type": "RollingUpdate",
                         "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
            "selector": {"matchLabels": meta["labels"]},
            "template": {"metadata": inside, "spec": pod},
        },
    }  # fmt: skip
