"""How long placement takes: `python -m tknp_operator.placement [HOSTS]`.

Places a pool of half the hosts, with dual roots and spares, on GB200 trays in cliques of 18, from
Node objects on; then mends it after the loss of every tenth host. Prints both times.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from tknp_operator.api.service import parse_spec
from tknp_operator.placement.hosts import GPU, MEMORY, read_hosts
from tknp_operator.placement.place import Placement, place
from tknp_operator.placement.products import PRODUCT

CLIQUE = 18


def cluster(count: int, lost_every: int = 0) -> list[dict[str, Any]]:
    """Node objects; every `lost_every`th is not Ready."""
    return [
        {
            "metadata": {"name": f"tray-{i:05}", "labels": {
                PRODUCT: "NVIDIA-GB200", MEMORY: "189471",
                "nvidia.com/gpu.clique": f"cluster.{i // CLIQUE}",
                "topology.kubernetes.io/rack": f"rack-{i // CLIQUE}",
            }},
            "status": {
                "allocatable": {GPU: "4", "cpu": "144"},
                "conditions": [{"type": "Ready", "status": str(
                    not lost_every or i % lost_every != 0)}],
            },
        }
        for i in range(count)
    ]  # fmt: skip


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    spec = parse_spec({
        "image": "none", "model": {"source": {"hostPath": {"path": "/m"}}},
        "decode": {"nodes": min(count // 4 * 2, 1024), "tensorParallel": 4, "copies": 2,
                   "spareNodes": 16},
    })  # fmt: skip
    healthy, hurt = cluster(count), cluster(count, lost_every=10)
    start = time.perf_counter()
    found = place(spec, read_hosts(healthy, spec, {}))
    placed = time.perf_counter()
    current = found.slots if isinstance(found, Placement) else ()
    after = place(spec, read_hosts(hurt, spec, {}), current)
    mended = time.perf_counter()
    moved = sum(a != b for a, b in zip(current, getattr(after, "slots", ()), strict=True))
    print(f"{count} hosts, {spec.decode.nodes} nodes: placed in {placed - start:.3f} s, "
          f"mended in {mended - placed:.3f} s ({moved} nodes moved)")  # fmt: skip


if __name__ == "__main__":
    main()
