"""Built-in kinds against the OpenAPI schemas of a Kubernetes version, unknown fields refused.

A real server drops unknown fields with a warning, or refuses them in an apply; here nobody may
send one.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from importlib import resources
from typing import Any

import jsonschema
from referencing import Registry, Resource

from .errors import Refused, invalid

_FOLDER = "kubernetes-json-schema/v1.36.0-local-strict"


def check(obj: dict[str, Any], partial: bool = False) -> None:
    """Raise Refused 400 for what can't be decoded, 422 for what is missing unless `partial`."""
    validator = _validator(obj["kind"], obj["apiVersion"])
    if validator is None:
        return
    missing = []
    for error in validator.iter_errors(obj):
        path = ".".join(map(str, error.absolute_path))
        if error.validator != "required":
            raise Refused(400, f"{obj['kind']} in version {obj['apiVersion']} cannot be handled: "
                               f"strict decoding error: {path}: {error.message}")  # fmt: skip
        missing.append((path, error.message))
    if missing and not partial:
        raise invalid(obj["kind"], str(obj["metadata"].get("name", "")), missing)


@lru_cache(maxsize=64)
def _validator(kind: str, api_version: str) -> Any:
    """None where Kubernetes itself has no such kind."""
    group = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", api_version)
    file = _folder() / f"{kind.lower()}-{group}.json"
    if not file.is_file():
        return None
    return jsonschema.Draft202012Validator(json.loads(file.read_text()), registry=_definitions())


@lru_cache(maxsize=1)
def _definitions() -> Any:
    text = (_folder() / "_definitions.json").read_text()
    return Resource.from_contents(json.loads(text)) @ Registry()


def _folder() -> Any:
    return resources.files("kubernetes_validate") / _FOLDER
