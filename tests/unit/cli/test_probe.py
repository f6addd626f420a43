"""`tknp probe` against real health services, with and without mutual TLS."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path

import grpc
import pytest
import yaml
from click.testing import CliRunner, Result
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from tknp.cli.main import main

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
Serve = Callable[..., str]


def probe(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["probe", *arguments])


@pytest.fixture
def serve() -> Iterator[Serve]:
    """`serve(ready, alive, tls)`: a port with health; returns its address."""
    servers = []

    def start(ready: int = SERVING, alive: int = SERVING, tls: dict[str, str] | None = None) -> str:
        server = grpc.server(futures.ThreadPoolExecutor(2))
        servicer = health.HealthServicer()
        servicer.set("", ready)
        servicer.set("tknp.liveness", alive)
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
        if tls is None:
            port = server.add_insecure_port("127.0.0.1:0")
        else:
            pem = {name: Path(tls[name]).read_bytes() for name in ("tls_cert", "tls_key", "tls_ca")}
            pair = [(pem["tls_key"], pem["tls_cert"])]
            required = grpc.ssl_server_credentials(pair, pem["tls_ca"], require_client_auth=True)
            port = server.add_secure_port("127.0.0.1:0", required)
        server.start()
        servers.append(server)
        return f"127.0.0.1:{port}"

    yield start
    for server in servers:
        server.stop(None)


def test_the_exit_code_answers_and_one_line_says_why(serve: Serve, free_port: int) -> None:
    well, loading = serve(), serve(NOT_SERVING, SERVING)
    for question in ("ready", "alive"):
        result = probe(question, well, well)
        assert (result.exit_code, result.output) == (0, "")
    assert probe("alive", loading).exit_code == 0
    result = probe("ready", well, loading)
    assert (result.exit_code, result.output) == (1, f"error: {loading}: not serving\n")
    assert probe("alive", serve(SERVING, NOT_SERVING)).exit_code == 1
    result = probe("ready", f"127.0.0.1:{free_port}")
    assert result.exit_code == 1
    assert result.output.count("\n") == 1
    assert f"127.0.0.1:{free_port}: " in result.output


def test_a_port_that_is_silent_is_given_up(free_port: int) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", free_port))
        listener.listen()
        result = probe("ready", f"127.0.0.1:{free_port}", "--timeout", "0.3")
    assert result.exit_code == 1
    assert f"127.0.0.1:{free_port}: " in result.output


def test_mutual_tls_comes_from_flags_environment_or_pool_file(
    serve: Serve, secured: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = serve(tls=secured)
    flags = ["--tls-ca", secured["tls_ca"]]
    assert probe("ready", address).exit_code == 1  # plain text
    assert probe("ready", address, *flags).exit_code == 1  # shows no certificate
    flags += ["--tls-cert", secured["tls_cert"], "--tls-key", secured["tls_key"]]
    assert probe("ready", address, *flags).exit_code == 0

    pool = {
        "model": "/models/x", "coordinator": "h:1", "data_plane": "h:2", **secured,
        "nodes": [{"addresses": [address]}], "prefill": [{"addresses": [address]}],
    }  # fmt: skip
    file = tmp_path / "pool.yaml"
    file.write_text(yaml.safe_dump(pool))
    assert probe("ready", address, "--pool", str(file)).exit_code == 0
    monkeypatch.setenv("TKNP_POOL", str(file))
    assert probe("ready", address).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["127.0.0.1"], "address='127.0.0.1'"),
        (["h:1", "--tls-cert", "x"], "tls_key=None"),
        (["h:1", "--tls-cert", "x", "--tls-key", "x"], "tls_ca=None"),
        (["h:1", "--tls-ca", "/nowhere"], "tls_ca='/nowhere'"),
        (["h:1", "--pool", "/nowhere"], "pool='/nowhere'"),
        ([], "HOST:PORT"),
    ],
)
def test_wrong_settings_are_refused(arguments: list[str], named: str) -> None:
    result = probe("ready", *arguments)
    assert result.exit_code == 2
    assert named in result.output


def test_it_starts_without_what_computes() -> None:
    """A kubelet runs it every few seconds."""
    code = (
        "import sys, tknp.cli.main as m; m.main(['probe', 'ready', '127.0.0.1:1'], "
        "standalone_mode=False); "
    )
    heavy = "('torch', 'transformers', 'numpy', 'ray', 'tokenizers')"
    check = f"print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code + check], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
