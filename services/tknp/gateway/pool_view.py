"""A pool as the page draws it, as plain data."""

from __future__ import annotations

from typing import Any

from tknp.gateway.pools import Upstream
from tknp.v1.common_pb2 import Phase


def pool_view(upstream: Upstream) -> dict[str, Any]:
    """What is known of one pool; without `nodes` where it has not said anything yet."""
    status = upstream.status
    view: dict[str, Any] = {
        "target": upstream.target,
        "ready": upstream.ready,
        "error": upstream.error,
        "model": upstream.model.name if upstream.model is not None else None,
    }
    if status is None:
        return view
    return view | {
        "strategy": status.strategy,
        "dtype": status.dtype,
        "tp": status.tp,
        "queued": status.queued,
        "prefilling": status.prefilling,
        "running": status.running,
        "steps": status.steps,
        "completed": status.completed,
        "streams": [
            {"stream": stream.stream, "steps": stream.steps, "running": stream.running}
            for stream in status.streams
        ],
        "nodes": [
            {
                "node": node.node,
                "phase": Phase.Name(node.progress.phase).removeprefix("PHASE_").lower(),
                "blocks": [[block.layer_start, block.layer_stop] for block in node.blocks],
                "requests": node.requests,
                "kv_tokens": node.kv_tokens,
                "capacity_tokens": node.capacity_tokens,
                "step_s": node.step_s,
            }
            for node in status.nodes
        ],
    }
