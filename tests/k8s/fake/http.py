"""HTTP in front of the verbs: who asks, paths, content types, codes, discovery.

One thread a connection. A watch ends with its timeoutSeconds, with its client, or with the server.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

from . import discovery, selectors, subresources, tables
from .api import Api
from .errors import Refused
from .kinds import Kind
from .rights import ADMINISTRATOR, Attributes, Rights
from .watches import Watch

_VERBS = {"GET": "get", "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


class FakeServer:
    """`with FakeServer() as server:` serves at `server.url` until left. `server.api` is behind it.

    `logs(namespace, pod, container)`: text that GET .../log answers; a kubelet sets it.
    """

    def __init__(self) -> None:
        self.api = Api()
        self.rights = Rights(self.api.store)
        self.closing = threading.Event()
        self.logs: Callable[[str, str, str], str] = lambda *_: ""
        self.requests: list[tuple[str, str]] = []
        handler = type("Handler", (_Handler,), {"server_side": self})
        self._http = _Server(("127.0.0.1", 0), handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,))

    def __enter__(self) -> FakeServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def kubeconfig(self, token: str = ADMINISTRATOR) -> str:
        """A kubeconfig of whom `token` is, as JSON, which is YAML."""
        return json.dumps({
            "apiVersion": "v1", "kind": "Config", "current-context": "fake",
            "clusters": [{"name": "fake", "cluster": {"server": self.url}}],
            "users": [{"name": "fake", "user": {"token": token}}],
            "contexts": [{"name": "fake", "context": {
                "cluster": "fake", "user": "fake", "namespace": "default"}}],
        })  # fmt: skip


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away, as killed processes do, is nothing to report."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Target:
    """What a path means."""

    def __init__(self, kind: Kind, namespace: str, name: str, subresource: str) -> None:
        self.kind, self.namespace, self.name = kind, namespace, name
        self.subresource = subresource


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or each answer waits 40 ms for its header's acknowledgement
    server_side: FakeServer
    query: dict[str, str]

    def log_message(self, format: str, *args: Any) -> None:
        """Tests look at what is stored, not at an access log."""

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def do_PUT(self) -> None:
        self._answer(self._put)

    def do_PATCH(self) -> None:
        self._answer(self._patch)

    def do_DELETE(self) -> None:
        self._answer(self._delete)

    def _answer(self, verb: Callable[[], None]) -> None:
        parts = urlsplit(self.path)
        self.query = {k: v[-1] for k, v in parse_qs(parts.query, keep_blank_values=True).items()}
        self.parts = [part for part in parts.path.split("/") if part]
        length = int(self.headers.get("Content-Length") or 0)
        self.body = self.rfile.read(length)
        self.server_side.requests.append((self.command, self.path))
        try:
            verb()
        except Refused as refusal:
            self._send(refusal.code, refusal.status)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _send(self, code: int, obj: Any) -> None:
        text = not isinstance(obj, dict)
        data = (str(obj) if text else json.dumps(obj)).encode()
        self.send_response(code)
        self.send_header("Content-Type", "text/plain" if text else "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _json(self) -> Any:
        if not self.body:
            return {}
        kind = (self.headers.get("Content-Type") or "").partition(";")[0]
        if "protobuf" in kind or "cbor" in kind:
            raise Refused(415, f"the body of the request was in an unknown format: {kind}")
        try:
            return json.loads(self.body)
        except ValueError as error:
            raise Refused(400, f"the body is not JSON: {error}") from error

    @property
    def _manager(self) -> str:
        agent = (self.headers.get("User-Agent") or "unknown").partition("/")[0]
        return self.query.get("fieldManager") or agent

    def _target(self) -> _Target:
        """`/api/v1/namespaces/NS/pods/NAME/status` and its like. Raises Refused 404."""
        parts, api = list(self.parts), self.server_side.api
        if parts[:1] == ["api"]:
            group, (version, *rest) = "", parts[1:] or [""]
        elif parts[:1] == ["apis"] and len(parts) > 2:
            group, version, *rest = parts[1:]
        else:
            raise Refused(404, "the server could not find the requested resource")
        namespace = ""
        if rest[:1] == ["namespaces"] and len(rest) > 2 and rest[2] not in ("status", "finalize"):
            namespace, rest = rest[1], rest[2:]
        kind = api.kinds.get((group, version, rest[0] if rest else ""))
        if kind is None or (namespace and not kind.namespaced) or len(rest) > 3:
            raise Refused(404, "the server could not find the requested resource")
        name, subresource = [*rest[1:], "", ""][:2]
        if subresource == "status" and not kind.status:
            raise Refused(404, "the server could not find the requested resource")
        if kind.namespaced and not namespace and (name or self.command == "POST"):
            raise Refused(404, "the server could not find the requested resource")
        target = _Target(kind, namespace, name, subresource)
        self._may(target, self._verb(target))
        return target

    def _verb(self, target: _Target) -> str:
        if self.command == "GET" and not target.name:
            return "watch" if self._watches else "list"
        if self.command == "DELETE" and not target.name:
            return "deletecollection"
        return _VERBS[self.command]

    @property
    def _watches(self) -> bool:
        return self.query.get("watch", "").lower() in ("1", "true")

    @property
    def _tabular(self) -> bool:
        return tables.wanted(self.headers.get("Accept") or "")

    def _may(self, target: _Target, verb: str) -> None:
        """Raise Refused 401 or 403 unless whoever asks may `verb`."""
        resource = "/".join(filter(None, (target.kind.plural, target.subresource)))
        self._allowed(Attributes(target.kind.group, resource, verb, target.namespace, target.name))

    def _allowed(self, wanted: Attributes) -> None:
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        self.server_side.rights.check(token, wanted)

    def _may_own(self, target: _Target, obj: Any) -> None:
        """To block the deletion of an owner one must be allowed to change its finalizers.

        As the admission plugin OwnerReferencesPermissionEnforcement has it, which some clusters
        turn on.
        """
        metadata = (obj if isinstance(obj, dict) else {}).get("metadata") or {}
        for owner in metadata.get("ownerReferences") or ():
            if owner.get("blockOwnerDeletion"):
                group, _, version = owner["apiVersion"].rpartition("/")
                for kind in self.server_side.api.kinds.values():
                    if (kind.group, kind.version, kind.kind) == (group, version, owner["kind"]):
                        self._allowed(Attributes(group, f"{kind.plural}/finalizers", "update",
                                                 target.namespace, owner["name"]))  # fmt: skip

    def _get(self) -> None:
        api = self.server_side.api
        if (found := discovery.document(api, self.parts)) is not None:
            self._send(200, found)
            return
        target = self._target()
        kind = target.kind
        if target.name:
            if target.subresource == "log":
                api.get(kind, target.namespace, target.name)
                container = self.query.get("container", "")
                text = self.server_side.logs(target.namespace, target.name, container)
                self._send(200, text)
                return
            obj = api.get(kind, target.namespace, target.name)
            if target.subresource == "scale":
                obj = subresources.scale(kind, obj)
            elif self._tabular:
                version = obj["metadata"]["resourceVersion"]
                obj = tables.table(kind, [obj], {"resourceVersion": version})
            self._send(200, obj)
            return
        by_label = selectors.labels(self.query.get("labelSelector", ""))
        by_field = selectors.fields(self.query.get("fieldSelector", ""), kind.kind)

        def wanted(obj: dict[str, Any]) -> bool:
            return by_label(obj) and by_field(obj)

        if self._watches:
            self._watch(target, wanted)
            return
        with api.store.lock:
            items = [o for o in api.store.all(kind.key, target.namespace) if wanted(o)]
            version = str(api.store.version)
        if self._tabular:
            self._send(200, tables.table(kind, items, {"resourceVersion": version}))
            return
        self._send(200, {"apiVersion": kind.api_version, "kind": f"{kind.kind}List",
                         "metadata": {"resourceVersion": version}, "items": items})  # fmt: skip

    def _post(self) -> None:
        api, target = self.server_side.api, self._target()
        if target.subresource == "eviction":
            options = self._json().get("deleteOptions") or {}
            self._send(201, subresources.evict(api, target.namespace, target.name, options))
            return
        if target.subresource == "token":
            api.get(target.kind, target.namespace, target.name)
            token = self.server_side.rights.token(target.namespace, target.name)
            self._send(201, {
                "apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest",
                "spec": {"audiences": ["fake"]},
                "status": {"token": token, "expirationTimestamp": "2100-01-01T00:00:00Z"},
            })  # fmt: skip
            return
        if target.subresource == "binding":
            pod = api.get(target.kind, target.namespace, target.name)
            pod["spec"]["nodeName"] = self._json()["target"]["name"]
            with api.store.lock:
                api.store.put(target.kind.key, pod)
            self._send(201, {"apiVersion": "v1", "kind": "Status", "status": "Success"})
            return
        if target.name:
            raise Refused(405, "the server does not allow this method on the requested resource")
        obj = self._json()
        self._may_own(target, obj)
        self._send(201, api.create(target.kind, target.namespace, obj, self._manager))

    def _put(self) -> None:
        api, target = self.server_side.api, self._target()
        if target.subresource == "scale":
            obj = api.get(target.kind, target.namespace, target.name)
            scale = self._json()
            self._send(200, subresources.rescale(api, target.kind, obj, scale, self._manager))
            return
        self._send(200, api.replace(
            target.kind, target.namespace, target.name, self._json(), self._manager,
            target.subresource,
        ))  # fmt: skip

    def _patch(self) -> None:
        api, target = self.server_side.api, self._target()
        content = (self.headers.get("Content-Type") or "").partition(";")[0]
        if content == "application/apply-patch+yaml":
            manager, force = self.query.get("fieldManager", ""), self.query.get("force") == "true"
            if api.store.get(target.kind.key, (target.namespace, target.name)) is None:
                self._may(target, "create")
            self._may_own(target, yaml.safe_load(self.body.decode()))
            obj, new = api.apply(
                target.kind, target.namespace, target.name, self.body.decode(), manager, force,
                target.subresource,
            )  # fmt: skip
            self._send(201 if new else 200, obj)
            return
        if target.subresource == "scale":
            obj = api.get(target.kind, target.namespace, target.name)
            scale = subresources.scale(target.kind, obj)
            scale["spec"] |= self._json().get("spec") or {}
            self._send(200, subresources.rescale(api, target.kind, obj, scale, self._manager))
            return
        self._send(200, api.patch(
            target.kind, target.namespace, target.name, self._json(), content, self._manager,
            target.subresource,
        ))  # fmt: skip

    def _delete(self) -> None:
        api, target = self.server_side.api, self._target()
        options = {**self._json()}
        for part in ("gracePeriodSeconds", "propagationPolicy"):
            if part in self.query:
                value = self.query[part]
                options.setdefault(part, int(value) if part == "gracePeriodSeconds" else value)
        if target.name:
            self._send(200, api.delete(target.kind, target.namespace, target.name, options))
            return
        by_label = selectors.labels(self.query.get("labelSelector", ""))
        gone = [o for o in api.store.all(target.kind.key, target.namespace) if by_label(o)]
        for obj in gone:
            api.delete(target.kind, target.namespace, obj["metadata"]["name"], options)
        self._send(200, {"apiVersion": target.kind.api_version, "kind": f"{target.kind.kind}List",
                         "metadata": {}, "items": gone})  # fmt: skip

    def _watch(self, target: _Target, wanted: Callable[[dict[str, Any]], bool]) -> None:
        watch = Watch(self.server_side.api.store, target.kind, target.namespace, wanted, self.query)
        batches = watch.batches(self.server_side.closing)
        first = next(batches, None)  # comes at once, so that a watcher hears it has begun
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        while first is not None:
            for event in first:
                data = json.dumps(event).encode() + b"\n"
                self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            self.wfile.flush()
            first = next(batches, None)
        self.wfile.write(b"0\r\n\r\n")
