from __future__ import annotations

import asyncio
from typing import NoReturn

import pytest

from tknp.cli.watch import beside
from tknp.errors import Unavailable


async def forever() -> NoReturn:
    await asyncio.Event().wait()
    raise RuntimeError("unreachable")


async def trouble() -> NoReturn:
    raise Unavailable("decode-node-1 has been stopped")


async def test_work_ends_with_its_result_or_with_what_a_watch_finds() -> None:
    assert await beside(asyncio.sleep(0, "done"), forever()) == "done"
    with pytest.raises(Unavailable, match="decode-node-1"):
        await beside(asyncio.Event().wait(), forever(), trouble())


async def test_nothing_goes_on_behind() -> None:
    ended = asyncio.Event()

    async def watch() -> NoReturn:
        try:
            await forever()
        finally:
            ended.set()

    await beside(asyncio.sleep(0), watch())
    assert ended.is_set()
