"""Node objects are read as Kubernetes and NVIDIA's feature discovery write them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from tknp_operator.api.spec import Spec
from tknp_operator.placement.hosts import quantity, read_host, read_hosts, tolerates
from tknp_operator.placement.products import allowed, product_class, product_name

MakeNode = Callable[..., dict[str, Any]]
MakeSpec = Callable[..., Spec]
NOW = datetime(2026, 1, 1, 0, 0, 20, tzinfo=UTC)  # 20 s after nodes last changed


@pytest.mark.parametrize(
    ("label", "family", "name"),
    [
        ("NVIDIA-GB200", "GB200", "GB200"),
        ("NVIDIA-B200", "B200", "B200"),
        ("NVIDIA-GH200-480GB", "GH200", "GH200 480GB"),
        ("NVIDIA-H200", "H200", "H200"),
        ("NVIDIA-H100-80GB-HBM3", "H100", "H100 80GB"),
        ("NVIDIA-H100-PCIe", "H100", "H100 PCIE"),
        ("NVIDIA-H100-NVL", "H100", "H100 NVL"),
        ("NVIDIA-A100-SXM4-40GB", "A100", "A100 40GB"),
        ("NVIDIA-A100-SXM4-80GB", "A100", "A100 80GB"),
        ("Tesla-V100-SXM2-16GB", "TESLA-V100-SXM2-16GB", "TESLA-V100-SXM2-16GB 16GB"),
    ],
)
def test_products_have_a_family_and_a_form(label: str, family: str, name: str) -> None:
    assert product_class(label) == family
    assert product_name({"nvidia.com/gpu.product": label}) == name


@pytest.mark.parametrize(
    ("label", "wanted", "is_it"),
    [
        ("NVIDIA-GB200", "GB200", True),
        ("NVIDIA-GB200", "B200", False),
        ("NVIDIA-B200", "b200", True),
        ("NVIDIA-H100-PCIe", "H100", True),
        ("NVIDIA-H100-PCIe", "NVIDIA-H100-PCIe", True),
        ("NVIDIA-H100-80GB-HBM3", "PCIe", False),
        ("NVIDIA-GH200-480GB", "H200", False),
        ("", "H100", False),
    ],
)
def test_users_name_a_family_or_a_part(label: str, wanted: str, *, is_it: bool) -> None:
    assert allowed(label, wanted) is is_it


def test_a_host_of_eight_is_two_slots_of_four_less_what_others_have(
    make_node: MakeNode, make_spec: MakeSpec
) -> None:
    node = make_node("a", gpus=8)
    assert [read_host(node, make_spec(), used).slots for used in (0, 1, 4, 5, 8)] == [2, 1, 1, 0, 0]
    assert read_host(node, make_spec(tensorParallel=8)).slots == 1
    full = read_host(node, make_spec(), 5)
    assert full.unusable == "has fewer than 4 free nvidia.com/gpu"
    assert full.memory_bytes == 81_559 << 20


def test_rdma_bounds_slots_too(make_node: MakeNode, make_spec: MakeSpec) -> None:
    spec = make_spec(topology={"rdmaResource": "rdma/ib"})
    assert read_host(make_node("a", gpus=8, rdma=4), spec).slots == 1
    assert read_host(make_node("a", gpus=8), spec).unusable == "has fewer than 4 rdma/ib"


def test_topology_is_read_from_the_labels_that_the_spec_names(
    make_node: MakeNode, make_spec: MakeSpec
) -> None:
    node = make_node("a", clique="u.1", rack="r", rail="7", zone="z")
    plain = read_host(node, make_spec())
    assert (plain.domain, plain.rack, plain.rail) == ("u.1", "r", "")
    own = make_spec(topology={"rackLabel": "zone", "railLabel": "rail", "nvlinkDomainLabel": "no"})
    host = read_host(node, own)
    assert (host.domain, host.rack, host.rail) == ("", "z", "7")


UNUSABLE: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
    # node, spec, part of the reason, what becomes of nodes of the pool that are there
    ({}, {}, "", "yes"),
    ({"deleting": True}, {}, "is being deleted", "no"),
    ({"ready": "False"}, {}, "is not Ready", "yes"),
    ({"ready": "Unknown"}, {"timeouts": {"nodeLostSeconds": 20}}, "is not Ready", "no"),
    ({"ready": "Unknown", "taints": ("node.kubernetes.io/unreachable::NoExecute",)}, {},
     "is not Ready", "yes"),
    ({"cordoned": True}, {}, "is cordoned", "until replaced"),
    ({"taints": ("gpu:x:NoSchedule",)}, {}, "has the taint gpu:NoSchedule", "until replaced"),
    ({"taints": ("gpu:x:PreferNoSchedule",)}, {}, "", "yes"),
    ({"taints": ("gpu:x:NoExecute",)}, {}, "has the taint gpu:NoExecute", "no"),
    ({"taints": ("gpu:x:NoExecute",), "cordoned": True}, {}, "has the taint gpu:NoExecute", "no"),
    ({"taints": ("gpu:x:NoSchedule",)},
     {"scheduling": {"tolerations": [{"key": "gpu", "operator": "Exists"}]}}, "", "yes"),
    ({}, {"scheduling": {"nodeSelector": {"pool": "a"}}}, "lacks the label pool=a", "no"),
    ({"pool": "a"}, {"scheduling": {"nodeSelector": {"pool": "a"}}}, "", "yes"),
    ({}, {"gpuProducts": ["GB200", "B200"]}, "has NVIDIA-H100-80GB-HBM3 GPUs, not GB200 or", "no"),
    ({"product": "NVIDIA-H100-80GB-HBM3-MIG-1g.10gb"}, {}, "divides its GPUs by MIG", "no"),
    ({"nvidia.com/gpu.sharing-strategy": "time-slicing"}, {}, "shares its GPUs by time-sl", "no"),
    ({"gpus": 0}, {}, "has fewer than 4 free nvidia.com/gpu", "no"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "asked", "reason", "stays"), UNUSABLE)
def test_a_host_says_why_it_is_not_usable_and_whether_nodes_may_stay(
    make_node: MakeNode, make_spec: MakeSpec, given: dict[str, Any], asked: dict[str, Any],
    reason: str, stays: str,
) -> None:  # fmt: skip
    host = read_host(make_node("a", **given), make_spec(**asked), now=NOW)
    assert host.unusable.startswith(reason)
    assert bool(host.unusable) == bool(reason)
    assert host.stays == stays


def test_without_a_clock_a_node_that_is_not_ready_is_lost(
    make_node: MakeNode, make_spec: MakeSpec
) -> None:
    assert read_host(make_node("a", ready="False"), make_spec()).stays == "no"


def test_cpu_hosts_hold_what_they_have_room_for(make_node: MakeNode, make_spec: MakeSpec) -> None:
    node = make_node("a", gpus=0, cpu="7910m", memory="32Gi")
    assert read_host(node, make_spec(device="cpu")).slots > 1
    asked = {"requests": {"cpu": "2", "memory": "4Gi"}}
    assert read_host(node, make_spec(device="cpu", resources=asked)).slots == 3
    asked = {"requests": {"cpu": 1, "memory": "20Gi"}}
    assert read_host(node, make_spec(device="cpu", resources=asked)).slots == 1
    asked = {"requests": {"memory": "64Gi"}}
    short = read_host(node, make_spec(device="cpu", resources=asked))
    assert short.unusable == "has fewer than 64Gi memory"


@pytest.mark.parametrize(
    ("toleration", "does"),
    [
        ({"operator": "Exists"}, True),
        ({"key": "k", "operator": "Exists"}, True),
        ({"key": "k", "value": "v"}, True),
        ({"key": "k", "value": "w"}, False),
        ({"key": "k"}, False),
        ({"key": "j", "operator": "Exists"}, False),
        ({"key": "k", "value": "v", "effect": "NoExecute"}, False),
        ({"key": "k", "value": "v", "effect": "NoSchedule"}, True),
    ],
)
def test_tolerations_are_those_of_kubernetes(toleration: dict[str, str], *, does: bool) -> None:
    assert tolerates(toleration, {"key": "k", "value": "v", "effect": "NoSchedule"}) is does


@pytest.mark.parametrize(
    ("text", "number"),
    [("500m", 0.5), ("16Gi", 16 * 2**30), (3, 3), ("1e3", 1000), ("2k", 2000), ("1E", 1e18),
     ("lots", 0), ("", 0)],
)  # fmt: skip
def test_quantities(text: object, number: float) -> None:
    assert quantity(text) == number


def test_hosts_come_in_order_of_name(make_node: MakeNode, make_spec: MakeSpec) -> None:
    nodes = [make_node(name) for name in "cab"]
    assert [h.name for h in read_hosts(nodes, make_spec(), {})] == ["a", "b", "c"]
    used = read_hosts(nodes, make_spec(), {"b": 1})
    assert [h.slots for h in used] == [1, 0, 1]
