"""What the figures are about: the rows of a study, and how they look."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from orchestra.report.collect import RunData
from orchestra.report.figures.style import Style, lines_of, style_of
from orchestra.report.measures import FINAL_LOSS, Target
from orchestra.report.rows import Row
from orchestra.report.study import Study

_METRIC = "metrics."


@dataclass(frozen=True)
class Subject:
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
    def target(self) -> Target | None:
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
