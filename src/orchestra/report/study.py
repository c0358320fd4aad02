"""The runs of a report as one study: its rows best first, and each beside its rival."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from orchestra.errors import InputError, nearest
from orchestra.report.collect import Source
from orchestra.report.rows import (
    PACE,
    SENT,
    SETUP,
    STALENESS,
    STALEST,
    TIME_TO_TARGET,
    TRAIN,
    Difference,
    Measure,
    ReportTarget,
    Row,
    common_settings,
    final_measures,
    paired_difference,
    target_of,
)

_AT_WILL = ("checkpoint_every", "patience")
"""Settings that make no run better or worse."""


@dataclass(frozen=True)
class Study:
    """All that a page says follows from this.

    `rows` are in the order of the records; `baseline` is what differences are taken from: a label
    or the name of a row; None for one process with all cores.
    """

    sources: Sequence[Source]
    rows: Sequence[Row]
    baseline: str | None = None

    def __post_init__(self) -> None:
        known = {row.label for row in self.rows} | {row.name for row in self.rows}
        if self.baseline is not None and self.baseline not in known:
            raise InputError(
                f"--baseline: no row {self.baseline!r}; {nearest(self.baseline, known)}"
            )

    @cached_property
    def target(self) -> ReportTarget | None:
        """What all runs were to reach; None where they had no or different targets."""
        targets = {target_of(source.experiment) for source in self.sources}
        return targets.pop() if len(targets) == 1 else None

    @cached_property
    def differing(self) -> dict[str, list[tuple[Source, object]]]:
        """Settings in which the sources differ, with the value of each: none in a fair study.

        A record from before there was a setting says nothing about it.
        """
        settings = [common_settings(source.experiment) for source in self.sources]
        keys = dict.fromkeys(key for each in settings for key in each if key not in _AT_WILL)
        known = {
            key: [
                (s, each[key])
                for s, each in zip(self.sources, settings, strict=True)
                if key in each
            ]
            for key in keys
        }
        return {
            key: values
            for key, values in known.items()
            if len({repr(value) for _, value in values}) > 1
        }

    @cached_property
    def finals(self) -> list[Measure]:
        """The figures of the final parameters, the chief one first; none where only time passed."""
        return [] if self.only_time else final_measures(self.rows, self.target)

    @cached_property
    def chief(self) -> Measure:
        """What final parameters are ranked by; the speed where there are none."""
        return next((measure for measure in self.finals if measure.rising is not None), PACE)

    @cached_property
    def only_time(self) -> bool:
        """Whether nothing was computed: runs of shapes, which have no final figures."""
        records = [run.record for row in self.rows for run in row.completed]
        return bool(records) and not any(
            record.metrics or record.final_loss is not None or record.parameters_sha256
            for record in records
        )

    @cached_property
    def measures(self) -> list[Measure]:
        """Every figure of the table, in its order."""
        first = [TIME_TO_TARGET] if self.target and not self.only_time else []
        stale = [STALENESS, STALEST] if any(row.values(STALENESS.read) for row in self.rows) else []
        return [*first, *self.finals, TRAIN, PACE, SETUP, SENT, *stale]

    @cached_property
    def ranked(self) -> list[Row]:
        """The rows, best first: who reaches the target most often, then soonest; else by the chief
        figure. Rows without a completed run are last."""
        return sorted(self.rows, key=self._rank)

    @property
    def seeds(self) -> int:
        """The largest number of completed seeds of any row."""
        return max((len(row.completed) for row in self.rows), default=0)

    def reached(self, row: Row) -> int:
        """In how many of its runs a row reached the target."""
        return len(row.values(TIME_TO_TARGET.read))

    def rival(self, row: Row) -> Row | None:
        """The row that `row` is measured against; None for itself, and where there is none."""
        if self.baseline is None:
            rivals = [other for other in self._alike(row) if other.single]
        else:
            named = [other for other in self.rows if other.name == self.baseline]
            labelled = [other for other in self.rows if other.label == self.baseline]
            equal = [other for other in labelled if other.ranks == row.ranks]
            rivals = named or equal or (labelled if len(labelled) == 1 else [])
        return rivals[0] if rivals and rivals[0] is not row else None

    def difference(self, row: Row, measure: Measure) -> Difference | None:
        """`row` - its rival, over the seeds that both have."""
        rival = self.rival(row)
        return None if rival is None else self.between(row, rival, measure)

    def between(self, row: Row, other: Row, measure: Measure) -> Difference | None:
        """`row` - `other`, over the seeds that both have."""
        difference = paired_difference(row.values(measure.read), other.values(measure.read))
        if difference is None or measure.resolution is None:
            return difference
        coarse = [each.mean(measure.resolution) or 0.0 for each in (row, other)]
        return difference.widened(*coarse)

    def _alike(self, row: Row) -> list[Row]:
        """Rows of the same experiment on as many ranks."""
        settings = common_settings(row.source.experiment)
        return [
            other
            for other in self.rows
            if other.ranks == row.ranks and common_settings(other.source.experiment) == settings
        ]

    def _rank(self, row: Row) -> tuple[float, ...]:
        infinity = float("inf")
        reached = self.reached(row) if self.target else 0
        time = row.mean(TIME_TO_TARGET.read) if reached else None
        chief = row.mean(self.chief.read)
        train = row.mean(TRAIN.read)
        return (
            not row.completed,
            -reached / len(row.runs),
            infinity if time is None else time,
            infinity if chief is None else self.chief.order(chief),
            infinity if train is None else train,
        )
