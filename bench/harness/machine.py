"""Which machine a result comes from.

The bandwidth of a shared host changes from minute to minute, so it is measured beside every result.
"""

from __future__ import annotations

import os
import platform
import subprocess
import time
from datetime import datetime
from pathlib import Path

import torch

from tknp.kernels.library import available, load
from tknp.kv.storage import KvStorage

_READ_BYTES = 512 << 20
_READS = 5
_MATRIX = 768


def describe() -> dict[str, str]:
    """Date, processor, cores, memory, instruction set and the versions that matter."""
    status = available()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "date": datetime.now().astimezone().isoformat(timespec="minutes"),
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{memory / 2**30:.0f} GiB",
        "kernels": status.isa or f"none: {status.reason}",
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def load_average() -> float:
    """Processes that wanted to run over the last minute: above 1, neighbours disturb a result."""
    return os.getloadavg()[0]


def read_bandwidth(threads: int) -> float:
    """GB/s that `threads` threads together read from memory in huge pages, best of five."""
    data = KvStorage(1, 1, 1, 1, _READ_BYTES // 4, torch.bfloat16).data

    def once() -> float:
        start = time.perf_counter()
        load().read(data.data_ptr(), data.nbytes, threads)
        return data.nbytes / (time.perf_counter() - start) / 1e9

    return max(once() for _ in range(_READS))


def copy_bandwidth(size_bytes: int) -> float:
    """GB/s at which this thread copies `size_bytes` from memory to memory, best of five."""
    source = torch.ones(size_bytes, dtype=torch.uint8)
    target = torch.zeros_like(source)

    def once() -> float:
        start = time.perf_counter()
        target.copy_(source)
        return size_bytes / (time.perf_counter() - start) / 1e9

    return max(once() for _ in range(_READS))


def multiply_rate(threads: int) -> float:
    """FLOP/s of torch's matrix product, float32 or bfloat16, whichever is faster; best of five."""
    torch.set_num_threads(threads)

    def once(dtype: torch.dtype) -> float:
        a = torch.ones(_MATRIX, _MATRIX, dtype=dtype)
        start = time.perf_counter()
        a @ a
        return 2 * _MATRIX**3 / (time.perf_counter() - start)

    return max(once(dtype) for dtype in (torch.float32, torch.bfloat16) for _ in range(_READS))


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def _commit() -> str:
    """Short id of the commit these files belong to; `+`: with changes not committed."""
    here = Path(__file__).parent
    command = ("git", "-C", str(here), "describe", "--always", "--exclude=*", "--dirty=+")
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
