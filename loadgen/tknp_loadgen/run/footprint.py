"""How much memory this process has needed."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")


def max_rss_bytes() -> int:
    """The most resident memory so far.

    Linux keeps `ru_maxrss` across exec, so that a small child of a large process would report its
    parent's: VmHWM is of this program alone.
    """
    if _STATUS.exists():
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
