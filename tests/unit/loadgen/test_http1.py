"""The HTTP client against a server that says whatever a test wants, byte by byte."""

from __future__ import annotations

import asyncio
import time

import pytest

from tknp_loadgen.target.base import Failure, Unmeasured
from tknp_loadgen.target.openai_http import HttpSettings, OpenAiHttp

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"


async def why_failed(answer: bytes) -> str:
    """The reason that a request gets whose answer is this, after which the server hangs up."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    listening = await asyncio.start_server(connected, "127.0.0.1", 0)
    host, port = listening.sockets[0].getsockname()
    target = OpenAiHttp(HttpSettings(f"http://{host}:{port}/v1", "m"), time.monotonic_ns)
    await target.open(1)
    sink = Unmeasured()
    target.begin(b"POST / HTTP/1.1\r\n\r\n", sink)
    try:
        with pytest.raises(Failure) as failed:
            async with asyncio.timeout(60):
                await sink.done
    finally:
        await target.close()
        listening.close()
    return str(failed.value)


@pytest.mark.parametrize("said", [b"HTTP/1.", HEAD])
async def test_a_connection_lost_within_the_head(said: bytes) -> None:
    assert await why_failed(said) == "the server closed the connection within its response"


NUMBER = b'data: {"choices": [{"text": "a"}], "usage": 5}\n\n'
LIST = b'data: {"choices": [], "usage": [5]}\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize(("body", "reason"), [(NUMBER, "TypeError: "), (LIST, "AttributeError: ")])
@pytest.mark.parametrize("length", [True, False])
async def test_a_defect_of_ours_is_called_by_its_name(
    body: bytes, reason: str, length: bool
) -> None:
    """It is not taken for broken HTTP, and the request ends: within the body and at its end."""
    size = f"content-length: {len(body)}\r\n".encode() if length else b""
    assert (await why_failed(HEAD + size + b"\r\n" + body)).startswith(reason)


async def test_what_is_not_http() -> None:
    assert (await why_failed(b"SSH-2.0-OpenSSH\r\n")).startswith("not HTTP: ")
