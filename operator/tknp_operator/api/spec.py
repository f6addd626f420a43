"""TokenParallelService: what a user asks for. The one source of the CRD and of its documentation.

    object from the API server -> parse() -> Service(name, namespace, uid, generation, spec)

The CRD of these models (`tknp_operator.api.crd`) lets the API server refuse most mistakes; `parse`
refuses them all again, because an object may be older than the CRD. Both say the same.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PlainValidator, WithJsonSchema

from tknp_operator.api.rules import Part, Rule
from tknp_operator.api.source import Model, Name

GROUP, VERSION, KIND = "tknp.io", "v1alpha1", "TokenParallelService"
PLURAL = "tokenparallelservices"

LONGEST_NAME = 40
NAME = Rule(
    "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
    lambda name: (
        len(name) <= LONGEST_NAME and re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", name) is not None
    ),
    "metadata.name begins host names: use at most 40 of a-z, 0-9 and -, a letter first",
)

Seconds = Annotated[int, Field(ge=1, le=86_400)]
Count = Annotated[int, Field(ge=1, le=1024)]
Key = Annotated[str, Field(max_length=317)]
"""A name of up to 63 characters behind a domain of up to 253, as of labels and resources."""
Free = dict[str, Any]
"""A mapping that Kubernetes itself checks when pods are made."""

_QUANTITY = r"^[0-9]+(\.[0-9]+)?(m|[kMGTPE]|[KMGTPE]i)?$"


def _quantity(value: object) -> int | str:
    if (
        isinstance(value, bool)
        or not re.fullmatch(_QUANTITY, str(value))
        or isinstance(value, float)
    ):
        raise ValueError("write a whole number or a quoted quantity such as '500m' or '16Gi'")
    return value if isinstance(value, int) else str(value)


Quantity = Annotated[int | str, PlainValidator(_quantity), WithJsonSchema(
    {"x-kubernetes-int-or-string": True, "pattern": _QUANTITY})]  # fmt: skip


class Resources(Part):
    requests: dict[str, Quantity] = {}
    """What the scheduler sets aside."""
    limits: dict[str, Quantity] = {}
    """What the pod may use at most."""


# CEL for Decode.roots and Decode.owners: nodes that are not only the other.
_COUNT = "(self.roles.size() == 0 ? self.nodes : self.roles.filter(r, r != '{}').size())"
_ROOTS, _OWNERS = _COUNT.format("attention-owner"), _COUNT.format("decode-root")


class Decode(Part):
    nodes: Count
    """Decode nodes of the pool, N. Each is one pod."""
    tensor_parallel: Annotated[int, Field(ge=1, le=16)] = 1
    """T: GPUs of a node and ranks of it. One number for the whole pool."""
    device: Literal["cuda", "cpu"] = "cuda"
    """cpu: no GPU is asked for, and nodes may share a host."""
    gpu_products: Annotated[list[Annotated[str, Field(max_length=63)]], Field(max_length=16)] = []
    """Allowed values of the label nvidia.com/gpu.product or parts of them, such as H100; all."""
    allow_mixed_products: bool = False
    """Whether one pool may have nodes of several products."""
    strategy: Literal["tknp", "dp", "tp", "pp", "dcp", "helix"] = "tknp"
    """How model and requests are divided: see docs/strategies.md."""
    copies: Literal[1, 2] = 1
    """Of the weights; 2: dual active roots."""
    microbatches: Count | None = None
    """Streams of steps (tknp, pp); unset: what the strategy takes."""
    width: Count | None = None
    """Most owners of one request; unset: as few as hold it, up to all."""
    roles: Annotated[
        list[Literal["decode-node", "decode-root", "attention-owner"]], Field(max_length=1024)
    ] = []
    """One a node; empty: decode-node for all."""
    kv_dtype: Literal["auto"] = "auto"
    """Of the KV cache; auto: the dtype of the model."""
    page_size: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Tokens in a KV page; unset: 64 on CPU, 256 on CUDA."""
    kv_memory: Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?[kMGT]i?B?$")] | None = None
    """KV cache of a rank; unset: what is free once weights are loaded."""
    max_batch: Annotated[int, Field(ge=1, le=65_536)] = 256
    """Rows of a step, of each stream."""
    spare_nodes: Annotated[int, Field(ge=0, le=64)] = 0
    """Nodes of the cluster to hold in reserve for a lost one."""
    resources: Resources = Resources()
    """Of each pod; GPUs are added."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(f"self.copies == 1 || {_ROOTS} % 2 == 0",
             lambda d: d.copies == 1 or d.roots % 2 == 0,
             "copies 2 pairs every root with the one half a turn away: make their number even"),
        Rule("self.copies == 1 || self.strategy == 'tknp'",
             lambda d: d.copies == 1 or d.strategy == "tknp",
             "copies 2 is dual active roots: set strategy tknp or copies 1"),
        Rule("!has(self.microbatches) || self.strategy in ['tknp', 'pp']",
             lambda d: d.microbatches is None or d.strategy in ("tknp", "pp"),
             "only tknp and pp have microbatches: leave it out"),
        Rule("!has(self.microbatches) || self.strategy != 'tknp' || self.copies == 2 "
             f"|| {_ROOTS} % self.microbatches == 0",
             lambda d: d.microbatches is None or d.strategy != "tknp" or d.copies == 2
             or d.roots % d.microbatches == 0,
             "microbatches must divide the nodes that root layers, so that they are evenly apart"),
        Rule("self.copies == 1 || !has(self.microbatches) || self.microbatches == 2",
             lambda d: d.copies == 1 or d.microbatches in (None, 2),
             "copies 2 has two microbatches: leave microbatches out"),
        Rule("self.strategy != 'tp' || self.nodes == 1",
             lambda d: d.strategy != "tp" or d.nodes == 1,
             "tp runs in one node: set nodes 1 and all its GPUs as tensorParallel"),
        Rule(f"!has(self.width) || (self.strategy == 'tknp' && self.width <= {_OWNERS})",
             lambda d: d.width is None or (d.strategy == "tknp" and d.width <= d.owners),
             "width is for tknp and at most the number of nodes that own requests"),
        Rule("self.roles.size() == 0 || (self.strategy == 'tknp' "
             "&& self.roles.size() == self.nodes)",
             lambda d: not d.roles or (d.strategy == "tknp" and len(d.roles) == d.nodes),
             "roles is for tknp and has one entry a node"),
        Rule("self.roles.size() == 0 || (self.roles.exists(r, r != 'attention-owner') "
             "&& self.roles.exists(r, r != 'decode-root'))",
             lambda d: not d.roles or (any(r != "attention-owner" for r in d.roles)
                                       and any(r != "decode-root" for r in d.roles)),
             "roles must leave a node that roots layers and a node that owns requests"),
        Rule("self.device == 'cuda' || self.gpuProducts.size() == 0",
             lambda d: d.device == "cuda" or not d.gpu_products,
             "gpuProducts needs device cuda"),
    )  # fmt: skip

    @property
    def roots(self) -> int:
        """Nodes that root layers."""
        return sum(role != "attention-owner" for role in self.roles) if self.roles else self.nodes

    @property
    def owners(self) -> int:
        """Nodes that own requests."""
        return sum(role != "decode-root" for role in self.roles) if self.roles else self.nodes

    def role(self, node: int) -> str:
        """What node `node` runs; decode-node: both."""
        return self.roles[node] if self.roles else "decode-node"


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
    ray: Literal["standalone"] = "standalone"
    """Each pod runs Ray by itself, so that pods come and go one by one."""
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
    )  # fmt: skip


class Topology(Part):
    nvlink_domain_label: Key = "nvidia.com/gpu.clique"
    """Nodes that agree in it share NVLink."""
    rack_label: Key = "topology.kubernetes.io/rack"
    """Dual roots are put in two racks where it tells them apart."""
    rail_label: Key = ""
    """Nodes that agree in it are near by network; empty: nobody knows."""
    rdma_resource: Key = ""
    """Such as rdma/ib: one a GPU; pods get it, and the capability IPC_LOCK."""
    compute_domain: bool = False
    """Claim an IMEX channel (GB200) through a ComputeDomain."""


class Scheduling(Part):
    node_selector: dict[str, str] = {}
    """Labels that nodes of the cluster must have."""
    tolerations: Annotated[list[Free], Field(max_length=32)] = []
    """As in a pod."""
    priority_class_name: str = ""
    """Of all pods but the gateway's."""


class Drain(Part):
    seconds: Seconds = 30
    """How long open requests may go on when the pool is told to stop; others are replayed."""


class Timeouts(Part):
    step_seconds: Seconds = 10
    """Longest wait for a peer on the data plane."""
    lease_seconds: Annotated[int, Field(ge=5, le=3600)] = 30
    """How long a reservation outlives the side that made it."""
    start_seconds: Seconds = 1800
    """Longest start of a pod, loading included."""
    node_lost_seconds: Seconds = 30
    """How long a node may be NotReady before another takes its place."""


class Observability(Part):
    metrics: bool = True
    """Whether every process serves Prometheus metrics."""
    traces_endpoint: str = ""
    """OTLP over HTTP, of the gateway."""


class Spec(Part):
    image: Annotated[str, Field(min_length=1, max_length=1024)]
    """Of decode, prefill and coordinator."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    """When nodes fetch it."""
    image_pull_secrets: Annotated[list[Name], Field(max_length=16)] = []
    """Names of Secrets of the namespace."""
    gateway_image: str = ""
    """Of the gateway; empty: image."""
    model: Model
    """What is served."""
    decode: Decode
    """The pool of decode nodes."""
    prefill: Prefill = Prefill()
    """Replicas that compute prompts."""
    gateway: Gateway = Gateway()
    """The public HTTP and gRPC endpoint."""
    topology: Topology = Topology()
    """What labels of nodes mean."""
    scheduling: Scheduling = Scheduling()
    """Where pods may run."""
    drain: Drain = Drain()
    """How a pool ends."""
    timeouts: Timeouts = Timeouts()
    """How long to wait for what."""
    observability: Observability = Observability()
    """Metrics and traces."""
    suspend: bool = False
    """Drain the pool and run nothing, keeping the object."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule("self.decode.device == 'cuda' || (!self.topology.computeDomain "
             "&& self.topology.rdmaResource == '')",
             lambda s: s.decode.device == "cuda" or not (s.topology.compute_domain
                                                         or s.topology.rdma_resource),
             "topology.computeDomain and topology.rdmaResource need decode.device cuda"),
    )  # fmt: skip
