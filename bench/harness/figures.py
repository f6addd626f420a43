"""Plots in the form of Figures 5, 8, 9 and 11 of Decode Token Parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.waves import DOUBLED, VARIANTS, Cell, node_memory_bytes
from tknp.config import PoolConfig
from tknp.kv.size import token_bytes
from tknp.layout.layout import NodeSpec, make_layout
from tknp.layout.rank import Rank
from tknp.layout.strategy import Strategy
from tknp.model.checkpoint import open_checkpoint

NODES = (1, 2, 4, 8)
_PEERS = {"DP": "tab:gray", "PP": "tab:orange", "PP serial": "navajowhite", DOUBLED.name: "black"}
_SIZE = (4.2, 3.2)


def capacity_tokens(settings: dict[str, Any], nodes: int) -> int:
    """KV tokens that `nodes` nodes of the benchmark hold together, integer tokens a node."""
    config = open_checkpoint("smollm2").config
    memory = node_memory_bytes()
    given = {name: value for name, value in settings.items() if name != "strategy"}
    layout = make_layout(
        config, "bfloat16", 1, [NodeSpec(memory)] * nodes,
        strategy=Strategy(settings.get("strategy", PoolConfig.strategy)), **given,
    )  # fmt: skip
    of_layer = token_bytes(config, "bfloat16") // config.layers
    each = [
        (memory - layout.weight_bytes(rank)) // (of_layer * len(layout.kv_layers(rank)))
        for rank in (Rank(node, 0) for node in range(nodes))
    ]
    return sum(each) if layout.divides == "tokens" else min(each)


def draw(cells: Sequence[Cell], directory: Path) -> list[Path]:
    """One file a figure and link, of what `cells` has. Needs matplotlib."""
    import matplotlib

    matplotlib.use("agg")
    directory.mkdir(parents=True, exist_ok=True)
    made = [_capacity(directory / "strategies-capacity.png")]
    for link in dict.fromkeys(cell.link for cell in cells):
        some = [cell for cell in cells if cell.link == link]
        suffix = "" if link == "host" else "-" + link.replace(" ", "-")
        made.append(_throughput(some, directory / f"strategies-throughput{suffix}.png"))
        made.append(_times(some, directory / f"strategies-times{suffix}.png"))
        made.append(_schedules(some, directory / f"strategies-schedules{suffix}.png"))
    return made


def _capacity(path: Path) -> Path:
    """Figure 5: usable KV against nodes."""
    figure, (axes,) = _panels(1)
    shown = {"DP": {"strategy": "dp"}, "PP": {"strategy": "pp", "microbatches": 1},
             "DCP": {"strategy": "dcp"}, "TKNP": {}, "TKNP dual": {"copies": 2}}  # fmt: skip
    for index, (name, settings) in enumerate(shown.items()):
        counts = [n for n in NODES if name != "TKNP dual" or n % 2 == 0]
        tokens = [capacity_tokens(dict(settings), n) for n in counts]
        places = [NODES.index(n) + 0.16 * (index - 2) for n in counts]
        axes.bar(places, tokens, 0.16, label=name, color=_color(name))
    axes.set_xticks(range(len(NODES)), [str(n) for n in NODES])
    axes.set_xlabel("nodes of equal memory")
    axes.set_ylabel("KV tokens the pool holds")
    return _save(figure, [axes], path)


def _throughput(cells: Sequence[Cell], path: Path) -> Path:
    """Figure 8: completion throughput against the offered batch, a panel a context."""
    contexts = sorted({cell.context for cell in cells})
    figure, panels = _panels(len(contexts))
    for axes, context in zip(panels, contexts, strict=True):
        _lines(axes, [c for c in cells if c.context == context], "tokens_per_s", 1.0)
        axes.set_title(f"context {context}")
        axes.set_ylabel("tokens/s, all waves")
    return _save(figure, panels, path)


def _times(cells: Sequence[Cell], path: Path) -> Path:
    """Figure 9: admission waiting, ITL and completion at the longest context."""
    longest = max(cell.context for cell in cells)
    some = [c for c in cells if c.context == longest and c.variant != DOUBLED.name]
    figure, panels = _panels(3)
    for axes, (name, factor, label) in zip(
        panels,
        (("waiting_s", 1.0, "mean wait, s"), ("itl_s", 1e3, "mean ITL, ms"),
         ("completion_s", 1.0, "mean completion, s")),
        strict=True,
    ):  # fmt: skip
        _lines(axes, some, name, factor)
        axes.set_title(f"context {longest}")
        axes.set_ylabel(label)
    return _save(figure, panels, path)


def _schedules(cells: Sequence[Cell], path: Path) -> Path:
    """Figure 11: schedules of microbatches at the shortest context."""
    shortest = min(cell.context for cell in cells)
    names = [v.name for v in VARIANTS if v.token_parallel] + ["DP", "PP"]
    figure, (axes,) = _panels(1)
    some = [c for c in cells if c.context == shortest and c.variant in names]
    _lines(axes, some, "tokens_per_s", 1.0)
    axes.set_title(f"context {shortest}")
    axes.set_ylabel("tokens/s, all waves")
    return _save(figure, [axes], path)


def _lines(axes: Any, cells: Sequence[Cell], name: str, factor: float) -> None:
    for variant in VARIANTS:
        some = sorted((c for c in cells if c.variant == variant.name), key=lambda c: c.batch)
        if some:
            axes.plot(
                [c.batch for c in some], [c.median(name) * factor for c in some],
                marker="o", markersize=3, label=variant.name, color=_color(variant.name),
                linestyle="--" if variant.doubled else "-",
            )  # fmt: skip
    axes.set_xscale("log", base=2)
    batches = sorted({cell.batch for cell in cells})
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.set_xlabel("requests offered")


def _color(name: str) -> str:
    others = ("tab:red", "tab:green", "olive", "tab:blue", "tab:purple", "tab:cyan")
    ordered = [variant.name for variant in VARIANTS if variant.name not in _PEERS]
    return _PEERS.get(name) or others[ordered.index(name)]


def _panels(count: int) -> tuple[Any, list[Any]]:
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(
        1, count, figsize=(_SIZE[0] * count, _SIZE[1]), squeeze=False, layout="constrained"
    )
    return figure, list(grid[0])


def _legend(axes: Any) -> tuple[list[Any], list[str]]:
    lines, names = axes.get_legend_handles_labels()
    return lines, names


def _save(figure: Any, panels: Sequence[Any], path: Path) -> Path:
    for axes in panels:
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    named = {name: line for axes in panels for line, name in zip(*_legend(axes), strict=True)}
    panels[0].legend(named.values(), named.keys(), fontsize=7)
    figure.savefig(path, dpi=130)
    return path
