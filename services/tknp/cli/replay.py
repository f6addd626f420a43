"""`tknp replay`: run a recorded scheduling again and see that it decides the same."""

from __future__ import annotations

from pathlib import Path

import click

from tknp.cli.output import out, plural


@click.command("replay")
@click.argument("recording", type=click.Path(path_type=Path), metavar="FILE")
def command(recording: Path) -> None:
    """Replay what `tknp up --record FILE` wrote; fails at the first decision that differs."""
    from tknp.coordinator.replay import replay

    calls = replay(recording)
    out().print(f"{plural(calls, 'call')} replayed, every decision as recorded")
