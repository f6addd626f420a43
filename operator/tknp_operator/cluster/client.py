"""Requests to an API server: plain JSON in, plain JSON out, typed refusals.

Every request has a deadline. What Kubernetes answers with another status than 2xx becomes a
`Refusal` that has the status and the server's words.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import urllib3
from kubernetes import client, config

from tknp.errors import InvalidValue, TknpError
from tknp_operator.build.names import MANAGER
from tknp_operator.cluster.kinds import KINDS, Kind

TIMEOUT_S = 30.0
WATCH_S = 240
JSON = "application/json"
MERGE = "application/merge-patch+json"
APPLY = "application/apply-patch+yaml"


class Refusal(TknpError):
    """The API server's answer to a request that it did not carry out; `code`: HTTP status."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class Unreachable(TknpError):
    """No answer came."""

    status = "UNAVAILABLE"


def connect(kubeconfig: Path | None) -> client.ApiClient:
    """A client for `kubeconfig`, else the cluster that this pod is in. Raises InvalidValue."""
    try:
        if kubeconfig is not None:
            made: client.ApiClient = config.new_client_from_config(str(kubeconfig))
            return made
        config.load_incluster_config()
    except (config.ConfigException, OSError) as error:
        raise InvalidValue(
            "kubeconfig", str(kubeconfig) if kubeconfig else None,
            f"{error}; name a readable kubeconfig, or run in a pod with a service account",
        ) from error  # fmt: skip
    return client.ApiClient()


class Api:
    """Verbs on kinds, for any thread."""

    def __init__(self, api: client.ApiClient) -> None:
        self._api = api

    def request(
        self, method: str, path: str, query: Mapping[str, str] | None = None,
        body: Any = None, content: str = JSON,
    ) -> Any:  # fmt: skip
        """The answer's JSON. Raises Refusal or Unreachable."""
        response = self._send(method, path, query, body, content, TIMEOUT_S)
        try:
            text = response.response.read()
        except urllib3.exceptions.HTTPError as error:
            raise Unreachable(f"{method} {path}: {error}") from error
        return json.loads(text)

    def list(self, kind: Kind, namespace: str | None, selector: str) -> tuple[list[Any], str]:
        """Objects, each with its kind, and the list's resourceVersion."""
        items: list[Any] = []
        query = {"limit": "500", **({"labelSelector": selector} if selector else {})}
        while True:
            answer = self.request("GET", kind.path(namespace), query)
            items += answer.get("items") or []
            following = answer["metadata"].get("continue")
            if not following:
                return items, answer["metadata"]["resourceVersion"]
            query["continue"] = following

    def watch(
        self, kind: Kind, namespace: str | None, selector: str, version: str
    ) -> Iterator[dict[str, Any]]:
        """Events since `version` until the server ends the stream. Raises Refusal, Unreachable."""
        query = {
            "watch": "1", "allowWatchBookmarks": "true", "timeoutSeconds": str(WATCH_S),
            "resourceVersion": version, **({"labelSelector": selector} if selector else {}),
        }  # fmt: skip
        response = self._send("GET", kind.path(namespace), query, None, JSON, WATCH_S + TIMEOUT_S)
        rest = b""
        try:
            for chunk in response.response.stream(amt=None, decode_content=True):
                *lines, rest = (rest + chunk).split(b"\n")
                yield from (json.loads(line) for line in lines if line.strip())
        except urllib3.exceptions.HTTPError as error:
            raise Unreachable(f"watch of {kind.plural}: {error}") from error
        finally:
            response.response.close()

    def apply(self, manifest: Mapping[str, Any]) -> Any:
        """Server-side apply under our field manager, taking fields from others."""
        kind, meta = KINDS[manifest["kind"]], manifest["metadata"]
        path = kind.path(meta.get("namespace"), meta["name"])
        query = {"fieldManager": MANAGER, "force": "true"}
        return self.request("PATCH", path, query, json.dumps(manifest), APPLY)

    def create(self, manifest: Mapping[str, Any]) -> Any:
        kind, meta = KINDS[manifest["kind"]], manifest["metadata"]
        query = {"fieldManager": MANAGER}
        return self.request("POST", kind.path(meta.get("namespace")), query, manifest)

    def merge(
        self, kind: Kind, namespace: str, name: str, patch: Mapping[str, Any], sub: str = ""
    ) -> Any:
        """Merge `patch` into an object or its subresource `sub`."""
        path = kind.path(namespace, name) + (f"/{sub}" if sub else "")
        return self.request("PATCH", path, {"fieldManager": MANAGER}, patch, MERGE)

    def delete(
        self, kind: Kind, namespace: str, name: str, uid: str, grace_s: int | None = None
    ) -> None:
        """Delete that very object, dependents in the background."""
        options: dict[str, Any] = {
            "apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid},
            "propagationPolicy": "Background",
        }  # fmt: skip
        if grace_s is not None:
            options["gracePeriodSeconds"] = grace_s
        self.request("DELETE", kind.path(namespace, name), None, options)

    def served(self, prefix: str) -> Sequence[str]:
        """Resources of a group's version such as /apis/ray.io/v1; empty: the cluster has it not."""
        try:
            found = self.request("GET", prefix)
        except Refusal as refusal:
            if refusal.code in (403, 404):
                return ()
            raise
        return [resource["name"] for resource in found["resources"]]

    def _send(
        self, method: str, path: str, query: Mapping[str, str] | None, body: Any, content: str,
        timeout_s: float,
    ) -> Any:  # fmt: skip
        serialized = self._api.param_serialize(
            method, path, query_params=list((query or {}).items()),
            header_params={"Accept": JSON, "Content-Type": content},
            body=body, auth_settings=["BearerToken"],
        )  # fmt: skip
        try:
            response = self._api.call_api(*serialized, _request_timeout=(5.0, timeout_s))
            if 200 <= response.status <= 299:
                return response
            text = response.response.read().decode("utf-8", "replace")
        except client.ApiException as error:
            raise Unreachable(f"{method} {path}: {error.reason}") from error
        except urllib3.exceptions.HTTPError as error:
            raise Unreachable(f"{method} {path}: {error}") from error
        raise Refusal(response.status, f"{method} {path}: {_words(text)}")


def _words(text: str) -> str:
    try:
        return str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        return text[:500] or "no reason given"
