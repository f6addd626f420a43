"""Memory of one rank: what there is, what is asked of it, and errors with both numbers.

Linux promises more memory than it has and kills who touches it, so large allocations are compared
with what is available first. Ranks that start together on one host may still race for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch

from tknp.errors import CapacityError

_CPU_SHARE = 0.1
_CPU_MOST_BYTES = 2 << 30
_CUDA_SHARE = 0.9
_CGROUPS = Path("/sys/fs/cgroup")
_REMEDY = (
    "give this rank fewer layers (more nodes, a higher TP degree), a smaller KV budget "
    "(kv_memory_bytes, memory_bytes, max_model_len) or more memory"
)


def measured_kv_bytes(device: torch.device) -> int:
    """Bytes for KV on one rank, measured after its weights are loaded.

    CUDA: nine tenths of what is free. CPU: a tenth of what is available but at most 2 GiB, since
    several ranks of several pools may share the host; declare `kv_memory_bytes` to use more.
    """
    if device.type == "cuda":
        return int(available_bytes(device) * _CUDA_SHARE)
    return min(int(available_bytes(device) * _CPU_SHARE), _CPU_MOST_BYTES)


def available_bytes(device: torch.device) -> int:
    """Bytes that this process may still allocate: of the device, or of host and cgroup."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free
    return min([psutil.virtual_memory().available, *_cgroup_rooms()])


@contextmanager
def allocating(what: str, need_bytes: int, device: torch.device) -> Iterator[None]:
    """Around the allocation of `what`. Raises CapacityError naming what is needed and available.

    Checked before the block runs, and where the allocator refuses all the same.
    """
    available = available_bytes(device)
    if need_bytes > available:
        raise CapacityError(_short(what, need_bytes, available, device))
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not _is_refusal(error):
            raise
        raise CapacityError(_short(what, need_bytes, available, device)) from error


@contextmanager
def computing(what: str, device: torch.device, remedy: str) -> Iterator[None]:
    """Around work that takes memory as it goes. Raises CapacityError where there is none.

    The message says what the allocator was asked for, as far as it tells, and what is available.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not _is_refusal(error):
            raise
        raise CapacityError(
            f"no memory to compute {what}, {_room_text(available_bytes(device), device)}: {remedy} "
            f"({str(error).partition(chr(10))[0] or 'the allocator says no more'})"
        ) from error


def _is_refusal(error: MemoryError | RuntimeError) -> bool:
    """Whether an allocator refused; torch's for the CPU has no type of its own."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return "alloc" in str(error).lower()


def _short(what: str, need: int, available: int, device: torch.device) -> str:
    room = _room_text(available, device)
    return f"{what} need {need} bytes ({_gib(need)}), {room}: {_REMEDY}"


def _room_text(available: int, device: torch.device) -> str:
    where = "of the host" if device.type == "cpu" else f"of {device}"
    return f"{available} bytes ({_gib(available)}) {where} are available"


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"


def _cgroup_rooms(root: Path = _CGROUPS, own: Path = Path("/proc/self/cgroup")) -> list[int]:
    """Room left under the memory limit of this process's cgroup (v2) and each above it."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return []
    rooms = []
    for line in lines:
        if not line.startswith("0::"):
            continue
        path = Path(line.removeprefix("0::").lstrip("/"))
        for group in (path, *path.parents):
            room = _room(root / group)
            if room is not None:
                rooms.append(room)
    return rooms


def _room(group: Path) -> int | None:
    """Limit less usage; file pages that the kernel can drop count as free."""
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
        stat = (group / "memory.stat").read_text()
    except (OSError, ValueError):
        return None
    if limit == "max":
        return None
    droppable = sum(
        int(line.split()[1]) for line in stat.splitlines() if line.startswith("inactive_file ")
    )
    return max(int(limit) - used + droppable, 0)
