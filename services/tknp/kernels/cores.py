"""Which cores the threads of kernels run on.

Threads of a kernel meet hundreds of times a step, so one that is moved to another core, or shares
one while another stands empty, holds up all. A rank that computes with as many threads as its
process may use cores therefore keeps each of them on its own; where several ranks share the cores,
each has fewer threads than that, and the system places them.

Only the calling thread and the threads that compute for it are kept, for as long as they live: a
parallel region of fewer threads, but more than one, ends the rest, and their successors inherit the
calling thread's core, so every kernel runs with `threads()`. Other threads that the calling one
starts inherit it too: start them elsewhere, or before.
"""

from __future__ import annotations

import ctypes
import logging
import os

from tknp.kernels.library import load, threads

log = logging.getLogger(__name__)


def keep_cores() -> tuple[int, ...]:
    """Keep the calling thread and those that compute for it on cores of their own, if they fit.

    Returns the cores, in order of the threads; empty where threads are fewer or more than the
    cores that the calling thread may use, or there is one. Unavailable where there are no kernels.
    """
    cores = tuple(sorted(os.sched_getaffinity(0)))
    if len(cores) < 2 or threads() != len(cores):
        return ()
    kept = load().keep_cores((ctypes.c_int32 * len(cores))(*cores), len(cores))
    if kept < len(cores):
        log.warning("only %d of %d threads could be kept on a core", kept, len(cores))
        return ()
    return cores
