"""Runs of layers outside an engine."""

from __future__ import annotations

from collections.abc import Generator

from tknp.kernels.layers import Ran
from tknp.transport.base import Work


def run_through(steps: Generator[Work, None, Ran]) -> Ran:
    """Wait wherever a run has to be waited for; what it gave."""
    try:
        while True:
            next(steps).wait()
    except StopIteration as end:
        ran: Ran = end.value
        return ran
