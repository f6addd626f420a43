"""A service on the fake cluster, its kubelet, and a client inside the cluster."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .cluster import Cluster


@dataclass
class Scene:
    """A service on the fake cluster, its kubelet, and a client inside the cluster."""

    cluster: Cluster
    kubelet: Any
    namespace: str
    directory: Path
    name: str = "demo"

    @property
    def service(self) -> dict[str, Any]:
        """The object as it is now."""
        found = self.cluster.services.get(name=self.name, namespace=self.namespace)
        service: dict[str, Any] = found.to_dict()
        return service

    def condition(self, kind: str) -> dict[str, Any]:
        """A condition of the service; empty while it has none such."""
        conditions = (self.service.get("status") or {}).get("conditions") or ()
        return next((c for c in conditions if c["type"] == kind), {})

    def pods(self) -> dict[str, bool]:
        """Every pod and whether it is ready."""
        listed = self.cluster.core.list_namespaced_pod(self.namespace).items
        return {
            pod.metadata.name: any(
                c.type == "Ready" and c.status == "True" for c in pod.status.conditions or ()
            )
            for pod in listed
        }

    def all_ready(self) -> bool:
        """Whether there are pods, all of them ready; raises what has ended the kubelet."""
        if self.kubelet.error is not None:
            raise self.kubelet.error
        pods = self.pods()
        return bool(pods) and all(pods.values())

    def logs(self) -> str:
        """The state of things, for a failure's message."""
        tails = [
            f"{r.pod['metadata']['name']}: {r.log.read_text(errors='replace')[-1500:]}"
            for r in list(self.kubelet.running.values())
            if r.log.exists()
        ]
        return "\n".join([str(self.pods()), str(self.service.get("status")), *tails])

    def secret(self, name: str, key: str) -> bytes:
        data = self.cluster.core.read_namespaced_secret(name, self.namespace).data
        return base64.b64decode(data[key])

    def generate(self, prompt: str, tokens: int = 8) -> str:
        """What `tknp generate` answers, run inside the cluster with the API token."""
        for key in ("ca.crt", "api-token"):
            (self.directory / key).write_bytes(self.secret(f"{self.name}-internal", key))
        done = subprocess.run(
            [str(Path(sys.executable).parent / "tknp"), "generate", "--json", "--raw",
             "--target", f"{self.name}-coordinator.{self.namespace}.svc:50051",
             "--tls-ca", str(self.directory / "ca.crt"),
             "--token-file", str(self.directory / "api-token"),
             "--max-tokens", str(tokens), "--ignore-eos", prompt],
            env=dict(self.kubelet.environment), capture_output=True, text=True, check=False,
            timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return str(json.loads(done.stdout)["text"])
