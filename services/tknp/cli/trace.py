"""`tknp trace`: what every rank of a running pool does in its next steps.

    pool file -> Tracing.Trace on every rank, at once -> spans -> Chrome trace | a picture

Ranks tell times by their hosts' clocks: spans of one host are aligned to microseconds, those of
several as well as their clocks are synchronized.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tknp.cli.options import POSITIVE, option

if TYPE_CHECKING:
    from grpc import aio

    from tknp.config import PoolConfig
    from tknp.planner.spans import Span
    from tknp.planner.timeline import Timeline
    from tknp.v1.tracing_pb2 import TraceResponse

_ANSWER_S = 10.0  # beyond the recording itself


async def record(pool: PoolConfig, steps: int, timeout_s: float) -> list[Span]:
    """Spans of the next `steps` steps of every decode rank, counted from the first one's start.

    Raises Unavailable when no step passes within `timeout_s`, or the error of a rank.
    """
    from tknp.errors import Unavailable
    from tknp.rpc.channel import connect
    from tknp.rpc.security import read_security

    security = read_security(pool)
    channels = {a: connect(a, security) for node in pool.nodes for a in node.addresses}
    try:
        answers = await asyncio.gather(
            *(_trace(a, channel, steps, timeout_s) for a, channel in channels.items())
        )
    finally:
        for channel in channels.values():
            await channel.close(None)
    origin = min(answer.origin_unix_s for answer in answers)
    spans = [span for answer in answers for span in spans_of(answer, origin)]
    if not spans:
        raise Unavailable(f"no step passed within {timeout_s:g} s: send requests meanwhile")
    first = min(span.start_s for span in spans)
    return [replace(span, start_s=span.start_s - first) for span in spans]


async def _trace(
    address: str, channel: aio.Channel, steps: int, timeout_s: float
) -> TraceResponse:  # fmt: skip
    from grpc import aio

    from tknp.rpc.status import error_from
    from tknp.v1.tracing_pb2 import TraceRequest
    from tknp.v1.tracing_pb2_grpc import TracingStub

    request = TraceRequest(steps=steps, timeout_s=timeout_s)
    try:
        return await TracingStub(channel).Trace(request, timeout=timeout_s + _ANSWER_S)
    except aio.AioRpcError as error:
        raise error_from(error, address) from error


def spans_of(answer: TraceResponse, origin_unix_s: float) -> list[Span]:
    """What one rank has recorded, counted from `origin_unix_s`."""
    from tknp.layout.program import Kind
    from tknp.layout.rank import Rank
    from tknp.planner.spans import Span

    kinds = [Kind(name) for name in answer.kinds]
    rank, late = Rank(answer.node, answer.tp_rank), answer.origin_unix_s - origin_unix_s
    columns = zip(
        answer.stream, answer.step, answer.kind, answer.layer, answer.start_s, answer.seconds,
        answer.waited_s, strict=True,
    )  # fmt: skip
    return [
        Span(rank, stream, step, kinds[kind], layer, late + start, seconds, waited)
        for stream, step, kind, layer, start, seconds, waited in columns
    ]


def middle_step(spans: Sequence[Span]) -> tuple[float, float]:
    """From when to when one step of the lowest stream lasted, where its ids are embedded.

    All that was recorded where no two steps of a stream follow each other.
    """
    from tknp.layout.program import Kind

    begins = sorted(
        (span.stream, span.step, span.start_s)
        for span in spans
        if span.kind is Kind.EMBED and span.rank.t == 0
    )
    first = {(stream, step): start for stream, step, start in reversed(begins)}
    pairs = [
        (start, first[stream, step + 1])
        for (stream, step), start in sorted(first.items())
        if (stream, step + 1) in first and stream == begins[0][0]
    ]
    if not pairs:
        return 0.0, max(span.end_s for span in spans)
    return pairs[len(pairs) // 2]


@click.command("trace")
@option("--pool", "pool_file", type=click.Path(path_type=Path), required=True, metavar="FILE",
        help="The pool's configuration; `tknp up` prints where it wrote it.")  # fmt: skip
@click.option("--steps", type=POSITIVE, default=8, show_default=True, help="How many, up to 256.")
@click.option("--timeout", "timeout_s", type=click.FloatRange(min=0, min_open=True, max=600),
              default=30.0, show_default=True, metavar="SECONDS",
              help="Longest wait for so many steps.")  # fmt: skip
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE.json",
              help="Write a Chrome trace there; open it in ui.perfetto.dev.")  # fmt: skip
@click.option("--timeline", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="Draw one step there: .png or .html.")  # fmt: skip
def command(
    pool_file: Path, steps: int, timeout_s: float, output: Path | None, timeline: Path | None
) -> None:
    """Record the next steps of a running pool, operation by operation.

    Only steps that requests need are run, so that some must be running meanwhile.

    Example: tknp trace --pool pool.yaml --output trace.json --timeline step.html
    """
    from tknp.cli.explain import write_timeline
    from tknp.cli.output import out
    from tknp.config import read_pool
    from tknp.planner import chrome

    if output is None and timeline is None:
        raise click.UsageError("give --output or --timeline")
    pool = read_pool(pool_file, {})
    spans = asyncio.run(record(pool, steps, timeout_s))
    console = out()
    if output is not None:
        output.write_text(json.dumps(chrome.trace(spans)), encoding="utf-8")
        console.print(f"{len(spans):,} operations written to {output}", soft_wrap=True)
    if timeline is not None:
        write_timeline(_picture(pool, spans), timeline)
        console.print(f"one step drawn to {timeline}", soft_wrap=True)


def _picture(pool: PoolConfig, spans: Sequence[Span]) -> Timeline:
    from tknp.cli.output import plural, seconds_text
    from tknp.planner.timeline import draw

    start, stop = middle_step(spans)
    title = f"{Path(pool.model).name} · {pool.strategy.upper()} · {plural(len(pool.nodes), 'node')}"
    rows = [span for span in spans if span.rank.t == 0]
    subtitle = f"recorded on {pool.device}: a step of {seconds_text(stop - start)}, rank 0 of nodes"
    return draw(rows, title, subtitle, start_s=start, stop_s=stop)
