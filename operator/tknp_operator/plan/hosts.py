"""Hosts for placement, with what a running pool may expect of them.

A host of the running pool stays usable while it is cordoned, tainted, or not Ready for less than
`nodeLostSeconds`: moving a node ends every stream's step, so it must be worth it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from datetime import datetime

from tknp_operator.api.spec import Spec
from tknp_operator.placement.hosts import Host, read_hosts
from tknp_operator.plan.observed import Observed, lost_since


def offered(
    spec: Spec, observed: Observed, running_on: Collection[str], now: datetime
) -> tuple[tuple[Host, ...], float | None]:
    """Hosts, and seconds until one that is not Ready counts as lost; None: there is none."""
    soonest: float | None = None
    stays: set[str] = set()
    for node in observed.nodes:
        name = node["metadata"]["name"]
        if name not in running_on or "deletionTimestamp" in node["metadata"]:
            continue
        since = lost_since(node)
        if since is None:
            stays.add(name)
            continue
        left_s = spec.timeouts.node_lost_seconds - (now - since).total_seconds()
        if left_s > 0:
            stays.add(name)
            soonest = left_s if soonest is None else min(soonest, left_s)
    hosts = tuple(
        replace(host, unusable="") if host.name in stays else host
        for host in read_hosts(observed.nodes, spec, observed.used_gpus)
    )
    return hosts, soonest
