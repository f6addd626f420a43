"""What every epoch needs and outlives it: secrets, names, policies, the model's copy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from tknp_operator.api.service import Service
from tknp_operator.build import compute_domain, ray_service
from tknp_operator.build.gateway import keys_secret_name
from tknp_operator.build.hydrate import hydration_job
from tknp_operator.build.network import disruption_budget, headless_service, network_policy
from tknp_operator.build.secrets import (
    api_keys_secret,
    ca_name,
    ca_secret,
    certificate,
    incomplete,
    internal_name,
    internal_secret,
    renewal_due,
)
from tknp_operator.plan.differ import applied
from tknp_operator.plan.gateway import by_kuberay
from tknp_operator.plan.observed import Observed
from tknp_operator.plan.steps import Create, Merge, Step


def basis(service: Service, observed: Observed, now: datetime) -> Iterable[Step]:
    """Steps of this round for all of it but the model."""
    ca = observed.get("Secret", ca_name(service))
    if ca is None:
        ca = ca_secret(service, now)
        yield Create(ca)
    internal = observed.get("Secret", internal_name(service))
    if internal is None:
        yield Create(internal_secret(service, ca, now))
    elif service.spec.security.internal_tls_secret is None and renewal_due(internal, now):
        data = certificate(service, ca, now)
        yield Merge("Secret", internal_name(service), {"data": data})
    keys = f"{service.name}-api-keys"
    if keys_secret_name(service) == keys and observed.get("Secret", keys) is None:
        yield Create(api_keys_secret(service))
    wanted = [headless_service(service), network_policy(service),
              disruption_budget(service, "prefill")]  # fmt: skip
    if service.spec.topology.compute_domain and compute_domain.KIND in observed.served:
        wanted.append(compute_domain.compute_domain(service))
    yield from applied(observed, wanted)


def shown(service: Service, observed: Observed) -> Mapping[str, Any] | None:
    """The Secret of the certificate that pods show; None: it is not there yet."""
    theirs = service.spec.security.internal_tls_secret
    return observed.get("Secret", theirs or internal_name(service))


def lacking(service: Service, observed: Observed) -> str:
    """What the cluster would need for this service and has not; empty: nothing."""
    if service.spec.topology.compute_domain and compute_domain.KIND not in observed.served:
        return ("the cluster serves no ComputeDomain: install NVIDIA's DRA driver and restart the "
                "operator, or set topology.computeDomain false")  # fmt: skip
    gateway = service.spec.gateway
    if gateway.enabled and by_kuberay(service, observed.served) and (
        ray_service.KIND not in observed.served
    ):  # fmt: skip
        return ("the cluster serves no RayService: install KubeRay 1.5.1 or newer and restart the "
                "operator, or set gateway.ray standalone")  # fmt: skip
    theirs = service.spec.security.internal_tls_secret
    if theirs and (why := incomplete(observed.get("Secret", theirs))):
        return (f"Secret {theirs} {why}: make it, with cert-manager for example, or leave "
                "security.internalTlsSecret out")  # fmt: skip
    return ""


def hydration(service: Service, observed: Observed, steps: list[Step]) -> str:
    """Adds the Job that copies the model; why pods can't start yet, empty if they can."""
    if service.spec.model.source.object_store is None:
        return ""
    job = hydration_job(service)
    seen = observed.get("Job", job["metadata"]["name"])
    if seen is None:
        steps.append(Create(job))
        return "the model is being copied"
    conditions = {c["type"] for c in (seen.get("status") or {}).get("conditions") or ()
                  if c["status"] == "True"}  # fmt: skip
    if "Complete" in conditions:
        return ""
    if "Failed" in conditions:
        return f"Job {seen['metadata']['name']} failed: look at its log, mend it, delete the Job"
    return "the model is being copied"
