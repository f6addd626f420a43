"""`tknp gateway`: OpenAI HTTP and gRPC in front of pools, by Ray Serve, until SIGTERM.

settings file + flags -> GatewaySettings -> a Ray cluster of one node -> replicas
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from tknp.cli.options import FILE, combined, option
from tknp.cli.serve import LOG_FORMAT
from tknp.errors import TknpError

PORT = click.IntRange(1, 65535)


def gateway_options(function: Any) -> Any:
    """Flags of settings, absent (None) unless given."""
    return combined(
        option("--pool-target", "pools", multiple=True, metavar="HOST:PORT",
               help="Coordinator of a pool, or dns:HOST:PORT for all that HOST has; may be given "
                    "several times."),
        option("--http-host", help="Where HTTP listens (127.0.0.1)."),
        option("--http-port", type=PORT, help="(8000)"),
        option("--grpc-port", type=click.IntRange(0, 65535),
               help="gRPC on the same host, with the same TLS. 0, the default: off."),
        option("--min-replicas", type=click.IntRange(1), help="(1)"),
        option("--max-replicas", type=click.IntRange(1), help="(4)"),
        option("--tls-ca", type=FILE, help="Use TLS to pools and trust these PEM certificates."),
        option("--token-file", type=FILE, help="Holds the bearer token that pools ask for."),
        option("--keys-file", type=FILE, help="API keys and their limits; unset: nobody is asked."),
        option("--http-cert", type=FILE, help="PEM certificate of both ports."),
        option("--http-key", type=FILE, help="PEM key of that certificate."),
        option("--http-client-ca", type=FILE, help="Ask clients for certificates of this CA."),
        option("--drain-s", type=float, metavar="SECONDS",
               help="How long open streams may go on after SIGTERM (60)."),
        option("--hold-s", type=float, metavar="SECONDS",
               help="How long a new request waits for a pool that is away (0: it is refused)."),
        option("--replay-wait-s", type=float, metavar="SECONDS",
               help="How long a stream that has lost its pool waits for one (120)."),
        option("--log-file", type=FILE, help="JSON lines of requests are appended to it."),
        click.option("--replay/--no-replay", default=None,
               help="Whether streams that lose their pool go on elsewhere (yes)."),
        option("--insecure", is_flag=True, default=None,
               help="Let ports beyond loopback do without TLS and keys."),
    )(function)  # fmt: skip


@click.command("gateway")
@option("--settings", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
        help="YAML with any of the settings; flags win.")  # fmt: skip
@gateway_options
def command(settings: Path | None, replay: bool | None, **flags: Any) -> None:
    """Serve the OpenAI API and gRPC in front of pools until SIGTERM.

    Example: tknp gateway --pool-target 127.0.0.1:50051
    """
    import logging

    from tknp.gateway.settings import settings_from_text

    values = {name: value for name, value in flags.items() if value not in (None, ())}
    if "pools" in values:
        values["pools"] = list(values["pools"])
    if replay is False:
        values["replays"] = 0
    if settings is not None:
        values["settings"] = str(settings)
    checked = settings_from_text(values)
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    try:
        from tknp.gateway.serve_run import run

        run(checked)
    except ModuleNotFoundError as error:
        raise TknpError(f"{error.name} is not installed: pip install 'tknp[gateway]'") from error
