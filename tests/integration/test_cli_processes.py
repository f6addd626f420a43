"""The supervisor with real processes: who dies is named, and nobody outlives it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from tknp.cli.processes import Command, Interrupted, ProcessDied, Supervisor, tail_of
from tknp.errors import TknpError

SLEEP = "import time; print('up', flush=True); time.sleep(600)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEP}"
# A child of its own in the same process group, which outlives it unless the group is killed.
PARENT = (
    "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'import time; "
    f"time.sleep(600)']); print(p.pid, flush=True); {SLEEP}"
)


Step = Callable[[Supervisor], Awaitable[Any]]


def python(name: str, code: str) -> Command:
    return Command(name, [sys.executable, "-I", "-S", "-c", code])


def gone(pid: int) -> bool:
    """Whether `pid` has ended, or is a zombie that only its parent's wait keeps."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def until(condition: Callable[[], bool]) -> None:
    """Wait for another process; pytest's own limit ends a wait in vain."""
    while not condition():
        time.sleep(0.005)


async def until_gone(*pids: int) -> None:
    await asyncio.to_thread(until, lambda: all(gone(pid) for pid in pids))


async def first_lines(log: Path, count: int) -> list[str]:
    """The first lines of `log`, once there are that many."""
    await asyncio.to_thread(until, lambda: log.read_text().count("\n") >= count)
    return log.read_text().splitlines()[:count]  # noqa: ASYNC240


async def forever(_: Supervisor) -> None:
    await asyncio.Event().wait()


@dataclass
class Stage:
    """Starts children under a supervisor, then runs `work` under its guard."""

    logs: Path
    grace_s: float = 20.0
    pids: list[int] = field(default_factory=list)

    async def play(
        self, *commands: Command, work: Step = forever, before: Step | None = None
    ) -> Any:
        async with Supervisor(self.logs, self.grace_s) as supervisor:
            for command in commands:
                self.pids.append((await supervisor.start(command)).pid)
            if before:
                await before(supervisor)
            return await supervisor.guard(_result(work(supervisor)))


async def _result(work: Awaitable[Any]) -> Any:
    return await work


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


async def test_the_child_that_dies_is_named_with_code_and_log(stage: Stage) -> None:
    dying = python("dying", "print('reason'); raise SystemExit(3)")
    with pytest.raises(ProcessDied) as caught:
        await stage.play(python("steady", SLEEP), dying)
    log = stage.logs / "dying.log"
    assert str(caught.value) == f"dying exited with code 3; its log is {log}"
    assert caught.value.__notes__ == ["reason"]
    assert all(gone(pid) for pid in stage.pids)


async def test_a_killed_child_is_named_with_its_signal(stage: Stage) -> None:
    async def kill(supervisor: Supervisor) -> None:
        os.kill(supervisor.children[1].pid, signal.SIGKILL)

    with pytest.raises(ProcessDied, match="victim was killed by SIGKILL"):
        await stage.play(python("steady", SLEEP), python("victim", SLEEP), before=kill)


async def test_a_child_that_ends_well_unasked_is_a_death_too(stage: Stage) -> None:
    with pytest.raises(ProcessDied, match="early exited with code 0"):
        await stage.play(python("early", ""))


async def test_a_program_that_does_not_exist_is_named(stage: Stage) -> None:
    with pytest.raises(TknpError, match="absent"):
        await stage.play(Command("absent", [str(stage.logs / "no-such-program")]))


async def test_work_that_fails_because_a_child_dies_blames_the_child(stage: Stage) -> None:
    async def fail(_: Supervisor) -> None:
        (stage.logs / "go").touch()
        raise TknpError("the connection was lost")

    waits = (
        f"import os, sys\nwhile not os.path.exists({str(stage.logs / 'go')!r}): pass\nsys.exit(9)"
    )
    with pytest.raises(ProcessDied, match="cause exited with code 9"):
        await stage.play(python("cause", waits), work=fail)


async def test_work_that_fails_by_itself_keeps_its_error(stage: Stage) -> None:
    async def fail(_: Supervisor) -> None:
        raise TknpError("its own fault")

    with pytest.raises(TknpError, match="its own fault"):
        await stage.play(python("steady", SLEEP), work=fail)
    assert gone(stage.pids[0])


async def test_the_result_of_work_is_returned(stage: Stage) -> None:
    async def answer(supervisor: Supervisor) -> int:
        return len(supervisor.children)

    assert await stage.play(python("steady", SLEEP), work=answer) == 1


async def test_sigterm_is_enough_for_a_child_that_heeds_it(stage: Stage) -> None:
    code = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit('goodbye'))\n"
        "print('up', flush=True)\n"
        "time.sleep(600)"
    )

    async def stop(supervisor: Supervisor) -> int:
        await first_lines(stage.logs / "polite.log", 1)
        polite = supervisor.children[0]
        await supervisor.stop()
        return polite.exited.result()

    async with Supervisor(stage.logs, stage.grace_s) as supervisor:
        await supervisor.start(python("polite", code))
        assert await stop(supervisor) == 1
    assert "goodbye" in (stage.logs / "polite.log").read_text()


async def test_a_child_that_ignores_sigterm_is_killed(stage: Stage) -> None:
    async with Supervisor(stage.logs, grace_s=0.2) as supervisor:
        child = await supervisor.start(python("stubborn", STUBBORN))
        await first_lines(stage.logs / "stubborn.log", 1)
        await supervisor.stop()
        assert child.exited.result() == -signal.SIGKILL


async def test_children_of_children_end_too(stage: Stage) -> None:
    async with Supervisor(stage.logs) as supervisor:
        child = await supervisor.start(python("parent", PARENT))
        grandchild = int((await first_lines(stage.logs / "parent.log", 2))[0])
        assert not gone(grandchild)
    await until_gone(child.pid, grandchild)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_a_signal_interrupts_and_ends_all(stage: Stage, signum: signal.Signals) -> None:
    async def interrupt(_: Supervisor) -> None:
        os.kill(os.getpid(), signum)

    with pytest.raises(Interrupted) as caught:
        await stage.play(python("steady", SLEEP), before=interrupt)
    assert caught.value.exit_code == 128 + signum
    assert gone(stage.pids[0])


async def test_a_second_signal_skips_the_grace_period(stage: Stage) -> None:
    async def interrupt_twice(_: Supervisor) -> None:
        await first_lines(stage.logs / "stubborn.log", 1)
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)

    stage.grace_s = 3600.0
    with pytest.raises(Interrupted):
        await stage.play(python("stubborn", STUBBORN), before=interrupt_twice)
    assert gone(stage.pids[0])


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal")
async def test_children_die_with_a_supervisor_that_is_killed(stage: Stage) -> None:
    code = (
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from tknp.cli.processes import Command, Supervisor\n"
        "async def main():\n"
        f"    async with Supervisor(Path({str(stage.logs)!r})) as s:\n"
        "        for n in range(2):\n"
        f"            argv = [sys.executable, '-I', '-S', '-c', {STUBBORN!r}]\n"
        "            print((await s.start(Command(str(n), argv))).pid, flush=True)\n"
        "        await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    pids = [int(await parent.stdout.readline()) for _ in range(2)]
    for number in range(2):
        await first_lines(stage.logs / f"{number}.log", 1)
    parent.kill()
    await parent.wait()
    await until_gone(*pids)


def test_tail_reads_the_end_alone(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("".join(f"line {n}\n" for n in range(10_000)))
    assert tail_of(log, 2) == "line 9998\nline 9999"
    log.write_bytes(b"\xff\xfe broken")
    assert tail_of(log).endswith("broken")
