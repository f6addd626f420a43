"""Panels and the frame that the four dashboards share, over grafana-foundation-sdk's builders.

A dashboard is a list of rows, a row a title and panels. Every panel has a title, a unit and a
sentence that says how to read it. Expressions name a pool by `SELECT`, its label matchers; rates
are over $__rate_interval. Tails come from buckets by histogram_quantile: no panel shows a mean of
latencies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grafana_foundation_sdk.builders import (
    bargauge,
    common,
    dashboard,
    heatmap,
    prometheus,
    stat,
    table,
    timeseries,
)
from grafana_foundation_sdk.models.common import (
    BarGaugeDisplayMode,
    BigValueColorMode,
    BigValueGraphMode,
    LegendDisplayMode,
    LegendPlacement,
    SortOrder,
    StackingMode,
    TooltipDisplayMode,
    VisibilityMode,
    VizOrientation,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    DataTransformerConfig,
    DynamicConfigValue,
    FieldColorModeId,
    Threshold,
    ThresholdsMode,
    ValueMap,
    ValueMappingResult,
    VariableOption,
    VariableRefresh,
    VariableSort,
)
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode, HeatmapColorScale
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

SELECT = 'namespace="$namespace", pool="$pool"'
SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
TAG = "tknp"
WIDTH = 24
Query = tuple[str, str]  # expression, legend
Steps = Sequence[tuple[float | None, str]]  # from which value which colour, the first from None

USE: Steps = ((None, "green"), (0.8, "yellow"), (0.95, "red"))
ANY_IS_BAD: Steps = ((None, "green"), (0.001, "red"))
# Quantiles are told apart by how dark they are, the same in every panel.
_QUANTILES = {"p50": "light-blue", "p90": "blue", "p99": "dark-purple"}


def series(name: str, *more: str, **equal: str) -> str:
    """Selector of `name` in the chosen pool. `more`: matchers; `equal`: labels and values."""
    matchers = (SELECT, *more, *(f'{label}="{value}"' for label, value in equal.items()))
    return f"{name}{{{', '.join(matchers)}}}"


def rate(name: str, *more: str, **equal: str) -> str:
    """Rate of a counter in the chosen pool, labels as `series` takes them."""
    return f"rate({series(name, *more, **equal)}[$__rate_interval])"


def quantile(q: float, name: str, *by: str, more: Sequence[str] = ()) -> str:
    """Quantile `q` of histogram `name`, over all of its series or by labels `by`."""
    buckets = f"sum by ({', '.join(('le', *by))}) ({rate(f'{name}_bucket', *more)})"
    return f"histogram_quantile({q}, {buckets})"


def quantiles(name: str, *qs: float) -> list[Query]:
    """Queries of several quantiles, p50 p90 p99 unless given, with their names as legends."""
    return [(quantile(q, name), f"p{100 * q:g}") for q in qs or (0.5, 0.9, 0.99)]


def lines(
    title: str, unit: str, description: str, *queries: Query,
    width: int = 8, height: int = 8, stacked: bool = False, most: float | None = None,
) -> timeseries.Panel:  # fmt: skip
    """Values over time; `stacked` where they are parts of a whole. `most`: end of the axis."""
    panel = _framed(timeseries.Panel(), title, unit, description, width, height, queries)
    panel.min(0).line_width(1).fill_opacity(60 if stacked else 8)
    panel.show_points(VisibilityMode.NEVER).span_nulls(False)
    panel.legend(
        common.VizLegendOptions().display_mode(LegendDisplayMode.LIST)
        .placement(LegendPlacement.BOTTOM).show_legend(True)
    )  # fmt: skip
    panel.tooltip(
        common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING)
    )
    if stacked:
        panel.stacking(common.StackingConfig().mode(StackingMode.NORMAL))
    if most is not None:
        panel.max(most)
    for legend, colour in _QUANTILES.items():
        if any(shown == legend for _, shown in queries):
            panel.override_by_name(legend, [_colour(colour)])
    return panel


def number(
    title: str, unit: str, description: str, expression: str,
    *, width: int = 3, height: int = 4, steps: Steps = ((None, "blue"),),
    decimals: int | None = None,
    words: dict[str, tuple[str, str]] | None = None, graph: bool = True, empty: str = "no data",
) -> stat.Panel:  # fmt: skip
    """One value now. `words`: text and colour shown for a value; `empty`: shown without one."""
    query = [(expression, title)]
    panel = _framed(stat.Panel(), title, unit, description, width, height, query)
    panel.color_mode(BigValueColorMode.VALUE).thresholds(_thresholds(steps)).no_value(empty)
    panel.graph_mode(BigValueGraphMode.AREA if graph and not words else BigValueGraphMode.NONE)
    panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    if decimals is not None:
        panel.decimals(decimals)
    if words:
        options = {
            value: ValueMappingResult(text=text, color=colour)
            for value, (text, colour) in words.items()
        }
        panel.mappings([ValueMap(options=options)])
    return panel


def bars(
    title: str, unit: str, description: str, *queries: Query,
    width: int = 8, height: int = 8, steps: Steps = USE, most: float | None = None,
) -> bargauge.Panel:  # fmt: skip
    """One bar a series, now."""
    panel = _framed(
        bargauge.Panel(), title, unit, description, width, height, queries, instant=True
    )
    panel.display_mode(BarGaugeDisplayMode.BASIC).orientation(VizOrientation.HORIZONTAL)
    panel.min(0).thresholds(_thresholds(steps))
    panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    if most is not None:
        panel.max(most)
    return panel


def heat(
    title: str, description: str, histogram: str, *more: str, width: int = 12, height: int = 9
) -> heatmap.Panel:
    """Observations of a histogram of seconds by bucket over time: the whole distribution."""
    expression = f"sum by (le) (increase({series(f'{histogram}_bucket', *more)}[$__rate_interval]))"
    panel = _framed(heatmap.Panel(), title, "s", description, width, height, ())
    panel.with_target(_target(expression, "{{le}}", "A").format(PromQueryFormat.HEATMAP))
    panel.calculate(False).y_axis(heatmap.YAxisConfig().unit("s"))
    panel.color(
        heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Blues")
        .scale(HeatmapColorScale.EXPONENTIAL).exponent(0.5).steps(64).reverse(False).fill("dark-blue")
    )  # fmt: skip
    return panel.show_tooltip()


def rows(
    title: str, description: str, expression: str, *hidden: str, width: int = 8, height: int = 8
) -> table.Panel:
    """Label values of an instant vector as a table, without the columns `hidden`."""
    panel = _framed(table.Panel(), title, "none", description, width, height, ())
    panel.with_target(_target(expression, "", "A").format(PromQueryFormat.TABLE).instant())
    panel.show_header(True)
    excluded = dict.fromkeys(("Time", *hidden), True)
    return panel.with_transformation(
        DataTransformerConfig(id_val="organize", options={"excludeByName": excluded})
    )


def board(
    uid: str, title: str, description: str, *sections: tuple[str, Sequence[Any]],
    by_node: bool = False,
) -> dashboard.Dashboard:  # fmt: skip
    """The dashboard; `by_node` adds a choice of nodes. Panels of each section must fill rows."""
    made = dashboard.Dashboard(title).uid(uid).description(description).tags([TAG]).editable()
    made.time("now-1h", "now").refresh("30s").timezone("browser")
    made.tooltip(DashboardCursorSync.CROSSHAIR)
    made.link(
        dashboard.DashboardLink("TKNP").type(DashboardLinkType.DASHBOARDS).tags([TAG])
        .as_dropdown(True).include_vars(True).keep_time(True)
    )  # fmt: skip
    made.with_variable(
        dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
    )
    made.with_variable(_choice("namespace", "Namespace", "label_values(tknp_ready, namespace)"))
    made.with_variable(
        _choice("pool", "Pool", 'label_values(tknp_ready{namespace="$namespace"}, pool)')
    )
    if by_node:
        nodes = _choice("node", "Node", f"label_values(tknp_step_seconds_count{{{SELECT}}}, node)")
        every = VariableOption(selected=True, text="All", value="$__all")
        made.with_variable(nodes.multi(True).include_all(True).all_value(".*").current(every))
    number_of = 0
    for section, panels in sections:
        made.with_row(dashboard.Row(section))
        for panel in panels:
            number_of += 1
            made.with_panel(panel.id(number_of))
    return made


def _choice(name: str, label: str, query: str) -> dashboard.QueryVariable:
    return (
        dashboard.QueryVariable(name).label(label).datasource(SOURCE).query(query)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED).sort(VariableSort.NUMERICAL_ASC)
    )  # fmt: skip


def _framed(
    panel: Any, title: str, unit: str, description: str, width: int, height: int,
    queries: Sequence[Query], instant: bool = False,
) -> Any:  # fmt: skip
    """`panel`, of any of the builders, with what all have."""
    panel.title(title).unit(unit).description(description).datasource(SOURCE)
    panel.span(width).height(height)
    for index, (expression, legend) in enumerate(queries):
        target = _target(expression, legend, chr(ord("A") + index))
        panel.with_target(target.instant() if instant else target.range())
    return panel


def _target(expression: str, legend: str, ref: str) -> prometheus.Dataquery:
    return prometheus.Dataquery().expr(expression).legend_format(legend).ref_id(ref)


def _thresholds(steps: Steps) -> dashboard.ThresholdsConfig:
    marks = [Threshold(value=value, color=colour) for value, colour in steps]
    return dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(marks)


def _colour(name: str) -> DynamicConfigValue:
    return DynamicConfigValue(
        id_val="color", value={"mode": str(FieldColorModeId.FIXED), "fixedColor": name}
    )
