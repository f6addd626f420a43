"""DNS of the fake cluster: a file of names, and a library that has getaddrinfo read it.

Certificates are checked against names, so that names can't be replaced by addresses beforehand.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

_SOURCE = Path(__file__).with_name("hosts.c")


def build(directory: Path) -> Path:
    """Compile the library into `directory`; returns its path."""
    library = directory / "hosts.so"
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise RuntimeError("no C compiler was found: install gcc")
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(_SOURCE), "-ldl"], check=True
    )
    return library


def records(pods: list[dict[str, Any]], services: list[dict[str, Any]]) -> dict[str, str]:
    """Name -> address. A Service has the address of a ready pod that it selects, if there is one.

    A headless Service also gives each of its pods `hostname.service.namespace.svc`.
    """
    found: dict[str, str] = {}
    for service in services:
        spec, metadata = service["spec"], service["metadata"]
        selector, space = spec.get("selector"), metadata["namespace"]
        name = f"{metadata['name']}.{space}.svc"
        for pod in pods:
            labels = pod["metadata"].get("labels") or {}
            address = (pod.get("status") or {}).get("podIP")
            chosen = bool(selector) and selector.items() <= labels.items()
            if not (address and chosen and pod["metadata"]["namespace"] == space):
                continue
            ending = "deletionTimestamp" in pod["metadata"]
            if spec.get("publishNotReadyAddresses") or (ready(pod) and not ending):
                found.setdefault(name, address)
                if pod["spec"].get("subdomain") == metadata["name"]:
                    found[f"{pod['spec']['hostname']}.{name}"] = address
    return found


def ready(pod: dict[str, Any]) -> bool:
    """Whether the condition Ready of `pod` holds."""
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def write(path: Path, found: dict[str, str]) -> None:
    """Replace the file at once, since processes read it at any time."""
    fresh = path.with_suffix(".new")
    fresh.write_text("".join(f"{name} {address}\n" for name, address in sorted(found.items())))
    fresh.replace(path)
