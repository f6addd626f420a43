"""Every strategy on two nodes of one core each, with equal memory, from release to last completion.

    python bench/strategies.py                                      all of it, half an hour
    python bench/strategies.py --contexts 2048 --variants DP TKNP   a part of it
    python bench/strategies.py --cells FILE                         parts add up in FILE
    python bench/strategies.py --cells FILE --variants              only show and draw what FILE has
    python bench/strategies.py --delay-us 200                       messages between nodes later
    python bench/strategies.py --rate 1gbit                         and over a slow wire; as root

harness/waves.py says what a workload is. DP stands in the table twice: as two nodes that run at
once, and as one node that runs alone, half the requests, doubled. The two share a memory bus, so
that DP running concurrently reads its weights twice over it, which flatters whoever reads
them once: the second comparison has nothing of that, and the bandwidth of one and of two threads is
measured before every workload. Targets are for the best token-parallel schedule: at a context of
2,048 for 8 requests and more, otherwise for the largest batch. Contexts between them show what
whole pages do. The overlapped pipeline is a peer too, without a target. Tensor parallelism over
both nodes is missing: 9 heads can't be divided by two.

With --delay-us ranks see what another node sent that much later. With --rate the pool runs over
gloo in a network namespace whose loopback has that rate (tc tbf): control messages share it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from harness import alone, waves
from harness.figures import draw
from harness.options import finish, parser, tries
from harness.report import Row, at_least, note
from harness.waves import DOUBLED, DP, PIPELINE, VARIANTS, Cell, Run, Variant

from tknp.cli import local_pool
from tknp.cli.serve import serve_argv

CONTEXTS = (448, 512, 576, 1024, 1152, 1792, 2048)
BATCHES = (4, 8, 16, 32, 64)
TOKENS = 64
# context -> offered batch from which on, least of DP run concurrently and of DP run alone, doubled
TARGETS = {2048: (8, 1.9, 1.6), 1024: (64, 1.2, 1.15), 512: (64, 1.2, 1.1)}
ALONE = "one node"  # harness/alone.py
FIGURES = Path(__file__).parents[1] / "build/bench"
_INSIDE = "TKNP_BENCH_NAMESPACE"


def settings(options: argparse.Namespace) -> dict[str, object]:
    """What links change of a pool."""
    return {"transport": "distributed", "interface": "lo"} if options.rate else {}


def link(options: argparse.Namespace) -> str:
    parts = [options.rate] if options.rate else []
    parts += [f"{options.delay_us} us"] if options.delay_us else []
    return " ".join(parts) or "host"


def delay(microseconds: int) -> None:
    """Start decode nodes through harness/delayed.py."""
    script = str(Path(__file__).parent / "harness/delayed.py")

    def argv(role: str, pool_file: Path, *arguments: str) -> list[str]:
        given = serve_argv(role, pool_file, *arguments)
        if role != "decode-node":
            return given
        return [given[0], script, str(microseconds), *given[given.index("serve") :]]

    local_pool.serve_argv = argv  # type: ignore[attr-defined]


def enter_namespace(rate: str) -> None:
    """Run this command again where the loopback has `rate` and nobody else is on it."""
    if shutil.which("tc") is None or os.geteuid() != 0:
        sys.exit("--rate needs root, iproute2 and unshare")
    script = (
        f"ip link set lo up && tc qdisc add dev lo root tbf rate {rate} burst 256kb latency 200ms "
        '&& exec "$@"'
    )
    os.environ[_INSIDE] = "1"
    command = ["unshare", "-n", "sh", "-c", script, "sh", sys.executable, *sys.argv]
    os.execvp(command[0], command)


class Cells:
    """What has been measured, in memory and, if there is a file, there too."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.all: list[Cell] = []
        if path is not None and path.exists():
            for plain in json.loads(path.read_text()):
                runs = [Run(**{**r, "read_gb_per_s": tuple(r["read_gb_per_s"])})
                        for r in plain.pop("runs")]  # fmt: skip
                self.all.append(Cell(**plain, runs=runs))

    def add(
        self, on: str, variant: Variant, tokens: int, context: int, batch: int, run: Run
    ) -> None:
        """Keep `run`, in the file too: what follows may take long, or never end."""
        new = Cell(on, variant.name, context, batch, tokens)
        key = (on, variant.name, context, batch, tokens)
        found = [c for c in self.all if (c.link, c.variant, c.context, c.batch, c.tokens) == key]
        if not found:
            self.all.append(new)
            found = [new]
        found[0].runs.append(run)
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            whole = self._path.with_suffix(".part")
            whole.write_text(json.dumps([cell.plain() for cell in self.all], indent=1))
            whole.replace(self._path)


def rows(cells: Sequence[Cell]) -> list[Row]:
    """Each variant to DP of the same workload; the best token-parallel schedule to some peers."""
    found: list[Row] = []
    workloads = dict.fromkeys((c.link, c.context, c.batch, c.tokens) for c in cells)
    for on, context, batch, tokens in sorted(workloads):
        speed = {
            c.variant: c.median("tokens_per_s")
            for c in cells
            if (c.link, c.context, c.batch, c.tokens) == (on, context, batch, tokens)
        }
        name = f"{'' if on == 'host' else on + ', '}context {context}, {batch} offered"
        peer = speed.get(DP.name)
        found += [
            Row(f"{name}: {variant}", ours, "tokens/s", peer)
            for variant, ours in speed.items()
            if variant != DP.name
        ]
        parallel = [v.name for v in VARIANTS if v.token_parallel and v.name in speed]
        if not parallel:
            continue
        best = max(parallel, key=lambda variant: speed[variant])
        from_batch, *least = TARGETS.get(context, (sys.maxsize, 0.0, 0.0))
        bounds = map(at_least, least) if batch >= from_batch and on == "host" else (None, None)
        for other, target in zip((DP, DOUBLED, PIPELINE), (*bounds, None), strict=True):
            if other.name in speed:
                label = f"{name}: best token-parallel schedule ({best}) to {other.name}"
                found.append(Row(label, speed[best], "tokens/s", speed[other.name], target))
    if cells:
        reads = [run.read_gb_per_s for cell in cells for run in cell.runs]
        for threads, values in enumerate(zip(*reads, strict=True), start=1):
            label = f"read bandwidth of {threads} thread{'s' * (threads > 1)}"
            found.append(Row(f"{label}, lowest", min(values), "GB/s"))
            found.append(Row(f"{label}, highest", max(values), "GB/s"))
    return found


async def run(options: argparse.Namespace, cells: Cells) -> None:
    chosen = [v for v in VARIANTS if v.name in options.variants]
    for _ in range(tries(options, 3)):
        for variant in chosen:
            keep = partial(cells.add, link(options), variant, options.tokens)
            await waves.measure(
                variant, options.contexts, options.batches, options.tokens, settings(options), keep
            )


def arguments() -> argparse.Namespace:
    names = [variant.name for variant in VARIANTS] + [ALONE]
    flags = parser(__doc__)
    add: Any = flags.add_argument
    add("--contexts", nargs="+", type=int, metavar="N", help="tokens of KV at release")
    add("--batches", nargs="+", type=int, metavar="N", help="requests offered at once")
    add("--variants", nargs="*", default=names, choices=names, help="to run (all)")
    add("--tokens", type=int, default=TOKENS, metavar="N", help=f"of each request ({TOKENS})")
    add("--cells", type=Path, metavar="FILE", help="add to what is in FILE, and report all of it")
    add("--delay-us", type=int, default=0, metavar="N", help="of messages between nodes")
    add("--rate", default="", metavar="RATE", help="of the wire between nodes, such as 1gbit")
    add("--figures", type=Path, default=FIGURES, metavar="DIR", help="plots go there")
    options = flags.parse_args()
    quick = options.quick
    options.contexts = options.contexts or ([512] if quick else list(CONTEXTS))
    options.batches = options.batches or ([8] if quick else list(BATCHES))
    return options


def main() -> None:
    options = arguments()
    if options.rate and _INSIDE not in os.environ:
        enter_namespace(options.rate)
    if options.delay_us:
        delay(options.delay_us)
    cells = Cells(options.cells)
    asyncio.run(run(options, cells))
    one_node = alone.rows(1, 20 if options.quick else 100) if ALONE in options.variants else []
    for path in draw(cells.all, options.figures) if cells.all else []:
        note(f"  {path}")
    finish("Strategies", rows(cells.all) + one_node, options)


if __name__ == "__main__":
    main()
