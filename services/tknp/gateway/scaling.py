"""How many replicas a gateway needs: by the streams that they have.

Replicas that listen by themselves are not counted by Serve's router, so each reports its streams
(`Replica.record_autoscaling_stats`). Serve applies bounds and delays of its AutoscalingConfig to
what comes out here.
"""

from __future__ import annotations

import math
from typing import Any

STREAMS = "streams"
TARGET = 64  # streams of a replica; above it Serve starts another, up to max_replicas


def by_streams(context: Any) -> tuple[int, dict[str, Any]]:
    """Replicas for the streams that `context` (an AutoscalingContext) reports, and no state.

    Keeps what runs while nothing has been reported: a new deployment, or a controller's restart.
    """
    reported = (context.aggregated_metrics or {}).get(STREAMS)
    if not reported:
        return context.target_num_replicas, {}
    target = context.config.target_ongoing_requests
    return max(1, math.ceil(sum(reported.values()) / target)), {}
