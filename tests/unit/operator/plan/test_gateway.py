"""Gateways: their scale, who runs Ray for them, and what that runs, read by Ray's own schema."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tknp.gateway.settings import settings_from_text
from tknp_operator.api.spec import LONGEST_NAME
from tknp_operator.build.gateway import gateway_command
from tknp_operator.build.ray_service import RAY_VERSION, ray_service

CONSTRAINTS = Path(__file__).parents[4] / "constraints.txt"
RAY = frozenset({"RayService"})


def test_replicas_change_the_deployment_and_nothing_else(world: Any) -> None:
    world.settle()
    world.service["spec"]["gateway"] = {"replicas": 3}
    assert world.tick() == ["apply Deployment/s-gateway"]
    assert world.objects["Deployment", "s-gateway"]["spec"]["replicas"] == 3
    assert world.tick() == []
    world.service["spec"]["gateway"] = {"autoscaling": {"minReplicas": 2, "maxReplicas": 5}}
    assert world.tick() == ["apply HorizontalPodAutoscaler/s-gateway", "apply Deployment/s-gateway"]
    assert "replicas" not in world.objects["Deployment", "s-gateway"]["spec"]
    world.service["spec"]["gateway"] = {"replicas": 2}
    assert world.tick() == [
        "apply Deployment/s-gateway",
        "delete HorizontalPodAutoscaler/s-gateway",
    ]
    world.service["spec"]["gateway"] = {"enabled": False}
    assert world.tick() == ["delete Deployment/s-gateway", "delete Service/s-gateway",
                            "delete PodDisruptionBudget/s-gateway"]  # fmt: skip
    assert world.tick() == []
    assert world.service["status"]["epoch"] == 1


def test_prefill_scales_by_its_queue(make_world: Callable[..., Any], spec: dict[str, Any]) -> None:
    spec["prefill"] = {"replicas": 1, "maxReplicas": 3,
                       "autoscaling": {"maxReplicas": 3}}  # fmt: skip
    world = make_world(spec)
    world.settle()
    assert ("HorizontalPodAutoscaler", "s-prefill") in world.objects
    del world.service["spec"]["prefill"]["autoscaling"]
    assert world.tick() == ["delete HorizontalPodAutoscaler/s-prefill"]


def test_streams_wait_for_as_long_as_a_pool_may_start(world: Any) -> None:
    world.service["spec"] |= {"timeouts": {"startSeconds": 900}, "gateway": {"holdSeconds": 60}}
    command = gateway_command(world.parsed())
    flags = dict(zip(command[2::2], command[3::2], strict=False))
    assert flags["--replay-wait-s"] == "900"
    assert flags["--hold-s"] == "60"
    assert command[-1] == "--insecure"


def test_without_kuberay_a_ray_service_is_refused_with_the_remedy(world: Any) -> None:
    world.service["spec"]["gateway"] = {"ray": "rayService"}
    for _ in range(3):
        world.tick()
    assert world.condition("Placed")["message"] == (
        "the cluster serves no RayService: install KubeRay 1.5.1 or newer and restart the "
        "operator, or set gateway.ray standalone"
    )
    assert not world.pods()


def test_kuberay_takes_the_gateways_and_gives_them_back(world: Any) -> None:
    world.served = RAY
    world.settle()
    assert ("Deployment", "s-gateway") in world.objects  # standalone unless asked for
    world.service["spec"]["gateway"] = {"ray": "rayService", "replicas": 2}
    assert world.tick() == [
        "apply Service/s-gateway", "apply NetworkPolicy/s-ray", "apply RayService/s-gateway",
        "delete Deployment/s-gateway", "delete PodDisruptionBudget/s-gateway",
    ]  # fmt: skip
    selector = world.objects["Service", "s-gateway"]["spec"]["selector"]
    assert selector["ray.io/serve"] == "true"
    world.tick()
    assert world.tick() == []
    counted = world.service["status"]["gateway"]
    assert (counted["replicas"], counted["ready"]) == (2, 0)
    world.objects["RayService", "s-gateway"]["status"] = {"numServeEndpoints": 2}
    world.tick()
    assert world.service["status"]["gateway"]["ready"] == 2
    world.service["spec"]["gateway"] = {"replicas": 2}
    assert world.tick() == [
        "apply Service/s-gateway", "apply Deployment/s-gateway",
        "apply PodDisruptionBudget/s-gateway", "delete RayService/s-gateway",
        "delete NetworkPolicy/s-ray",
    ]  # fmt: skip
    assert world.service["status"]["epoch"] == 1


@pytest.mark.parametrize(
    ("gateway", "served", "kind"),
    [
        ({}, RAY, "RayService"), ({}, frozenset(), "Deployment"),
        ({"tlsSecret": "t"}, RAY, "Deployment"),
        ({"autoscaling": {"maxReplicas": 2}}, RAY, "Deployment"),
    ],
)  # fmt: skip
def test_auto_takes_kuberay_where_it_can_do_all_that_is_asked_for(
    world: Any, gateway: dict[str, Any], served: frozenset[str], kind: str
) -> None:
    world.service["spec"]["gateway"] = {"ray": "auto", **gateway}
    world.served = served
    world.settle()
    found = {k for k, name in world.objects if name == "s-gateway"} & {"RayService", "Deployment"}
    assert found == {kind}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_kuberay_is_told_is_what_ray_and_the_gateway_take(world: Any) -> None:
    from ray.serve.schema import ServeDeploySchema

    world.service["spec"]["gateway"] = {"ray": "rayService", "replicas": 3}
    made = ray_service(world.parsed(), "ca")["spec"]
    config = yaml.safe_load(made["serveConfigV2"])
    read = ServeDeploySchema.model_validate(config)
    (application,) = read.applications
    module, _, name = application.import_path.partition(":")
    assert (module, name) == ("tknp.gateway.serve_app", "build")
    settings = settings_from_text(application.args)
    assert (settings.min_replicas, settings.max_replicas) == (3, 3)
    assert settings.pools == ("s-coordinator.ns.svc:50051",)
    assert settings.keys_file
    assert read.http_options.port == settings.http_port
    cluster = made["rayClusterConfig"]
    assert cluster["authOptions"] == {"mode": "token"}
    assert f"ray=={RAY_VERSION}" in CONSTRAINTS.read_text()
    (workers,) = cluster["workerGroupSpecs"]
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"] == 3
    for group in (cluster["headGroupSpec"], workers):
        assert group["template"]["metadata"]["annotations"] == {"tknp.io/ca": "ca"}
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        (container,) = group["template"]["spec"]["containers"]
        assert container["securityContext"]["readOnlyRootFilesystem"]


def test_the_longest_name_leaves_room_for_what_kuberay_appends(world: Any) -> None:
    """KubeRay refuses a RayService whose name has more than 47 characters."""
    world.service["metadata"]["name"] = "s" * LONGEST_NAME
    assert len(ray_service(world.parsed())["metadata"]["name"]) <= 47


def test_ray_is_asked_how_it_is_by_the_kubelet_itself(world: Any) -> None:
    """Probes of KubeRay's own are commands that no image of ours has."""
    cluster = ray_service(world.parsed())["spec"]["rayClusterConfig"]
    (workers,) = cluster["workerGroupSpecs"]
    asked = {}
    for group in (cluster["headGroupSpec"], workers):
        (container,) = group["template"]["spec"]["containers"]
        for name in ("livenessProbe", "readinessProbe"):
            probe = container[name]
            asked[container["name"], name] = probe.get("tcpSocket") or probe["httpGet"]
            assert "exec" not in probe
            assert (probe["periodSeconds"], probe["timeoutSeconds"]) == (5, 3)
            assert probe["failureThreshold"] == (24 if name == "livenessProbe" else 2)
    assert asked == {
        ("ray-head", "livenessProbe"): {"port": 6379},
        ("ray-head", "readinessProbe"): {"port": 6379},
        ("ray-worker", "livenessProbe"): {"port": 52365},
        ("ray-worker", "readinessProbe"): {"path": "/-/healthz", "port": 8000},
    }
