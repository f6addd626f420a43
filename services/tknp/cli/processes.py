"""Child processes that end together.

    async with Supervisor(logs) as supervisor:       # takes SIGINT, SIGTERM, SIGHUP
        await supervisor.start(Command("node-0", [...]))
        await supervisor.guard(wait_until_ready())   # or ProcessDied, or Interrupted
    # SIGTERM to each, at most `grace_s`, SIGKILL to every process group: none is left

Each child leads its own session, so that a terminal's Ctrl-C reaches only the supervisor, which
then decides the order. On Linux a child is also killed by the kernel when the supervisor is gone,
however that happened. A second signal while stopping skips the rest of the grace period.
Start children from the main thread: the kernel ties them to the thread that forked them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from tknp.cli import parent_death
from tknp.errors import TknpError

GRACE_S = 4.0
KILL_WAIT_S = 1.0
SETTLE_S = 0.5
TAIL_LINES = 15
TAIL_BYTES = 8192
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
T = TypeVar("T")


@dataclass(frozen=True)
class Command:
    """What to run under which name. `environment` replaces the inherited one unless None."""

    name: str
    argv: Sequence[str]
    environment: Mapping[str, str] | None = None


class ProcessDied(TknpError):
    """A child ended that nobody asked to end. Notes carry the end of its log."""

    status = "UNAVAILABLE"

    def __init__(self, name: str, code: int, log: Path | None) -> None:
        if code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        else:
            how = f"exited with code {code}"
        super().__init__(f"{name} {how}" + (f"; its log is {log}" if log else ""))
        self.name = name
        self.code = code
        if log and (tail := tail_of(log)):
            self.add_note(tail)


class Interrupted(Exception):
    """A signal asked to stop."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.exit_code = 128 + signum


@dataclass
class Child:
    command: Command
    process: asyncio.subprocess.Process
    log: Path | None
    exited: asyncio.Task[int]

    @property
    def pid(self) -> int:
        return self.process.pid


def tail_of(log: Path, lines: int = TAIL_LINES) -> str:
    """The last `lines` lines of `log`, without reading all of it."""
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - TAIL_BYTES))
        text = file.read().decode(errors="replace")
    return "\n".join(text.strip().splitlines()[-lines:])


def signal_group(pid: int, signum: int) -> None:
    """Signal every process of the group that `pid` leads, if any is left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signum)


@dataclass
class Supervisor:
    """Starts children, notices the first that dies, and leaves none behind.

    `log_directory`: one file a child; None lets them share this process's output.
    """

    log_directory: Path | None = None
    grace_s: float = GRACE_S
    children: list[Child] = field(default_factory=list)
    _dead: list[Child] = field(default_factory=list)
    _signals: list[int] = field(default_factory=list)
    _asked: asyncio.Event = field(default_factory=asyncio.Event)
    _asked_again: asyncio.Event = field(default_factory=asyncio.Event)
    _handled: list[signal.Signals] = field(default_factory=list)

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        for signum in STOP_SIGNALS:
            if signal.getsignal(signum) is not signal.SIG_IGN:  # nohup stays nohup
                loop.add_signal_handler(signum, self._on_signal, signum)
                self._handled.append(signum)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:  # fmt: skip
        try:
            await self.stop()
        finally:
            for signum in self._handled:
                asyncio.get_running_loop().remove_signal_handler(signum)

    def _on_signal(self, signum: int) -> None:
        if self._signals:
            self._asked_again.set()
        self._signals.append(signum)
        self._asked.set()

    async def start(self, command: Command) -> Child:
        """Start `command`; raises TknpError when it can't be executed."""
        argv = list(command.argv)
        if sys.platform == "linux":
            argv = [sys.executable, "-I", "-S", parent_death.__file__, str(os.getpid()), *argv]
        log = self.log_directory / f"{command.name}.log" if self.log_directory else None
        try:
            with contextlib.ExitStack() as stack:
                output = stack.enter_context(log.open("wb")) if log else None
                process = await asyncio.create_subprocess_exec(
                    *argv, env=command.environment, stdin=asyncio.subprocess.DEVNULL,
                    stdout=output, stderr=output, start_new_session=True,
                )  # fmt: skip
        except OSError as error:
            raise TknpError(f"{command.name} can't be started: {error}") from error
        child = Child(command, process, log, asyncio.create_task(process.wait()))
        child.exited.add_done_callback(lambda _: self._dead.append(child))
        self.children.append(child)
        return child

    async def guard(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` while every child lives.

        Raises ProcessDied naming the first child that ended, Interrupted on a signal, or what
        `work` raised. `work` is cancelled in the first two cases.
        """
        task = asyncio.create_task(work)
        asked = asyncio.create_task(self._asked.wait())
        exits = [child.exited for child in self.children]
        try:
            await asyncio.wait({task, asked, *exits}, return_when=asyncio.FIRST_COMPLETED)
            failed = task.done() and not task.cancelled() and task.exception() is not None
            if failed and not self._asked.is_set() and exits:
                # Work usually fails because a process behind it is dying: name that process.
                await asyncio.wait(
                    {asked, *exits}, timeout=SETTLE_S, return_when=asyncio.FIRST_COMPLETED
                )
            if self._signals:
                raise Interrupted(self._signals[0])
            if self._dead:
                first = self._dead[0]
                raise ProcessDied(first.command.name, first.exited.result(), first.log)
            return task.result()
        finally:
            task.cancel()
            asked.cancel()
            await asyncio.gather(task, asked, return_exceptions=True)

    async def stop(self) -> None:
        """End every child and everything in their process groups. Idempotent."""
        exits = [child.exited for child in self.children]
        for child in self.children:
            if not child.exited.done():
                with contextlib.suppress(ProcessLookupError):
                    child.process.terminate()
        if exits:
            everyone = asyncio.create_task(asyncio.wait(exits))
            again = asyncio.create_task(self._asked_again.wait())
            await asyncio.wait(
                (everyone, again), timeout=self.grace_s, return_when=asyncio.FIRST_COMPLETED
            )
            everyone.cancel()
            again.cancel()
            for child in self.children:
                signal_group(child.pid, signal.SIGKILL)
            await asyncio.wait(exits, timeout=KILL_WAIT_S)
        self.children.clear()
