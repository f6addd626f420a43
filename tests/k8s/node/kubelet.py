"""The loop: what pods should be, what their processes are, and what is told of them.

    Pending --bind--> started --startup probe--> --readiness--> Ready
       exit: restart after a second while restartPolicy says so; else Succeeded or Failed
       deletionTimestamp: SIGTERM, SIGKILL after the grace, then deletion with grace 0

One thread looks at everything four times a second; one more runs probes, which take a moment each:
every second until they succeed, then with their own period.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kubernetes import client
from kubernetes.client import ApiException

from . import names
from .deployments import keep as keep_deployments
from .sandbox import NotYet, Sandbox, prepare

_LOOK_S = 0.25
_RESTART_S = 1.0
_NET = 77 + int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


class Running:
    """One pod here. `ready` and `started` are what its probes have said."""

    def __init__(self, pod: dict[str, Any], address: str, directory: Path) -> None:
        self.pod, self.address, self.directory = pod, address, directory
        self.process: subprocess.Popen[bytes] | None = None
        self.sandbox: Sandbox | None = None
        self.started = self.ready = False
        self.restarts, self.exit_code = 0, None
        self.waiting, self.terminated_s = "ContainerCreating", 0.0
        self.failures: dict[str, int] = {}
        self.due_s: dict[str, float] = {}  # when which probe is next
        self.told: dict[str, Any] = {}

    @property
    def container(self) -> dict[str, Any]:
        found: dict[str, Any] = self.pod["spec"]["containers"][0]
        return found

    @property
    def log(self) -> Path:
        return self.directory / f"{self.container['name']}.log"


class Kubelet:
    """All nodes of the cluster behind `api`, from `with` until left; pods of one container.

    `nodes`: names that have been made. Set `deaf` to nodes whose machine is gone.
    """

    def __init__(self, api: client.ApiClient, directory: Path, nodes: list[str]) -> None:
        self.core, self._api = client.CoreV1Api(api), api
        self.nodes, self.deaf = nodes, set[str]()
        self.running: dict[str, Running] = {}
        self._directory, self._hosts = directory, directory / "hosts"
        self._hosts.touch()
        self._library = names.build(directory)
        self._addresses = 0
        self._closing = threading.Event()
        self._threads = [threading.Thread(target=self._until_closed, args=(work,))
                         for work in (self._look, self._probe)]  # fmt: skip
        self.error: Exception | None = None

    def __enter__(self) -> Kubelet:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        for thread in self._threads:
            thread.join()
        for running in self.running.values():
            _end(running, signal.SIGKILL)

    def of(self, pod_name: str) -> Running:
        """The pod named so. Raises KeyError if it is not here."""
        for running in list(self.running.values()):
            if running.pod["metadata"]["name"] == pod_name:
                return running
        raise KeyError(pod_name)

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to know names of the cluster and this Python environment."""
        return {
            "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}",
            "LD_PRELOAD": str(self._library), "TKNP_FAKE_HOSTS": str(self._hosts),
            "GRPC_DNS_RESOLVER": "native", "PYTHONUNBUFFERED": "1",
            # CPU kernels are compiled, as an image brings them
            "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache")),
        }  # fmt: skip

    def logs(self, namespace: str, pod: str, container: str) -> str:
        """What the container has written."""
        return self.of(pod).log.read_text(errors="replace")

    def _until_closed(self, work: Any) -> None:
        while not self._closing.wait(_LOOK_S):
            try:
                work()
            except ApiException as error:
                if error.status not in (404, 409):
                    self.error = error
            except Exception as error:
                self.error = error
                raise

    def lose(self, node: str) -> None:
        """The machine of `node` is gone: its processes end and nobody tells of it."""
        self.deaf.add(node)
        for running in list(self.running.values()):
            if running.pod["spec"].get("nodeName") == node:
                _end(running, signal.SIGKILL)

    def _look(self) -> None:
        plain = self._api.sanitize_for_serialization
        keep_deployments(self._api)
        pods = plain(self.core.list_pod_for_all_namespaces())["items"]
        services = plain(self.core.list_service_for_all_namespaces())["items"]
        names.write(self._hosts, names.records(pods, services))
        for pod in pods:
            node, uid = pod["spec"].get("nodeName"), pod["metadata"]["uid"]
            if node is None and "deletionTimestamp" not in pod["metadata"]:
                self._bind(pod)
            elif node in self.nodes and node not in self.deaf:
                if uid not in self.running:
                    self._addresses += 1
                    third, fourth = divmod(self._addresses, 250)
                    address = f"127.{_NET}.{third}.{fourth + 1}"
                    directory = self._directory / uid
                    directory.mkdir()
                    self.running[uid] = Running(pod, address, directory)
                self.running[uid].pod = pod
                self._keep(self.running[uid])
        here = {pod["metadata"]["uid"] for pod in pods}
        for uid, running in list(self.running.items()):
            if uid not in here:  # deleted with grace 0 by somebody else
                _end(running, signal.SIGKILL)
                del self.running[uid]

    def _bind(self, pod: dict[str, Any]) -> None:
        """The node that its affinity names, or the first that lives."""
        wanted = [name for name in self.nodes if name not in self.deaf]
        affinity = (pod["spec"].get("affinity") or {}).get("nodeAffinity") or {}
        required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
        for term in required.get("nodeSelectorTerms") or ():
            for field in term.get("matchFields") or ():
                wanted = [name for name in wanted if name in field["values"]]
        if wanted:
            metadata = pod["metadata"]
            self.core.create_namespaced_pod_binding(
                metadata["name"], metadata["namespace"],
                {"metadata": {"name": metadata["name"]},
                 "target": {"apiVersion": "v1", "kind": "Node", "name": wanted[0]}},
                _preload_content=False,
            )  # fmt: skip

    def _keep(self, running: Running) -> None:
        """One look at one pod: start, restart, end, tell."""
        metadata, process = running.pod["metadata"], running.process
        if process is not None and process.poll() is not None:
            running.exit_code, running.process = process.returncode, None
            running.started = running.ready = False
            running.due_s.clear()
            running.terminated_s = time.monotonic()
        if "deletionTimestamp" in metadata:
            self._let_go(running)
            return
        policy = running.pod["spec"].get("restartPolicy", "Always")
        again = running.exit_code is None or policy == "Always"
        again = again or (policy == "OnFailure" and running.exit_code != 0)
        due = time.monotonic() - running.terminated_s >= _RESTART_S
        if running.process is None and again and due:
            if running.exit_code is not None:
                running.restarts += 1
            self._start(running)
        self._tell(running)

    def _start(self, running: Running) -> None:
        try:
            running.sandbox = sandbox = prepare(
                running.pod, running.container, running.directory, running.address, self._read
            )
        except NotYet as reason:
            running.waiting = str(reason)
            return
        environment = {**sandbox.environment, **self.environment}
        running.sandbox = Sandbox(sandbox.directory, sandbox.rewrite, environment)
        container = running.container
        command = [*(container.get("command") or ()), *(container.get("args") or ())]
        with open(running.log, "ab") as log:
            running.process = subprocess.Popen(
                [sandbox.rewrite(part) for part in command], cwd=running.directory,
                env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip

    def _read(self, kind: str, namespace: str, name: str) -> dict[str, Any] | None:
        read = {"ConfigMap": self.core.read_namespaced_config_map,
                "Secret": self.core.read_namespaced_secret}[kind]  # fmt: skip
        try:
            found: dict[str, Any] = self._api.sanitize_for_serialization(read(name, namespace))
        except ApiException as error:
            if error.status == 404:
                return None
            raise
        return found

    def _let_go(self, running: Running) -> None:
        metadata = running.pod["metadata"]
        running.ready = False
        if running.process is not None:
            if "ending" not in running.told:
                running.told["ending"] = time.monotonic()
                _end(running, signal.SIGTERM)
            grace_s = metadata["deletionGracePeriodSeconds"]
            if time.monotonic() - running.told["ending"] > grace_s:
                _end(running, signal.SIGKILL)
            self._tell(running)
            return
        self.core.delete_namespaced_pod(
            metadata["name"], metadata["namespace"], grace_period_seconds=0
        )

    def _tell(self, running: Running) -> None:
        """Patch the status where it has changed."""
        name, alive = running.container["name"], running.process is not None
        done = not alive and running.exit_code is not None
        policy = running.pod["spec"].get("restartPolicy", "Always")
        over = done and (policy == "Never" or (policy == "OnFailure" and not running.exit_code))
        phase = "Pending" if not alive and not done else "Running"
        if over:
            phase = "Failed" if running.exit_code else "Succeeded"
        if alive:
            state: dict[str, Any] = {"running": {}}
        elif done:
            state = {"terminated": {"exitCode": running.exit_code}}
        else:
            state = {"waiting": {"reason": "ContainerCreating", "message": running.waiting}}
        truth = str(running.ready)
        told = {
            "phase": phase, "podIP": running.address,
            "conditions": [
                {"type": kind, "status": truth, "lastTransitionTime": _now()}
                for kind in ("Ready", "ContainersReady")
            ],
            "containerStatuses": [{
                "name": name, "ready": running.ready, "started": running.started, "state": state,
                "restartCount": running.restarts, "image": running.container["image"],
                "imageID": "",
            }],
        }  # fmt: skip
        compared = {**told, "conditions": truth}
        if running.told.get("status") == compared:
            return
        metadata = running.pod["metadata"]
        self.core.patch_namespaced_pod_status(
            metadata["name"], metadata["namespace"], {"status": told}
        )
        running.told["status"] = compared

    def _probe(self) -> None:
        """Ask each running pod what is next to be asked; the rest of a round's time is a pause."""
        for running in list(self.running.values()):
            if running.process is None or running.sandbox is None or self._closing.is_set():
                continue
            if running.pod["spec"]["nodeName"] in self.deaf:
                continue
            self._ask(running, "readinessProbe" if running.started else "startupProbe")
            if running.started and running.ready and "livenessProbe" in running.container:
                self._ask(running, "livenessProbe")
        self._closing.wait(1.0)

    def _ask(self, running: Running, kind: str) -> None:
        probe, sandbox = running.container.get(kind) or {}, running.sandbox
        if sandbox is None or time.monotonic() < running.due_s.get(kind, 0.0):
            return
        if not probe:
            well = True
        elif not _listens(running):
            well = False  # whoever asks, so that nobody has to be started to ask
        elif "httpGet" in probe:
            well = _answers(running.address, probe["httpGet"])
        else:
            done = subprocess.run(
                [sandbox.rewrite(part) for part in probe["exec"]["command"]],
                env=dict(sandbox.environment), cwd=running.directory, capture_output=True,
                check=False, timeout=60,
            )  # fmt: skip
            well = done.returncode == 0
            with open(running.log, "ab") as log:
                log.write(b"" if well else f"{kind}: ".encode() + done.stdout + done.stderr)
        if well:
            running.due_s[kind] = time.monotonic() + probe.get("periodSeconds", 1)
        if running.process is None:
            return
        running.failures[kind] = 0 if well else running.failures.get(kind, 0) + 1
        limit = probe.get("failureThreshold", 3)
        if kind == "startupProbe":
            running.started = running.started or well
        elif kind == "readinessProbe":
            running.ready = well or (running.ready and running.failures[kind] < limit)
        if kind != "readinessProbe" and running.failures[kind] >= limit:
            _end(running, signal.SIGTERM)


def _end(running: Running, number: signal.Signals) -> None:
    """Signal the container: SIGTERM to its first process, SIGKILL to all."""
    process = running.process
    if process is None or process.poll() is not None:
        return
    if number is signal.SIGTERM:
        process.terminate()
        return
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def _listens(running: Running) -> bool:
    """Whether the container's first port is open; true for one without ports."""
    for port in (running.container.get("ports") or ())[:1]:
        try:
            socket.create_connection((running.address, port["containerPort"]), 1.0).close()
        except OSError:
            return False
    return True


def _answers(address: str, get: dict[str, Any]) -> bool:
    """Whether an HTTP probe is answered with a code below 400."""
    url = f"http://{address}:{get['port']}{get['path']}"
    try:
        with urllib.request.urlopen(url, timeout=3) as response:
            return bool(response.status < 400)
    except OSError:
        return False


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
