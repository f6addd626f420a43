"""One replica acts, the others follow the cluster and wait: a Lease, by the package's own elector.

A replica that can't renew for 10 of its 15 seconds ends its process, so that it never acts beside
the next one, which takes over within 20 s.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable

from kubernetes import client
from kubernetes.leaderelection import electionconfig, leaderelection
from kubernetes.leaderelection.resourcelock.leaselock import LeaseLock

log = logging.getLogger(__name__)
LEASE = "tknp-operator"
LEASE_S, RENEW_S, RETRY_S = 15, 10, 2


def lead(api: client.ApiClient, namespace: str, name: str, act: Callable[[], None]) -> None:
    """Wait for Lease `name` of `namespace`, call `act` in a thread, never return: lost is lost."""
    identity = f"{os.environ.get('HOSTNAME', 'operator')}_{uuid.uuid4().hex[:8]}"
    client.Configuration.set_default(api.configuration)  # which the lock's own client takes
    lock = LeaseLock(name, namespace, identity)

    def lost() -> None:
        log.error("the lease is lost")
        os._exit(1)  # at once: another may act from now on

    def acting() -> None:
        try:
            act()
        except BaseException:
            log.exception("the leader can't go on")
            os._exit(1)  # rather than renew the lease and do nothing

    settings = electionconfig.Config(
        lock, lease_duration=LEASE_S, renew_deadline=RENEW_S, retry_period=RETRY_S,
        onstarted_leading=acting, onstopped_leading=lost,
    )  # fmt: skip
    leaderelection.LeaderElection(settings).run()
