"""TokenParallelService: what a user asks for. The one source of the CRD and of its documentation.

    object from the API server -> parse() -> Service(name, namespace, uid, generation, spec)

The CRD of these models (`tknp_operator.api.crd`) lets the API server refuse most mistakes; `parse`
refuses them all again, because an object may be older than the CRD. Both say the same.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from tknp_operator.api.rules import Part, Rule
from tknp_operator.api.source import Model, Name

GROUP, VERSION, KIND = "tknp.io", "v1alpha1", "TokenParallelService"
PLURAL = "tokenparallelservices"

Seconds = Annotated[int, Field(ge=1, le=86_400)]
Count = Annotated[int, Field(ge=1, le=1024)]
Free = dict[str, Any]
"""A mapping that Kubernetes itself checks when pods are made."""


class Resources(Part):
    requests: dict[str, int | str] = {}
    limits: dict[str, int | str] = {}


class Decode(Part):
    nodes: Count
    """Decode nodes of the pool, N. Each is one pod."""
    tensor_parallel: Annotated[int, Field(ge=1, le=16)] = 1
    """T: GPUs of a node and ranks of it. One number for the whole pool."""
    device: Literal["cuda", "cpu"] = "cuda"
    gpu_products: Annotated[list[Annotated[str, Field(max_length=63)]], Field(max_length=16)] = []
    """Allowed values of the label nvidia.com/gpu.product or parts of them, such as H100; all."""
    allow_mixed_products: bool = False
    """Whether one pool may have nodes of several products."""
    strategy: Literal["tknp", "dp", "tp", "pp", "dcp", "helix"] = "tknp"
    copies: Literal[1, 2] = 1
    """Of the weights; 2: dual active roots."""
    microbatches: Count | None = None
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
    spare_nodes: Annotated[int, Field(ge=0, le=64)] = 0
    """Nodes of the cluster to hold in reserve for a lost one."""
    resources: Resources = Resources()
    """Of each pod; GPUs are added."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule("self.copies == 1 || self.nodes % 2 == 0",
             lambda d: d.copies == 1 or d.nodes % 2 == 0,
             "copies 2 pairs node b with node b + nodes/2: make nodes even"),
        Rule("self.copies == 1 || self.strategy == 'tknp'",
             lambda d: d.copies == 1 or d.strategy == "tknp",
             "copies 2 is dual active roots: set strategy tknp or copies 1"),
        Rule("!has(self.microbatches) || self.strategy in ['tknp', 'pp']",
             lambda d: d.microbatches is None or d.strategy in ("tknp", "pp"),
             "only tknp and pp have microbatches: leave it out"),
        Rule("!has(self.microbatches) || self.strategy != 'tknp' || self.copies == 2 "
             "|| self.nodes % self.microbatches == 0",
             lambda d: d.microbatches is None or d.strategy != "tknp" or d.copies == 2
             or d.nodes % d.microbatches == 0,
             "microbatches must divide nodes, so that roots are evenly apart"),
        Rule("self.copies == 1 || !has(self.microbatches) || self.microbatches == 2",
             lambda d: d.copies == 1 or d.microbatches in (None, 2),
             "copies 2 has two microbatches: leave microbatches out"),
        Rule("!has(self.width) || (self.strategy == 'tknp' && self.width <= self.nodes)",
             lambda d: d.width is None or (d.strategy == "tknp" and d.width <= d.nodes),
             "width is for tknp and at most nodes"),
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

    def role(self, node: int) -> str:
        return self.roles[node] if self.roles else "decode-node"


class Scaling(Part):
    min_replicas: Count = 1
    max_replicas: Count

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
    autoscaling: PrefillScaling | None = None
    resources: Resources = Resources()

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
    replicas: Annotated[int, Field(ge=1, le=256)] = 1
    autoscaling: GatewayScaling | None = None
    ray: Literal["auto", "standalone", "rayService"] = "auto"
    """auto: a KubeRay RayService where its CRD is served, else Ray inside each pod."""
    api_keys_secret: Name | None = None
    """Has keys.yaml; unset: the operator makes one key in NAME-api-keys."""
    tls_secret: Name | None = None
    """Of type kubernetes.io/tls; unset: plain HTTP inside the cluster."""
    resources: Resources = Resources()


class Topology(Part):
    nvlink_domain_label: str = "nvidia.com/gpu.clique"
    rack_label: str = "topology.kubernetes.io/rack"
    rail_label: str = ""
    rdma_resource: str = ""
    """Such as rdma/ib: one a GPU; pods get it, and the capability IPC_LOCK."""
    compute_domain: bool = False
    """Claim an IMEX channel (GB200) through a ComputeDomain."""


class Scheduling(Part):
    node_selector: dict[str, str] = {}
    tolerations: Annotated[list[Free], Field(max_length=32)] = []
    priority_class_name: str = ""


class Drain(Part):
    seconds: Seconds = 30
    """How long open requests may go on when the pool is told to stop; others are replayed."""


class Timeouts(Part):
    step_seconds: Seconds = 10
    """Longest wait for a peer on the data plane."""
    lease_seconds: Annotated[int, Field(ge=5, le=3600)] = 30
    start_seconds: Seconds = 1800
    """Longest start of a pod, loading included."""
    node_lost_seconds: Seconds = 30
    """How long a node may be NotReady before another takes its place."""


class Observability(Part):
    metrics: bool = True
    traces_endpoint: str = ""
    """OTLP over HTTP, of the gateway."""


class Spec(Part):
    image: Annotated[str, Field(min_length=1, max_length=1024)]
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    image_pull_secrets: Annotated[list[Name], Field(max_length=16)] = []
    gateway_image: str = ""
    """Of the gateway; empty: image."""
    model: Model
    decode: Decode
    prefill: Prefill = Prefill()
    gateway: Gateway = Gateway()
    topology: Topology = Topology()
    scheduling: Scheduling = Scheduling()
    drain: Drain = Drain()
    timeouts: Timeouts = Timeouts()
    observability: Observability = Observability()
    suspend: bool = False
    """Drain the pool and run nothing, keeping the object."""
