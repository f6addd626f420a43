"""Notices what the exit of a process doesn't show: one that is stopped, hangs, or has been lost.

    stopped    the kernel says that a process is stopped, whatever phase it is in
    lost       the coordinator says that the pool failed, or that a service is silent
    silent     the coordinator doesn't answer

Each ends what runs beside it with an error that names the process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, NoReturn, TypeVar

import psutil

from tknp.cli.processes import Child
from tknp.cli.readiness import reason, services
from tknp.client import Client
from tknp.errors import DeadlineExceeded, Unavailable
from tknp.v1.common_pb2 import Phase

_LOOK_S = 0.5
_STOPPED_LOOKS = 6
_ASK_S = 3.0
_ASKS = 2
T = TypeVar("T")


async def beside(work: Coroutine[Any, Any, T], *watches: Coroutine[Any, Any, NoReturn]) -> T:
    """The result of `work`, unless a watch raises first."""
    tasks = [asyncio.create_task(coroutine) for coroutine in (work, *watches)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        result: T = tasks[0].result()
        return result
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def stopped(children: Sequence[Child]) -> NoReturn:
    """Raise Unavailable naming the child that has been stopped for some seconds."""
    looks = dict.fromkeys((child.pid for child in children), 0)
    while True:
        await asyncio.sleep(_LOOK_S)
        for child in children:
            looks[child.pid] = looks[child.pid] + 1 if _is_stopped(child.pid) else 0
            if looks[child.pid] >= _STOPPED_LOOKS:
                seconds = _STOPPED_LOOKS * _LOOK_S
                raise Unavailable(
                    f"{child.command.name} has been stopped (SIGSTOP) for {seconds:.0f} s"
                )


async def lost(client: Client) -> NoReturn:
    """Raise Unavailable with the reason when the pool has failed or a service is silent."""
    unanswered = 0
    while True:
        await asyncio.sleep(_LOOK_S)
        try:
            async with asyncio.timeout(_ASK_S):
                status = await client.status()
        except (TimeoutError, Unavailable, DeadlineExceeded) as error:
            unanswered += 1
            if unanswered >= _ASKS:
                raise Unavailable("coordinator does not answer") from error
            continue
        unanswered = 0
        failed = [name for name, p in services(status) if p.phase == Phase.PHASE_FAILED]
        if status.phase == Phase.PHASE_FAILED or failed:
            raise Unavailable(f"the pool has failed: {reason(status)}")


def _is_stopped(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return False
