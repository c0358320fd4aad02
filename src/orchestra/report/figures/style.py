"""How a strategy looks, in every figure the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from orchestra.report.rows import Row

# Okabe and Ito, "Color Universal Design" (2008), without yellow, which is too pale for a line on
# white, and without black, which is for one process.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
SIGNS = {
    "circle": "●",
    "square": "■",
    "triangle-up": "▲",
    "diamond": "◆",
    "cross": "✚",
    "triangle-down": "▼",
    "triangle-right": "▶\N{VARIATION SELECTOR-15}",
    "triangle-left": "◀\N{VARIATION SELECTOR-15}",
}
"""Vega's shapes, and what stands for them in a text."""
SHAPES = tuple(SIGNS)
_STAR = (
    "M0.00,-1.00L0.26,-0.36L0.95,-0.31L0.43,0.14L0.59,0"
    ".81L0.00,0.45L-0.59,0.81L-0.43,0.14L-0.95,-0.31L-0.26,-0.36Z"
)
DASHES = ((1, 0), (7, 3), (2, 3), (10, 3, 2, 3), (12, 5))
INK = "ink"
"""The colour of text: dark on a light ground, light on a dark one."""


@dataclass(frozen=True)
class Style:
    """How lines and points of a strategy are drawn.

    `colour` is "ink" where it is that of the text; `dash` are pixels on and off; `shape` is a name
    of Vega's, or the path of one.
    """

    colour: str
    dash: tuple[int, ...]
    shape: str


def style_of(rows: Sequence[Row]) -> dict[str, Style]:
    """The style of each row, by its name; one strategy looks alike at every number of ranks.

    It does not depend on the order of `rows`, which is that of their success.

    No two strategies share dash and shape up to 24, so that they differ without colour as well.
    """
    lines = lines_of(rows)
    styles: dict[str, Style] = {}
    distributed = single = 0
    for row in sorted(rows, key=lambda row: row.name):
        line = lines[row.name]
        if line in styles:
            continue
        if row.single:
            styles[line] = Style(INK, DASHES[single % len(DASHES)], _STAR)
            single += 1
        else:
            styles[line] = _style(distributed)
            distributed += 1
    return {row.name: styles[lines[row.name]] for row in rows}


def lines_of(rows: Sequence[Row]) -> dict[str, str]:
    """By the name of a row, what it is at any number of ranks: its label where that is enough."""
    seen: Counter[tuple[str, int]] = Counter()
    lines = {}
    for row in sorted(rows, key=lambda row: row.name):
        seen[row.label, row.ranks] += 1
        number = seen[row.label, row.ranks]
        lines[row.name] = row.label if number == 1 else f"{row.label} #{number}"
    return lines


def _style(index: int) -> Style:
    return Style(
        COLOURS[index % len(COLOURS)],
        DASHES[index // len(COLOURS) % len(DASHES)],
        SHAPES[index % len(SHAPES)],
    )
