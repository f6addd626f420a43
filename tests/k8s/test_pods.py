"""Pods as the operator builds them, run for real: their commands, files, names, TLS and probes.

No operator decides anything here; the manifests of one epoch are put on the fake API server and a
kubelet of the tests starts what they say.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from tknp_operator.api.service import parse
from tknp_operator.build.network import coordinator_service, headless_service
from tknp_operator.build.pods import coordinator_pod, decode_pod, prefill_pod
from tknp_operator.build.pool import pool_file_map
from tknp_operator.build.secrets import ca_secret, internal_secret
from tknp_operator.placement.place import PlacedNode, Placement, Slot

pytestmark = [pytest.mark.timeout(240), pytest.mark.full]


def test_an_epoch_serves_and_prefill_replicas_come_and_go(scene: Any, until: Any) -> None:
    here = scene("a", "b")
    core, namespace, service = here.cluster.core, here.namespace, parse(here.service)
    slots = [Slot("a"), Slot("b")]
    placement = Placement(tuple(PlacedNode(n, slot, "") for n, slot in enumerate(slots)))
    now = datetime.now(UTC)
    secret = internal_secret(service, ca_secret(service, now), now)
    core.create_namespaced_secret(namespace, secret)
    core.create_namespaced_config_map(namespace, pool_file_map(service, 1, placement))
    core.create_namespaced_service(namespace, headless_service(service))
    core.create_namespaced_service(namespace, coordinator_service(service, 1))
    pods = [decode_pod(service, 1, n, slot) for n, slot in enumerate(slots)]
    for pod in (*pods, prefill_pod(service, 1, 0), coordinator_pod(service, 1)):
        core.create_namespaced_pod(namespace, pod)
    until(here.all_ready, here.logs, 90)
    where = {p.metadata.name: p.spec.node_name for p in core.list_namespaced_pod(namespace).items}
    assert (where["demo-decode-1-0"], where["demo-decode-1-1"]) == ("a", "b")
    text = here.generate("hello")

    core.create_namespaced_pod(namespace, prefill_pod(service, 1, 1))
    until(here.all_ready, here.logs)
    core.delete_namespaced_pod("demo-prefill-1-0", namespace)
    until(lambda: "demo-prefill-1-0" not in here.pods(), here.logs)
    assert here.generate("hello") == text
