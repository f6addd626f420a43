"""The port: what it answers, on which thread values are read, and what it does with trouble."""

from __future__ import annotations

import asyncio
import http.client
import ssl
import threading
import urllib.error
import urllib.request

import pytest

from tknp.cli.ports import free_ports
from tknp.errors import Unavailable
from tknp.metrics import table
from tknp.metrics.http import MetricsServer
from tknp.metrics.registry import Registry


@pytest.fixture
def address() -> str:
    return f"127.0.0.1:{free_ports(1)[0]}"


async def get(
    address: str, path: str = "/metrics", accept: str = "", tls: ssl.SSLContext | None = None
) -> tuple[str, str]:
    """Content type and body."""

    def blocking() -> tuple[str, str]:
        url = f"{'https' if tls else 'http'}://{address}{path}"
        request = urllib.request.Request(url, headers={"Accept": accept})
        with urllib.request.urlopen(request, timeout=30, context=tls) as response:
            return response.headers["Content-Type"], response.read().decode()

    return await asyncio.to_thread(blocking)


async def test_readers_run_on_the_event_loop(address: str) -> None:
    registry = Registry("coordinator")
    threads = []

    def reader() -> dict[tuple[str, ...], float]:
        threads.append(threading.current_thread())
        return {(): float(len(asyncio.all_tasks()) > 0)}

    registry.read(table.STEPS, reader)
    server = MetricsServer(registry, address)
    server.start()
    try:
        assert not threads
        kind, text = await get(address)
    finally:
        await server.close()
    assert threads == [threading.current_thread()]
    assert kind.startswith("text/plain")
    assert "\ntknp_steps_total 1.0\n" in text


async def test_openmetrics_and_single_metrics_on_request(address: str) -> None:
    registry = Registry("decode-root")
    registry.histogram(table.STEP, "0", "0").observe(0.1)
    server = MetricsServer(registry, address)
    server.start()
    try:
        kind, text = await get(address, accept="application/openmetrics-text")
        assert kind.startswith("application/openmetrics-text")
        assert "# UNIT tknp_step_seconds seconds" in text
        assert text.endswith("# EOF\n")
        _, text = await get(address, "/metrics?name[]=tknp_build_info")
        assert "tknp_build_info{" in text
        assert "tknp_step_seconds" not in text
    finally:
        await server.close()


async def test_a_reader_that_fails_fails_the_scrape_alone(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    registry = Registry("coordinator")
    broken = [True]

    def reader() -> dict[tuple[str, ...], float]:
        return {(): 1.0 / (not broken[0])}

    registry.read(table.STEPS, reader)
    server = MetricsServer(registry, address)
    server.start()
    try:
        with pytest.raises(urllib.error.HTTPError, match="500"):
            await get(address)
        broken[0] = False
        assert "\ntknp_steps_total 1.0\n" in (await get(address))[1]
    finally:
        await server.close()
    assert "ZeroDivisionError" in capsys.readouterr().err


async def test_a_taken_port_is_refused_and_free_after_close(address: str) -> None:
    first = MetricsServer(Registry("coordinator"), address)
    second = MetricsServer(Registry("prefill"), address)
    first.start()
    try:
        with pytest.raises(Unavailable, match=rf"cannot serve metrics on {address}"):
            second.start()
    finally:
        await first.close()
    second.start()
    try:
        assert 'service="prefill"' in (await get(address))[1]
    finally:
        await second.close()
    with pytest.raises(urllib.error.URLError):
        await get(address)


async def test_with_tls_only_certificates_of_the_ca_are_answered(
    address: str, secured: dict[str, str]
) -> None:
    tls = secured["tls_cert"], secured["tls_key"], secured["tls_ca"]
    server = MetricsServer(Registry("coordinator"), address, tls)
    stranger = ssl.create_default_context(cafile=secured["tls_ca"])
    member = ssl.create_default_context(cafile=secured["tls_ca"])
    member.load_cert_chain(secured["tls_cert"], secured["tls_key"])
    host, port = address.split(":")
    server.start()
    _, silent = await asyncio.open_connection(host, int(port))  # must hold up nobody
    try:
        assert 'service="coordinator"' in (await get(address, tls=member))[1]
        with pytest.raises((urllib.error.URLError, OSError)):
            await get(address, tls=stranger)
        with pytest.raises((urllib.error.URLError, OSError, http.client.HTTPException)):
            await get(address)
        assert 'service="coordinator"' in (await get(address, tls=member))[1]
    finally:
        await server.close()
        silent.close()


async def test_without_an_address_nothing_is_served() -> None:
    server = MetricsServer(Registry("coordinator"), "")
    server.start()
    await server.close()
