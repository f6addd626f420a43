"""Layouts of the published evaluation, and what the planner says of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest

from tknp.layout.strategy import Strategy
from tknp.planner.explain import Explanation, Load, explain
from tknp.planner.hardware import HARDWARE
from tknp.planner.models import MODELS


@pytest.fixture(scope="session")
def explained() -> Callable[..., Explanation]:
    """Llama 3.1 405B on machines of eight H100, unless told otherwise."""

    @lru_cache
    def make(
        strategy: str, nodes: int, model: str = "llama-3.1-405b", tp: int = 8, batch: int = 128,
        context: int = 4096, hardware: str = "h100", width: int | None = None, **options: Any,
    ) -> Explanation:  # fmt: skip
        return explain(
            MODELS[model], HARDWARE[hardware], Strategy(strategy), nodes=nodes, tp=tp,
            load=Load(batch, context, width), **options,
        )  # fmt: skip

    return make
