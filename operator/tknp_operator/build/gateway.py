"""The gateway: a Deployment whose pods run Ray Serve by themselves.

Pods find the coordinator by its Service, which always has the present epoch's, so that streams that
lose one epoch go on with the next.
"""

from __future__ import annotations

from typing import Any

from tknp_operator.api.service import Service
from tknp_operator.api.spec import GatewayScaling, PrefillScaling
from tknp_operator.build.names import (
    COORDINATOR_PORT,
    HTTP_PORT,
    KEYS_DIRECTORY,
    SECRET_DIRECTORY,
    metadata,
)
from tknp_operator.build.pods import GRACE_S, UID

TLS_DIRECTORY = "/etc/tknp/tls"


def keys_secret_name(service: Service) -> str:
    return service.spec.gateway.api_keys_secret or f"{service.name}-api-keys"


def gateway_command(service: Service) -> list[str]:
    """What a pod runs. Plain HTTP inside a cluster needs --insecure; keys are asked for."""
    spec = service.spec
    command = [
        "tknp", "gateway", "--pool-target",
        f"{service.name}-coordinator.{service.namespace}.svc:{COORDINATOR_PORT}",
        "--http-host", "0.0.0.0", "--http-port", str(HTTP_PORT),
        "--tls-ca", f"{SECRET_DIRECTORY}/ca.crt", "--token-file", f"{SECRET_DIRECTORY}/api-token",
        "--keys-file", f"{KEYS_DIRECTORY}/keys.yaml", "--drain-s", str(spec.drain.seconds),
        "--max-replicas", "1",
    ]  # fmt: skip
    if spec.gateway.tls_secret:
        return [*command, "--http-cert", f"{TLS_DIRECTORY}/tls.crt",
                "--http-key", f"{TLS_DIRECTORY}/tls.key"]  # fmt: skip
    return [*command, "--insecure"]


def gateway_deployment(service: Service) -> dict[str, Any]:
    """Without `replicas` where an autoscaler sets them."""
    spec, gateway = service.spec, service.spec.gateway
    meta = metadata(service, f"{service.name}-gateway", "gateway")
    scheme = "HTTPS" if gateway.tls_secret else "HTTP"
    secrets = [("internal", f"{service.name}-internal", SECRET_DIRECTORY),
               ("keys", keys_secret_name(service), KEYS_DIRECTORY)]  # fmt: skip
    if gateway.tls_secret:
        secrets.append(("tls", gateway.tls_secret, TLS_DIRECTORY))
    empty = [("tmp", "/tmp"), ("shm", "/dev/shm")]
    env = [{"name": "HOME", "value": "/tmp"}]
    if spec.observability.traces_endpoint:
        env.append({"name": "OTEL_EXPORTER_OTLP_ENDPOINT",
                    "value": spec.observability.traces_endpoint})  # fmt: skip

    def probe(path: str, failures: int) -> dict[str, Any]:
        return {"httpGet": {"path": path, "port": HTTP_PORT, "scheme": scheme},
                "periodSeconds": 5, "timeoutSeconds": 3, "failureThreshold": failures}  # fmt: skip

    container = {
        "name": "gateway", "image": spec.gateway_image or spec.image,
        "imagePullPolicy": spec.image_pull_policy, "command": gateway_command(service),
        "env": env, "ports": [{"name": "http", "containerPort": HTTP_PORT}],
        "resources": {k: v for k, v in gateway.resources.model_dump().items() if v},
        "securityContext": {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True,
                            "capabilities": {"drop": ["ALL"]}},
        "startupProbe": probe("/health", 60), "readinessProbe": probe("/ready", 2),
        "livenessProbe": probe("/health", 6),
        "volumeMounts": [
            *({"name": name, "mountPath": path, "readOnly": True} for name, _, path in secrets),
            *({"name": name, "mountPath": path} for name, path in empty),
        ],
    }  # fmt: skip
    pod = {
        "terminationGracePeriodSeconds": spec.drain.seconds + GRACE_S,
        "automountServiceAccountToken": False, "enableServiceLinks": False,
        "securityContext": {"runAsNonRoot": True, "runAsUser": UID, "runAsGroup": UID,
                            "fsGroup": UID, "seccompProfile": {"type": "RuntimeDefault"}},
        "imagePullSecrets": [{"name": name} for name in spec.image_pull_secrets],
        "tolerations": list(spec.scheduling.tolerations),
        "topologySpreadConstraints": [{
            "maxSkew": 1, "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": {
                "matchLabels": meta["labels"]}}],
        "containers": [container],
        "volumes": [
            *({"name": name, "secret": {"secretName": secret, "defaultMode": 0o440}}
              for name, secret, _ in secrets),
            {"name": "tmp", "emptyDir": {}}, {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }  # fmt: skip
    return {
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": meta,
        "spec": {
            **({} if gateway.autoscaling else {"replicas": gateway.replicas}),
            "strategy": {"type": "RollingUpdate",
                         "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
            "selector": {"matchLabels": meta["labels"]},
            "template": {"metadata": {"labels": meta["labels"]}, "spec": pod},
        },
    }  # fmt: skip


def autoscalers(service: Service) -> list[dict[str, Any]]:
    """One for each role that scales by load; see docs/autoscaling.md for the metrics."""
    made = []
    prefill, gateway = service.spec.prefill.autoscaling, service.spec.gateway.autoscaling
    if prefill is not None:
        target = {"apiVersion": "tknp.io/v1alpha1", "kind": "TokenParallelService",
                  "name": service.name}  # fmt: skip
        made.append(_autoscaler(service, "prefill", target, prefill, "tknp_prefill_queue",
                                prefill.target_queue_per_replica))  # fmt: skip
    if gateway is not None and service.spec.gateway.enabled:
        target = {"apiVersion": "apps/v1", "kind": "Deployment", "name": f"{service.name}-gateway"}
        made.append(_autoscaler(service, "gateway", target, gateway, "tknp_gateway_streams",
                                gateway.target_streams_per_replica))  # fmt: skip
    return made


def _autoscaler(
    service: Service, role: str, target: dict[str, str],
    scaling: PrefillScaling | GatewayScaling, metric: str, average: int,
) -> dict[str, Any]:  # fmt: skip
    selector = {"matchLabels": {"namespace": service.namespace, "pool": service.name}}
    return {
        "apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler",
        "metadata": metadata(service, f"{service.name}-{role}", role),
        "spec": {
            "scaleTargetRef": target, "minReplicas": scaling.min_replicas,
            "maxReplicas": scaling.max_replicas,
            "metrics": [{"type": "External", "external": {
                "metric": {"name": metric, "selector": selector},
                "target": {"type": "AverageValue", "averageValue": str(average)}}}],
            "behavior": {"scaleDown": {"stabilizationWindowSeconds": 300}},
        },
    }  # fmt: skip
