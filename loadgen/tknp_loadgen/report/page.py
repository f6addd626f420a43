"""The report: one HTML file without a request to anywhere, a PNG and a CSV of the same runs."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from tknp_loadgen.measure.result import Result, flat
from tknp_loadgen.report import ecdf, loads, timeline
from tknp_loadgen.report.axes import HEIGHT, Draw, png, svg
from tknp_loadgen.report.theme import DARK, LIGHT, variables

ROWS = (
    ("ttft_ms", "TTFT", "ms", "From scheduled arrival to the first chunk with a token."),
    ("tpot_ms", "TPOT", "ms", "Time a token after the first chunk, one value a request."),
    ("itl_ms", "ITL", "ms", "Gap between chunks over the tokens of the later one, by token; "
     "admitted requests."),
    ("max_stall_ms", "longest stall", "ms", "Each request's longest gap between chunks."),
    ("queue_wait_ms", "queue wait", "ms", "In the server's queue, as it reports."),
    ("completion_s", "completion", "s", "From scheduled arrival to the last token; all requests."),
    ("normalized_latency_ms_per_token", "normalized latency", "ms/token",
     "Completion over output tokens."),
    ("ttft_from_send_ms", "TTFT from send", "ms", "What a client that ignores its own lateness "
     "would report."),
    ("client_lag_ms", "client lag", "ms", "How late requests left."),
)  # fmt: skip
COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")
STYLE = """
*{box-sizing:border-box}body{margin:0;background:var(--paper);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1240px;margin:0 auto;padding:28px 20px 60px}
h1{font-size:24px;margin:0 0 2px}h2{font-size:18px;margin:36px 0 10px}
p,.note{color:var(--muted);margin:4px 0 12px}
.badge{display:inline-block;padding:1px 10px;border-radius:99px;font-size:12px;font-weight:600;
color:var(--paper);vertical-align:middle;margin-left:8px}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:10px;margin:14px 0}
.card{background:var(--card);border:1px solid var(--grid);border-radius:10px;padding:12px 14px}
.card b{display:block;font-size:23px;line-height:1.25;font-weight:650}
.card span{color:var(--muted);font-size:13px}.card small{display:block;color:var(--muted)}
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{padding:6px 10px;text-align:right;border-bottom:1px solid var(--grid);white-space:nowrap}
th:first-child,td:first-child{text-align:left}th{color:var(--muted);font-weight:500;font-size:13px}
td.bad{color:var(--bad);font-weight:600}.unit{color:var(--muted);font-size:13px}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(520px,100%),1fr));gap:14px}
.three{grid-template-columns:repeat(auto-fit,minmax(min(340px,100%),1fr))}
figure{margin:0;background:var(--card);border:1px solid var(--grid);border-radius:10px;padding:10px}
figure.wide{grid-column:1/-1}svg{display:block;width:100%;height:auto}
svg text{font-family:inherit}details{margin:10px 0}summary{cursor:pointer;color:var(--muted)}
ul{margin:6px 0;padding-left:20px;color:var(--muted)}code{font-size:13px}
.warn{border-left:3px solid var(--bad);padding:6px 12px;background:var(--card);margin:10px 0}
"""


def write_report(results: Sequence[Result], directory: Path) -> list[Path]:
    """Write report.html, report.png and report.csv of one run or several; returns the paths."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / f"report.{kind}" for kind in ("html", "png", "csv")]
    paths[0].write_text(page(results), encoding="utf-8")
    png(_figures(results), paths[1])
    _csv(results, paths[2])
    return paths


def page(results: Sequence[Result]) -> str:
    """The whole page."""
    title = results[0].name if len(results) == 1 else f"{len(results)} runs"
    parts = [f"<h1>Load report: {escape(title)}</h1>", _subtitle(results)]
    if len(results) > 1:
        parts += ["<h2>Runs</h2>", _runs(results)]
        parts += ["<h2>Across loads</h2>", _small(_over_loads(results))]
    for result in loads.ordered(results):
        parts += _section(result, alone=len(results) == 1)
    if len(results) == 1:
        parts += ["<h2>At this load</h2>", _small(_over_loads(results))]
    parts += ["<h2>Distributions</h2>",
              "<p>Failures count as never: a curve ends below 1 by their share.</p>",
              _panels(_distributions(results)), _footer()]  # fmt: skip
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>Load report: {escape(title)}</title><style>:root{{{variables(LIGHT)}}}"
        f"@media(prefers-color-scheme:dark){{:root{{{variables(DARK)}}}}}{STYLE}</style></head>"
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )


def _over_loads(results: Sequence[Result]) -> list[tuple[Draw, float]]:
    return [(make(results), HEIGHT)
            for make in (loads.attainment, loads.throughput, loads.p95_completion)]  # fmt: skip


def _distributions(results: Sequence[Result]) -> list[tuple[Draw, float]]:
    runs = loads.ordered(results)
    return [(make(runs), HEIGHT)
            for make in (ecdf.ttft, ecdf.itl, ecdf.normalized, ecdf.completion)]  # fmt: skip


def _over_time(result: Result) -> list[tuple[Draw, float]]:
    tall = HEIGHT + min(4.0, len(result.columns) / 60)
    return [(timeline.requests(result), tall), (timeline.load(result), HEIGHT),
            (timeline.lag(result), HEIGHT)]  # fmt: skip


def _figures(results: Sequence[Result]) -> list[tuple[Draw, float]]:
    """What the PNG shows; of several runs only what compares them."""
    shown = _over_loads(results) + _distributions(results)
    return shown + _over_time(results[0]) if len(results) == 1 else shown


def _panels(figures: Sequence[tuple[Draw, float]], first_wide: bool = False) -> str:
    parts = []
    for number, (draw, height) in enumerate(figures):
        wide = first_wide and number == 0
        drawn = svg(draw, height, 13.0) if wide else svg(draw, height)
        parts.append(f"<figure{' class=wide' if wide else ''}>{drawn}</figure>")
    return f"<div class=figures>{''.join(parts)}</div>"


def _small(figures: Sequence[tuple[Draw, float]]) -> str:
    """Three in a row."""
    drawn = (svg(draw, height * 0.9, 4.3) for draw, height in figures)
    return f"<div class='figures three'>{''.join(f'<figure>{one}</figure>' for one in drawn)}</div>"


def _subtitle(results: Sequence[Result]) -> str:
    first = results[0]
    hashes = {result.trace.sha256[:12] for result in results}
    words = [str(first.config.get("target")), str(first.config.get("model") or "")]
    words.append(f"trace {', '.join(sorted(hashes))}" if len(hashes) <= 3 else
                 f"{len(hashes)} traces")  # fmt: skip
    words.append(f"SLO: {first.slo}")
    return f"<p>{escape(' · '.join(word for word in words if word))}</p>"


def _section(result: Result, alone: bool) -> list[str]:
    summary = result.summary
    badge = ("good", "valid") if summary["valid"] else ("bad", "invalid")
    parts = [
        f"<h2>{escape(result.name)} <span class=badge style='background:var(--{badge[0]})'>"
        f"{badge[1]}</span></h2>",
        *(f"<div class=warn>{escape(reason)}</div>" for reason in summary["invalid_reasons"]),
        _cards(summary), _table(summary), _notes(summary),
        _panels(_over_time(result), first_wide=True),
    ]  # fmt: skip
    if alone:
        return parts
    return ["<details><summary>", escape(result.name), " in detail</summary>", *parts, "</details>"]


def _cards(summary: Mapping[str, Any]) -> str:
    slo = summary["slo"]
    lost = summary["failed"]
    cards = (
        (f"{slo['attained_ratio']:.1%}", "SLO attained",
         f"95%: {slo['ci_low']:.1%} to {slo['ci_high']:.1%}"),
        (f"{_number(summary['completion_throughput_tokens_per_s'])}", "tokens/s",
         "release to last completion"),
        (_number(summary["completion_s"]["p95"]) + " s", "p95 completion",
         "from scheduled arrival"),
        (_duration(summary["ttft_ms"]["p50"]), "median TTFT",
         f"p95 {_duration(summary['ttft_ms']['p95'])}"),
        (_number(summary["itl_ms"]["p50"]) + " ms", "median ITL",
         f"p95 {_number(summary['itl_ms']['p95'])} ms"),
        (f"{summary['completed']}/{summary['scheduled']}", "completed",
         f"{lost} failed" if lost else "none failed"),
        (_number(summary["client_lag_ms"]["p99"]) + " ms", "client lag p99",
         f"p50 {_number(summary['client_lag_ms']['p50'])} ms"),
    )  # fmt: skip
    return "<div class=cards>" + "".join(
        f"<div class=card><span>{escape(name)}</span><b>{escape(value)}</b>"
        f"<small>{escape(note)}</small></div>"
        for value, name, note in cards
    ) + "</div>"  # fmt: skip


def _table(summary: Mapping[str, Any]) -> str:
    head = "".join(f"<th>{name}</th>" for name in COLUMNS)
    rows = []
    for key, name, unit, meaning in ROWS:
        values = summary.get(key)
        if not values:
            continue
        cells = "".join(
            f"<td{' class=bad' if _infinite(values[c]) else ''}>{_number(values[c])}</td>"
            for c in COLUMNS
        )
        rows.append(f'<tr><td title="{escape(meaning)}">{name} <span class=unit>{unit}</span></td>'
                    f"{cells}</tr>")  # fmt: skip
    return (f"<div class=scroll><table><thead><tr><th></th>{head}</tr></thead>"
            f"<tbody>{''.join(rows)}</tbody></table></div>")  # fmt: skip


def _runs(results: Sequence[Result]) -> str:
    names = ("run", "load", "SLO attained", "95% interval", "goodput /s", "tokens/s",
             "p95 completion s", "TTFT p50 ms", "ITL p50 ms", "failed", "valid")  # fmt: skip
    rows = []
    for result in loads.ordered(results):
        s, slo = result.summary, result.summary["slo"]
        cells = (
            escape(result.name), escape(loads.label(result)[1]), f"{slo['attained_ratio']:.1%}",
            f"{slo['ci_low']:.1%} to {slo['ci_high']:.1%}", _number(slo["goodput_per_s"]),
            _number(s["completion_throughput_tokens_per_s"]), _number(s["completion_s"]["p95"]),
            _number(s["ttft_ms"]["p50"]), _number(s["itl_ms"]["p50"]), str(s["failed"]),
            "yes" if s["valid"] else "no",
        )  # fmt: skip
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    head = "".join(f"<th>{name}</th>" for name in names)
    return (f"<div class=scroll><table><thead><tr>{head}</tr></thead>"
            f"<tbody>{''.join(rows)}</tbody></table></div>")  # fmt: skip


def _notes(summary: Mapping[str, Any]) -> str:
    items = [f"{count} x {reason}" for reason, count in summary["errors"].items()]
    items += list(summary["warnings"])
    answers = summary["answers"]
    if answers["checked"]:
        items.append(f"{answers['found']} of {answers['checked']} needle tasks answered right")
    spread = summary["client_lag_ms"]["burst_spread"]
    if spread is not None:
        items.append(f"requests due together left within {_number(spread)} ms")
    return f"<ul>{''.join(f'<li>{escape(item)}</li>' for item in items)}</ul>" if items else ""


def _footer() -> str:
    return ("<p class=note>Time zero of every latency is the scheduled arrival. Percentiles are "
            "observed values with failures as +inf. Made by tknp-load.</p>")  # fmt: skip


def _csv(results: Sequence[Result], path: Path) -> None:
    """One column a run."""
    tables = [dict(flat(result.summary)) for result in results]
    names = list(dict.fromkeys(name for table in tables for name in table))
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(("measure", *(result.name for result in results)))
        rows.writerows((name, *(table.get(name) for table in tables)) for name in names)


def _infinite(value: float | None) -> bool:
    return value is not None and math.isinf(value)


def _duration(ms: float | None) -> str:
    """Milliseconds, in seconds where there are many."""
    if ms is not None and math.isfinite(ms) and ms >= 10_000:
        return f"{ms / 1e3:.3g} s"
    return f"{_number(ms)} ms"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    if math.isinf(value):
        return "∞"
    if value == 0:
        return "0"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
