"""What stands before the pool: prefill replicas and gateways, and what they are scaled by."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from tknp_operator.api.rules import Part, Rule
from tknp_operator.api.source import Name
from tknp_operator.api.values import Count, Resources


class Scaling(Part):
    min_replicas: Count = 1
    """Never fewer than these."""
    max_replicas: Count
    """Never more than these."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule("self.minReplicas <= self.maxReplicas", lambda s: s.min_replicas <= s.max_replicas,
             "minReplicas must be at most maxReplicas"),
    )  # fmt: skip


class PrefillScaling(Scaling):
    target_queue_per_replica: Annotated[int, Field(ge=1)] = 4
    """Requests that wait for prefill or are in it, for each replica."""


class GatewayScaling(Scaling):
    target_streams_per_replica: Annotated[int, Field(ge=1)] = 200
    """Open streams of each replica."""


class Prefill(Part):
    replicas: Annotated[int, Field(ge=1, le=256)] = 1
    """The scale subresource sets this."""
    max_replicas: Annotated[int, Field(ge=1, le=256)] | None = None
    """Places that the pool keeps for prefill; changing it restarts the pool. Unset: replicas."""
    tensor_parallel: Annotated[int, Field(ge=1, le=16)] = 1
    """GPUs of a replica and ranks of it."""
    autoscaling: PrefillScaling | None = None
    """By the queue; unset: replicas stays as it is."""
    resources: Resources = Resources()
    """Of each pod; GPUs are added."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule("!has(self.maxReplicas) || self.replicas <= self.maxReplicas",
             lambda p: p.max_replicas is None or p.replicas <= p.max_replicas,
             "replicas must be at most maxReplicas: raise maxReplicas, which restarts the pool"),
        Rule("!has(self.autoscaling) || (has(self.maxReplicas) "
             "&& self.autoscaling.maxReplicas <= self.maxReplicas)",
             lambda p: p.autoscaling is None or (p.max_replicas is not None
                                                 and p.autoscaling.max_replicas <= p.max_replicas),
             "autoscaling needs prefill.maxReplicas of at least autoscaling.maxReplicas"),
    )  # fmt: skip

    @property
    def places(self) -> int:
        """Replicas that the pool file names."""
        return self.max_replicas or self.replicas


class Gateway(Part):
    enabled: bool = True
    """Whether this service brings gateways of its own."""
    replicas: Annotated[int, Field(ge=1, le=256)] = 1
    """Pods, where nothing scales them."""
    autoscaling: GatewayScaling | None = None
    """By open streams; unset: replicas stays as it is."""
    ray: Literal["standalone", "rayService", "auto"] = "standalone"
    """standalone: each pod runs Ray alone. rayService: KubeRay does. auto: that if it is there."""
    hold_seconds: Annotated[int, Field(ge=0, le=86_400)] = 600
    """How long a new request waits while the pool is away, as in an update; 0: it is refused."""
    api_keys_secret: Name | None = None
    """Has keys.yaml; unset: the operator makes one key in NAME-api-keys."""
    tls_secret: Name | None = None
    """Of type kubernetes.io/tls; unset: plain HTTP inside the cluster."""
    resources: Resources = Resources()
    """Of each pod."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule("self.enabled || !has(self.autoscaling)",
             lambda g: g.enabled or g.autoscaling is None,
             "autoscaling needs a gateway: set enabled true or leave autoscaling out"),
        Rule("self.ray != 'rayService' || !has(self.tlsSecret)",
             lambda g: g.ray != "rayService" or g.tls_secret is None,
             "KubeRay asks gateways by plain HTTP: leave tlsSecret out and put TLS on the ingress, "
             "or set ray standalone"),
        Rule("self.ray != 'rayService' || !has(self.autoscaling)",
             lambda g: g.ray != "rayService" or g.autoscaling is None,
             "a RayService keeps as many pods as replicas says: leave autoscaling out, or set ray "
             "standalone"),
    )  # fmt: skip
