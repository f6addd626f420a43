"""The ledger of a gateway's keys as a deployment of Ray Serve, and replicas' way to it.

Serve keeps one replica of it, starts it anew where it dies and takes it away with the gateway.
"""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from tknp.gateway.ledger import Answer, Claim, Ledger, Limit, Use
from tknp.gateway.settings import GatewaySettings

_MOST_CALLS = 10_000  # at once; each takes microseconds


@serve.deployment(
    name="limits",
    num_replicas=1,
    max_ongoing_requests=_MOST_CALLS,
    graceful_shutdown_timeout_s=1.0,
    ray_actor_options={"num_cpus": 0},
)
class LedgerReplica:
    """The only one."""

    def __init__(self) -> None:
        self._ledger = Ledger()

    async def ask(self, claim: Claim, more: Use, limit: Limit) -> Answer:
        return self._ledger.ask(claim, more, limit)

    async def note(self, claim: Claim) -> None:
        self._ledger.note(claim)


class RemoteLedger:
    """A `SharedLedger` behind `handle`."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle

    async def ask(self, claim: Claim, more: Use, limit: Limit) -> Answer:
        answer: Answer = await self._handle.ask.remote(claim, more, limit)
        return answer

    async def note(self, claim: Claim) -> None:
        await self._handle.note.remote(claim)


def ledger_of(settings: GatewaySettings) -> serve.Application | None:
    """What replicas with `settings` have to share; None where they have nothing to."""
    if settings.keys_file is None or settings.max_replicas == 1:
        return None
    deployment: Any = LedgerReplica  # the decorator hides that it makes a Deployment
    bound: serve.Application = deployment.bind()
    return bound
