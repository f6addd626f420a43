"""Manifests and commands of the documentation, as far as an API server alone can answer them."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tknp_operator.api.service import parse

DOCS = Path(__file__).parents[2] / "docs"
KUBECTL = Path(sys.executable).parent / "kubectl"


def blocks(page: str, language: str) -> list[str]:
    """Fenced blocks of a page."""
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


def commands() -> list[list[str]]:
    """What the pages have kubectl read or patch of a service, without what follows for ever."""
    found = []
    for page in ("deploy.md", "operations.md"):
        for block in blocks(page, "sh"):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words[:1] == ["kubectl"] and {"get", "patch"} & set(words) and "tps" in words:
                    found.append([word for word in words[1:] if word not in ("-w", "wait")])
    return found


@pytest.fixture
def documented(fake_cluster: Any) -> Any:
    """The service of deploy.md, created."""
    found = map(yaml.safe_load, blocks("deploy.md", "yaml"))
    body = next(obj for obj in found if obj["kind"] == "TokenParallelService")
    namespace = body["metadata"]["namespace"]
    fake_cluster.core.create_namespace({"metadata": {"name": namespace}})
    yield fake_cluster.services.create(body=body, namespace=namespace).to_dict()
    fake_cluster.core.delete_namespace(namespace)


def test_the_example_is_a_service(documented: dict[str, Any]) -> None:
    assert parse(documented).spec.decode.nodes == 4


def test_commands_about_services_work(fake_cluster: Any, documented: dict[str, Any]) -> None:
    metadata, found = documented["metadata"], commands()
    assert len(found) >= 4
    for command in found:
        named = {"NS": metadata["namespace"], "NAME": metadata["name"]}
        words = [named.get(word, word) for word in command]
        done = subprocess.run(
            [str(KUBECTL), "--kubeconfig", str(fake_cluster.kubeconfig), *words],
            capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, (command, done.stderr)
