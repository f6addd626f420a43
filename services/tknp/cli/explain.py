"""`tknp explain`: what a strategy does with a model, before any process runs.

model, strategy, pool, load -> tknp.planner.explain -> tables | JSON | a picture of one step
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tknp.cli.options import POSITIVE, Bytes, Roles, combined
from tknp.layout.strategy import Strategy
from tknp.planner.hardware import HARDWARE

if TYPE_CHECKING:
    from tknp.planner.explain import Explanation
    from tknp.planner.models import Model
    from tknp.planner.timeline import Timeline


def model_for(name: str) -> Model:
    """A model of the table, or the shapes of a checkpoint. Raises InvalidValue naming the table."""
    from tknp.errors import CheckpointError, InvalidValue
    from tknp.model.checkpoint import open_checkpoint
    from tknp.planner.models import MODELS, Model

    if name in MODELS:
        return MODELS[name]
    try:
        checkpoint = open_checkpoint(name)
    except CheckpointError as error:
        if Path(name).exists():
            raise
        raise InvalidValue(
            "model", name, f"name a checkpoint, or one of {', '.join(MODELS)}"
        ) from error
    return Model(Path(name).name, checkpoint.config)


def write_timeline(timeline: Timeline, path: Path) -> None:
    """Draw to `path`, whose ending says how."""
    from tknp.errors import InvalidValue
    from tknp.planner import html, png

    if path.suffix == ".html":
        path.write_text(html.render(timeline), encoding="utf-8")
    elif path.suffix == ".png":
        png.write(timeline, path)
    else:
        raise InvalidValue("timeline", str(path), "name a file that ends in .html or .png")


def predicted(explained: Explanation) -> Timeline:
    """One step of stream 0 at every node."""
    from tknp.cli.explain_view import heading
    from tknp.cli.output import seconds_text
    from tknp.planner.timeline import draw

    found = explained.forecast
    load = explained.load
    subtitle = (
        f"predicted for {explained.hardware.name}: batch {load.batch}, context {load.context:,}, "
        f"{seconds_text(found.step_s)} a token, {found.tokens_per_s:,.0f} tokens/s"
    )
    return draw(
        found.spans, heading(explained), subtitle, start_s=found.start_s, stop_s=found.stop_s
    )


@click.command("explain")
@combined(
    click.option("--strategy", type=click.Choice([s.value for s in Strategy]), default="tknp",
                 show_default=True),
    click.option("--model", default="smollm2-135m", show_default=True, metavar="NAME|CHECKPOINT",
                 help="Of the planner's table (llama-3.1-8b, -70b, -405b, nemotron-4-340b, "
                      "smollm2-135m), or a checkpoint."),
    click.option("--nodes", type=POSITIVE, default=2, show_default=True, help="Machines."),
    click.option("--tp", type=POSITIVE, default=1, show_default=True, help="Ranks of a machine."),
    click.option("--kvp", type=POSITIVE, help="Sequence shards (dcp, helix)."),
    click.option("--copies", type=POSITIVE, help="Copies of the weights, 1 or 2 (tknp)."),
    click.option("--microbatches", type=POSITIVE, help="Streams (tknp, pp)."),
    click.option("--width", type=POSITIVE,
                 help="Owners of a request (tknp); unset: as few as can hold it."),
    click.option("--overlap", type=POSITIVE,
                 help="Groups of rows whose exchange runs under attention (helix)."),
    click.option("--inside", is_flag=True, default=None,
                 help="Sequence shards inside machines, not across (dcp, helix)."),
    click.option("--roles", type=Roles(), default=(), metavar="ROLE,ROLE,...",
                 help="Of each machine: decode-node, decode-root, attention-owner (tknp)."),
    click.option("--batch", type=POSITIVE, default=32, show_default=True, help="Requests."),
    click.option("--context", type=POSITIVE, default=4096, show_default=True,
                 help="Tokens of each."),
    click.option("--hardware", type=click.Choice(list(HARDWARE)), default="h100",
                 show_default=True, help="What a rank is."),
    click.option("--memory", type=Bytes(), help="Weights plus KV a rank; unset: the hardware's."),
    click.option("--json", "as_json", is_flag=True, help="Print everything as JSON."),
    click.option("--timeline", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
                 help="Draw one step there: .png or .html."),
)  # fmt: skip
def command(
    strategy: str, model: str, nodes: int, tp: int, batch: int, context: int, width: int | None,
    hardware: str, memory: int | None, as_json: bool, timeline: Path | None, **options: Any,
) -> None:  # fmt: skip
    """Show what a strategy does with a model: layout, program of a step, bytes, time.

    Nothing is started. Times are a roofline's: compare strategies with them, don't quote them.

    Example: tknp explain --strategy tknp --model llama-3.1-405b --nodes 4 --tp 8 --batch 128
    """
    from tknp.cli.explain_view import show
    from tknp.cli.output import err, out
    from tknp.planner.explain import Load, explain, with_memory
    from tknp.planner.hardware import known_hardware
    from tknp.planner.report import as_dict

    machine = known_hardware(hardware)
    if memory is not None:
        machine = with_memory(machine, memory)
    explained = explain(
        model_for(model), machine, Strategy(strategy), nodes=nodes, tp=tp,
        load=Load(batch, context, width), **options,
    )  # fmt: skip
    if timeline is not None:
        write_timeline(predicted(explained), timeline)
        err().print(f"[dim]timeline written to {timeline}[/]")
    if as_json:
        click.echo(json.dumps(as_dict(explained)))
    else:
        show(out(), explained)
