"""Hosts for placement, and those whose pods nobody reaches any more."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime

from tknp_operator.api.spec import Spec
from tknp_operator.placement.hosts import Host, read_hosts
from tknp_operator.plan.observed import Observed, lost_since


def offered(
    spec: Spec, observed: Observed, running_on: Collection[str], now: datetime
) -> tuple[tuple[Host, ...], float | None]:
    """Hosts, and seconds until one that is not Ready counts as lost; None: there is none."""
    left_s = [
        spec.timeouts.node_lost_seconds - (now - since).total_seconds()
        for node in observed.nodes if node["metadata"]["name"] in running_on
        if (since := lost_since(node)) is not None
    ]  # fmt: skip
    soonest = min((left for left in left_s if left > 0), default=None)
    return read_hosts(observed.nodes, spec, observed.used_gpus, now), soonest


def lost_hosts(spec: Spec, observed: Observed, now: datetime) -> frozenset[str]:
    """Hosts of pods whose machine is gone, or has not been Ready for `nodeLostSeconds`.

    Nobody there ends a pod: it stays Terminating until somebody deletes it by force.
    """
    nodes = {node["metadata"]["name"]: node for node in observed.nodes}
    lost = set()
    for host in {pod["spec"].get("nodeName", "") for pod in observed.pods()} - {""}:
        since = (
            lost_since(nodes[host]) if host in nodes else datetime.min.replace(tzinfo=now.tzinfo)
        )
        if since and (now - since).total_seconds() >= spec.timeouts.node_lost_seconds:
            lost.add(host)
    return frozenset(lost)
