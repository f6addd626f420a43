"""A timeline as one HTML file: an SVG, light or dark as the reader's system is."""

from __future__ import annotations

from html import escape

from tknp.planner.timeline import ROWS, Panel, Timeline, Track

_WIDTH, _LEFT, _RIGHT = 1200, 150, 64
_ROW, _GAP, _TRACK_GAP, _AXIS = 14, 2, 12, 34
_TICKS = 8

# Lane colours by (row, stream parity), from one palette readable on both grounds.
_STYLE = """
:root { --ground: #ffffff; --ink: #1c2430; --faint: #6b7685; --rule: #e2e6ec; --band: #f5f7fa;
  --dense-0: #2f6fde; --dense-1: #8db4f2; --attention-0: #d9720f; --attention-1: #f2b679;
  --exchange-0: #12876b; --exchange-1: #7cc7b2; --idle: #c9d0d9; }
@media (prefers-color-scheme: dark) { :root { --ground: #12161c; --ink: #e4e9f0; --faint: #93a0b0;
  --rule: #2a323d; --band: #181e26; --dense-0: #5b93f5; --dense-1: #2c55a0;
  --attention-0: #f09a3e; --attention-1: #95591a; --exchange-0: #3cc29e; --exchange-1: #1c6e59;
  --idle: #3a4452; } }
body { background: var(--ground); color: var(--ink); margin: 24px;
  font: 13px/1.45 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1200px; margin: 0 auto; }
h1 { font-size: 19px; font-weight: 600; margin: 0; }
p { color: var(--faint); margin: 2px 0 14px; }
h2 { font-size: 13px; font-weight: 600; margin: 22px 0 4px; }
svg { display: block; width: 100%; height: auto; }
text { fill: var(--faint); font-size: 11px; }
text.node { fill: var(--ink); font-weight: 600; font-size: 12px; }
line { stroke: var(--rule); } rect.band { fill: var(--band); } rect.idle { fill: var(--idle); }
ul { list-style: none; display: flex; flex-wrap: wrap; gap: 4px 18px; padding: 0; margin: 0; }
li { color: var(--faint); } i { display: inline-block; width: 12px; height: 12px;
  border-radius: 2px; margin-right: 5px; vertical-align: -2px; }
"""


def render(timeline: Timeline) -> str:
    """The whole document."""
    panels = "\n".join(
        (f"<h2>{escape(panel.title)}</h2>\n" if panel.title else "") + _svg(panel)
        for panel in timeline.panels
    )
    return (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>{escape(timeline.title)}</title>\n<style>{_STYLE}{_fills()}</style>\n<main>\n"
        f"<h1>{escape(timeline.title)}</h1>\n<p>{escape(timeline.subtitle)}</p>\n"
        f"{_legend(timeline)}\n{panels}\n</main>\n</html>\n"
    )


def _fills() -> str:
    return "".join(
        f".{row}-{i} {{ fill: var(--{row}-{i}); background: var(--{row}-{i}); }}\n"
        for row in ROWS[:-1]
        for i in range(2)
    )


def _legend(timeline: Timeline) -> str:
    shades = range(min(timeline.streams, 2))
    names = {0: "", 1: ", odd streams"} if timeline.streams > 1 else {0: ""}
    items = [
        f'<li><i class="{row}-{shade}"></i>{row}{names[shade]}</li>'
        for row in ROWS[:-1]
        for shade in shades
    ]
    return f'<ul>{"".join(items)}<li><i style="background: var(--idle)"></i>idle</li></ul>'


def _svg(panel: Panel) -> str:
    track = len(ROWS) * (_ROW + _GAP) + _TRACK_GAP
    height = len(panel.tracks) * track + _AXIS
    scale = (_WIDTH - _LEFT - _RIGHT) / panel.seconds
    parts = [f'<svg viewBox="0 0 {_WIDTH} {height}" role="img">']
    parts += _axis(panel.seconds, scale, height)
    for i, one in enumerate(panel.tracks):
        parts += _track(one, i * track, scale)
    return "\n".join([*parts, "</svg>"])


def _track(track: Track, top: float, scale: float) -> list[str]:
    width = _WIDTH - _LEFT - _RIGHT
    parts = [f'<text class="node" x="0" y="{top + _ROW - 2}">{escape(track.name)}</text>']
    for i, (row, bars, ratio) in enumerate(zip(ROWS, track.bars, track.ratios, strict=True)):
        y = top + i * (_ROW + _GAP)
        middle = y + _ROW - 3
        parts.append(f'<rect class="band" x="{_LEFT}" y="{y}" width="{width}" height="{_ROW}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{middle}" text-anchor="end">{row}</text>')
        parts.append(f'<text x="{_WIDTH - _RIGHT + 8}" y="{middle}">{ratio:.0%}</text>')
        for bar in bars:
            name = row if bar.stream < 0 else f"{row}-{bar.stream % 2}"
            x, length = _LEFT + bar.start_s * scale, (bar.stop_s - bar.start_s) * scale
            parts.append(
                f'<rect class="{name}" x="{x:.2f}" y="{y}" width="{max(length, 0.3):.2f}" '
                f'height="{_ROW}"><title>{escape(bar.label)}</title></rect>'
            )
    return parts


def ticks(seconds: float) -> list[float]:
    """Round times, at most _TICKS + 1 of them, that fit `seconds`."""
    step = 1e-9
    while seconds / step > _TICKS:
        for factor in (1, 2, 5):
            if seconds / (step * factor) <= _TICKS:
                step *= factor
                break
        else:
            step *= 10
    return [i * step for i in range(int(seconds / step) + 1)]


def time_text(seconds: float, scale: float) -> str:
    """`seconds` in the unit that suits a picture of `scale` seconds."""
    value, unit = (seconds * 1e3, "ms") if scale >= 1e-3 else (seconds * 1e6, "µs")
    return f"{value:.6g} {unit}"


def _axis(seconds: float, scale: float, height: float) -> list[str]:
    bottom, parts = height - _AXIS + 4, []
    for tick in ticks(seconds):
        x = _LEFT + tick * scale
        parts.append(f'<line x1="{x:.2f}" y1="0" x2="{x:.2f}" y2="{bottom}"/>')
        parts.append(
            f'<text x="{x:.2f}" y="{bottom + 16}" text-anchor="middle">'
            f"{time_text(tick, seconds)}</text>"
        )
    return parts
