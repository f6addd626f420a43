"""docs/api.md does what it says: its curl and Python examples, against a running pool."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import yaml

from tknp.gateway.keys import read_keys
from tknp.gateway.settings import settings_from
from tknp.local import InProcessPool

pytestmark = pytest.mark.asyncio(loop_scope="module")
TEXT = (Path(__file__).parents[3] / "docs" / "api.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[str]:
    return [text for name, text in BLOCKS if name == language]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def places(
    open_speaker: Callable[..., Any], serving: Callable[..., Any]
) -> AsyncIterator[dict[str, str]]:
    """What stands in the document, and what it is here."""
    pool = open_speaker(served_model_name="smollm2")
    async with InProcessPool(pool), serving(pool.config.coordinator) as served:
        yield {"http://127.0.0.1:8000": served.url, "127.0.0.1:50051": pool.config.coordinator}


async def output(places: dict[str, str], *argv: str) -> str:
    """Of a command, which has to succeed."""
    for written, here in places.items():
        argv = tuple(argument.replace(written, here) for argument in argv)
    process = await asyncio.create_subprocess_exec(
        *argv, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    out, errors = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 0, errors.decode()
    return out.decode()


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("script", blocks("bash"))
async def test_curl(places: dict[str, str], script: str) -> None:
    shown = await output(places, "bash", "-euo", "pipefail", "-c", script)
    assert "error" not in shown
    assert ("data: [DONE]" in shown) == ("stream" in script)


@pytest.mark.parametrize("script", blocks("python"))
async def test_python(places: dict[str, str], script: str) -> None:
    assert await output(places, sys.executable, "-c", script)


@pytest.mark.skipif(shutil.which("grpcurl") is None, reason="grpcurl is not installed")
async def test_grpcurl(places: dict[str, str]) -> None:
    (script,) = (text for text in blocks("") if text.startswith("grpcurl"))
    assert "tknp.v1.Inference" in await output(places, "bash", "-euo", "pipefail", "-c", script)


async def test_settings_and_keys(tmp_path: Path) -> None:
    settings, keys = (yaml.safe_load(text) for text in blocks("yaml"))
    assert settings_from(settings).max_replicas == 8
    path = tmp_path / "keys.yaml"
    path.write_text(yaml.safe_dump(keys))
    assert [tenant.name for tenant in read_keys(str(path)).tenants] == ["research"]


async def test_the_commands_exist() -> None:
    from tknp.cli.gateway import command as gateway
    from tknp.cli.up import command as up

    flags = {flag for command in (gateway, up) for p in command.params for flag in p.opts}
    flags |= {
        flag for command in (gateway, up) for p in command.params for flag in p.secondary_opts
    }
    for flag in re.findall(r"`?tknp (?:up|gateway) [^`\n#]*", TEXT):
        assert set(re.findall(r"--[a-z-]+", flag)) <= flags | {"--help"}
