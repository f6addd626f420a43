"""A Ray cluster of one node for one gateway: `tknp gateway`.

    ports -> environment -> ray.init (loopback, no dashboard, a token of its own) -> Serve
          -> application, whose replicas listen on the ports; Serve has no proxies here
    SIGTERM or SIGINT: no new requests, open streams end, everything stops; a second one: at once

Ray's processes share this one's fate, whichever way it ends, and what they write is removed.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from tknp.errors import Unavailable
from tknp.gateway.front import check_tls
from tknp.gateway.ports import Ports
from tknp.gateway.settings import GatewaySettings

log = logging.getLogger(__name__)
_LOOPBACK = "127.0.0.1"
# Where sockets may be: their paths have to be short, which TMPDIR need not be.
_SOCKETS = "/tmp"
_PREFIX = "tknp-ray-"
_OBJECT_STORE_BYTES = 80 << 20  # the least that Ray takes; nothing of ours is put there


def environment() -> dict[str, str]:
    """What Ray reads before it is imported; what is set already wins."""
    return {
        "RAY_USAGE_STATS_ENABLED": "0",
        # Despite its name it makes a cluster of one node that listens on loopback only, anywhere.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_SERVE_LOG_TO_STDERR": "0",
        "RAY_DEDUP_LOGS": "0",
        # What costs most while nothing happens: how often the controller looks at its deployments,
        # and Ray at the machine for a dashboard that nobody sees.
        "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.3",
        "RAY_enable_metrics_collection": "0",
        "REPORTER_UPDATE_INTERVAL_MS": "60000",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        # One event loop for a replica's own work and its streams: a chunk changes threads no more
        # than it has to.
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    }


@contextmanager
def cluster() -> Iterator[Path]:
    """A Ray cluster that ends with this context, files and all; gives its private directory."""
    for name, value in environment().items():
        os.environ.setdefault(name, value)
    import ray

    _sweep()
    directory = tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=_SOCKETS)
    try:
        ray.init(
            address="local", num_cpus=4, num_gpus=0, include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES, logging_level=logging.ERROR,
            log_to_driver=False, _node_ip_address=_LOOPBACK, _temp_dir=directory,
        )  # fmt: skip
        try:
            yield Path(directory)
        finally:
            ray.shutdown()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _sweep() -> None:
    """Remove what gateways that were killed left behind."""
    for path in Path(_SOCKETS).glob(f"{_PREFIX}*-*"):
        pid = path.name.removeprefix(_PREFIX).partition("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(path, ignore_errors=True)


def start(settings: GatewaySettings, ports: str) -> None:
    """Start the application, or update it to `settings`; returns when it answers.

    `ports`: path of the gateway's `Ports`.
    """
    from ray import serve
    from ray.serve.config import ProxyLocation
    from ray.serve.schema import LoggingConfig

    from tknp.gateway.serve_app import NAME, application

    logging.getLogger("ray").setLevel(logging.WARNING)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    quiet = LoggingConfig(log_level="WARNING", enable_access_log=False)
    serve.start(proxy_location=ProxyLocation.Disabled, logging_config=quiet)
    try:
        app = application(settings, ports)
        serve.run(app, name=NAME, route_prefix="/", logging_config=quiet)
    except RuntimeError as error:
        raise Unavailable(f"the gateway does not start: {error}") from error


def run(settings: GatewaySettings) -> None:
    """Serve until SIGTERM or SIGINT; a line on standard output says that the gateway answers.

    Raises InvalidValue for files and ports that can't be used.
    """
    check_tls(settings)
    asked = threading.Semaphore(0)

    def stop(_: int, __: FrameType | None) -> None:
        asked.release()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    scheme = "https" if settings.http_cert else "http"
    with (
        cluster() as directory,
        Ports(settings.http_host, settings.http_port, settings.grpc_port, directory) as ports,
    ):
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)  # Ray has put its own there
        start(settings, ports.path)
        print(f"gateway: {scheme}://{settings.http_host}:{settings.http_port}", flush=True)
        asked.acquire()
        ports.close()
        if settings.drain_s > 0:
            _drain(asked, time.monotonic() + settings.drain_s)


def _drain(asked: threading.Semaphore, until_s: float) -> None:
    """Let open streams end, unless asked once more or the time is up."""
    from ray import serve

    drained = threading.Thread(target=serve.shutdown, daemon=True)
    drained.start()
    while drained.is_alive() and time.monotonic() < until_s and not asked.acquire(timeout=0.1):
        continue
