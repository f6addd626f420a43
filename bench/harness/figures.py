"""Plots in the form of Figures 5, 8, 9 and 11 of Decode Token Parallelism, and one that has it all.

    cells --draw-->  strategies.png             throughput at the contexts that have goals
                     strategies-capacity.png    Figure 5    strategies-throughput.png  Figure 8
                     strategies-times.png       Figure 9    strategies-schedules.png   Figure 11
                     strategies-links.png       the same work over every link

Others than strategies-capacity and -links have one file a link, its name at the end. A point is the
median of its runs, a thin line behind it reaches from the least to the most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from harness.panels import MUTED, batches, column, panels, save, style
from harness.waves import DOUBLED, DP, VARIANTS, Cell, Variant, node_memory_bytes
from tknp.config import PoolConfig
from tknp.kv.size import token_bytes
from tknp.layout.layout import NodeSpec, make_layout
from tknp.layout.rank import Rank
from tknp.layout.strategy import Strategy
from tknp.model.checkpoint import open_checkpoint

NODES = (1, 2, 4, 8)
SHOWN = (512, 1024, 2048)
"""Contexts of strategies.png."""
_THROUGHPUT = "tokens/s, all waves"
_TIMES = (
    ("waiting_s", 1.0, "mean wait until the first step, s", "admission waiting"),
    ("itl_s", 1e3, "mean ITL, ms", "between tokens of a running request"),
    ("completion_s", 1.0, "mean completion, s", "completion, waiting included"),
)
_NAMES = tuple(variant.name for variant in VARIANTS)
_MODEL = "SmolLM2-135M in bfloat16"
_MEMORY = "weights to weights plus KV as 454 to 560"
_SETUP = (
    f"{_MODEL}, two nodes of one core each, {_MEMORY}; requests of equal length, KV ready at "
    "release, until the last one ends"
)


def capacity_tokens(variant: Variant, nodes: int) -> int:
    """KV tokens that `nodes` nodes of the benchmark hold together, integer tokens a node."""
    config = open_checkpoint("smollm2").config
    memory = node_memory_bytes()
    given: dict[str, Any] = {k: v for k, v in variant.settings.items() if k != "strategy"}
    strategy = Strategy(str(variant.settings.get("strategy", PoolConfig.strategy)))
    layout = make_layout(
        config, "bfloat16", 1, [NodeSpec(memory)] * nodes, strategy=strategy, **given
    )  # fmt: skip
    of_layer = token_bytes(config, "bfloat16") // config.layers
    each = [
        (memory - layout.weight_bytes(rank)) // (of_layer * len(layout.kv_layers(rank)))
        for rank in (Rank(node, 0) for node in range(nodes))
    ]
    return sum(each) if layout.divides == "tokens" else min(each)


def draw(cells: Sequence[Cell], directory: Path) -> list[Path]:
    """Whatever `cells` has, into `directory`; the files written. Needs matplotlib."""
    directory.mkdir(parents=True, exist_ok=True)
    made = [_capacity(directory / "strategies-capacity.png")]
    links = list(dict.fromkeys(cell.link for cell in cells))
    for link in links:
        some = [cell for cell in cells if cell.link == link]
        suffix = "" if link == "host" else "-" + link.replace(" ", "-")
        contexts = sorted({cell.context for cell in some})
        shown = [context for context in contexts if context in SHOWN]
        for name, chosen in (("strategies", shown), ("strategies-throughput", contexts)):
            if chosen:
                path = directory / f"{name}{suffix}.png"
                made.append(_throughput(some, chosen, VARIANTS, link, path))
        made.append(_times(some, contexts[-1], link, directory / f"strategies-times{suffix}.png"))
        schedules = [v for v in VARIANTS if v.token_parallel or v.name in ("DP", "PP")]
        ends = list(dict.fromkeys((contexts[0], contexts[-1])))
        path = directory / f"strategies-schedules{suffix}.png"
        made.append(_throughput(some, ends, schedules, link, path))
    if len(links) > 1:
        made += _links(cells, links, directory / "strategies-links.png")
    return made


def _capacity(path: Path) -> Path:
    """Figure 5: usable KV against nodes, and what multiple of DP it is."""
    figure, (axes,) = panels(1, wide=7.2)
    shown = [v for v in VARIANTS if v.name in ("DP", "PP serial", "DCP", "TKNP", "TKNP dual")]
    alone = {n: capacity_tokens(DP, n) for n in NODES}
    bar = 0.17
    for index, variant in enumerate(shown):
        counts = [n for n in NODES if variant.settings.get("copies", 1) == 1 or n % 2 == 0]
        tokens = [capacity_tokens(variant, n) for n in counts]
        places = [NODES.index(n) + bar * (index - (len(shown) - 1) / 2) for n in counts]
        label = "PP" if variant.name == "PP serial" else variant.name
        axes.bar(places, tokens, bar * 0.92, label=label, color=variant.look.color)
        for place, n, count in zip(places, counts, tokens, strict=True):
            if variant.name != DP.name and n > 1:
                axes.text(
                    place, count, f"{count / alone[n]:.1f}", ha="center", va="bottom", fontsize=6.5,
                    color=MUTED,
                )  # fmt: skip
    axes.set_xticks(range(len(NODES)), [str(n) for n in NODES])
    style(axes, "KV that a pool holds; numbers: times DP", "nodes of equal memory", "tokens")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    return save(figure, [axes], path, f"{_MODEL}, {_MEMORY} in each node", _NAMES)


def _throughput(
    cells: Sequence[Cell], contexts: Sequence[int], variants: Iterable[Variant], link: str,
    path: Path,
) -> Path:  # fmt: skip
    """Figures 8 and 11: completion throughput against the offered batch, a panel a context."""
    names = [variant.name for variant in variants]
    figure, found = panels(len(contexts))
    tokens = set()
    for axes, context in zip(found, contexts, strict=True):
        some = [c for c in _comparable(cells, context) if c.variant in names]
        tokens |= {cell.tokens for cell in some}
        _lines(axes, some, "tokens_per_s", 1.0)
        style(axes, f"context {context:,}", "requests offered at once", _THROUGHPUT)
        axes.text(
            0, 1.02, _against_dp(some), transform=axes.transAxes, fontsize=7.5, color=MUTED
        )  # fmt: skip
    return save(figure, found, path, _caption(tokens, link), _NAMES)


def _times(cells: Sequence[Cell], context: int, link: str, path: Path) -> Path:
    """Figure 9: admission waiting, ITL and completion at the longest context."""
    some = [c for c in _comparable(cells, context) if c.variant != DOUBLED.name]
    figure, found = panels(len(_TIMES))
    for axes, (name, factor, label, title) in zip(found, _TIMES, strict=True):
        _lines(axes, some, name, factor)
        style(axes, title, "requests offered at once", label)
        axes.text(
            0, 1.02, f"context {context:,}", transform=axes.transAxes, fontsize=7.5, color=MUTED
        )  # fmt: skip
    return save(figure, found, path, _caption({cell.tokens for cell in some}, link), _NAMES)


def _links(cells: Sequence[Cell], links: Sequence[str], path: Path) -> list[Path]:
    """The workload that was measured over most links, of most variants; none if over one only."""
    over: dict[tuple[int, int, int], list[Cell]] = {}
    for cell in cells:
        over.setdefault((cell.context, cell.batch, cell.tokens), []).append(cell)
    work, some = max(
        over.items(), key=lambda item: (len({c.link for c in item[1]}), len(item[1]), item[0])
    )
    places = [link for link in links if any(cell.link == link for cell in some)]
    if len(places) < 2:
        return []
    figure, (axes,) = panels(1, wide=7.2)
    for variant in VARIANTS:
        mine = {cell.link: cell for cell in some if cell.variant == variant.name}
        xs = [at for at, link in enumerate(places) if link in mine]
        ys = [mine[places[at]].median("tokens_per_s") for at in xs]
        if xs:
            axes.plot(xs, ys, label=variant.name, **variant.look.plain())
    named = ["shared memory" if link == "host" else link for link in places]
    axes.set_xticks(range(len(places)), named)
    axes.set_xlim(-0.3, len(places) - 0.7)
    style(axes, f"context {work[0]:,}, {work[1]} offered", "link between nodes", _THROUGHPUT)
    return [save(figure, [axes], path, _caption({work[2]}, ""), _NAMES)]


def _comparable(cells: Sequence[Cell], context: int) -> list[Cell]:
    """Those of `context` whose requests are as long as those of most of them."""
    some = [cell for cell in cells if cell.context == context]
    lengths = Counter(cell.tokens for cell in some)
    usual = max(lengths, key=lambda tokens: (lengths[tokens], tokens))
    return [cell for cell in some if cell.tokens == usual]


def _against_dp(cells: Sequence[Cell]) -> str:
    """The best token-parallel schedule to both of DP's, at the largest batch that has them."""
    parallel = [variant.name for variant in VARIANTS if variant.token_parallel]
    for batch in sorted({cell.batch for cell in cells}, reverse=True):
        speed = {c.variant: c.median("tokens_per_s") for c in cells if c.batch == batch}
        ours = [speed[name] for name in parallel if name in speed]
        peers = [peer.name for peer in (DP, DOUBLED) if peer.name in speed]
        if ours and peers:
            parts = [f"{max(ours) / speed[name]:.2f} times {name}" for name in peers]
            return f"best TKNP at {batch}: {', '.join(parts)}"
    return ""


def _caption(tokens: Iterable[int], link: str) -> str:
    lengths = " or ".join(str(count) for count in sorted(tokens))
    over = f"; nodes over {link}" if link not in ("", "host") else ""
    return f"{_SETUP}; {lengths} tokens each{over}"


def _lines(axes: Any, cells: Sequence[Cell], name: str, factor: float) -> None:
    for variant in VARIANTS:
        some = sorted((c for c in cells if c.variant == variant.name), key=lambda c: c.batch)
        if not some:
            continue
        xs = [cell.batch for cell in some]
        axes.plot(
            xs, [c.median(name) * factor for c in some], label=variant.name, **variant.look.plain()
        )  # fmt: skip
        column(axes, xs, [[getattr(r, name) * factor for r in c.runs] for c in some], variant.look)
    batches(axes, {cell.batch for cell in cells})
