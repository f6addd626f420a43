"""How many pods of a role an eviction leaves, by the disruption controller's own arithmetic."""

from __future__ import annotations

from typing import Any

import pytest

from tknp_operator.api.service import parse
from tknp_operator.build.names import ROLE
from tknp_operator.build.network import disruption_budget, pool_budgets

PREFILL, NODES = 3, 4


def allowed(budget: dict[str, Any], pods: int, scale: int) -> int:
    """Evictions that are left to `budget`; `scale`: what the pods' owner says of its size."""
    spec = budget["spec"]
    needed = spec["minAvailable"] if "minAvailable" in spec else scale - spec["maxUnavailable"]
    return max(pods - int(needed), 0)


@pytest.mark.parametrize(
    ("role", "pods", "expected"),
    [("decode", NODES, 0), ("coordinator", 1, 0), ("prefill", PREFILL, 1)],
)
def test_only_prefill_is_evicted(role: str, pods: int, expected: int) -> None:
    """The owner's scale subresource counts prefill, whatever pods it is asked for."""
    service = parse({
        "metadata": {"name": "s", "namespace": "ns", "uid": "u-0"},
        "spec": {"image": "i", "model": {"source": {"builtin": "smollm2"}},
                 "decode": {"nodes": NODES, "device": "cpu"},
                 "prefill": {"replicas": PREFILL}},
    })  # fmt: skip
    budgets = [disruption_budget(service, "prefill"), *pool_budgets(service, 1, NODES)]
    (budget,) = [b for b in budgets if b["spec"]["selector"]["matchLabels"][ROLE] == role]
    assert allowed(budget, pods, scale=PREFILL) == expected
