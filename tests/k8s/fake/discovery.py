"""What a server says of itself: versions, groups, resources. Enough for kubectl and clients."""

from __future__ import annotations

from typing import Any

from .api import Api
from .kinds import VERBS, Kind


def document(api: Api, parts: list[str]) -> dict[str, Any] | str | None:
    """The discovery document at path `parts`; None if it is none of these."""
    if parts == ["version"]:
        return {
            "major": "1",
            "minor": "36",
            "gitVersion": "v1.36.0-fake",
            "platform": "linux/amd64",
        }
    if parts[:1] in (["healthz"], ["livez"], ["readyz"]):
        return "ok"
    if parts[:2] == ["openapi", "v3"]:
        return _openapi(api, "/".join(parts[2:]))
    if parts == ["api"]:
        return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}
    if parts == ["apis"]:
        groups = sorted({group for group, _, _ in api.kinds if group})
        return {"kind": "APIGroupList", "apiVersion": "v1",
                "groups": [_group(api, group) for group in groups]}  # fmt: skip
    if parts == ["api", "v1"]:
        return _resources(api, "", "v1")
    if parts[:1] == ["apis"] and len(parts) in (2, 3):
        versions = {version for group, version, _ in api.kinds if group == parts[1]}
        if len(parts) == 2 and versions:
            return {"kind": "APIGroup", "apiVersion": "v1", **_group(api, parts[1])}
        if len(parts) == 3 and parts[2] in versions:
            return _resources(api, parts[1], parts[2])
    return None


def _openapi(api: Api, path: str) -> dict[str, Any] | None:
    """Which versions there are; of one, that its PATCH can check fields, which kubectl asks."""
    kinds: dict[str, list[Kind]] = {}
    for kind in api.kinds.values():
        kinds.setdefault(f"{'apis' if kind.group else 'api'}/{kind.api_version}", []).append(kind)
    if not path:
        return {"paths": {at: {"serverRelativeURL": f"/openapi/v3/{at}"} for at in kinds}}
    if path not in kinds:
        return None
    parameter = {"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}
    paths = {}
    for kind in kinds[path]:
        gvk = {"group": kind.group, "version": kind.version, "kind": kind.kind}
        space = "namespaces/{namespace}/" if kind.namespaced else ""
        paths[f"/{path}/{space}{kind.plural}/{{name}}"] = {"patch": {
            "parameters": [parameter], "x-kubernetes-group-version-kind": gvk,
            "responses": {"200": {"description": "OK"}}}}  # fmt: skip
    info = {"title": "Kubernetes", "version": "v1.36.0-fake"}
    return {"openapi": "3.0.0", "info": info, "paths": paths}


def _group(api: Api, group: str) -> dict[str, Any]:
    versions = [
        {"groupVersion": f"{group}/{version}", "version": version}
        for version in sorted({v for g, v, _ in api.kinds if g == group})
    ]
    return {"name": group, "versions": versions, "preferredVersion": versions[-1]}


def _resources(api: Api, group: str, version: str) -> dict[str, Any]:
    found = []
    for kind in api.kinds.values():
        if (kind.group, kind.version) == (group, version):
            found += _of(kind)
    name = f"{group}/{version}" if group else version
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": name,
            "resources": found}  # fmt: skip


def _of(kind: Kind) -> list[dict[str, Any]]:
    base = {"singularName": kind.kind.lower(), "namespaced": kind.namespaced, "kind": kind.kind}
    found = [{**base, "name": kind.plural, "verbs": VERBS, "shortNames": list(kind.short)}]
    subresources = [("status", kind.status), ("scale", kind.scale is not None)]
    for name, has in subresources:
        if has:
            found.append({**base, "name": f"{kind.plural}/{name}",
                          "verbs": ["get", "patch", "update"]})  # fmt: skip
    if kind.kind == "Pod":
        found.append({**base, "name": "pods/log", "verbs": ["get"]})
        found.append({**base, "name": "pods/eviction", "verbs": ["create"]})
    return found
