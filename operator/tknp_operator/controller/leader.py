"""One replica acts, the others follow the cluster and wait: a Lease, by the package's own elector.

    the leader renews every retry_s; its watchdog ends the process `stops_s` after it last did
    others act lease_s after they have seen it renewed last, which is later than that

Time counts from the start of the last request that renewed, by a thread that asks nobody: however
the API server is lost (refusing, cut off, hanging, answering byte by byte), and whenever a leader
was frozen, it ends in time, or at once when it wakes up. So two never act at once, and the next one
acts within 20 s. A request that nothing answers ends within request_s, to be tried again.
"""

from __future__ import annotations

import copy
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

import urllib3
from kubernetes import client
from kubernetes.leaderelection import electionconfig, leaderelection
from kubernetes.leaderelection.resourcelock.leaselock import LeaseLock

log = logging.getLogger(__name__)
LEASE = "tknp-operator"


class Times(NamedTuple):
    """Seconds, whole ones of at least 1."""

    lease_s: int = 15
    renew_s: int = 8
    retry_s: int = 2
    request_s: int = 2

    @property
    def stops_s(self) -> int:
        """Longest from its last renewal to a leader's end, whatever its elector does meanwhile.

        Short of lease_s, so that what it has begun is over when another one acts.
        """
        return self.lease_s - self.retry_s

    @property
    def takeover_s(self) -> int:
        """Longest from the last renewal of a leader that is gone to the first act of the next.

        It sees that renewal at a look, counts from there, and looks once more.
        """
        return self.lease_s + 2 * self.retry_s


TIMES = Times()


def lead(
    api: client.ApiClient, namespace: str, name: str, act: Callable[[], None], times: Times = TIMES
) -> None:
    """Wait for Lease `name` of `namespace`, call `act` in a thread, never return: lost is lost."""
    identity = f"{os.environ.get('HOSTNAME', 'operator')}_{uuid.uuid4().hex[:8]}"

    def lost() -> None:
        log.error("the lease is lost")
        os._exit(1)  # at once: another may act from now on

    lock = lock_of(api, namespace, name, identity, times.request_s)
    renewals = Renewals(lock)

    def watch() -> None:
        while (left_s := renewals.last_s + times.stops_s - time.monotonic()) > 0:
            time.sleep(left_s)
        lost()

    def acting() -> None:
        threading.Thread(target=watch, name="watchdog", daemon=True).start()
        try:
            act()
        except BaseException:
            log.exception("the leader can't go on")
            os._exit(1)  # rather than renew the lease and do nothing

    settings = electionconfig.Config(
        lock, lease_duration=times.lease_s, renew_deadline=times.renew_s,
        retry_period=times.retry_s,
        onstarted_leading=acting, onstopped_leading=lost,
    )  # fmt: skip
    try:
        leaderelection.LeaderElection(settings).run()
    except BaseException:
        log.exception("the election can't go on")
        os._exit(1)  # rather than act without a lease, or wait for ever


class Renewals:
    """`last_s`: when the last request that wrote `lock` was begun, by the monotonic clock."""

    def __init__(self, lock: LeaseLock, clock: Callable[[], float] = time.monotonic) -> None:
        self.last_s = clock()

        def noting(write: Callable[..., bool]) -> Callable[..., bool]:
            def done(*arguments: Any, **named: Any) -> bool:
                began_s = clock()
                if written := write(*arguments, **named):
                    self.last_s = began_s
                return written

            return done

        for verb in ("create", "update"):
            setattr(lock, verb, noting(getattr(lock, verb)))


def lock_of(
    api: client.ApiClient, namespace: str, name: str, identity: str, request_s: int
) -> LeaseLock:
    """The package's lock, over requests that end in time and fail in the one way it knows."""
    configuration = copy.copy(api.configuration)
    configuration.retries = False  # the elector tries again by itself
    lock = LeaseLock(name, namespace, identity)
    lock.api_instance = client.CoordinationV1Api(client.ApiClient(configuration))

    def bounded(call: Callable[..., Any]) -> Callable[..., Any]:
        def ask(*arguments: Any, **named: Any) -> Any:
            try:
                return call(*arguments, **named, _request_timeout=request_s)
            except urllib3.exceptions.HTTPError as error:
                raise client.ApiException(status=0, reason=str(error)) from error

        return ask

    for verb in ("read", "create", "replace"):
        method = f"{verb}_namespaced_lease"
        setattr(lock.api_instance, method, bounded(getattr(lock.api_instance, method)))
    return lock
