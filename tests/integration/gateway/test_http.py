"""What the OpenAI client does not show: plain HTTP, keys, limits, clients that leave or dawdle."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
import pytest_asyncio

from tknp.client import Client
from tknp.local import InProcessPool

pytestmark = pytest.mark.asyncio(loop_scope="module")
Until = Callable[[Callable[[], bool]], Awaitable[None]]
BODY = {"model": "speaker", "prompt": "x", "temperature": 0, "max_tokens": 4}
ENDLESS = {**BODY, "max_tokens": 100_000, "stream": True}
KEYS = {"first": "key-0123456789abcdef", "second": "other-0123456789abcdef"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(open_speaker: Callable[..., Any]) -> AsyncIterator[Any]:
    opened = open_speaker()
    async with InProcessPool(opened):
        yield opened.config


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(pool: Any, serving: Callable[..., Any]) -> AsyncIterator[SimpleNamespace]:
    async with serving(pool.coordinator) as found:
        yield found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(served: SimpleNamespace) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(base_url=served.url, timeout=60) as client:
        yield client


async def idle(pool: Any) -> None:
    """Wait until no node of `pool` holds a page."""
    async with asyncio.timeout(60), Client(pool.coordinator) as client:
        while any(node.used_pages for node in (await client.status()).nodes):
            pass


async def test_tokenize_and_detokenize(http: httpx2.AsyncClient) -> None:
    text = "h\u00e9llo \u4e16\u754c"
    found = (await http.post("/tokenize", json={"prompt": text})).json()
    assert found["tokens"] == list(text.encode())
    assert (found["count"], found["max_model_len"]) == (len(text.encode()), 1 << 17)
    back = await http.post("/detokenize", json={"tokens": found["tokens"], "model": "speaker"})
    assert back.json() == {"prompt": text}
    chat = {"messages": [{"role": "developer", "content": "a"}], "model": "speaker"}
    tokens = (await http.post("/tokenize", json=chat)).json()["tokens"]
    shown = (await http.post("/detokenize", json={"tokens": tokens})).json()
    assert shown == {"prompt": "system: aassistant: "}
    for body, status in (({}, 400), ({"prompt": "a", "messages": []}, 400), ({"prompt": 1}, 422)):
        assert (await http.post("/tokenize", json=body)).status_code == status
    refused = await http.post("/detokenize", json={"tokens": [261]})
    assert refused.status_code == 400
    assert "ids end at 260" in refused.json()["error"]["message"]


async def test_what_probes_and_scrapers_ask(http: httpx2.AsyncClient) -> None:
    assert (await http.get("/health")).json() == {"status": "ok"}
    assert (await http.get("/ready")).json() == {"status": "ready"}
    assert set((await http.get("/version")).json()) == {"version"}
    assert (await http.post("/v1/completions", json=BODY)).status_code == 200
    metrics = (await http.get("/metrics")).text
    assert 'tknp_gateway_requests_total{endpoint="/v1/completions",status="200"}' in metrics
    assert 'tknp_gateway_pools{state="ready"} 1.0' in metrics
    assert 'tknp_gateway_inflight{tenant="anybody"} 0.0' in metrics
    page = await http.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]


async def test_the_view_of_the_pool(http: httpx2.AsyncClient, pool: Any) -> None:
    (view,) = (await http.get("/pools")).json()["pools"]
    assert (view["target"], view["ready"], view["model"]) == (pool.coordinator, True, "speaker")
    assert [node["blocks"] for node in view["nodes"]] == [[[0, 1]], [[1, 2]]]
    assert all(node["capacity_tokens"] > 0 for node in view["nodes"])


async def test_errors_of_http_itself_have_the_same_shape(http: httpx2.AsyncClient) -> None:
    for response, status in (
        (await http.get("/absent"), 404),
        (await http.get("/v1/completions"), 405),
        (await http.post("/v1/completions", content=b"{"), 422),
        (await http.post("/v1/completions", json=[1]), 422),
        (await http.post("/v1/chat/completions", json={**BODY, "messages": []}), 422),
    ):
        assert response.status_code == status
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


async def test_a_body_too_large_is_not_read(pool: Any, serving: Callable[..., Any]) -> None:
    async def drip() -> AsyncIterator[bytes]:
        for _ in range(64):
            yield b" " * 1000

    async with (
        serving(pool.coordinator, max_body_bytes=2000) as small,
        httpx2.AsyncClient(base_url=small.url) as http,
    ):
        said = await http.post("/v1/completions", json={**BODY, "prompt": "x" * 3000})
        assert said.status_code == 413
        assert "2000 bytes" in said.json()["error"]["message"]
        assert (await http.post("/v1/completions", content=drip())).status_code == 413
        assert (await http.post("/v1/completions", json=BODY)).status_code == 200


async def test_a_client_that_leaves_frees_its_pages(
    http: httpx2.AsyncClient, pool: Any, served: SimpleNamespace, until: Until
) -> None:
    async with http.stream("POST", "/v1/completions", json={**ENDLESS, "n": 3}) as response:
        lines = response.aiter_lines()
        await anext(lines)
        assert served.gateway.inflight == 3
    await idle(pool)
    await until(lambda: not served.gateway.inflight)
    with pytest.raises(httpx2.ReadTimeout):
        await http.post(
            "/v1/completions", json={**ENDLESS, "stream": False},
            timeout=httpx2.Timeout(60, read=0.3),
        )  # fmt: skip
    await idle(pool)
    async with asyncio.timeout(60):
        while 'status="499"' not in (await http.get("/metrics")).text:
            pass
    await until(lambda: not served.gateway.inflight)


async def test_a_reader_that_stops_reading_stalls_nobody(
    http: httpx2.AsyncClient, served: SimpleNamespace, until: Until
) -> None:
    """Its own chunks wait in its connection; others go on, and it gets all of them in the end."""
    small = socket.socket()
    small.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 17)  # fits segments
    small.connect(("127.0.0.1", served.port))
    reader, writer = await asyncio.open_connection(sock=small, limit=1)
    asked = {**BODY, "max_tokens": 300, "stream": True, "n": 2, "logprobs": 20}
    body = json.dumps(asked).encode()
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: gateway\r\nContent-Type: application/json\r\n"
        b"Connection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    )
    await until(lambda: served.gateway.inflight == 2)
    for _ in range(3):
        found = await http.post("/v1/completions", json=BODY)
        assert found.json()["choices"][0]["text"] == "Wave"
    whole = b""
    while piece := await reader.read(1 << 16):
        whole += piece
    assert whole.count(b'"finish_reason":"length"') == 2
    assert b"data: [DONE]" in whole
    writer.close()


async def test_a_reader_that_never_reads_again_keeps_no_place(
    pool: Any, serving: Callable[..., Any], until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has asked for ends by its own timeout, and so does the answer."""
    monkeypatch.setattr("tknp.gateway.openai.held.UNREAD_S", 0.1)
    async with serving(pool.coordinator, send_bytes=1 << 13) as served:
        small = socket.socket()
        small.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 13)
        small.connect(("127.0.0.1", served.port))
        body = json.dumps({**ENDLESS, "n": 16, "logprobs": 20, "timeout_s": 3}).encode()
        small.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: gateway\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        await until(lambda: served.gateway.inflight == 16)
        await until(lambda: not served.gateway.inflight)
        small.close()


async def test_requests_of_a_replica_are_limited(
    pool: Any, serving: Callable[..., Any], until: Until
) -> None:
    async with (
        serving(pool.coordinator, max_inflight=1) as one,
        httpx2.AsyncClient(base_url=one.url, timeout=60) as http,
    ):
        async with http.stream("POST", "/v1/completions", json=ENDLESS) as held:
            lines = held.aiter_lines()  # which closes the stream when nobody has it any more
            await anext(lines)
            refused = await http.post("/v1/completions", json=BODY)
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) > 0
            assert refused.json()["error"]["type"] == "rate_limit_error"
        await until(lambda: not one.gateway.inflight)
        assert (await http.post("/v1/completions", json=BODY)).status_code == 200


async def test_keys_and_their_limits(
    pool: Any, serving: Callable[..., Any], until: Until, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(
        f"keys:\n- {{name: first, key: {KEYS['first']}, max_requests: 1, priority: 5}}\n"
        f"- {{name: second, key: {KEYS['second']}, max_tokens: 20}}\n"
    )
    first, second = ({"Authorization": f"Bearer {KEYS[name]}"} for name in KEYS)
    async with (
        serving(pool.coordinator, keys_file=str(keys)) as closed,
        httpx2.AsyncClient(base_url=closed.url, timeout=60) as http,
    ):
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic eDp5"}):
            for path in ("/v1/models", "/pools"):
                refused = await http.get(path, headers=headers)
                assert refused.status_code == 401
                assert refused.json()["error"]["code"] == "invalid_api_key"
            assert (
                await http.post("/v1/completions", json=BODY, headers=headers)
            ).status_code == 401
        for path in ("/health", "/ready", "/metrics", "/"):
            assert (await http.get(path)).status_code == 200

        async def ask(headers: dict[str, str], **values: Any) -> httpx2.Response:
            return await http.post("/v1/completions", json={**BODY, **values}, headers=headers)

        async with http.stream("POST", "/v1/completions", json=ENDLESS, headers=first) as held:
            lines = held.aiter_lines()  # which closes the stream when nobody has it any more
            await anext(lines)
            assert (await ask(first)).status_code == 429
            assert (await ask(second)).status_code == 200
        await until(lambda: not closed.gateway.inflight)
        assert (await ask(first, n=2)).status_code == 400
        assert (await ask(first, priority=5)).status_code == 200
        assert (await ask(first, priority=6)).status_code == 400
        assert (await ask(second, max_tokens=20)).status_code == 400
        assert (await ask(second, max_tokens=10, n=2)).status_code == 400
        assert closed.gateway.inflight == 0
        assert not any(t.used.requests or t.used.tokens for t in closed.gateway.keys.tenants)
        metrics = (await http.get("/metrics")).text
        assert not any(key in metrics for key in KEYS.values())


async def test_a_prompt_may_be_held_shorter_than_the_pool_takes(
    pool: Any, serving: Callable[..., Any]
) -> None:
    async with (
        serving(pool.coordinator, max_prompt_tokens=3) as short,
        httpx2.AsyncClient(base_url=short.url) as http,
    ):
        assert (await http.post("/v1/completions", json=BODY)).status_code == 200
        refused = await http.post("/v1/completions", json={**BODY, "prompt": "xxxx"})
        assert refused.status_code == 400
        assert "at most 3" in refused.json()["error"]["message"]


async def test_without_a_pool(serving: Callable[..., Any], make_pool: Callable[..., Any]) -> None:
    async with (
        serving("127.0.0.1:9") as lonely,
        httpx2.AsyncClient(base_url=lonely.url) as http,
    ):
        assert (await http.get("/health")).status_code == 200
        assert (await http.get("/v1/models")).json()["data"] == []
        for refused in (
            await http.get("/ready"),
            await http.post("/v1/completions", json=BODY),
            await http.get("/v1/models/speaker"),
        ):
            assert refused.status_code == 503
            assert "127.0.0.1:9" in refused.json()["error"]["message"]
            assert refused.headers["retry-after"]
