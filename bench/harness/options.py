"""The command line that every benchmark has, and its last act.

All take the same flags, so that `make bench ARGS=...` can pass them to each; what a flag doesn't
concern ignores it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Collection, Sequence

from harness.machine import describe
from harness.report import Row, show

PEERS = ("llama.cpp", "openvino", "transformers")
Shape = tuple[int, int]
"""Tokens of context and requests in a batch."""


def parser(description: str | None) -> argparse.ArgumentParser:
    """Flags of every benchmark. `description`: the module's docstring."""
    result = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument(
        "--json", action="store_true", help="rows as JSON; the table goes to standard error"
    )
    result.add_argument("--quick", action="store_true", help="fewer, shorter tries: a smoke test")
    result.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), metavar="N",
        help="of every process that computes, ours and peers' (all cores)",
    )  # fmt: skip
    result.add_argument("--tries", type=int, metavar="N", help="behind each result")
    result.add_argument(
        "--peers", nargs="*", default=PEERS, choices=PEERS, help="to run beside, if found (all)"
    )
    result.add_argument(
        "--peers-python", metavar="PYTHON", help="an interpreter that imports openvino_genai"
    )
    result.add_argument(
        "--shapes", nargs="*", metavar="CONTEXTxBATCH", help="of decode, e.g. 512x1 4096x8 (all)"
    )
    return result


def shapes(options: argparse.Namespace, usual: Collection[Shape]) -> list[Shape]:
    """(context, batch) that --shapes names, all of `usual` without it. Exits for others."""
    if options.shapes is None:
        return list(usual)
    named = {f"{context}x{batch}": (context, batch) for context, batch in usual}
    unknown = [name for name in options.shapes if name not in named]
    if unknown:
        sys.exit(f"--shapes {unknown[0]}: choose from {', '.join(named)}")
    return [named[name] for name in options.shapes]


def tries(options: argparse.Namespace, usual: int) -> int:
    """What --tries says, else one with --quick, else `usual`."""
    return options.tries or (1 if options.quick else usual)


def finish(title: str, rows: Sequence[Row], options: argparse.Namespace) -> None:
    """Show `rows`."""
    show(title, rows, describe(), sys.stderr if options.json else sys.stdout)
    if options.json:
        print(json.dumps([row.plain() for row in rows], indent=1))
