"""Where a step may give way: before it computes, with several streams on one engine thread.

A step yields TURN like something to be waited for. Whoever drives a single step finds it done;
`tknp.engine.lanes` decides which of its streams goes on.
"""

from __future__ import annotations


class _Turn:
    """Implements `tknp.transport.base.Work`."""

    def wait(self) -> None:
        """Nothing to wait for."""

    def done(self) -> bool:
        return True


TURN = _Turn()
