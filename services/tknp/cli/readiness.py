"""Waits for a pool to be ready and shows how far each service is.

The coordinator answers GetStatus from the moment its port is open and passes on what the other
services report. On a terminal each service has a bar; elsewhere each change of phase is a line.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn

from tknp.cli.output import plural, size_text
from tknp.client import Client
from tknp.errors import DeadlineExceeded, Unavailable
from tknp.v1 import common_pb2
from tknp.v1.common_pb2 import Phase
from tknp.v1.coordinator_pb2 import Status

POLL_S = 0.1
PHASES = {
    common_pb2.PHASE_UNSPECIFIED: "starting",
    common_pb2.PHASE_LOADING: "loading weights",
    common_pb2.PHASE_JOINING: "joining peers",
    common_pb2.PHASE_WARMING: "warming up",
    common_pb2.PHASE_READY: "ready",
    common_pb2.PHASE_DRAINING: "draining",
    common_pb2.PHASE_FAILED: "failed",
}


def phase_text(phase: int) -> str:
    """A phase in words."""
    return PHASES.get(Phase.ValueType(phase), f"phase {phase}")


def services(status: Status) -> Iterator[tuple[str, common_pb2.Progress]]:
    """Name and progress of each service behind the coordinator."""
    for index, replica in enumerate(status.prefill):
        yield f"prefill {index}", replica.progress
    for node in status.nodes:
        yield f"node {node.node}", node.progress


def absent(status: Status) -> str:
    """Which services are not ready, in words. A pool may serve without all its prefill replicas."""
    return ", ".join(
        f"{name} is {phase_text(progress.phase)}"
        for name, progress in services(status)
        if progress.phase != common_pb2.PHASE_READY
    )


def missing(status: Status | None) -> str:
    """What a pool is still waiting for, in words."""
    if status is None:
        return "the coordinator does not answer"
    return absent(status) or f"the coordinator is {phase_text(status.phase)}"


class Display(Protocol):
    """Shows the latest status of a pool that is starting."""

    def __enter__(self) -> object: ...
    def __exit__(self, *error: object) -> None: ...
    def update(self, status: Status) -> None: ...


class Bars:
    """One bar a service, for a terminal. It goes when the pool is ready."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            SpinnerColumn(style="cyan"),
            TextColumn("{task.description:<12}"),
            BarColumn(bar_width=32, complete_style="cyan", finished_style="green"),
            TextColumn("[dim]{task.fields[note]}"),
            console=console,
            transient=True,
        )
        self._tasks: dict[str, TaskID] = {}
        self._pool = self._progress.add_task("pool", total=None, note="starting processes")

    def __enter__(self) -> object:
        return self._progress.__enter__()

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def update(self, status: Status) -> None:
        self._progress.update(self._pool, visible=False)
        for name, progress in services(status):
            if name not in self._tasks:
                self._tasks[name] = self._progress.add_task(name, total=None, note="")
            note = phase_text(progress.phase)
            if progress.phase == common_pb2.PHASE_LOADING and progress.total_bytes:
                note += f", {size_text(progress.loaded_bytes)} of {size_text(progress.total_bytes)}"
            ready = progress.phase == common_pb2.PHASE_READY
            total = progress.total_bytes or (1 if ready else None)
            done = total or 0 if ready else progress.loaded_bytes
            self._progress.update(self._tasks[name], total=total, completed=done, note=note)


class Lines:
    """One line a change of phase, for a log."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._seen: dict[str, int] = {}

    def __enter__(self) -> object:
        return self

    def __exit__(self, *error: object) -> None:
        return

    def update(self, status: Status) -> None:
        for name, progress in services(status):
            if self._seen.get(name, common_pb2.PHASE_UNSPECIFIED) != progress.phase:
                self._seen[name] = progress.phase
                loading = progress.phase == common_pb2.PHASE_LOADING and progress.total_bytes
                size = f", {size_text(progress.total_bytes)}" if loading else ""
                self._console.print(f"{name}: {phase_text(progress.phase)}{size}")


async def wait_until_ready(client: Client, console: Console, timeout_s: float) -> Status:
    """Poll until the pool and each of its services are ready.

    Raises DeadlineExceeded after `timeout_s` naming what is missing, Unavailable with the reason
    when the pool has failed.
    """
    status: Status | None = None
    display: Display = Bars(console) if console.is_terminal else Lines(console)
    try:
        with display:
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        status = await client.status()
                    except Unavailable:
                        pass  # its port is not open yet
                    else:
                        display.update(status)
                        if status.ready and not absent(status):
                            return status
                        if status.phase == common_pb2.PHASE_FAILED:
                            raise Unavailable(f"the pool failed to start: {reason(status)}")
                    await asyncio.sleep(POLL_S)
    except TimeoutError as error:
        raise DeadlineExceeded(
            f"not ready within {plural(round(timeout_s), 'second')}: {missing(status)}; "
            "allow more with --ready-timeout"
        ) from error


def reason(status: Status) -> str:
    """Why a pool has failed."""
    errors = [f"{name}: {p.error}" for name, p in services(status) if p.error]
    return status.error or "; ".join(errors) or "no reason was given"
