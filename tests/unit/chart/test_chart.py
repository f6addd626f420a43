"""The chart renders to objects that Kubernetes takes, and refuses values that can't be right."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from helm_python import Chart, lint
from helm_python.errors import HelmError

from tknp_operator.cluster.rights import RIGHTS

ROOT = Path(__file__).parents[3]
CHART = ROOT / "charts" / "tknp"
OTHERS = ("tknp.io/v1alpha1", "monitoring.coreos.com/v1")
SERVICE: dict[str, Any] = {
    "enabled": True,
    "spec": {"model": {"source": {"builtin": "smollm2"}}, "decode": {"nodes": 2, "device": "cpu"}},
}
GPU: dict[str, Any] = {
    "enabled": True,
    "spec": {
        "model": {"source": {"pvc": {"claimName": "models"}}, "shape": "llama-3.1-405b"},
        "decode": {"nodes": 4, "tensorParallel": 8, "gpuProducts": ["H100"], "spareNodes": 1},
        "prefill": {"replicas": 2, "tensorParallel": 8},
    },
}
RACK: dict[str, Any] = {
    "enabled": True,
    "spec": {
        "model": {"source": {"pvc": {"claimName": "models"}}},
        "decode": {"nodes": 8, "copies": 2, "tensorParallel": 4, "gpuProducts": ["GB200"]},
        "topology": {"computeDomain": True, "rdmaResource": "rdma/ib"},
    },
}
LOAD = {"enabled": True, "target": "grpc://demo-coordinator:50051", "traceConfigMap": "t",
        "resultsClaim": "r"}  # fmt: skip
ON = {"podMonitor": {"enabled": True}, "rules": {"enabled": True, "runbooks": "https://x.io/"}}
VALUES: dict[str, dict[str, Any]] = {
    "default": {},
    "cpu": yaml.safe_load((CHART / "values-cpu.yaml").read_text()),
    "h100": {"service": GPU},
    "gb200": {"service": RACK, "imagePullSecrets": [{"name": "registry"}]},
    "namespaced": {"operator": {"watchNamespace": "ns"}, "service": SERVICE},
    "everything": {"monitoring": ON, "crds": {"upgrade": True}, "service": SERVICE, "load": LOAD},
    "nothing": {
        "operator": {"enabled": False}, "networkPolicy": {"enabled": False},
        "monitoring": {"dashboards": {"enabled": False}},
    },
}  # fmt: skip
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"operators": {}}, "operators"),
    ({"operator": {"replicas": 0}}, "replicas"),
    ({"operator": {"replicas": "two"}}, "replicas"),
    ({"operator": {"image": {"pullPolicy": "Sometimes"}}}, "pullPolicy"),
    ({"operator": {"image": {"repository": ""}}}, "repository"),
    ({"operator": {"logLevel": "loud"}}, "logLevel"),
    ({"operator": {"watchNamespace": "Not A Name"}}, "watchNamespace"),
    ({"operator": {"tolerations": {"key": "x"}}}, "tolerations"),
    ({"operator": {"serviceAccount": {"create": False}}}, "operator.serviceAccount.name"),
    ({"imagePullSecrets": ["registry"]}, "imagePullSecrets"),
    ({"imagePullSecrets": [{}]}, "imagePullSecrets"),
    ({"nameOverride": "UPPER"}, "nameOverride"),
    ({"crds": {"upgrade": "yes"}}, "upgrade"),
    ({"crds": {"upgrade": True}, "operator": {"enabled": False}}, "operator.enabled"),
    ({"service": {"enabled": True}}, "service.spec.model"),
    ({"service": {"enabled": True, "spec": {"model": {"name": "m"}}}}, "service.spec.decode"),
    ({"service": {"enabled": True, "name": "a" * 40}}, "name"),
    ({"service": {**SERVICE, "spec": {**SERVICE["spec"], "decode": {"nodes": 3, "copies": 2}}}},
     "make it even"),
    ({"service": SERVICE, "operator": {"watchNamespace": "other"}}, "operator.watchNamespace"),
    ({"service": {**SERVICE, "name": "7b"}}, "set service.name"),
    ({"service": {**SERVICE, "spec": {**SERVICE["spec"], "decode": {"device": "cpu"}}}},
     "service.spec.decode.nodes"),
    ({"networkPolicy": {"enabled": False, "gatewayFrom": [{"podSelector": {}}]}},
     "networkPolicy.enabled"),
    ({"load": {**LOAD, "pool": "demo", "target": "http://demo-gateway:8000"}},
     "leave load.pool out"),
    ({"load": {**LOAD, "tlsSecret": "mine"}}, "set load.pool"),
    ({"monitoring": {"podMonitor": {"pools": [{"ranks": 2}]}}}, "name"),
    ({"networkPolicy": {"gatewayFrom": "everybody"}}, "gatewayFrom"),
    ({"monitoring": {"podMonitor": {"enabled": "auto"}}}, "enabled"),
    ({"monitoring": {"podMonitor": {"interval": "often"}}}, "interval"),
    ({"load": {"enabled": True}}, "load.target"),
    ({"load": {**LOAD, "target": "demo:50051"}}, "target"),
    ({"load": {**LOAD, "resultsClaim": ""}}, "load.resultsClaim"),
    ({"load": {**LOAD, "pods": 0}}, "pods"),
]  # fmt: skip
Render = Callable[..., list[dict[str, Any]]]


def pods(objects: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for obj in objects:
        if obj["kind"] == "Pod":
            yield obj["metadata"]["name"], obj["spec"]
        elif obj["kind"] in ("Deployment", "Job"):
            yield obj["metadata"]["name"], obj["spec"]["template"]["spec"]


def test_lint_is_content() -> None:
    report = lint(CHART, strict=True)
    assert report["errors"] == []
    assert all(message["severity"] < 2 for message in report["messages"])


@pytest.mark.parametrize("name", VALUES)
def test_kubernetes_takes_every_object(render: Render, name: str) -> None:
    objects = render(VALUES[name])
    for obj in objects:
        if obj["apiVersion"] not in OTHERS:
            for version in ("1.31", "1.36"):
                kubernetes_validate.validate(obj, version, strict=True)
    assert len({(o["kind"], o["metadata"]["name"]) for o in objects}) == len(objects)
    assert bool(objects) == (name != "nothing")


@pytest.mark.parametrize("name", ["cpu", "h100", "gb200", "everything"])
def test_services_keep_the_schema_of_the_crd(render: Render, name: str) -> None:
    crd = yaml.safe_load((CHART / "crds" / "tknp.io_tokenparallelservices.yaml").read_text())
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    (service,) = (o for o in render(VALUES[name]) if o["kind"] == "TokenParallelService")
    jsonschema.validate(service["spec"], schema)
    from tknp_operator.api.service import parse

    wanted = "engine" if service["spec"]["decode"].get("device") == "cpu" else "cuda"
    assert parse(service).spec.image == f"tknp/{wanted}:0.1.0"


@pytest.mark.parametrize(("values", "named"), WRONG)
def test_wrong_values_are_refused_by_name(
    render: Render, values: dict[str, Any], named: str
) -> None:
    with pytest.raises(HelmError) as refused:
        render(values)
    assert named in str(refused.value).replace("/", ".")


@pytest.mark.parametrize("name", VALUES)
def test_pods_can_do_no_harm(render: Render, name: str) -> None:
    for pod, spec in pods(render(VALUES[name])):
        assert spec["securityContext"]["runAsNonRoot"] is True, pod
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, pod
        for container in spec["containers"]:
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"] is True, pod
            assert security["allowPrivilegeEscalation"] is False, pod
            assert security["capabilities"] == {"drop": ["ALL"]}, pod
            assert container["resources"]["limits"]["memory"], pod


@pytest.mark.parametrize("namespace", ["", "ns"])
def test_the_chart_grants_what_the_operator_says_it_does(render: Render, namespace: str) -> None:
    """Whether it does that is shown on an API server, in tests/k8s/test_rights.py."""
    values = {"operator": {"watchNamespace": namespace}, "crds": {"upgrade": True}}
    granted = {
        (group, resource, verb)
        for role in render(values) if role["kind"] in ("Role", "ClusterRole")
        for rule in role["rules"] for group in rule["apiGroups"]
        for resource in rule["resources"] for verb in rule["verbs"]
    }  # fmt: skip
    said = {(right.group, right.resource, verb) for right in RIGHTS for verb in right.verbs}
    assert granted == said


def test_one_namespace_needs_no_more_than_nodes_of_the_cluster(render: Render) -> None:
    objects = render(VALUES["namespaced"])
    (role,) = (o for o in objects if o["kind"] == "ClusterRole")
    assert role["rules"] == [{"apiGroups": [""], "resources": ["nodes"],
                              "verbs": ["list", "watch"]}]  # fmt: skip


def test_two_releases_share_no_name(render: Render) -> None:
    cluster_wide = ("ClusterRole", "ClusterRoleBinding")
    names = [
        {(o["kind"], o["metadata"]["name"]) for o in render(VALUES["everything"], *release)
         if o["kind"] in cluster_wide}
        for release in (("a", "x"), ("a", "y"), ("b", "x"))
    ]  # fmt: skip
    assert len(set.union(*names)) == sum(map(len, names))
    here = [
        {(o["kind"], o["metadata"]["name"]) for o in render({"service": SERVICE}, name)}
        for name in ("a", "b")
    ]
    assert not here[0] & here[1]


def test_selectors_meet_their_pods(render: Render) -> None:
    objects = render({})
    (deployment,) = (o for o in objects if o["kind"] == "Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"].items()
    for obj in objects:
        if obj["kind"] in ("PodDisruptionBudget", "Deployment"):
            assert obj["spec"]["selector"]["matchLabels"].items() <= labels
    (policy,) = (o for o in objects if o["metadata"]["name"].endswith("-operator")
                 and o["kind"] == "NetworkPolicy")  # fmt: skip
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels


def test_rules_and_dashboards_are_those_of_the_files(render: Render) -> None:
    objects = render(VALUES["everything"])
    (rules,) = (o for o in objects if o["kind"] == "PrometheusRule")
    plain = yaml.safe_load((CHART / "alerts" / "tknp.yaml").read_text())
    assert [g["name"] for g in rules["spec"]["groups"]] == [g["name"] for g in plain["groups"]]
    links = [r["annotations"]["runbook_url"] for g in rules["spec"]["groups"]
             for r in g["rules"] if "alert" in r]  # fmt: skip
    assert links
    assert all(link.startswith("https://x.io/docs/runbooks/") for link in links)
    boards = [o for o in objects if o["kind"] == "ConfigMap"]
    found = {key for o in boards for key in o["data"]}
    assert found == {path.name for path in (CHART / "dashboards").glob("*.json")}
    assert all(o["metadata"]["labels"]["grafana_dashboard"] == "1" for o in boards)


def test_notes_say_what_to_run_next(chart: Chart) -> None:
    texts = chart.render({"service": SERVICE}, name="demo", namespace="ns")
    (notes,) = (text for path, text in texts.items() if path.endswith("NOTES.txt"))
    for words in ("wait tps/demo", "svc/demo-gateway", "demo-api-keys", "helm -n ns test demo"):
        assert words in notes
    bare = {**SERVICE, "spec": {**SERVICE["spec"], "gateway": {"enabled": False}}}
    values = {"service": bare, "operator": {"enabled": False}}
    texts = chart.render(values, name="demo", namespace="ns")
    (notes,) = (text for path, text in texts.items() if path.endswith("NOTES.txt"))
    assert "demo-coordinator.ns.svc:50051" in notes
    assert "no operator" in notes
    assert "helm -n ns test" not in notes
    assert "svc/demo-gateway" not in notes


@pytest.mark.skipif(not shutil.which("hadolint", path=Path(sys.executable).parent),
                    reason="hadolint is not installed")  # fmt: skip
def test_container_files_are_clean() -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    done = subprocess.run([hadolint, ROOT / "containers" / "Dockerfile"], capture_output=True,
                          text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout
