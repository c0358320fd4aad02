"""What the figures are about: the rows of a study, and how each strategy looks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from orchestra.report.collect import RunData
from orchestra.report.rows import FINAL_LOSS, ReportTarget, Row
from orchestra.report.study import Study

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


_METRIC = "metrics."


@dataclass(frozen=True)
class FigureData:
    """A study as figures show it: only rows with completed runs, best first."""

    study: Study

    @cached_property
    def rows(self) -> list[Row]:
        """What can be drawn, best first."""
        return [row for row in self.study.ranked if row.completed]

    @cached_property
    def styles(self) -> Mapping[str, Style]:
        """By the name of a row, how it looks."""
        return style_of(self.rows)

    @cached_property
    def lines(self) -> Mapping[str, str]:
        """By the name of a row, what it is at any number of ranks."""
        return lines_of(self.rows)

    @cached_property
    def widest(self) -> list[Row]:
        """Of each strategy, its row on the most ranks: what figures in detail are about."""
        most: dict[str, int] = {}
        for row in self.rows:
            line = self.lines[row.name]
            most[line] = max(row.ranks, most.get(line, 0))
        return [row for row in self.rows if row.ranks == most[self.lines[row.name]]]

    @property
    def target(self) -> ReportTarget | None:
        """What all runs were to reach."""
        return self.study.target

    @property
    def metric(self) -> str | None:
        """The metric to show beside the loss, if there is any."""
        key = self.study.chief.key
        return key.removeprefix(_METRIC) if key.startswith(_METRIC) else None

    @property
    def runs(self) -> list[RunData]:
        """All completed runs."""
        return [run for row in self.rows for run in row.completed]

    def better(self, metric: str) -> str:
        """Which way is better, for the title of an axis; nothing where that is not known."""
        keys = {FINAL_LOSS.key: "loss"}
        for measure in self.study.finals:
            name = keys.get(measure.key, measure.key.removeprefix(_METRIC))
            if name == metric and measure.rising is not None:
                return f", {'higher' if measure.rising else 'lower'} is better"
        return ""
