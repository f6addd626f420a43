"""What tests of single modules share."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def minimal() -> dict[str, Any]:
    """A pool file that says no more than it has to."""
    return {
        "model": "some/model",
        "coordinator": "127.0.0.1:7000",
        "data_plane": "127.0.0.1:7001",
        "nodes": [{"addresses": ["127.0.0.1:7100"]}, {"addresses": ["127.0.0.1:7200"]}],
        "prefill": [{"addresses": ["127.0.0.1:7300"]}],
    }
