"""Colors by role. A page has them as CSS variables, so that it follows the reader's light or dark.

Figures are drawn once, by matplotlib, with a placeholder color for each role; in the SVG the
placeholders become `var(--role)`. A PNG is drawn with the light colors themselves.
"""

from __future__ import annotations

LIGHT = {
    "paper": "#ffffff", "card": "#f6f7f9", "ink": "#1c2430", "muted": "#667085", "grid": "#e3e7ee",
    "line": "#d0d5dd", "s0": "#2563eb", "s1": "#d9480f", "s2": "#0f9d76", "s3": "#9333ea",
    "s4": "#b7791f", "s5": "#0e7490", "wait": "#93b4f5", "good": "#17966b", "fair": "#e6a117",
    "bad": "#d92d20", "lost": "#98a2b3",
}  # fmt: skip
DARK = {
    "paper": "#12161d", "card": "#1b212b", "ink": "#e6eaf0", "muted": "#97a3b6", "grid": "#28303c",
    "line": "#384353", "s0": "#6ea8ff", "s1": "#ff9466", "s2": "#4ad6a7", "s3": "#c792ff",
    "s4": "#e9bd5b", "s5": "#5fd0e6", "wait": "#3f63ad", "good": "#35c08d", "fair": "#f0b840",
    "bad": "#ff6b5e", "lost": "#5d6878",
}  # fmt: skip
SERIES = ("s0", "s1", "s2", "s3", "s4", "s5")
# One placeholder a role: near-black, so that no other color of a figure is like it.
PLACEHOLDERS = {role: f"#0001{number:02x}" for number, role in enumerate(LIGHT)}


def themed(svg: str) -> str:
    """An SVG of placeholders with CSS variables in their place."""
    for role, placeholder in PLACEHOLDERS.items():
        svg = svg.replace(placeholder, f"var(--{role})")
    return svg


def variables(colors: dict[str, str]) -> str:
    return "".join(f"--{role}:{color};" for role, color in colors.items())
