"""Run a command that dies when its parent does: `parent_death.py PARENT_PID COMMAND...`.

Linux only. The kernel's parent-death signal survives exec, so the command itself needs to know
nothing. It is set here rather than between fork and exec of the parent, where no Python code is
safe once gRPC has started threads. Run as a file with `-I -S`: nothing but the standard library.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    parent, command = int(arguments[0]), arguments[1:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0):
        sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:  # it died before the signal was set
        sys.exit("the parent process is gone")
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
