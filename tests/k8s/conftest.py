"""Where tests of Kubernetes run: on the fake API server always, on a real cluster when asked.

`pytest -m k8s tests/k8s` with KUBECONFIG set runs the same tests against the cluster of its current
context, as its administrator, each in a namespace of its own (TKNP_K8S_NAMESPACE: in that one,
which is kept). No node has to be there: tests make Nodes without machines. A context or server
whose name speaks of production is refused unless TKNP_K8S_CONTEXT names that context.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from kubernetes import config as kubernetes_config
from kubernetes.client import ApiException

HERE = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "k8s: runs on the cluster of KUBECONFIG, `make test-k8s`")
    if _asked_for(config):
        config.option.reportchars += "s"  # why a test of a real cluster was left out


def _asked_for(config: pytest.Config) -> bool:
    """Whether `-m` asks for the tests of a real cluster."""
    return "k8s" in config.getoption("markexpr").replace("not k8s", "")


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


@pytest.fixture(scope="session")
def fake_kubernetes() -> ModuleType:
    """The package of the fake API server."""
    return _package("tknp_fake_kubernetes", HERE / "fake")


@pytest.fixture(scope="session")
def node_package() -> ModuleType:
    """The package of the kubelet."""
    return _package("tknp_fake_node", HERE / "node")


@pytest.fixture(scope="session")
def clusters() -> ModuleType:
    """The package of clusters, accounts, machines and scenes."""
    return _package("tknp_test_clusters", HERE / "clusters")


@pytest.fixture(scope="module")
def bare_cluster(
    fake_kubernetes: ModuleType, clusters: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """A fake API server with nothing in it."""
    with fake_kubernetes.FakeServer() as server:
        path = tmp_path_factory.mktemp("kube") / "config"
        path.write_text(server.kubeconfig())
        api = kubernetes_config.new_client_from_config(str(path))
        yield clusters.Cluster(path, api, server)
        api.close()


@pytest.fixture(scope="module")
def fake_cluster(bare_cluster: Any, clusters: ModuleType) -> Iterator[Any]:
    """A fake API server with this project's CRDs."""
    with clusters.prepared(bare_cluster) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def real_cluster(request: pytest.FixtureRequest, clusters: ModuleType) -> Iterator[Any]:
    """The cluster of KUBECONFIG."""
    if not _asked_for(request.config):
        pytest.skip("asked for by `-m k8s` only")
    with clusters.prepared(clusters.real()) as cluster:
        yield cluster


@pytest.fixture(scope="module", params=["fake", pytest.param("real", marks=pytest.mark.k8s)])
def cluster(request: pytest.FixtureRequest) -> Any:
    """The fake and, with `-m k8s` and KUBECONFIG, the real cluster."""
    return request.getfixturevalue(f"{request.param}_cluster")


@pytest.fixture
def namespace(cluster: Any, clusters: ModuleType) -> Iterator[str]:
    """A namespace for one test."""
    with clusters.namespace(cluster) as name:
        yield name


@pytest.fixture
def collecting(cluster: Any) -> None:
    """Only where somebody collects what has lost its owner."""
    if not cluster.collects:
        pytest.skip("no garbage collector is at work: kube-controller-manager doesn't run")


@pytest.fixture
def maps(cluster: Any) -> Any:
    """ConfigMaps."""
    return cluster.resource("v1", "ConfigMap")


@pytest.fixture
def pods(cluster: Any) -> Any:
    """Pods."""
    return cluster.resource("v1", "Pod")


@pytest.fixture(scope="module")
def things(cluster: Any, clusters: ModuleType) -> Iterator[Any]:
    """A kind of the tests' own."""
    with clusters.things(cluster) as resource:
        yield resource


@pytest.fixture(scope="session")
def a_map() -> Callable[..., dict[str, Any]]:
    """`a_map("name", key="value")`: a ConfigMap."""

    def make(name: str, **data: str) -> dict[str, Any]:
        return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}

    return make


@pytest.fixture(scope="session")
def pod_spec() -> dict[str, Any]:
    """Of a pod that no scheduler finds a node for."""
    ports = [{"name": "grpc", "containerPort": 50051}]
    return {"nodeSelector": {"tknp-test": "nowhere"},
            "containers": [{"name": "main", "image": "none", "ports": ports}]}  # fmt: skip


@pytest.fixture(scope="session")
def status_of() -> Callable[[Callable[[], Any]], tuple[int, str]]:
    """`status_of(call)`: code and reason of the refusal of `call`."""

    def ask(call: Callable[[], Any]) -> tuple[int, str]:
        with pytest.raises(ApiException) as raised:
            call()
        return raised.value.status, json.loads(raised.value.body)["reason"]

    return ask


@pytest.fixture(scope="session")
def started(clusters: ModuleType) -> Callable[..., Any]:
    """`with started(kubeconfig, log, "--flag", ...) as process:` the operator's own process."""

    @contextlib.contextmanager
    def start(kubeconfig: Path, log: Path, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
        program = str(Path(sys.executable).parent / "tknp-operator")
        command = [program, "--kubeconfig", str(kubeconfig), "--metrics-port", "0", *flags]
        with open(log, "ab") as file:
            process = subprocess.Popen(command, stdout=file, stderr=file)
        yield process
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    return start


@pytest.fixture
def operator(
    fake_cluster: Any, clusters: ModuleType, started: Callable[..., Any], tmp_path: Path
) -> Iterator[Any]:
    """The operator, outside of the cluster, with the rights of its account there."""
    with clusters.namespace(fake_cluster) as system:
        clusters.grant(fake_cluster, system, {})
        kubeconfig = clusters.kubeconfig_of(fake_cluster, system, tmp_path)
        with started(kubeconfig, tmp_path / "operator.log") as process:
            yield process


@pytest.fixture
def machines(
    fake_cluster: Any, node_package: ModuleType, clusters: ModuleType, tmp_path: Path
) -> Iterator[Callable[..., Any]]:
    """`machines("a", "b")`: Nodes of the fake cluster, and the running kubelet of them all."""
    running = []

    def start(*names: str) -> Any:
        for name in names:
            fake_cluster.core.create_node({"metadata": {"name": name}})
            clusters.tell_node(fake_cluster, name, ready=True)
        directory = tmp_path / "kubelet"
        directory.mkdir()
        kubelet = node_package.Kubelet(fake_cluster.api, directory, list(names))
        running.append(kubelet.__enter__())
        fake_cluster.fake.logs = kubelet.logs
        return kubelet

    yield start
    for kubelet in running:
        kubelet.__exit__(None, None, None)
        for name in kubelet.nodes:
            fake_cluster.core.delete_node(name)


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


@pytest.fixture
def scene(
    fake_cluster: Any, clusters: ModuleType, machines: Callable[..., Any],
    tiny_service: Callable[..., Any], tmp_path: Path,
) -> Iterator[Callable[..., Any]]:  # fmt: skip
    """`scene("a", "b", ...)`: nodes so named, and the service `demo` applied in a namespace.

    Keywords go to `tiny_service`.
    """
    made = []

    def make(*nodes: str, **values: Any) -> Any:
        namespace = f"scene-{uuid.uuid4().hex[:6]}"
        fake_cluster.core.create_namespace({"metadata": {"name": namespace}})
        found = clusters.Scene(fake_cluster, machines(*nodes), namespace, tmp_path)
        body = tiny_service("demo", namespace, **values)
        fake_cluster.services.create(body=body, namespace=namespace)
        made.append(found)
        return found

    yield make
    for found in made:
        found.cluster.core.delete_namespace(found.namespace)


@pytest.fixture(scope="session")
def service_object() -> Callable[..., dict[str, Any]]:
    """`service_object("demo", "ns", nodes=2)`: a service on CPU without gateway.

    `change`: called with the spec before it is returned. `paused`: no operator touches it.
    """

    def make(
        name: str, namespace: str, nodes: int = 2,
        change: Callable[[Any], object] = lambda _: None, *, paused: bool = False,
    ) -> dict[str, Any]:  # fmt: skip
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
        metadata: dict[str, Any] = {"name": name, "namespace": namespace}
        if paused:
            metadata["annotations"] = {"tknp.io/paused": "true"}
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
