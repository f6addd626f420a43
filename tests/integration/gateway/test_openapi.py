"""What the gateway says of its HTTP interface holds, whatever is sent to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio

from tknp.local import InProcessPool

schemathesis = pytest.importorskip("schemathesis")
pytestmark = pytest.mark.asyncio(loop_scope="module")
EXAMPLES = 15


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(
    open_speaker: Callable[..., Any], serving: Callable[..., Any]
) -> AsyncIterator[SimpleNamespace]:
    pool = open_speaker()
    async with InProcessPool(pool), serving(pool.config.coordinator) as found:
        yield found


async def test_every_operation_answers_as_described(served: SimpleNamespace) -> None:
    """No server error, no status and no body that the schema doesn't have."""
    from hypothesis import HealthCheck, Phase, given, settings
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

    checks = [
        not_a_server_error, status_code_conformance, content_type_conformance,
        response_schema_conformance,
    ]  # fmt: skip

    def run() -> list[str]:
        schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
        tried: list[str] = []
        for result in schema.get_all_operations():
            operation = result.ok()
            tried.append(f"{operation.method.upper()} {operation.path}")

            @settings(
                max_examples=EXAMPLES, deadline=None, derandomize=True, database=None,
                phases=[Phase.generate], suppress_health_check=list(HealthCheck),
            )  # fmt: skip
            @given(case=operation.as_strategy())
            def conforms(case: Any) -> None:
                case.call_and_validate(checks=checks, timeout=60)

            conforms()
        return tried

    tried = await asyncio.to_thread(run)
    assert {"POST /v1/completions", "POST /v1/chat/completions", "GET /v1/models"} <= set(tried)


async def test_the_schema_has_no_end_that_is_not_ours(served: SimpleNamespace) -> None:
    described = served.gateway and (await asyncio.to_thread(_schema, served.url))
    assert set(described["paths"]) == {
        "/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/models/{name}", "/tokenize",
        "/detokenize", "/health", "/ready", "/version", "/metrics", "/pools",
    }  # fmt: skip
    errors = described["paths"]["/v1/completions"]["post"]["responses"]
    assert {"400", "401", "404", "408", "413", "422", "429", "503"} <= set(errors)


def _schema(url: str) -> Any:
    import httpx2

    return httpx2.get(f"{url}/openapi.json").json()
