"""Keys of a terminal, one at a time, without waiting for a line."""

from __future__ import annotations

import asyncio
import os
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def keys() -> Iterator[asyncio.Queue[str]]:
    """Characters typed on standard input, where that is a terminal, as they come.

    The terminal is as before afterwards; Ctrl-C still interrupts. To be entered on the event loop.
    """
    typed: asyncio.Queue[str] = asyncio.Queue()
    if not sys.stdin.isatty():
        yield typed
        return
    descriptor, loop = sys.stdin.fileno(), asyncio.get_running_loop()
    before = termios.tcgetattr(descriptor)

    def read() -> None:
        data = os.read(descriptor, 64)
        if not data:  # the terminal is gone
            loop.remove_reader(descriptor)
        for character in data.decode(errors="replace"):
            typed.put_nowait(character)

    tty.setcbreak(descriptor)
    loop.add_reader(descriptor, read)
    try:
        yield typed
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
