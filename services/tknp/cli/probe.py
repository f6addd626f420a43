"""`tknp probe`: what a kubelet asks of the ports of one pod, with the certificate that the pod has.

    flags, TKNP_* or the pool file -> TLS files -> grpc.health.v1 Check of each address -> exit code

Kubernetes' own gRPC probe speaks no TLS and asks one port, while a pod has one a TP rank. Health is
answered without a token, so none is read. Nothing here imports torch or the model: a kubelet starts
this every few seconds. Exit codes: 0 all serve; 1 one does not, or did not answer in time, and why
is one line; 2 the settings are wrong.
"""

from __future__ import annotations

import time
from pathlib import Path

import click
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tknp.cli.options import FILE, option
from tknp.config import check_address, read_pool
from tknp.errors import InvalidValue, Unavailable
from tknp.rpc.pem import read_ca, read_pair

SERVICES = {"ready": "", "alive": "tknp.liveness"}
_OPTIONS = [("grpc.enable_http_proxy", 0)]
_ABSENT = "gave no answer in time"


def credentials(
    tls_ca: str | None, tls_cert: str | None, tls_key: str | None
) -> grpc.ChannelCredentials | None:
    """TLS that trusts `tls_ca` and shows `tls_cert`, if given; None without `tls_ca`.

    Raises InvalidValue naming the setting for files that can't be read or don't belong together.
    """
    if (tls_cert is None) != (tls_key is None):
        missing = "tls_key" if tls_key is None else "tls_cert"
        raise InvalidValue(missing, None, "give certificate and key, or neither")
    if tls_ca is None:
        if tls_cert is not None:
            raise InvalidValue("tls_ca", None, "say whose certificates are trusted")
        return None
    cert, key = read_pair(tls_cert, tls_key) if tls_cert and tls_key else (None, None)
    return grpc.ssl_channel_credentials(read_ca("tls_ca", tls_ca), key, cert)


def ask(address: str, service: str, tls: grpc.ChannelCredentials | None, timeout_s: float) -> str:
    """Why `service` at `address` (HOST:PORT) does not serve; empty if it does."""
    channel = (
        grpc.insecure_channel(address, _OPTIONS)
        if tls is None
        else grpc.secure_channel(address, tls, _OPTIONS)
    )
    with channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=service), timeout=timeout_s
            )
        except grpc.RpcError as error:
            late = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            return f"{address}: {_ABSENT if late else error.details() or error.code().name}"
    if answer.status == health_pb2.HealthCheckResponse.SERVING:
        return ""
    status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return f"{address}: {status.lower().replace('_', ' ')}"


@click.command("probe")
@click.argument("question", type=click.Choice(list(SERVICES)))
@click.argument("addresses", metavar="HOST:PORT...", nargs=-1, required=True)
@option("--pool", "pool_file", type=click.Path(path_type=Path), metavar="FILE",
        help="Take TLS files from this pool's configuration.")  # fmt: skip
@option("--tls-ca", type=FILE, help="Use TLS and trust these PEM certificates.")
@option("--tls-cert", type=FILE, help="PEM certificate to show; internal ports ask for one.")
@option("--tls-key", type=FILE, help="PEM key of that certificate.")
@click.option("--timeout", "timeout_s", type=click.FloatRange(min=0, min_open=True), default=3.0,
              show_default=True, metavar="SECONDS", help="Longest wait for all.")  # fmt: skip
def command(
    question: str, addresses: tuple[str, ...], pool_file: Path | None, tls_ca: str | None,
    tls_cert: str | None, tls_key: str | None, timeout_s: float,
) -> None:  # fmt: skip
    """Ask whether every process at HOST:PORT is ready or alive; the exit code says it.

    Example: tknp probe ready node-0.pool:50100 node-0.pool:50101 --pool /etc/tknp/pool/pool.yaml
    """
    given = {"tls_ca": tls_ca, "tls_cert": tls_cert, "tls_key": tls_key}
    if pool_file is not None:
        config = read_pool(pool_file, given)
        given = {name: getattr(config, name) for name in given}
    tls = credentials(**given)
    deadline_s = time.monotonic() + timeout_s
    for address in addresses:
        check_address("address", address)
        left_s = max(deadline_s - time.monotonic(), 0.0)
        reason = ask(address, SERVICES[question], tls, left_s)
        if reason:
            raise Unavailable(reason)
