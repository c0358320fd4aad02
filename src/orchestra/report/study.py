"""The runs of a report as one study: rows best first, each beside its rival, and their looks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from orchestra.errors import InputError, nearest
from orchestra.records.record import RunRecord
from orchestra.records.store import RunFolder, RunStore
from orchestra.report import measures, numbers
from orchestra.report.measures import FINAL_LOSS, METRIC, TIME_TO_TARGET, Measure
from orchestra.report.numbers import Difference
from orchestra.report.rows import Row, common_settings, grouped, numbered, rows_of
from orchestra.trainer.settings import Target

# Okabe and Ito, "Color Universal Design" (2008), without yellow, which is too pale for a line on
# white, and without black, which is for one process.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
SIGNS = {
    "circle": "●", "square": "■", "triangle-up": "▲", "diamond": "◆", "cross": "✚",
    "triangle-down": "▼", "triangle-right": "▶\N{VARIATION SELECTOR-15}",
    "triangle-left": "◀\N{VARIATION SELECTOR-15}",
}  # fmt: skip
"""Vega's shapes, and the characters that represent them in text."""
_STAR = (
    "M0.00,-1.00L0.26,-0.36L0.95,-0.31L0.43,0.14L0.59,0"
    ".81L0.00,0.45L-0.59,0.81L-0.43,0.14L-0.95,-0.31L-0.26,-0.36Z"
)
DASHES = ((1, 0), (7, 3), (2, 3), (10, 3, 2, 3), (12, 5))
INK = "ink"  # the colour of text: dark on a light ground, light on a dark one


@dataclass(frozen=True)
class Style:
    """The look of a strategy's lines and points."""

    colour: str  # "ink": that of the text
    dash: tuple[int, ...]  # pixels on and off
    shape: str  # a name of Vega's, or the path of one

    @property
    def css_colour(self) -> str:
        """The colour on a page."""
        return "currentColor" if self.colour == INK else self.colour

    @property
    def sign(self) -> str:
        """The character for the shape in a text."""
        return SIGNS.get(self.shape, "★")


@dataclass(frozen=True)
class Study:
    """The rows of a report, on which everything on its page depends.

    `baseline`, from which differences are taken, is a label, a row's name, or that of
    a folder with one row; None: one process.
    `InputError` is raised if there is no such row.
    """

    sources: Sequence[RunStore]
    baseline: str | None = None

    def __post_init__(self) -> None:
        known = {row.label for row in self.rows} | {row.name for row in self.rows}
        if self.baseline is not None and self.baseline not in known:
            own = [row for row in self.rows if row.source.folder.name == self.baseline]
            if len(own) == 1:
                object.__setattr__(self, "baseline", own[0].name)
                return
            raise InputError(
                f"--baseline: no row {self.baseline!r}; {nearest(self.baseline, known)}"
            )

    @cached_property
    def rows(self) -> list[Row]:
        """The rows in the order of the records."""
        return rows_of(self.sources)

    @cached_property
    def ranked(self) -> list[Row]:
        """The rows, best first: who reaches the target most often, then soonest; else by the
        primary figure. Rows without a completed run are last."""
        return sorted(self.rows, key=self._rank)

    @cached_property
    def completed(self) -> list[Row]:
        """The rows that have completed runs, best first."""
        return [row for row in self.ranked if row.completed]

    @property
    def runs(self) -> list[RunFolder]:
        """All completed runs."""
        return [run for row in self.completed for run in row.completed]

    @cached_property
    def records(self) -> list[RunRecord]:
        """The records of all completed runs, row by row in the order of `rows`."""
        return [run.record for row in self.rows for run in row.completed]

    @cached_property
    def target(self) -> Target | None:
        """The target of all runs; None if they had none or different ones."""
        targets = {measures.target_of(source.experiment) for source in self.sources}
        # A time to target beside that to another one would be compared all the same
        return targets.pop() if len(targets) == 1 else None

    @cached_property
    def differing(self) -> dict[str, list[tuple[RunStore, object]]]:
        """The settings in which the sources differ, each with their values; empty if it is fair.

        A record from before there was a setting says nothing about it. Of no concern are settings
        that make no run better or worse.
        """
        known: dict[str, list[tuple[RunStore, object]]] = {}
        for source in self.sources:
            for key, value in common_settings(source.experiment).items():
                # How often a run is saved, or waits for a silent rank, changes no figure
                if key not in ("checkpoint_every", "patience"):
                    known.setdefault(key, []).append((source, value))
        return {
            key: values for key, values in known.items() if len({repr(v) for _, v in values}) > 1
        }

    @cached_property
    def only_time(self) -> bool:
        """True if nothing was computed: runs of shapes, which have no final figures."""
        # Shapes compute nothing, so their runs have no hash of parameters either
        return bool(self.records) and not any(
            record.learned.metrics
            or record.learned.loss is not None
            or record.learned.parameters_sha256
            for record in self.records
        )

    @cached_property
    def finals(self) -> list[Measure]:
        """The figures of the final parameters: the target's metric first, then the others, then
        the loss; none where only time passed."""
        if self.only_time:
            return []
        names = dict.fromkeys(name for record in self.records for name in record.learned.metrics)
        wanted = self.target.metric if self.target else None
        in_order = sorted(names, key=lambda name: name != wanted)
        # The loss is a field of the record, and stands at the end
        metrics = [measures.final_metric(n, self.target) for n in in_order if n != "loss"]
        return [*metrics, FINAL_LOSS]

    @cached_property
    def primary(self) -> Measure:
        """The first measure of the final parameters that can rank runs; the speed without one."""
        ranking = (measure for measure in self.finals if measure.rising is not None)
        return next(ranking, measures.PACE)

    @cached_property
    def measures(self) -> list[Measure]:
        """All measures of the table, in its order."""
        first = [TIME_TO_TARGET] if self.target and not self.only_time else []
        runs = (*measures.OF_RUNS, *self._known(measures.OF_STALENESS))
        return [*first, *self.finals, *runs, *self.of_machines]

    @cached_property
    def of_machines(self) -> list[Measure]:
        """The measures of how well unlike nodes were used, and of costs and energy, where the
        runs know them. Costs are left out if they are in several currencies."""
        currencies = {
            run.record.spending.currency for run in self.runs if run.record.spending.currency
        }
        # No rate of exchange is known here
        costs = measures.costs_in(*currencies) if len(currencies) == 1 else ()
        return self._known((*measures.OF_UNLIKE_NODES, *costs, *measures.OF_ENERGY))

    def _known(self, measures: Sequence[Measure]) -> list[Measure]:
        return [m for m in measures if any(row.values(m.read) for row in self.rows)]

    @property
    def seeds(self) -> int:
        """The largest number of completed seeds of any row."""
        return max((len(row.completed) for row in self.rows), default=0)

    def reached(self, row: Row) -> int:
        """Return in how many of its runs a row reached the target."""
        return len(row.values(TIME_TO_TARGET.read))

    def rival(self, row: Row) -> Row | None:
        """Return the row to compare `row` with; None for the baseline itself, or without any."""
        equal = [other for other in self.rows if other.ranks == row.ranks]
        if self.baseline is None:
            # Same budget and settings; another learning rate, say, would be part of the difference
            own = common_settings(row.source.experiment)
            rivals = [r for r in equal if r.single and common_settings(r.source.experiment) == own]
        else:
            named = [other for other in self.rows if other.name == self.baseline]
            labelled = [other for other in self.rows if other.label == self.baseline]
            # A label may stand at several numbers of ranks: then the row with the same one
            same = [other for other in equal if other.label == self.baseline]
            rivals = named or same or (labelled if len(labelled) == 1 else [])
        return rivals[0] if rivals and rivals[0] is not row else None

    def difference(self, row: Row, measure: Measure) -> Difference | None:
        """Return `row` - its rival, over the seeds that both completed."""
        rival = self.rival(row)
        return None if rival is None else self.between(row, rival, measure)

    def between(self, row: Row, other: Row, measure: Measure) -> Difference | None:
        """Return `row` - `other`, over the seeds that both completed."""
        values = row.values(measure.read), other.values(measure.read)
        difference = numbers.paired_difference(*values)
        if difference is None or measure.resolution is None:
            return difference
        # Each true time lies before the one read, by up to the spacing of the snapshots
        return difference.widened(*(each.mean(measure.resolution) or 0.0 for each in (row, other)))

    def _rank(self, row: Row) -> tuple[float, ...]:
        reached = self.reached(row) if self.target else 0
        time = row.mean(TIME_TO_TARGET.read) if reached else None
        final, train = row.mean(self.primary.read), row.mean(measures.TRAIN.read)
        by = (time, None if final is None else self.primary.order(final), train)
        # Rows are ranked by how often they reach the target, then by how soon.
        last = not row.completed, -reached / len(row.runs)
        return (*last, *(math.inf if value is None else value for value in by))

    # How figures show it

    @cached_property
    def lines(self) -> dict[str, str]:
        """The name of each completed row's line over numbers of ranks: its label if enough."""
        lines: dict[str, str] = {}
        # By name, so that the same strategy of two sources has one line at all numbers of ranks
        by_name = sorted(self.completed, key=lambda row: row.name)
        for rows in grouped(by_name, lambda row: row.ranks).values():
            names = numbered([row.label for row in rows], " #")
            lines.update(zip((row.name for row in rows), names, strict=True))
        return lines

    @cached_property
    def by_line(self) -> dict[str, list[Row]]:
        """The completed rows of each of the `lines`, best first."""
        return grouped(self.completed, lambda row: self.lines[row.name])

    @cached_property
    def styles(self) -> Mapping[str, Style]:
        """By the name of a completed row, its style. A strategy looks the same at every number
        of ranks, however well it does.

        No two strategies share dash and shape up to 24, so that they differ without colour as well.
        """
        # Styles follow names and not results: a strategy keeps its look while the names stay.
        rows = sorted(self.completed, key=lambda row: row.name)
        styles: dict[str, Style] = {}
        # The dash changes once the colours are used up, the shape with every line: on grey paper
        # these two have to be enough.
        for single in (True, False):
            own = dict.fromkeys(self.lines[row.name] for row in rows if row.single is single)
            colours, shapes = ([INK], [_STAR]) if single else (COLOURS, [*SIGNS])
            for index, line in enumerate(own):
                dash = DASHES[index // len(colours) % len(DASHES)]
                colour, shape = colours[index % len(colours)], shapes[index % len(shapes)]
                styles[line] = Style(colour, dash, shape)
        return {row.name: styles[self.lines[row.name]] for row in self.completed}

    @cached_property
    def widest(self) -> list[Row]:
        """The row of each strategy with the most ranks, which the detailed figures show."""
        # A line for every number of ranks would be more than can be told apart
        most = [max(rows, key=lambda row: row.ranks) for rows in self.by_line.values()]
        return [row for row in self.completed if row in most]

    @property
    def metric(self) -> str | None:
        """The metric to show next to the loss; None for a task without metrics."""
        key = self.primary.key
        return key.removeprefix(METRIC) if key.startswith(METRIC) else None

    def better(self, metric: str) -> str:
        """Return which direction is better, for the title of an axis; empty if unknown."""
        key = FINAL_LOSS.key if metric == "loss" else f"{METRIC}{metric}"
        rising = next((m.rising for m in self.finals if m.key == key), None)
        return "" if rising is None else f", {'higher' if rising else 'lower'} is better"
