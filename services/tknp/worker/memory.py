"""KV budget where none is declared."""

from __future__ import annotations

import psutil
import torch

_CPU_SHARE = 0.1
_CPU_MOST_BYTES = 2 << 30
_CUDA_SHARE = 0.9


def measured_kv_bytes(device: torch.device) -> int:
    """Bytes for KV on one rank, measured after its weights are loaded.

    CUDA: nine tenths of what is free. CPU: a tenth of what is available but at most 2 GiB, since
    several ranks of several pools may share the host; declare `kv_memory_bytes` to use more.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * _CUDA_SHARE)
    return min(int(psutil.virtual_memory().available * _CPU_SHARE), _CPU_MOST_BYTES)
