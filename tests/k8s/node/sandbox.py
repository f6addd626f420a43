"""What a container sees: its volumes as directories, and its command with their paths in it."""

from __future__ import annotations

import base64
import contextlib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Both are the machine's own: shared memory has to be where the C library looks for it.
_LEFT_ALONE = ("/dev/shm",)


class NotYet(Exception):
    """A volume's ConfigMap or Secret is not there; the pod waits for it."""


@dataclass(frozen=True)
class Sandbox:
    """`rewrite(text)`: paths of volumes in `text` as they are on this machine."""

    directory: Path
    rewrite: Callable[[str], str]
    environment: Mapping[str, str]


def prepare(
    pod: dict[str, Any], container: dict[str, Any], directory: Path, address: str,
    read: Callable[[str, str, str], dict[str, Any] | None],
) -> Sandbox:  # fmt: skip
    """Write the volumes of `container` below `directory`.

    `read(kind, namespace, name)` gives a ConfigMap or a Secret. Raises NotYet while one is missing.
    """
    volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes") or ()}
    places: dict[str, str] = {}
    contents: list[tuple[Path, dict[str, bytes]]] = []
    for mount in container.get("volumeMounts") or ():
        if mount["mountPath"] in _LEFT_ALONE:
            continue
        volume = volumes[mount["name"]]
        place = directory / "volumes" / mount["name"]
        if "hostPath" in volume:
            place = Path(volume["hostPath"]["path"])
        else:
            place.mkdir(parents=True, exist_ok=True)
            contents.append((place, _files(volume, pod["metadata"]["namespace"], read)))
        places[mount["mountPath"]] = str(place / mount["subPath"] if "subPath" in mount else place)

    rewrite = _rewriter(places, address)
    for place, files in contents:
        for name, data in files.items():
            with contextlib.suppress(UnicodeDecodeError):
                data = rewrite(data.decode()).encode()
            (place / name).write_bytes(data)
    environment = {
        variable["name"]: rewrite(str(variable.get("value", "")))
        for variable in container.get("env") or ()
        if "valueFrom" not in variable
    }
    return Sandbox(directory, rewrite, {**_inherited(), **environment})


def _files(
    volume: dict[str, Any], namespace: str,
    read: Callable[[str, str, str], dict[str, Any] | None],
) -> dict[str, bytes]:  # fmt: skip
    for field, kind, key in (
        ("configMap", "ConfigMap", "name"),
        ("secret", "Secret", "secretName"),
    ):
        if field not in volume:
            continue
        obj = read(kind, namespace, volume[field][key])
        if obj is None:
            raise NotYet(f"{kind} {volume[field][key]} is not there")
        data = obj.get("data") or {}
        if kind == "Secret":
            return {name: base64.b64decode(value) for name, value in data.items()}
        return {name: str(value).encode() for name, value in data.items()}
    return {}


def _rewriter(places: Mapping[str, str], address: str) -> Callable[[str], str]:
    """All paths at once, so that what was put in is not looked at again."""
    paths = sorted(places, key=len, reverse=True)
    pattern = re.compile(
        r"(?<![\w./-])(" + "|".join(map(re.escape, [*paths, "0.0.0.0"])) + r")(?=$|[/\s'\",:])"
    )

    def replace(found: re.Match[str]) -> str:
        return places.get(found[1], address)

    return lambda text: pattern.sub(replace, text)


def _inherited() -> dict[str, str]:
    kept = ("LANG", "LC_ALL", "HF_HUB_OFFLINE", "OMP_NUM_THREADS")
    # All addresses of pods are on the loopback interface; the machine's own name may be nowhere.
    found = {name: os.environ[name] for name in kept if name in os.environ}
    return {**found, "TKNP_INTERFACE": "lo"}
