"""A model whose words are known, pools of it, and gateways served on this event loop."""

from __future__ import annotations

import asyncio
import shutil
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

WORDS = "Wave:\U0001f30ao\u0301\u4e16\u00e9."
"""What `speaker` says for ever: every byte of it occurs once, so each has one that follows it."""


@pytest.fixture(scope="session")
def words() -> str:
    return WORDS


@pytest.fixture(scope="session")
def speaker(random_checkpoint: Callable[..., Path], tmp_path_factory: Any) -> Path:
    """A checkpoint that says `words`, over and over, one byte a token, after x, y or a space.

    Its blocks add nothing to the residual and its head maps the embedding of each byte to the byte
    that follows, so that greedy text is known without another implementation.
    """
    import torch
    from safetensors.torch import load_file, save_file

    path = tmp_path_factory.mktemp("speaker") / "speaker"
    shutil.copytree(random_checkpoint(layers=2, q_heads=4, kv_heads=2, max_position=1 << 17), path)
    tensors = load_file(path / "model.safetensors")
    vectors = torch.nn.functional.normalize(tensors["model.embed_tokens.weight"], dim=-1)
    said = WORDS.encode()
    head = torch.zeros_like(vectors)
    for token, following in zip(said + b"xy ", said[1:] + said[:1] * 4, strict=True):
        head[following] += 2 * vectors[token]
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
        elif name.endswith("norm.weight"):
            tensor.fill_(1.0)
    tensors["model.embed_tokens.weight"] = vectors
    tensors["lm_head.weight"] = head
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.fixture(scope="session")
def open_speaker(make_pool: Callable[..., Any], speaker: Path) -> Callable[..., Any]:
    """Factory of pools of the speaker; keywords are settings of the pool file."""
    settings = {
        "nodes": 2, "page_size": 16, "kv_memory_bytes": 64 << 20, "max_batch": 32,
        "kv_transfer": "grpc",
    }  # fmt: skip
    return lambda **changed: make_pool(speaker, **{**settings, **changed})


@pytest.fixture(scope="session")
def until() -> Callable[[Callable[[], bool]], Awaitable[None]]:
    """`await until(condition)`; raises TimeoutError after a minute."""

    async def wait(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():  # noqa: ASYNC110 - nobody tells when this changes
                await asyncio.sleep(0.01)

    return wait


@pytest.fixture(scope="session")
def serving(
    until: Callable[..., Awaitable[None]],
) -> Callable[..., AbstractAsyncContextManager[SimpleNamespace]]:
    """`async with serving(target, ...) as served`: a gateway, behind HTTP at `served.url`.

    Keywords are settings of the gateway. `served.gateway` is the Gateway itself. `send_bytes`: what
    the kernel keeps of an answer that is not read; None: as much as it likes.
    """
    import uvicorn

    from tknp.gateway.gateway import Gateway
    from tknp.gateway.http import create_app
    from tknp.gateway.settings import GatewaySettings

    @asynccontextmanager
    async def serve(
        *targets: str, send_bytes: int | None = None, **settings: Any
    ) -> AsyncIterator[SimpleNamespace]:
        gateway = Gateway(GatewaySettings(pools=targets, **settings))
        door = socket.create_server(("127.0.0.1", 0))
        port = door.getsockname()[1]
        if send_bytes is not None:
            door.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_bytes)
        server = uvicorn.Server(uvicorn.Config(create_app(gateway), log_level="warning", ws="none"))
        # `serve` would take this process's signals
        task = asyncio.create_task(server._serve(sockets=[door]))
        await until(lambda: server.started or task.done())
        try:
            yield SimpleNamespace(gateway=gateway, url=f"http://127.0.0.1:{port}", port=port)
        finally:
            server.should_exit = True
            await task

    return serve
