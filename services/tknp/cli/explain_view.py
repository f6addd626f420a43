"""How `tknp explain` looks on a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tknp.cli.output import NOTHING, plural, roots_text, seconds_text, size_text
from tknp.layout.program import Kind
from tknp.layout.strategy import Strategy
from tknp.planner.explain import Explanation
from tknp.planner.folding import FoldedOp, Peers, Where

_NAMES_SHOWN = 4
_BAR = 30
_COLOURS = {"dense": "blue", "attention": "yellow", "exchange": "green", "idle": "bright_black"}
_KIND_COLOURS = {
    Kind.ATTEND: "yellow", Kind.MERGE: "yellow",
    **dict.fromkeys(
        (Kind.SCATTER, Kind.GATHER, Kind.QUERY, Kind.EXCHANGE, Kind.LSE_GATHER,
         Kind.REDUCE_SCATTER, Kind.HANDOFF, Kind.FEEDBACK, Kind.ALL_REDUCE), "green",
    ),
}  # fmt: skip


def heading(explained: Explanation) -> str:
    """Model, strategy and pool in one line."""
    layout = explained.layout
    parts = [f"{explained.model.name} · {layout.strategy.value.upper()}"]
    if layout.streams > 1 and layout.strategy is not Strategy.DP:
        copies = max(len(held) for held in layout.held)
        parts.append(
            f"{copies} copies"
            if copies > 1
            else plural(layout.streams, "microbatch", "microbatches")
        )
    machines = plural(explained.machines, "machine")
    ranks = plural(explained.machine_ranks, "rank")
    parts.append(f"{machines} of {ranks}")
    if (layout.nodes, layout.tp) != (explained.machines, explained.machine_ranks):
        parts.append(f"as {plural(layout.nodes, 'node')} of {layout.tp}")
    return " · ".join(parts)


def show(console: Console, explained: Explanation) -> None:
    """The whole explanation."""
    parts: list[RenderableType] = [
        Text(), Text.assemble(("● ", "green"), (heading(explained), "bold")), _load(explained),
        Text(), _title("layout", "a rank"), _layout(explained), Text(), *_capacity(explained),
        Text(), _title("program of a step", "rank 0 of a node unless said"), Text(),
        *_program(explained), _title("sent in a step", "a rank"), _traffic(explained), Text(),
        _title("forecast", f"{explained.hardware.name}, a roofline"), *_forecast(explained),
    ]  # fmt: skip
    console.print(Group(*parts))


def _ranges(numbers: Sequence[int]) -> str:
    """`0-2, 5` of 0, 1, 2, 5, in ascending order."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)


def _title(name: str, aside: str = "") -> Text:
    return Text.assemble((name, "bold"), (f"  {aside}" if aside else "", "dim"))


def _load(explained: Explanation) -> Text:
    load, width = explained.load, explained.step.width
    text = f"  {explained.model.recipe}; {plural(load.batch, 'request')} of {load.context:,} tokens"
    if width > 1:
        text += f", {width} owners each"
    return Text(text, style="dim")


def _table(*columns: tuple[str, str]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name, justify in columns:
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    return table


def _layout(explained: Explanation) -> Table:
    layout = explained.layout
    table = _table(
        ("  node", "left"), ("holds", "left"), ("roots for", "left"), ("weights", "right"),
        ("KV budget", "right"), ("tokens", "right"),
    )  # fmt: skip
    alike: dict[tuple[str, ...], list[int]] = {}
    for room in explained.capacity.nodes:
        blocks = layout.held[room.node]
        held = "\n".join(roots_text(b.start, b.stop, b.embedding, b.head) for b in blocks)
        row: tuple[str, ...] = (
            held or "attention only", _rooted(explained, room.node), size_text(room.weight_bytes),
            size_text(room.budget_bytes), f"{room.tokens:,}" if room.tokens else NOTHING,
        )  # fmt: skip
        alike.setdefault(row, []).append(room.node)
    for row, nodes in alike.items():
        table.add_row(f"  {_ranges(nodes)}", *row)
    return table


def _rooted(explained: Explanation, node: int) -> str:
    """Streams for which each block of `node` is the root's, one line a block."""
    layout = explained.layout
    if layout.spread:
        return f"1/{layout.nodes} of all"
    lines = []
    for block in layout.held[node]:
        streams = [
            s for s in range(layout.streams)
            if not block.empty and layout.routes[s][block.start] == node
        ]  # fmt: skip
        everyone = len(streams) == layout.streams
        lines.append("all" if everyone else f"stream {', '.join(map(str, streams))}")
    return "\n".join(lines) or NOTHING


def _capacity(explained: Explanation) -> list[Text]:
    room, load = explained.capacity, explained.load
    lines = [
        Text(
            f"  KV of {room.tokens:,} tokens, {size_text(room.kv_bytes)}: "
            f"{plural(explained.resident, 'such request')} at once"
        )
    ]
    if explained.resident < load.batch:
        lines[0].append(f", the other {load.batch - explained.resident} wait", style="yellow")
    ratio, unfitted = explained.ratio_to_dp(), explained.ratio_to_dp(fitted=False)
    tokens = explained.ratio_to_dp(tokens=True)
    if ratio is not None:
        line = Text(f"  {ratio:.2f} times the KV of data parallelism")
        if tokens is not None and abs(tokens - ratio) > 0.01:
            line.append(f" ({tokens:.2f} in tokens: whole layers)", style="dim")
        if unfitted is not None and abs(unfitted - ratio) > 0.01:
            line.append(f"\n  {unfitted:.2f} with a replica's memory budget", style="dim")
        lines.append(line)
    else:
        lines.append(Text("  a replica (data parallelism) doesn't fit a machine", style="dim"))
    return lines


def _program(explained: Explanation) -> Iterable[RenderableType]:
    for segment in explained.segments:
        yield Padding(Text(_places(segment.where, explained), style="cyan"), (0, 0, 0, 2))
        table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
        table.add_column(width=16)
        table.add_column(justify="right", width=10)
        table.add_column(ratio=1)
        for op in segment.operations:
            style = _KIND_COLOURS.get(op.kind, "blue")
            table.add_row(Text(f"    {op.kind}", style=style), plural(op.rows, "row"), _moves(op))
        yield table
        yield Text()


def _places(where: Sequence[Where], explained: Explanation) -> str:
    """`node 0: layers 0-31 · nodes 1-3: layers 32-63`."""
    several = explained.layout.streams > 1 and explained.layout.strategy is not Strategy.DP
    tp = explained.layout.tp
    ranks: dict[tuple[int, int], set[int]] = {}
    spans: dict[tuple[int, int], list[str]] = {}
    for place in where:
        key = place.node, place.stream
        ranks.setdefault(key, set()).add(place.t)
        if place.first >= 0:
            one = place.first == place.last
            span = str(place.first) if one else f"{place.first}-{place.last}"
            spans.setdefault(key, []).append(span)
    alike: dict[str, list[int]] = {}
    for (node, stream), found in ranks.items():
        what = f", stream {stream}" if several else ""
        if layers := spans.get((node, stream)):
            single = len(layers) == 1 and "-" not in layers[0]
            what += f": layer{'' if single else 's'} {', '.join(layers)}"
        elif tp > 1:
            others = "rank 1" if tp == 2 else f"ranks 1-{tp - 1}"
            what += ": " + ("all ranks" if found == {0, 1} else others if 1 in found else "rank 0")
        alike.setdefault(what, []).append(node)
    texts = [f"node{'s' if n[1:] else ''} {_ranges(n)}{what}" for what, n in alike.items()]
    more = len(texts) - _NAMES_SHOWN
    return " · ".join(texts[:_NAMES_SHOWN]) + (f" · and {more} more" if more > 0 else "")


def _moves(op: FoldedOp) -> Text:
    if op.sends == op.receives:
        parts = [_peers("⇄", peer) for peer in op.sends]
    else:
        parts = [_peers("→", peer) for peer in op.sends]
        parts += [_peers("←", peer) for peer in op.receives]
    if op.operand_bytes:
        who = "the pool" if op.scope == "pool" else "the node"
        parts.append(f"{size_text(op.operand_bytes)} over {who}")
    return Text("\n".join(parts))


def _peers(arrow: str, peers: Peers) -> str:
    link = "network" if peers.network else "NVLink"
    many = peers.count > 1
    who = f"{peers.count} {peers.role}s" if many else peers.role
    each = " each" if many else ""
    return f"{arrow} {who}: {size_text(peers.nbytes)} {'+'.join(peers.what)}{each}, {link}"


def _traffic(explained: Explanation) -> Table:
    table = _table(
        ("  node", "left"), ("network", "right"), ("NVLink", "right"),
        ("reduced in node", "right"), ("in pool", "right"),
    )  # fmt: skip
    tp = explained.layout.tp
    alike: dict[tuple[str, ...], dict[int, list[int]]] = {}
    for rank, moved in explained.traffic.items():
        sizes = (moved.network_bytes, moved.link_bytes, moved.reduced_bytes,
                 moved.pool_reduced_bytes)  # fmt: skip
        texts = tuple(size_text(count) if count else NOTHING for count in sizes)
        alike.setdefault(texts, {}).setdefault(rank.node, []).append(rank.t)
    for texts, nodes in alike.items():
        whole = tp == 1 or all(len(ranks) == 2 for ranks in nodes.values())
        partly = {0: ", rank 0", 1: f", ranks 1-{tp - 1}"}
        for t in (-1,) if whole else (0, 1):
            named = [node for node, ranks in nodes.items() if whole or t in ranks]
            if named:
                table.add_row(f"  {_ranges(named)}{partly.get(t, '')}", *texts)
    return table


def _forecast(explained: Explanation) -> Iterable[RenderableType]:
    found = explained.forecast
    yield Text(f"  {seconds_text(found.step_s)} between tokens, {found.tokens_per_s:,.0f} tokens/s")
    table = _table(("  node", "left"), *((lane, "right") for lane in _COLOURS), ("", "left"))
    for node, shares in found.busy.items():
        bar = Text()
        for lane, colour in _COLOURS.items():
            bar.append("█" * round(shares[lane] * _BAR), style=colour)
        table.add_row(f"  {node}", *(f"{shares[lane]:.0%}" for lane in _COLOURS), bar)
    yield table
