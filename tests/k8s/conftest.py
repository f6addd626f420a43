"""Where tests of Kubernetes run: on the fake API server always, on a real cluster when asked.

`pytest -m k8s tests/k8s` with KUBECONFIG set runs the same tests against the cluster of its current
context, each in a namespace of its own (TKNP_K8S_NAMESPACE: in that one, which is kept). A context
or server whose name speaks of production is refused unless TKNP_K8S_CONTEXT names that context.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from kubernetes import client, config, dynamic

HERE = Path(__file__).parent
CRDS = HERE.parents[1] / "charts" / "tknp" / "crds"
_PRODUCTION = re.compile(r"(^|[^a-z])(prod|production|live)([^a-z]|$)")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "k8s: runs on the cluster of KUBECONFIG, `make test-k8s`")


def _package(name: str, directory: Path) -> ModuleType:
    """Import the package in `directory` as `name`; test folders are no packages themselves."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            name, directory / "__init__.py", submodule_search_locations=[str(directory)]
        )
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@dataclass(frozen=True)
class Cluster:
    """A cluster under test. `fake`: the server object of the fake one, None for a real one."""

    kubeconfig: Path
    api: client.ApiClient
    fake: Any = None
    resources: dict[tuple[str, str], Any] = field(default_factory=dict)

    @property
    def core(self) -> client.CoreV1Api:
        return client.CoreV1Api(self.api)

    def resource(self, api_version: str, kind: str) -> Any:
        """A resource of the dynamic client, which sends what it is given; kept once discovered."""
        key = api_version, kind
        if key not in self.resources:
            resources = dynamic.DynamicClient(self.api).resources
            self.resources[key] = resources.get(api_version=api_version, kind=kind)
        return self.resources[key]


@pytest.fixture(scope="session")
def fake_kubernetes() -> ModuleType:
    """The package of the fake API server."""
    return _package("tknp_fake_kubernetes", HERE / "fake")


@pytest.fixture(scope="module")
def fake_cluster(
    fake_kubernetes: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """A fake API server with this project's CRDs."""
    with fake_kubernetes.FakeServer() as server:
        path = tmp_path_factory.mktemp("kube") / "config"
        path.write_text(server.kubeconfig())
        api = config.new_client_from_config(str(path))
        found = Cluster(path, api, server)
        crds = client.ApiextensionsV1Api(api)
        for file in sorted(CRDS.glob("*.yaml")):
            crds.create_custom_resource_definition(yaml.safe_load(file.read_text()))
        yield found
        api.close()


def _real() -> Cluster:
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


@pytest.fixture(scope="module", params=["fake", pytest.param("real", marks=pytest.mark.k8s)])
def cluster(request: pytest.FixtureRequest) -> Cluster:
    """The fake and, with `-m k8s` and KUBECONFIG, the real cluster."""
    if request.param == "fake":
        fake: Cluster = request.getfixturevalue("fake_cluster")
        return fake
    if "k8s" not in request.config.getoption("markexpr").replace("not k8s", ""):
        pytest.skip("asked for by `-m k8s` only")
    return _real()


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    """A namespace for one test."""
    given = os.environ.get("TKNP_K8S_NAMESPACE")
    if given and cluster.fake is None:
        yield given
        return
    name = f"tknp-test-{uuid.uuid4().hex[:8]}"
    cluster.core.create_namespace({"metadata": {"name": name}})
    yield name
    cluster.core.delete_namespace(name)


@pytest.fixture(scope="session")
def node_package() -> ModuleType:
    """The package of the kubelet."""
    return _package("tknp_fake_node", HERE / "node")


@pytest.fixture
def machines(
    fake_cluster: Cluster, node_package: ModuleType, tmp_path: Path
) -> Iterator[Callable[..., Any]]:
    """`machines("a", "b")`: Nodes of the fake cluster, and the running kubelet of them all."""
    started = []

    def start(*names: str) -> Any:
        for name in names:
            fake_cluster.core.create_node({"metadata": {"name": name}})
            tell_node(fake_cluster, name, ready=True)
        directory = tmp_path / "kubelet"
        directory.mkdir()
        kubelet = node_package.Kubelet(fake_cluster.api, directory, list(names))
        started.append(kubelet.__enter__())
        fake_cluster.fake.logs = kubelet.logs
        return kubelet

    yield start
    for kubelet in started:
        kubelet.__exit__(None, None, None)
        for name in kubelet.nodes:
            fake_cluster.core.delete_node(name)


@pytest.fixture(scope="session", name="tell_node")
def tell_node_fixture() -> Callable[..., None]:
    """`tell_node(cluster, name, ready=False)`."""
    return tell_node


def tell_node(cluster: Cluster, name: str, *, ready: bool, since: str = "") -> None:
    """What the control plane would say of a node: Ready, or not since `since`."""
    condition = {"type": "Ready", "status": str(ready), "reason": "Tests",
                 "lastTransitionTime": since or "2026-01-01T00:00:00Z"}  # fmt: skip
    amounts = {"cpu": "8", "memory": "32Gi", "pods": "110"}
    status = {"conditions": [condition], "capacity": amounts, "allocatable": amounts}
    cluster.core.patch_node_status(name, {"status": status})


@pytest.fixture(scope="session")
def until() -> Callable[..., Any]:
    """`until(condition, why)`: what `condition` gives once that is true; `why()` tells of the rest.

    Waits for a minute, or for `wait_s`.
    """

    def wait(condition: Callable[[], Any], why: Callable[[], str], wait_s: float = 60.0) -> Any:
        ends_s = time.monotonic() + wait_s
        while time.monotonic() < ends_s:
            if found := condition():
                return found
            time.sleep(0.1)
        pytest.fail(f"not within {wait_s:.0f} s: {why()}")

    return wait


@dataclass
class Scene:
    """A service on the fake cluster, its kubelet, and a client inside the cluster."""

    cluster: Cluster
    kubelet: Any
    namespace: str
    directory: Path
    name: str = "demo"

    @property
    def service(self) -> dict[str, Any]:
        """The object as it is now."""
        resource = self.cluster.resource("tknp.io/v1alpha1", "TokenParallelService")
        found: dict[str, Any] = resource.get(name=self.name, namespace=self.namespace).to_dict()
        return found

    def condition(self, kind: str) -> dict[str, Any]:
        """A condition of the service; empty while it has none such."""
        conditions = (self.service.get("status") or {}).get("conditions") or ()
        return next((c for c in conditions if c["type"] == kind), {})

    def pods(self) -> dict[str, bool]:
        """Every pod and whether it is ready."""
        listed = self.cluster.core.list_namespaced_pod(self.namespace).items
        return {
            pod.metadata.name: any(
                c.type == "Ready" and c.status == "True" for c in pod.status.conditions or ()
            )
            for pod in listed
        }

    def all_ready(self) -> bool:
        """Whether there are pods, all of them ready; raises what has ended the kubelet."""
        if self.kubelet.error is not None:
            raise self.kubelet.error
        pods = self.pods()
        return bool(pods) and all(pods.values())

    def logs(self) -> str:
        """The state of things, for a failure's message."""
        tails = [
            f"{r.pod['metadata']['name']}: {r.log.read_text(errors='replace')[-1500:]}"
            for r in list(self.kubelet.running.values())
            if r.log.exists()
        ]
        return "\n".join([str(self.pods()), str(self.service.get("status")), *tails])

    def secret(self, name: str, key: str) -> bytes:
        data = self.cluster.core.read_namespaced_secret(name, self.namespace).data
        return base64.b64decode(data[key])

    def generate(self, prompt: str, tokens: int = 8) -> str:
        """What `tknp generate` answers, run inside the cluster with the API token."""
        for key in ("ca.crt", "api-token"):
            (self.directory / key).write_bytes(self.secret(f"{self.name}-internal", key))
        done = subprocess.run(
            [str(Path(sys.executable).parent / "tknp"), "generate", "--json", "--raw",
             "--target", f"{self.name}-coordinator.{self.namespace}.svc:50051",
             "--tls-ca", str(self.directory / "ca.crt"),
             "--token-file", str(self.directory / "api-token"),
             "--max-tokens", str(tokens), "--ignore-eos", prompt],
            env=dict(self.kubelet.environment), capture_output=True, text=True, check=False,
            timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return str(json.loads(done.stdout)["text"])


@pytest.fixture
def scene(
    fake_cluster: Cluster, machines: Callable[..., Any], tiny_service: Callable[..., Any],
    tmp_path: Path,
) -> Iterator[Callable[..., Scene]]:  # fmt: skip
    """`scene("a", "b", ...)`: nodes so named, and the service `demo` applied in a namespace.

    Keywords go to `tiny_service`.
    """
    made = []

    def make(*nodes: str, **values: Any) -> Scene:
        namespace = f"scene-{uuid.uuid4().hex[:6]}"
        fake_cluster.core.create_namespace({"metadata": {"name": namespace}})
        found = Scene(fake_cluster, machines(*nodes), namespace, tmp_path)
        resource = fake_cluster.resource("tknp.io/v1alpha1", "TokenParallelService")
        resource.create(body=tiny_service("demo", namespace, **values), namespace=namespace)
        made.append(found)
        return found

    yield make
    for found in made:
        found.cluster.core.delete_namespace(found.namespace)


@pytest.fixture
def operator(fake_cluster: Cluster, tmp_path: Path) -> Iterator[Any]:
    """The operator's own process, outside of the cluster; its log is `operator.log`."""
    program = str(Path(sys.executable).parent / "tknp-operator")
    with open(tmp_path / "operator.log", "wb") as log:
        process = subprocess.Popen(
            [program, "--kubeconfig", str(fake_cluster.kubeconfig)], stdout=log, stderr=log
        )
    yield process
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@pytest.fixture(scope="session")
def service_object() -> Callable[..., dict[str, Any]]:
    """`service_object("demo", "ns", nodes=2)`: a service on CPU without gateway.

    `change`: called with the spec before it is returned.
    """

    def make(
        name: str, namespace: str, nodes: int = 2, change: Callable[[Any], object] = lambda _: None
    ) -> dict[str, Any]:
        spec = {
            "image": "tknp:test",
            "model": {"source": {"builtin": "smollm2"}, "name": "tiny", "dtype": "float32"},
            "decode": {"nodes": nodes, "device": "cpu", "kvMemory": "1MiB", "pageSize": 16},
            "prefill": {"replicas": 1, "maxReplicas": 2},
            "gateway": {"enabled": False},
            "drain": {"seconds": 5}, "timeouts": {"stepSeconds": 30, "nodeLostSeconds": 5},
            "observability": {"metrics": False},
        }  # fmt: skip
        change(spec)
        metadata = {"name": name, "namespace": namespace}
        return {"apiVersion": "tknp.io/v1alpha1", "kind": "TokenParallelService",
                "metadata": metadata, "spec": spec}  # fmt: skip

    return make


@pytest.fixture
def tiny_service(
    random_checkpoint: Callable[..., Path], service_object: Callable[..., dict[str, Any]]
) -> Callable[..., dict[str, Any]]:
    """As `service_object`, of a random model on this machine's disk."""

    def make(name: str, namespace: str, **values: Any) -> dict[str, Any]:
        path = random_checkpoint(layers=2, q_heads=4, kv_heads=2)
        made = service_object(name, namespace, **values)
        made["spec"]["model"]["source"] = {"hostPath": {"path": str(path)}}
        return made

    return make
