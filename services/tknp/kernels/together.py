"""Runs of whole layers under way: one by itself, or those of several streams in turns.

    wait()                csrc/layers.h    this run alone, until it is over or has to be waited for
    together(calls, ...)  csrc/together.h  a stage at a time of whichever is ready; `done` are then
                                           those that are over, or have to be waited for

Streams share the threads of a rank: what one waits for, another fills. Each call goes on where the
last one left it, in whichever way that was.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof, byref, c_int64, c_uint64, c_void_p

from tknp.kernels.library import Library, Run, threads

_STUCK, _OVER = 2, 3  # csrc/together.h


class LayersCall:
    """A run that goes on: by itself where it is waited for, or together with other streams' runs.

    Implements `tknp.transport.base.Work`, whose `wait` returns as the call does.
    """

    def __init__(self, library: Library, call: Run) -> None:
        self._library = library
        self.call = call
        self._returned = False

    def wait(self) -> None:
        if not self._returned:
            self._library.check(self._library.layers(byref(self.call), threads()))

    def done(self) -> bool:
        return self._returned

    @staticmethod
    def together(calls: Sequence[LayersCall], called: c_uint64, *, once: bool) -> bool:
        """Go on with several, until one is done, or has to wait as its `wait` would return.

        Until `called` is set, too; with `once`, until a stage is computed or none is ready. Returns
        whether anything was computed or is done. MemoryError as of `Library.check`.
        """
        count = len(calls)
        runs = (c_void_p * count)(*(addressof(each.call) for each in calls))
        states = (c_int64 * count)()
        before = sum(each.call.at for each in calls)
        library = calls[0]._library
        status = library.layers_together(runs, states, count, byref(called), once, threads())
        library.check(status)
        moved = sum(each.call.at for each in calls) != before
        for each, state in zip(calls, states, strict=True):
            each._returned = state in (_STUCK, _OVER)
        return moved or any(each._returned for each in calls)
