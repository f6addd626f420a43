"""The CRD is valid, structural, small, and what is committed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tknp_operator.api import crd, docs

ROOT = Path(__file__).parents[4]
FILE = ROOT / "charts/tknp/crds/tknp.io_tokenparallelservices.yaml"
PAGE = ROOT / "docs/tokenparallelservice.md"
FORBIDDEN = {"$ref", "$defs", "anyOf", "oneOf", "allOf", "not", "const", "title", "uniqueItems"}


def schema() -> dict[str, Any]:
    version = crd.custom_resource_definition()["spec"]["versions"][0]
    return dict(version["schema"]["openAPIV3Schema"])


def nodes(node: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, node
    for name, child in node.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if key in node:
            yield from nodes(node[key], f"{path}.{key}")


def test_the_committed_crd_and_page_are_what_is_generated() -> None:
    assert FILE.read_text() == crd.text()
    assert PAGE.read_text() == docs.text() + "\n"


@pytest.mark.parametrize("version", ["1.33", "1.36"])
def test_kubernetes_knows_its_form(version: str) -> None:
    kubernetes_validate.validate(yaml.safe_load(FILE.read_text()), version, strict=True)


def test_it_leaves_room_in_the_release_secret_of_helm() -> None:
    assert len(FILE.read_bytes()) < 60_000


def test_the_schema_is_structural() -> None:
    for path, node in nodes(schema()):
        assert not FORBIDDEN & node.keys(), path
        assert "type" in node or node.get("x-kubernetes-int-or-string"), path
        assert not ("properties" in node and "additionalProperties" in node), path
        assert set(node.get("required", ())) <= node.get("properties", {}).keys(), path
        if node.get("type") == "array":
            assert node["x-kubernetes-list-type"] in ("atomic", "map"), path
        if node.get("type") == "object" and path != ".metadata":
            known = "properties" in node or "additionalProperties" in node
            assert known or node.get("x-kubernetes-preserve-unknown-fields"), path


def test_defaults_keep_the_schema_that_they_are_in() -> None:
    for _, node in nodes(schema()["properties"]["spec"]):
        if "default" in node:
            jsonschema.validate(node["default"], node)


def test_every_field_of_the_spec_says_what_it_is_in_few_words() -> None:
    for path, node in nodes(schema()["properties"]["spec"], "spec"):
        if path != "spec" and not path.endswith((".items", ".additionalProperties")):
            assert 0 < len(node.get("description", "")) <= 100, path


def test_every_rule_has_a_message_of_one_line() -> None:
    rules = [rule for _, node in nodes(schema()) for rule in
             node.get("x-kubernetes-validations", ())]  # fmt: skip
    assert len(rules) >= 15
    for rule in rules:
        assert len(rule["message"].splitlines()) == 1


def test_nobody_has_to_quote_a_key_or_a_value() -> None:
    for path, node in nodes(schema()):
        words = [*node.get("properties", {}), *map(str, node.get("enum", ()))]
        for word in words if ".status" not in path else node.get("properties", {}):
            assert word.isdigit() or yaml.safe_load(word) == word, f"{path}: {word}"


def test_columns_scale_and_conditions_read_fields_that_exist() -> None:
    version = crd.custom_resource_definition()["spec"]["versions"][0]
    paths = {path for path, _ in nodes(schema())}
    scale = version["subresources"]["scale"]
    columns = version["additionalPrinterColumns"]
    read = [column["jsonPath"] for column in columns if not column["jsonPath"].startswith(".meta")]
    for path in [*scale.values(), *read]:
        assert re.sub(r"\[.*?\]", ".items", path) in paths, path
    assert {"Ready", "Epoch", "Nodes", "Prefill", "Gateway", "Message", "Age"} <= {
        column["name"] for column in columns
    }
    conditions = schema()["properties"]["status"]["properties"]["conditions"]
    assert conditions["x-kubernetes-list-map-keys"] == ["type"]
