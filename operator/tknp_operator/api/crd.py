"""The CustomResourceDefinition, made from the models of `tknp_operator.api.spec`.

    python -m tknp_operator.api.crd > charts/tknp/crds/tknp.io_tokenparallelservices.yaml

Kubernetes wants a structural schema: no $ref, no anyOf that types a value. Optional fields are
just not required; numbers-or-strings are x-kubernetes-int-or-string; free mappings keep what they
have. Descriptions stay short, because Helm keeps charts in a Secret of at most 1 MiB.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml
from pydantic import BaseModel

from tknp_operator.api.rules import Part
from tknp_operator.api.spec import GROUP, KIND, LONGEST_NAME, NAME, PLURAL, VERSION, Spec
from tknp_operator.api.status import STATUS

Schema = dict[str, Any]
_KEPT = ("type", "default", "enum", "pattern", "minimum", "maximum", "minLength", "maxLength",
         "minItems", "maxItems", "description", "x-kubernetes-int-or-string")  # fmt: skip
_COLUMNS = (
    ("Ready", "string", ".status.conditions[?(@.type=='Ready')].status", 0),
    ("Nodes", "integer", ".spec.decode.nodes", 0),
    ("Prefill", "integer", ".status.prefill.ready", 0),
    ("Gateway", "integer", ".status.gateway.ready", 0),
    ("Epoch", "integer", ".status.epoch", 0),
    ("Strategy", "string", ".spec.decode.strategy", 1),
    ("Message", "string", ".status.conditions[?(@.type=='Ready')].message", 0),
    ("Age", "date", ".metadata.creationTimestamp", 0),
)


def spec_schema() -> Schema:
    """Structural schema of `spec`."""
    full = Spec.model_json_schema(by_alias=True)
    return _structural(full, full.get("$defs", {}), _models(Spec))


def custom_resource_definition() -> Schema:
    """The whole object, ready to be applied."""
    columns = [
        {"name": name, "type": kind, "jsonPath": path, **({"priority": low} if low else {})}
        for name, kind, path, low in _COLUMNS
    ]
    version = {
        "name": VERSION, "served": True, "storage": True,
        "subresources": {
            "status": {},
            "scale": {"specReplicasPath": ".spec.prefill.replicas",
                      "statusReplicasPath": ".status.prefill.replicas",
                      "labelSelectorPath": ".status.prefill.selector"},
        },
        "additionalPrinterColumns": columns,
        "schema": {"openAPIV3Schema": {
            "type": "object",
            "description": "A model served by a token-parallel pool of decode nodes.",
            "required": ["spec"],
            "properties": {
                "apiVersion": {"type": "string"}, "kind": {"type": "string"},
                "metadata": {"type": "object", "properties": {
                    "name": {"type": "string", "maxLength": LONGEST_NAME}}},
                "spec": spec_schema(), "status": STATUS,
            },
            "x-kubernetes-validations": [{"rule": NAME.cel, "message": NAME.message}],
        }},
    }  # fmt: skip
    return {
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP, "scope": "Namespaced",
            "names": {"kind": KIND, "listKind": f"{KIND}List", "plural": PLURAL,
                      "singular": KIND.lower(), "shortNames": ["tps"], "categories": ["all"]},
            "versions": [version],
        },
    }  # fmt: skip


def _models(root: type[BaseModel]) -> dict[str, type[Part]]:
    """Every Part by name; names are unique because $defs are."""
    found: dict[str, type[Part]] = {}

    def walk(cls: type[Part]) -> None:
        for sub in cls.__subclasses__():
            found[sub.__name__] = sub
            walk(sub)

    walk(Part)
    found[""] = Spec
    return found


def _structural(
    node: Mapping[str, Any], definitions: Mapping[str, Any], models: Mapping[str, type[Part]],
    name: str = "",
) -> Schema:  # fmt: skip
    if "$ref" in node:
        name = node["$ref"].rpartition("/")[2]
        merged = {**definitions[name], **{k: v for k, v in node.items() if k != "$ref"}}
        return _structural(merged, definitions, models, name)
    if "anyOf" in node:
        (option,) = (option for option in node["anyOf"] if option.get("type") != "null")
        merged = {**option, **{k: v for k, v in node.items() if k not in ("anyOf", "default")}}
        return _structural(merged, definitions, models)
    if "const" in node:
        node = {**node, "enum": [node["const"]]}
    result: Schema = {key: node[key] for key in _KEPT if key in node}
    if "description" in result:
        result["description"] = " ".join(result["description"].split())
    if "enum" in result and "type" not in result:
        result["type"] = "string"
    if "items" in node:
        result["items"] = _structural(node["items"], definitions, models)
        result["x-kubernetes-list-type"] = "atomic"
        result.setdefault("maxItems", 1024)
    if result.get("type") == "object":
        if "default" in result:
            result["default"] = {}  # those of its fields follow
        if "properties" in node:
            result["properties"] = {
                key: _structural(value, definitions, models)
                for key, value in node["properties"].items()
            }
            if node.get("required"):
                result["required"] = sorted(node["required"])
            cls = models.get(name)
            if cls is not None and cls.rules:
                result["x-kubernetes-validations"] = [
                    {"rule": rule.cel, "message": rule.message} for rule in cls.rules
                ]
        elif isinstance(node.get("additionalProperties"), Mapping):
            values = _structural(node["additionalProperties"], definitions, models)
            result["additionalProperties"] = values
        else:
            result["x-kubernetes-preserve-unknown-fields"] = True
    return result


class _Plain(yaml.SafeDumper):
    """Writes what is used twice out twice: not every reader of YAML takes anchors."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def text() -> str:
    """What charts/tknp/crds has."""
    made = "# Made by `python -m tknp_operator.api.crd`; edit operator/tknp_operator/api instead.\n"
    crd = custom_resource_definition()
    return made + yaml.dump(crd, Dumper=_Plain, sort_keys=False, width=100)


def main() -> None:
    print(text(), end="")


if __name__ == "__main__":
    main()
