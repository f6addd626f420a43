"""What a replica says to the owners of one request."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from grpc import aio

from tknp.errors import CapacityError
from tknp.prefill.replica import _each
from tknp.v1.attention_owner_pb2 import TransferRequest


async def test_no_call_is_under_way_once_one_has_failed() -> None:
    """An Abort follows. An owner that heard of the transfer later would wait for its end."""
    heard: list[str] = []
    refused = asyncio.Event()

    async def refuses(request: TransferRequest, **options: float) -> Any:
        refused.set()
        nothing = aio.Metadata()
        raise aio.AioRpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, nothing, nothing, details="full")

    async def slow(request: TransferRequest, **options: float) -> Any:
        await refused.wait()
        for _ in range(10):
            await asyncio.sleep(0)
        heard.append(request.writer)

    calls: Any = [refuses, slow]
    with pytest.raises(CapacityError, match="attention owner: full"):
        await _each(calls, TransferRequest(writer="w"))
    assert heard == ["w"]
