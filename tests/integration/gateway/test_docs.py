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
# What stands in for grpcurl where it is not installed: it, too, knows no more than reflection says.
GRPCURL = """
import argparse
import grpc
from google.protobuf import descriptor_pool, json_format, message_factory
from grpc_reflection.v1alpha import proto_reflection_descriptor_database as reflection
parser = argparse.ArgumentParser()
parser.add_argument("-plaintext", action="store_true", required=True)
parser.add_argument("-d", default="{}")
parser.add_argument("target")
parser.add_argument("what")
given = parser.parse_args()
with grpc.insecure_channel(given.target) as channel:
    known = reflection.ProtoReflectionDescriptorDatabase(channel)
    if given.what == "list":
        print(*known.get_services(), sep="\\n")
    else:
        service, method = given.what.split("/")
        found = descriptor_pool.DescriptorPool(known).FindServiceByName(service)
        kind = found.FindMethodByName(method)
        asked, answered = map(message_factory.GetMessageClass, (kind.input_type, kind.output_type))
        call = channel.unary_stream(
            f"/{given.what}", asked.SerializeToString, answered.FromString
        )
        for answer in call(json_format.Parse(given.d, asked()), timeout=60):
            print(json_format.MessageToJson(answer))
"""
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


async def output(places: dict[str, str], *argv: str, before: Path | None = None) -> str:
    """Of a command, which has to succeed. `before`: where programs are looked for first."""
    for written, here in places.items():
        argv = tuple(argument.replace(written, here) for argument in argv)
    path = os.environ["PATH"] if before is None else f"{before}:{os.environ['PATH']}"
    process = await asyncio.create_subprocess_exec(
        *argv, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PATH": path},
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


async def test_grpcurl(places: dict[str, str], tmp_path: Path) -> None:
    if shutil.which("grpcurl") is None:
        stand_in = tmp_path / "grpcurl"
        stand_in.write_text(f"#!{sys.executable}\n{GRPCURL}")
        stand_in.chmod(0o755)
    (script,) = (text for text in blocks("") if text.startswith("grpcurl"))
    shown = await output(places, "bash", "-euo", "pipefail", "-c", script, before=tmp_path)
    assert "tknp.v1.Inference" in shown
    assert "FINISH_REASON_LENGTH" in shown


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
