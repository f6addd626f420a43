"""From `tknp up` to a pool that serves, cold and warm, and the memory of each process.

    python bench/startup.py [--quick]

One node, one prefill replica, SmolLM2 in bfloat16. Cold: the compiled kernels have to be built,
into an empty cache; left out where `python -m tknp.kernels.build` has put some already. Warm: they
are there. The files of the model and of Python itself are in the page cache both times. Memory is
proportional (PSS): pages that processes share count once.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
from harness.options import finish, parser
from harness.pool import pool
from harness.report import Row, note

from tknp.kernels.build import PREBUILT

KV_BYTES = 512 << 20
CACHE = "XDG_CACHE_HOME"


@contextmanager
def empty_cache() -> Iterator[None]:
    """User caches in a new, empty directory."""
    before = os.environ.get(CACHE)
    with tempfile.TemporaryDirectory() as directory:
        os.environ[CACHE] = directory
        try:
            yield
        finally:
            del os.environ[CACHE]
            if before is not None:
                os.environ[CACHE] = before


async def start(threads: int, name: str) -> list[Row]:
    began = time.perf_counter()
    async with pool(threads, kv_memory_bytes=KV_BYTES, settings={}) as (up, _):
        rows = [Row(f"{name} start until ready", time.perf_counter() - began, "s")]
        note(f"  {rows[0].name}: {rows[0].ours:.1f} s")
        for process, pid in up.pids.items():
            memory = psutil.Process(pid).memory_full_info().pss / 2**20
            rows.append(Row(f"memory of {process}, pool at rest", memory, "MiB"))
    return rows


def main() -> None:
    options: argparse.Namespace = parser(__doc__).parse_args()
    rows = []
    if PREBUILT.exists():
        note(f"  no cold start: kernels were compiled ahead ({PREBUILT})")
    elif not options.quick:
        with empty_cache():
            rows += asyncio.run(start(options.threads, "cold"))[:1]
    rows += asyncio.run(start(options.threads, "warm"))
    finish("Start and memory", rows, options)


if __name__ == "__main__":
    main()
