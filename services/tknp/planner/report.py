"""An explanation as a dictionary for JSON; names end in their unit."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from tknp.layout.rank import Rank
from tknp.planner.explain import Explanation
from tknp.planner.folding import FoldedOp, Peers, Segment


def as_dict(explained: Explanation) -> dict[str, Any]:
    """Everything; the sizes that the paper publishes are at the top level."""
    layout, load, sizes = explained.layout, explained.load, explained.payload
    output, lse = explained.dcp or (None, None)
    gather, operand = sizes.gather_bytes, sizes.operand_bytes
    return {
        "model": explained.model.name,
        "recipe": explained.model.recipe,
        "hardware": explained.hardware.name,
        "strategy": layout.strategy.value,
        "machines": explained.machines,
        "ranks_per_machine": explained.machine_ranks,
        "nodes": layout.nodes,
        "tp": layout.tp,
        "streams": layout.streams,
        "width": explained.step.width,
        "batch": load.batch,
        "context": load.context,
        "scatter_bytes_per_owner_rank": sizes.scatter_bytes,
        "gather_bytes_per_owner_rank": gather,
        "layer_payload_bytes_per_rank_group": sizes.layer_bytes,
        "all_reduce_operand_bytes": operand,
        "gather_to_all_reduce_ratio": gather / operand if gather and operand else None,
        "root_qkv_elements_per_rank": load.batch // layout.streams
        * layout.heads(Rank(0, 0)).qkv_width,
        "partial_output_bytes_per_rank": sizes.output_bytes,
        "lse_bytes_per_rank": sizes.lse_bytes,
        "dcp_output_bytes_per_rank": output,
        "dcp_lse_bytes_per_rank": lse,
        "output_reduction_to_dcp": 1 - gather / output if gather and output else None,
        "kv_capacity_ratio_to_dp": explained.ratio_to_dp(),
        "kv_capacity_ratio_to_dp_unfitted": explained.ratio_to_dp(fitted=False),
        "kv_token_ratio_to_dp": explained.ratio_to_dp(tokens=True),
        "kv_bytes": explained.capacity.kv_bytes,
        "kv_tokens": explained.capacity.tokens,
        "resident_requests": explained.resident,
        "layout": _layout(explained),
        "program": [_segment(segment) for segment in explained.segments],
        "sent_per_step": _traffic(explained),
        "forecast": _forecast(explained),
    }  # fmt: skip


def _layout(explained: Explanation) -> list[dict[str, Any]]:
    layout = explained.layout
    return [
        {
            "node": room.node,
            "blocks": [asdict(block) for block in layout.held[room.node]],
            "roots": [
                {"stream": stream, "layers": layout.routes[stream].count(room.node)}
                for stream in range(layout.streams)
                if room.node in layout.routes[stream]
            ],
            "owns_requests_of_streams": [
                stream for stream, nodes in enumerate(layout.owners) if room.node in nodes
            ],
            "weight_bytes_per_rank": room.weight_bytes,
            "kv_budget_bytes_per_rank": room.budget_bytes,
            "kv_tokens": room.tokens,
        }
        for room in explained.capacity.nodes
    ]


def _segment(segment: Segment) -> dict[str, Any]:
    return {
        "where": [asdict(where) for where in segment.where],
        "operations": [_operation(op) for op in segment.operations],
    }


def _operation(op: FoldedOp) -> dict[str, Any]:
    found: dict[str, Any] = {"kind": op.kind.value, "rows": op.rows}
    if op.operand_bytes:
        found |= {"operand_bytes": op.operand_bytes, "scope": op.scope}
    for name, peers in (("sends", op.sends), ("receives", op.receives)):
        if peers:
            found[name] = [_peer(peer) for peer in peers]
    return found


def _peer(peer: Peers) -> dict[str, Any]:
    return {
        "peer": peer.role, "count": peer.count, "bytes": peer.nbytes, "what": list(peer.what),
        "over": "network" if peer.network else "nvlink",
    }  # fmt: skip


def _traffic(explained: Explanation) -> list[dict[str, Any]]:
    return [
        {"node": rank.node, "t": rank.t, **asdict(moved)}
        for rank, moved in explained.traffic.items()
    ]


def _forecast(explained: Explanation) -> dict[str, Any]:
    found = explained.forecast
    return {
        "step_s": found.step_s,
        "tokens_per_s": found.tokens_per_s,
        "busy_ratio": [{"node": node, **lanes} for node, lanes in found.busy.items()],
    }
