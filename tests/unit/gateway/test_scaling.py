"""Replicas by streams, as Serve's controller asks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tknp.gateway.scaling import STREAMS, by_streams


@pytest.mark.parametrize(
    ("streams", "replicas"),
    [({}, 3), ({"a": 0.0}, 1), ({"a": 64.0}, 1), ({"a": 64.0, "b": 1.0}, 2), ({"a": 200.0}, 4)],
)
def test_a_replica_for_every_target_of_streams(streams: dict[str, float], replicas: int) -> None:
    """Three run; nothing reported changes nothing."""
    context = SimpleNamespace(
        aggregated_metrics={STREAMS: streams}, target_num_replicas=3,
        config=SimpleNamespace(target_ongoing_requests=64),
    )  # fmt: skip
    assert by_streams(context) == (replicas, {})


def test_what_serve_has_not_collected_yet() -> None:
    assert by_streams(SimpleNamespace(aggregated_metrics=None, target_num_replicas=2)) == (2, {})
