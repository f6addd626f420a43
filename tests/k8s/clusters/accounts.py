"""The operator's account: its rights as the chart grants them, and a kubeconfig of it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from helm_python import Chart, Config
from kubernetes.client import ApiException

from .cluster import CHART, Cluster

_RIGHTS = ("ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding")
RELEASE = "tknp"


@contextlib.contextmanager
def install(cluster: Cluster, namespace: str, values: dict[str, Any]) -> Iterator[str]:
    """The chart, installed by Helm until left; its NOTES.

    Releases are kept in memory: a fake server can't read what Helm writes its own Secret with.
    """
    settings = {"kubeconfig_path": str(cluster.kubeconfig), "namespace": namespace}
    with Config(storage_driver="memory", **settings) as helm:
        release = helm.install(CHART, RELEASE, values, namespace=namespace)
        try:
            yield str(release["notes"])
        finally:
            helm.uninstall(RELEASE)


def grant(cluster: Cluster, namespace: str, values: dict[str, Any]) -> None:
    """Only what the chart grants, of the same names as in `install`; for good."""
    with Chart.load(CHART) as chart:
        files = chart.render(values, name=RELEASE, namespace=namespace)
    for path, text in files.items():
        for obj in yaml.safe_load_all(text) if path.endswith(".yaml") else ():
            if obj and obj["kind"] in _RIGHTS:
                resource = cluster.resource(obj["apiVersion"], obj["kind"])
                with contextlib.suppress(ApiException):  # it is there already
                    resource.create(body=obj, namespace=obj["metadata"].get("namespace"))


def kubeconfig_of(cluster: Cluster, namespace: str, directory: Path) -> Path:
    """A kubeconfig of the operator's account in `namespace`."""
    name = f"{RELEASE}-operator"
    made = cluster.core.create_namespaced_service_account_token(
        name, namespace, {"spec": {"audiences": [], "expirationSeconds": 3600}}
    )
    settings = cluster.api.configuration
    server: dict[str, Any] = {"server": settings.host}
    if settings.ssl_ca_cert:
        server["certificate-authority"] = str(settings.ssl_ca_cert)
    if not settings.verify_ssl:
        server["insecure-skip-tls-verify"] = True
    if settings.tls_server_name:
        server["tls-server-name"] = settings.tls_server_name
    path = directory / f"{name}.kubeconfig"
    path.write_text(json.dumps({
        "apiVersion": "v1", "kind": "Config", "current-context": name,
        "clusters": [{"name": name, "cluster": server}],
        "users": [{"name": name, "user": {"token": made.status.token}}],
        "contexts": [{"name": name, "context": {"cluster": name, "user": name}}],
    }))  # fmt: skip
    return path
