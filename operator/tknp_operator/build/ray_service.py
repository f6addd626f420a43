"""The gateway as one Ray cluster by KubeRay: a RayService, where the cluster has that kind.

    RayService -> KubeRay: head (no replicas) + a pod a replica -> tknp.gateway.serve_app:build

KubeRay starts Ray in the pods, deploys the application, labels pods whose proxy is well, and brings
a new cluster up beside the old one when pods change. Ray's ports ask for a token, which KubeRay
makes (1.5.1 and newer), and answer only pods of the cluster and KubeRay itself.
"""

from __future__ import annotations

from typing import Any

import yaml

from tknp_operator.api.service import Service
from tknp_operator.build.gateway import gateway_pod, gateway_settings
from tknp_operator.build.names import CA, HTTP_PORT, POOL, ROLE, metadata

API_VERSION, KIND = "ray.io/v1", "RayService"
SERVES = "ray.io/serve"  # KubeRay's label of pods whose proxy is well
GCS_PORT, DASHBOARD_PORT, AGENT_PORT = 6379, 8265, 52365
_EVERY = {"periodSeconds": 5, "timeoutSeconds": 3}
RAY_VERSION = "2.60.0"  # of our images: KubeRay wants to know it before it turns tokens on


def ray_service(service: Service, ca: str = "") -> dict[str, Any]:
    """The RayService. `ca`: digits of the CA that pods trust; they read it when they start."""
    spec = service.spec
    meta = metadata(service, f"{service.name}-gateway", "gateway")
    inside = {"labels": meta["labels"], **({"annotations": {CA: ca}} if ca else {})}

    def template(
        name: str, ports: dict[str, int], alive: dict[str, Any], well: dict[str, Any]
    ) -> dict[str, Any]:
        pod = gateway_pod(service)
        pod["containers"][0] |= {
            "name": name,
            "ports": [{"name": port, "containerPort": number} for port, number in ports.items()],
            # KubeRay's own, where these are missing, call wget, which our images have not
            "livenessProbe": {**alive, **_EVERY, "failureThreshold": 24, "initialDelaySeconds": 30},
            "readinessProbe": {**well, **_EVERY, "failureThreshold": 2},
        }
        return {"metadata": inside, "spec": pod}

    replicas = spec.gateway.replicas
    gcs = {"tcpSocket": {"port": GCS_PORT}}
    agent = {"tcpSocket": {"port": AGENT_PORT}}
    proxy = {"httpGet": {"path": "/-/healthz", "port": HTTP_PORT}}
    return {
        "apiVersion": API_VERSION, "kind": KIND, "metadata": meta,
        "spec": {
            "serveConfigV2": yaml.safe_dump(serve_config(service), sort_keys=False),
            "rayClusterDeletionDelaySeconds": spec.drain.seconds,
            "excludeHeadPodFromServeSvc": True,
            "rayClusterConfig": {
                "rayVersion": RAY_VERSION, "authOptions": {"mode": "token"},
                "headGroupSpec": {
                    "rayStartParams": {"num-cpus": "0", "dashboard-host": "0.0.0.0"},
                    "template": template("ray-head", {
                        "gcs-server": GCS_PORT, "dashboard": DASHBOARD_PORT, "client": 10001},
                        gcs, gcs),
                },
                "workerGroupSpecs": [{
                    "groupName": "gateway", "replicas": replicas, "minReplicas": replicas,
                    "maxReplicas": replicas, "rayStartParams": {"num-cpus": "1"},
                    "template": template("ray-worker", {"http": HTTP_PORT}, agent, proxy),
                }],
            },
        },
    }  # fmt: skip


def serve_config(service: Service) -> dict[str, Any]:
    """What Ray Serve runs: a replica on each pod but the head."""
    replicas = service.spec.gateway.replicas
    arguments = {**gateway_settings(service), "min_replicas": replicas, "max_replicas": replicas}
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": "0.0.0.0", "port": HTTP_PORT},
        "applications": [{
            "name": "tknp", "route_prefix": "/",
            "import_path": "tknp.gateway.serve_app:build", "args": arguments,
            "deployments": [{
                "name": "gateway", "max_replicas_per_node": 1, "ray_actor_options": {"num_cpus": 1},
            }],
        }],
    }  # fmt: skip


def ray_policy(service: Service) -> dict[str, Any]:
    """Ray's own ports answer its cluster and KubeRay; HTTP answers everybody, who shows a key."""
    own = {"podSelector": {"matchLabels": {POOL: service.name, ROLE: "gateway"}}}
    kuberay = {"namespaceSelector": {}, "podSelector": {
        "matchLabels": {"app.kubernetes.io/name": "kuberay-operator"}}}  # fmt: skip
    return {
        "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
        "metadata": metadata(service, f"{service.name}-ray", "gateway"),
        "spec": {
            **own, "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [own]},
                {"ports": [{"port": HTTP_PORT, "protocol": "TCP"}]},
                {"from": [kuberay], "ports": [{"port": DASHBOARD_PORT, "protocol": "TCP"}]},
            ],
        },
    }  # fmt: skip
