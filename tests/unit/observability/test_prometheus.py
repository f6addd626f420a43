"""Expressions of dashboards and rules, executed by a real Prometheus that scrapes a real pool.

The pool and the gateway run in this process; Prometheus is the Debian package's. Expressions of
what such a pool doesn't have, named in `RARE`, must be executable and may give nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvicorn
import yaml

from tknp.cli.ports import free_ports
from tknp.gateway.gateway import Gateway
from tknp.gateway.http import create_app
from tknp.gateway.settings import GatewaySettings
from tknp.local import InProcessPool
from tknp.pool import Pool, open_pool

RULES = Path(__file__).parents[3] / "charts" / "tknp" / "alerts" / "tknp.yaml"
# Counters whose labels appear with their first event.
RARE = ("tknp_transfers_aborted_total", "tknp_operator_")
INTERVAL_S = 1
_WAIT_S = 60


@pytest.fixture
def served(make_pool: Callable[..., Any], random_checkpoint: Callable[..., Path]) -> Pool:
    """A small pool of two nodes, every process with metrics."""
    path = random_checkpoint(layers=4, q_heads=4, kv_heads=2, head_dim=16, tied=True)
    made = make_pool(path, page_size=16, kv_memory_bytes="512KiB", kv_transfer="grpc",
                     served_model_name="small").config  # fmt: skip
    ports = iter(free_ports(4))

    def with_metrics(group: Any) -> Any:
        return replace(group, metrics_addresses=(f"127.0.0.1:{next(ports)}",))

    nodes, prefill = tuple(map(with_metrics, made.nodes)), tuple(map(with_metrics, made.prefill))
    address = f"127.0.0.1:{next(ports)}"
    return open_pool(replace(made, nodes=nodes, prefill=prefill, metrics_address=address))


@contextlib.asynccontextmanager
async def prometheus(directory: Path, targets: list[str]) -> AsyncIterator[Callable[[str], Any]]:
    """A server that scrapes `targets`; gives `ask(expression)`, the result of an instant query."""
    command = shutil.which("prometheus")
    if command is None:
        pytest.skip("prometheus is not installed: apt-get install prometheus")
    labels = {"namespace": "ai", "pool": "p"}
    config = {
        "global": {"scrape_interval": f"{INTERVAL_S}s"},
        "scrape_configs": [
            {"job_name": "tknp", "static_configs": [{"targets": targets, "labels": labels}]}
        ],
    }
    (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_ports(1)[0]}"
    process = subprocess.Popen(  # noqa: ASYNC220 - starts at once
        [command, "--config.file", "prometheus.yml", "--storage.tsdb.path", "data",
         "--web.listen-address", address, "--log.level", "error"],
        cwd=directory, stdout=subprocess.DEVNULL,
    )  # fmt: skip

    async def ask(expression: str) -> Any:
        query = urllib.parse.urlencode({"query": expression})

        def get() -> Any:
            url = f"http://{address}/api/v1/query?{query}"
            with urllib.request.urlopen(url, timeout=30) as response:
                return json.load(response)["data"]["result"]

        return await asyncio.to_thread(get)

    try:
        yield ask
    finally:
        process.terminate()
        process.wait(30)


async def until(ask: Callable[[str], Any], expression: str) -> None:
    """Wait until `expression` gives something."""
    async with asyncio.timeout(_WAIT_S):
        while True:
            with contextlib.suppress(OSError):  # it isn't up yet
                if await ask(expression):
                    return
            await asyncio.sleep(0.1)


@contextlib.asynccontextmanager
async def gateway_of(target: str) -> AsyncIterator[str]:
    """A gateway of the pool at `target`, served here: its HOST:PORT."""
    (port,) = free_ports(1)
    app = create_app(Gateway(GatewaySettings(pools=(target,))))
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning", ws="none"))
    task = asyncio.create_task(server._serve())  # `serve` would take this process's signals
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await task


async def answered(gateway: str, model: str) -> None:
    """Let the model write eight tokens after forty."""
    body = {"model": model, "prompt": list(range(40)), "max_tokens": 8, "stream": True}

    def post() -> None:
        headers = {"Content-Type": "application/json"}
        url = f"http://{gateway}/v1/completions"
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as response:
            assert b"[DONE]" in response.read()

    await asyncio.to_thread(post)


async def test_every_expression_gives_data_of_a_real_pool(
    served: Pool, queries: dict[str, str], rules: dict[str, Any], tmp_path: Path
) -> None:
    config = served.config
    ranks = [group.metrics_addresses[0] for group in (*config.nodes, *config.prefill)]
    async with (
        InProcessPool(served),
        gateway_of(config.coordinator) as gateway,
        prometheus(tmp_path, [config.metrics_address, gateway, *ranks]) as ask,
    ):
        await until(ask, 'tknp_gateway_pools{state="ready"} > 0')
        await answered(gateway, "small")  # counters with labels have begun
        await until(ask, "tknp_gateway_requests_total offset 1s")
        await until(ask, f"count(count_over_time(up[1m]) > 1) == {2 + len(ranks)}")
        await asyncio.gather(*(answered(gateway, "small") for _ in range(6)))
        for counted, series in (
            ("tknp_requests_total", 1), ("tknp_gateway_inter_chunk_seconds_count", 1),
            ("tknp_step_seconds_count", 2), ("tknp_transfer_seconds_count", 1),
        ):  # fmt: skip
            await until(ask, f"count(increase({counted}[5m]) > 0) == {series}")
        await until(
            ask, 'increase(tknp_gateway_requests_total{endpoint="/v1/completions"}[5m]) > 0'
        )
        found = {where: await ask(text) for where, text in queries.items()}
        recording = [
            rule["expr"] for group in rules["groups"] for rule in group["rules"] if "record" in rule
        ]
        found |= {text: await ask(text) for text in recording}

    for where, result in found.items():
        text = queries.get(where, where)
        assert result or any(name in text for name in RARE), f"{where}: nothing from {text}"
        assert all(sample["value"][1] != "NaN" for sample in result), f"{where}: NaN from {text}"
