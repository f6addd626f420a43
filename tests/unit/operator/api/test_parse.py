"""Samples are accepted by schema and parser alike; wrong objects are refused with a remedy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tknp.errors import InvalidValue
from tknp_operator.api.crd import spec_schema
from tknp_operator.api.docs import CPU_SAMPLE, GPU_SAMPLE
from tknp_operator.api.service import parse

Change = Callable[..., dict[str, Any]]


@pytest.mark.parametrize("sample", [CPU_SAMPLE, GPU_SAMPLE])
def test_samples_of_the_page_are_right(sample: str) -> None:
    page = (Path(__file__).parents[4] / "docs/tokenparallelservice.md").read_text()
    assert sample in page
    obj = yaml.safe_load(sample)
    jsonschema.validate(obj["spec"], spec_schema())
    obj["metadata"]["namespace"] = "default"
    assert parse(obj).name == obj["metadata"]["name"]


def test_defaults_of_the_parser_are_those_of_the_schema(changed: Change) -> None:
    def filled(value: Any, schema: dict[str, Any]) -> Any:
        if "properties" not in schema:
            return value
        value = dict(value)
        for name, field in schema["properties"].items():
            if name not in value and "default" in field:
                value[name] = field["default"]
            if name in value:
                value[name] = filled(value[name], field)
        return value

    spec = parse(changed()).spec
    assert spec.model_dump(by_alias=True, exclude_none=True, mode="json") == filled(
        changed()["spec"], spec_schema()
    )


WRONG: list[tuple[tuple[Any, ...], str, Any, str]] = [
    # changes, field, value, part of the remedy
    (("image", None), "spec.image", None, "is required"),
    (("image", ""), "spec.image", "", "at least 1 character"),
    (("colour", "red"), "spec.colour", "red", "remove it"),
    (("decode.node", 2), "spec.decode.node", 2, "remove it"),
    (("decode.nodes", 0), "spec.decode.nodes", 0, "greater than or equal to 1"),
    (("decode.nodes", "4"), "spec.decode.nodes", "4", "valid integer"),
    (("decode.nodes", True), "spec.decode.nodes", True, "valid integer"),
    (("decode.device", "tpu"), "spec.decode.device", "tpu", "'cuda' or 'cpu'"),
    (("decode.copies", 3), "spec.decode.copies", 3, "1 or 2"),
    (("decode.kvMemory", "lots"), "spec.decode.kvMemory", "lots", "pattern"),
    (("decode.kvDtype", "fp8"), "spec.decode.kvDtype", "fp8", "'auto'"),
    (("decode.resources.requests", {"cpu": 0.5}), "spec.decode.resources.requests.cpu", 0.5,
     "quoted quantity"),
    (("decode.resources.limits", {"memory": "16 GB"}), "spec.decode.resources.limits.memory",
     "16 GB", "quoted quantity"),
    (("model.source", {}), "spec.model.source", {}, "exactly one of pvc"),
    (("model.source.hostPath", {"path": "/m"}), "spec.model.source", ..., "exactly one of pvc"),
    (("model.source", {"hostPath": {"path": "m"}}), "spec.model.source.hostPath.path", "m",
     "pattern"),
    (("model.source", {"objectStore": {"uri": "ftp://x/y", "claimName": "c"}}),
     "spec.model.source.objectStore.uri", "ftp://x/y", "pattern"),
    (("model.source", {"pvc": {}}), "spec.model.source.pvc.claimName", None, "is required"),
    (("model.dtype", "int4"), "spec.model.dtype", "int4", "'bfloat16'"),
    (("model.maxLength", 0), "spec.model.maxLength", 0, "greater than or equal to 1"),
    (("decode.copies", 2, "decode.nodes", 3), "spec.decode", ..., "make their number even"),
    (("decode.copies", 2, "decode.strategy", "dp"), "spec.decode", ..., "set strategy tknp"),
    (("decode.copies", 2, "decode.microbatches", 4, "decode.nodes", 4), "spec.decode", ...,
     "leave microbatches out"),
    (("decode.microbatches", 2, "decode.strategy", "helix"), "spec.decode", ..., "leave it out"),
    (("decode.microbatches", 2, "decode.nodes", 3), "spec.decode", ..., "must divide"),
    (("decode.width", 3), "spec.decode", ..., "at most the number of nodes that own"),
    (("decode.width", 2, "decode.roles", ["decode-root", "decode-node"]), "spec.decode", ...,
     "at most the number of nodes that own"),
    (("decode.strategy", "tp"), "spec.decode", ..., "set nodes 1"),
    (("decode.roles", ["decode-node"]), "spec.decode", ..., "one entry a node"),
    (("decode.roles", ["decode-root", "decode-root"]), "spec.decode", ..., "owns requests"),
    (("decode.roles", ["decode-node", "root"]), "spec.decode.roles[1]", "root", "'decode-root'"),
    (("decode.gpuProducts", ["H100"]), "spec.decode", ..., "needs device cuda"),
    (("topology.computeDomain", True), "spec", ..., "need decode.device cuda"),
    (("topology.rdmaResource", "rdma/ib"), "spec", ..., "need decode.device cuda"),
    (("prefill.replicas", 3, "prefill.maxReplicas", 2), "spec.prefill", ..., "raise maxReplicas"),
    (("prefill.autoscaling", {"maxReplicas": 4}), "spec.prefill", ..., "prefill.maxReplicas"),
    (("gateway.autoscaling", {"minReplicas": 3, "maxReplicas": 2}), "spec.gateway.autoscaling",
     ..., "minReplicas must be at most"),
    (("gateway.enabled", False, "gateway.autoscaling", {"maxReplicas": 2}), "spec.gateway", ...,
     "set enabled true"),
    (("gateway.enabled", "yes"), "spec.gateway.enabled", "yes", "boolean"),
    (("gateway.ray", "cluster"), "spec.gateway.ray", "cluster", "'standalone'"),
    (("drain.seconds", 0), "spec.drain.seconds", 0, "greater than or equal to 1"),
    (("timeouts.leaseSeconds", 7200), "spec.timeouts.leaseSeconds", 7200, "less than or equal"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "field", "value", "remedy"), WRONG)
def test_wrong_objects_are_refused(
    changed: Change, changes: tuple[Any, ...], field: str, value: Any, remedy: str
) -> None:
    with pytest.raises(InvalidValue) as refused:
        parse(changed(*changes))
    assert refused.value.field == field
    assert remedy in refused.value.remedy
    if value is not ...:
        assert refused.value.value == value


@pytest.mark.parametrize("name", ["Demo", "my.pool", "1st", "end-", "x" * 40, ""])
def test_names_that_no_host_can_have_are_refused(changed: Change, name: str) -> None:
    obj = changed()
    obj["metadata"]["name"] = name
    with pytest.raises(InvalidValue, match=r"metadata\.name") as refused:
        parse(obj)
    assert "at most 39" in refused.value.remedy


def test_an_object_keeps_what_the_server_knows_of_it(changed: Change) -> None:
    obj = changed()
    obj["metadata"] |= {"uid": "u", "generation": 7, "finalizers": ["tknp.io/drain"],
                        "deletionTimestamp": "2026-01-01T00:00:00Z"}  # fmt: skip
    obj["status"] = {"epoch": 3}
    service = parse(obj)
    assert (service.uid, service.generation, service.deleting) == ("u", 7, True)
    assert service.finalizers == ("tknp.io/drain",)
    assert service.prior == {"epoch": 3}
