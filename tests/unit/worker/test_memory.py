from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

import psutil
import pytest
import torch

from tknp.errors import CapacityError
from tknp.worker import memory
from tknp.worker.memory import allocating, available_bytes, computing, measured_kv_bytes

CPU = torch.device("cpu")


def test_what_cannot_fit_is_refused_before_it_is_allocated_with_both_numbers() -> None:
    entered = False
    need = psutil.virtual_memory().total * 2
    message = rf"7 KV pages need {need} bytes \(.* GiB\), \d+ bytes"
    with pytest.raises(CapacityError, match=message), allocating("7 KV pages", need, CPU):
        entered = True
    assert not entered


@pytest.mark.parametrize(
    "refusal",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't"),
    ],
)
def test_an_allocator_that_refuses_all_the_same_is_reported_alike(refusal: Exception) -> None:
    message = r"weights need 8 bytes .* are available"
    with pytest.raises(CapacityError, match=message), allocating("weights", 8, CPU):
        raise refusal


def test_work_that_finds_no_memory_says_what_it_asked_for() -> None:
    message = r"no memory to compute a chunk, \d+ bytes .* available: pause .* 1152921504606846976"
    with pytest.raises(CapacityError, match=message), computing("a chunk", CPU, "pause"):
        torch.empty(1 << 60, dtype=torch.uint8)


@pytest.mark.parametrize(
    "around", [allocating("weights", 8, CPU), computing("a chunk", CPU, "pause")]
)
def test_other_errors_pass(around: AbstractContextManager[None]) -> None:
    with pytest.raises(RuntimeError, match="shape"), around:
        raise RuntimeError("shape mismatch")


def test_measured_memory_is_a_share_of_what_is_available() -> None:
    assert 0 < measured_kv_bytes(CPU) <= 2 << 30
    assert measured_kv_bytes(CPU) < available_bytes(CPU) <= psutil.virtual_memory().total


def group(path: Path, limit: str, used: int, inactive: int) -> None:
    path.mkdir(parents=True, exist_ok=True)
    (path / "memory.max").write_text(f"{limit}\n")
    (path / "memory.current").write_text(f"{used}\n")
    (path / "memory.stat").write_text(f"anon 1\ninactive_file {inactive}\nactive_file 5\n")


def test_the_limits_of_all_cgroups_above_count(tmp_path: Path) -> None:
    own = tmp_path / "self"
    own.write_text("4:memory:/old\n0::/pod/container\n")
    group(tmp_path / "pod", "1000", 300, 100)
    group(tmp_path / "pod" / "container", "max", 200, 0)
    group(tmp_path, "5000", 6000, 0)
    assert memory._cgroup_rooms(tmp_path, own) == [800, 0]
    assert memory._cgroup_rooms(tmp_path, tmp_path / "absent") == []
