"""The chart, rendered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_python import Chart

CHART = Path(__file__).parents[3] / "charts" / "tknp"


@pytest.fixture(scope="session")
def chart() -> Iterator[Chart]:
    with Chart.load(CHART) as loaded:
        yield loaded


@pytest.fixture(scope="session")
def render(chart: Chart) -> Callable[..., list[dict[str, Any]]]:
    """`render(values, name, namespace)`: objects, as `helm template` would print them."""

    def made(
        values: dict[str, Any], name: str = "demo", namespace: str = "ns"
    ) -> list[dict[str, Any]]:
        files = chart.render(values, name=name, namespace=namespace)
        return [
            obj for path, text in files.items() if not path.endswith(".txt")
            for obj in yaml.safe_load_all(text) if obj
        ]  # fmt: skip

    return made
