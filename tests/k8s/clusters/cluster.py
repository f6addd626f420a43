"""A cluster under test, the fake one or that of KUBECONFIG.

A real one may have no nodes, no scheduler and no controllers, and somebody else's operator may be
at work in it. What tests make there they take away again.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client, config, dynamic
from kubernetes.client import ApiException

CHART = Path(__file__).parents[3] / "charts" / "tknp"
_PRODUCTION = re.compile(r"(^|[^a-z])(prod|production|live)([^a-z]|$)")
_SETTLED_S, _COLLECTED_S = 15.0, 30.0
MERGE = "application/merge-patch+json"


@dataclass
class Cluster:
    """`kubeconfig`: of an administrator. `fake`: the server object of the fake one, else None.

    `gives_accounts`: whether a namespace gets the account of its pods by itself.
    """

    kubeconfig: Path
    api: client.ApiClient
    fake: Any = None
    gives_accounts: bool = True
    resources: dict[tuple[str, str], Any] = field(default_factory=dict)

    @property
    def core(self) -> client.CoreV1Api:
        return client.CoreV1Api(self.api)

    @property
    def services(self) -> Any:
        """TokenParallelServices."""
        return self.resource("tknp.io/v1alpha1", "TokenParallelService")

    def resource(self, api_version: str, kind: str) -> Any:
        """A resource of the dynamic client, which sends what it is given; kept once discovered."""
        key = api_version, kind
        if key not in self.resources:
            cache = Path(tempfile.gettempdir()) / f"tknp-test-{os.getpid()}-{uuid.uuid4().hex}"
            found = dynamic.DynamicClient(self.api, cache_file=str(cache)).resources
            self.resources[key] = found.get(api_version=api_version, kind=kind)
            cache.unlink(missing_ok=True)
        return self.resources[key]

    @cached_property
    def collects(self) -> bool:
        """Whether somebody deletes what has lost its owner, as kube-controller-manager does."""
        if self.fake is not None:
            return True
        owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": "nobody", "uid": "nobody"}
        name = f"tknp-test-{uuid.uuid4().hex[:8]}"
        body = {"metadata": {"name": name, "ownerReferences": [owner]}}
        self.core.create_namespaced_config_map("default", body)
        ends_s = time.monotonic() + _COLLECTED_S
        while time.monotonic() < ends_s:
            try:
                self.core.read_namespaced_config_map(name, "default")
            except ApiException as error:
                if error.status == 404:
                    return True
                raise
            time.sleep(0.5)
        self.core.delete_namespaced_config_map(name, "default")
        return False


def real() -> Cluster:
    """The cluster of KUBECONFIG, unless it looks like one that people depend on."""
    path = os.environ.get("KUBECONFIG")
    if not path:
        pytest.skip("KUBECONFIG is not set")
    _, context = config.list_kube_config_contexts(path)
    api = config.new_client_from_config(path)
    names = f"{context['name']} {context['context']['cluster']} {api.configuration.host}".lower()
    allowed = os.environ.get("TKNP_K8S_CONTEXT")
    if _PRODUCTION.search(names) and allowed != context["name"]:
        pytest.fail(f"{names} looks like production; set TKNP_K8S_CONTEXT={context['name']}")
    return Cluster(Path(path), api)


@contextlib.contextmanager
def prepared(cluster: Cluster) -> Iterator[Cluster]:
    """With this project's CRDs: those that are there, else the chart's until left."""
    crds, made = client.ApiextensionsV1Api(cluster.api), []
    for file in sorted((CHART / "crds").glob("*.yaml")):
        body = yaml.safe_load(file.read_text())
        name = body["metadata"]["name"]
        try:
            crds.create_custom_resource_definition(body)
            made.append(name)
        except ApiException as error:
            if error.status != 409:
                raise
        _settle(lambda name=name: _established(crds, name))
    yield cluster
    if cluster.fake is None:
        for name in made:
            crds.delete_custom_resource_definition(name)


def _established(crds: client.ApiextensionsV1Api, name: str) -> bool:
    conditions = (crds.read_custom_resource_definition(name).status or {}).conditions or ()
    return any(c.type == "Established" and c.status == "True" for c in conditions)


@contextlib.contextmanager
def namespace(cluster: Cluster) -> Iterator[str]:
    """A namespace for one test, with the account that pods run under.

    TKNP_K8S_NAMESPACE: that one of a real cluster, which is kept.
    """
    given = os.environ.get("TKNP_K8S_NAMESPACE") if cluster.fake is None else None
    name = given or f"tknp-test-{uuid.uuid4().hex[:8]}"
    if not given:
        cluster.core.create_namespace({"metadata": {"name": name}})
    if cluster.fake is None:
        if cluster.gives_accounts:
            _settle(lambda: _has_account(cluster, name))
        if not _has_account(cluster, name):  # a server without controllers refuses pods without it
            cluster.gives_accounts = False
            cluster.core.create_namespaced_service_account(name, {"metadata": {"name": "default"}})
    yield name
    if cluster.fake is None:
        empty(cluster, name)
    if not given:
        cluster.core.delete_namespace(name)


def _has_account(cluster: Cluster, namespace: str) -> bool:
    listed = cluster.core.list_namespaced_service_account(namespace).items
    return any(account.metadata.name == "default" for account in listed)


def _settle(done: Any) -> None:
    """Wait for what controllers do, for as long as it may take them."""
    ends_s = time.monotonic() + _SETTLED_S
    while not done() and time.monotonic() < ends_s:
        time.sleep(0.2)


def empty(cluster: Cluster, namespace: str) -> None:
    """Let go of services and pods for which nobody else will: no operator, no kubelet."""
    for service in cluster.services.get(namespace=namespace).items:
        place = {"name": service.metadata.name, "namespace": namespace}
        with contextlib.suppress(ApiException):
            cluster.services.delete(**place)
        with contextlib.suppress(ApiException):
            cluster.services.patch(
                body={"metadata": {"finalizers": None}}, content_type=MERGE, **place
            )
    for pod in cluster.core.list_namespaced_pod(namespace).items:
        with contextlib.suppress(ApiException):
            cluster.core.delete_namespaced_pod(pod.metadata.name, namespace, grace_period_seconds=0)
