"""TokenParallelService: what a user asks for. The one source of the CRD and of its documentation.

    object from the API server -> parse() -> Service(name, namespace, uid, generation, spec)

The CRD of these models (`tknp_operator.api.crd`) lets the API server refuse most mistakes; `parse`
refuses them all again, because an object may be older than the CRD. Both say the same.
"""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from tknp_operator.api.decode import Decode
from tknp_operator.api.rules import Part, Rule
from tknp_operator.api.serving import Gateway, Prefill
from tknp_operator.api.source import Model, Name
from tknp_operator.api.values import Free, Key, Seconds

GROUP, VERSION, KIND = "tknp.io", "v1alpha1", "TokenParallelService"
PLURAL = "tokenparallelservices"

LONGEST_NAME = 39  # KubeRay takes 47, and "-gateway" is behind it
NAME = Rule(
    "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
    lambda name: (
        len(name) <= LONGEST_NAME and re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", name) is not None
    ),
    f"metadata.name begins host names: use at most {LONGEST_NAME} of a-z, 0-9 and -, a letter "
    "first",
)


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


class Security(Part):
    internal_tls_secret: Name | None = None
    """Has ca.crt, tls.crt, tls.key, as of cert-manager; unset: the operator makes and renews it."""


class Drain(Part):
    seconds: Seconds = 30
    """How long open requests may go on when the pool is told to stop; others are replayed."""
    surge: bool = True
    """Start a changed pool beside the one that serves where hosts are free; drain after that."""


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
    security: Security = Security()
    """What processes of the pool show each other."""
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
