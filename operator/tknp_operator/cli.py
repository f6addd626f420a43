"""`tknp-operator`: the operator, in a pod or outside the cluster."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from pathlib import Path

import click

from tknp.errors import TknpError
from tknp_operator.api.crd import custom_resource_definition, text
from tknp_operator.cluster.client import Api, connect
from tknp_operator.controller.health import serve
from tknp_operator.controller.leader import LEASE, lead
from tknp_operator.controller.loop import Controller
from tknp_operator.controller.metrics import Metrics

OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
KUBECONFIG = click.option(
    "--kubeconfig", type=click.Path(path_type=Path, exists=True, dir_okay=False),
    envvar="KUBECONFIG", help="How to reach the cluster; unset: as a pod of it.",
)  # fmt: skip


@click.group(
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "TKNP_OPERATOR"},
)
@KUBECONFIG
@click.option("--namespace", help="The only one to look at; unset: all.")
@click.option(
    "--leader-elect/--no-leader-elect",
    default=None,
    show_default="in a pod: yes",
    help="Whether replicas take turns by a Lease.",
)
@click.option(
    "--lease-name",
    default=LEASE,
    show_default=True,
    help="Of that Lease: one for each set of replicas.",
)
@click.option("--lease-namespace", help="Where that is; unset: the pod's own.")
@click.option(
    "--metrics-port",
    type=click.IntRange(0, 65_535),
    default=8080,
    show_default=True,
    help="Of /metrics, /healthz and /readyz; 0: none.",
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
)
@click.pass_context
def command(
    context: click.Context, kubeconfig: Path | None, namespace: str | None,
    leader_elect: bool | None, lease_name: str, lease_namespace: str | None, metrics_port: int,
    log_level: str,
) -> None:  # fmt: skip
    """Keep every TokenParallelService of a cluster as it is asked for, until SIGTERM.

    Example: tknp-operator --kubeconfig ~/.kube/config --namespace models
    """
    if context.invoked_subcommand is not None:
        context.obj = kubeconfig
        return
    logging.basicConfig(level=log_level.upper(), stream=sys.stderr,
                        format="%(asctime)s %(levelname)s %(name)s: %(message)s")  # fmt: skip
    api, stop, metrics = connect(kubeconfig), threading.Event(), Metrics()
    Api(api).request("GET", "/version")  # says at once that nobody answers
    controller = Controller(Api(api), namespace, metrics)
    serve(metrics_port, metrics.registry, lambda: controller.synced)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    controller.start()
    elect = kubeconfig is None if leader_elect is None else leader_elect
    if not elect:
        controller.run(stop)
        return
    where = lease_namespace or (OWN_NAMESPACE.read_text() if OWN_NAMESPACE.exists() else "default")
    arguments = api, where, lease_name, lambda: controller.run(stop)
    leader = threading.Thread(target=lead, args=arguments, name="leader", daemon=True)
    leader.start()
    stop.wait()


@command.command("crds")
@click.option("--apply", "applies", is_flag=True, help="Apply it instead of printing it.")
@click.pass_obj
def crds(kubeconfig: Path | None, applies: bool) -> None:
    """Print the CustomResourceDefinition of this version, or apply it to the cluster."""
    if applies:
        Api(connect(kubeconfig)).apply(custom_resource_definition())
        click.echo("applied")
    else:
        click.echo(text(), nl=False)


def main() -> None:
    """Errors of ours are one line and exit code 1."""
    try:
        command()
    except TknpError as error:
        click.echo(f"tknp-operator: {error}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
