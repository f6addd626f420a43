"""The IMEX channel of GB200 racks: one ComputeDomain a pool, claimed by every decode pod.

NVIDIA's DRA driver makes a ResourceClaimTemplate of it. Its specification never changes, and
numNodes stays 0, since nodes of a pool come and go.
"""

from __future__ import annotations

from typing import Any

from tknp_operator.api.service import Service
from tknp_operator.build.names import metadata

API_VERSION, KIND = "resource.nvidia.com/v1beta1", "ComputeDomain"


def claim_template_name(service: Service) -> str:
    """What pods claim by."""
    return f"{service.name}-imex"


def compute_domain(service: Service) -> dict[str, Any]:
    """The domain; outlives epochs."""
    return {
        "apiVersion": API_VERSION, "kind": KIND,
        "metadata": metadata(service, f"{service.name}-imex", "pool"),
        "spec": {"numNodes": 0,
                 "channel": {"resourceClaimTemplate": {"name": claim_template_name(service)}}},
    }  # fmt: skip
