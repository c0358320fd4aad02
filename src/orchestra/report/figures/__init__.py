"""The figures of a report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from orchestra.report.collect import Source
from orchestra.report.figures.cluster import clusters
from orchestra.report.figures.curves import curves
from orchestra.report.figures.frame import Figure, save
from orchestra.report.figures.messages import messages
from orchestra.report.figures.results import differences, time_to_target, trade
from orchestra.report.figures.scaling import scaling
from orchestra.report.figures.seconds import seconds, staleness
from orchestra.report.figures.subject import FigureData, Style, style_of
from orchestra.report.figures.timeline import timelines
from orchestra.report.figures.traffic import links, traffic
from orchestra.report.figures.training_loss import training_loss
from orchestra.report.rows import Row
from orchestra.report.study import Study

__all__ = ["Figure", "Style", "figures", "save", "style_of"]

_FAMILIES = (
    clusters,
    time_to_target,
    trade,
    curves,
    training_loss,
    differences,
    seconds,
    traffic,
    links,
    staleness,
    scaling,
    timelines,
    messages,
)


def figures(
    sources: Sequence[Source], rows: Sequence[Row], baseline: str | None = None
) -> list[Figure]:
    """All figures that the runs of `rows` hold data for, in the order of a report.

    `rows` are of `sources`; differences are to the row or label `baseline`, or to one process.
    """
    subject = FigureData(Study(sources, rows, baseline))
    found = [figure for family in _FAMILIES for figure in family(subject)]
    return list(_named_apart(found))


def _named_apart(figures: Sequence[Figure]) -> Iterator[Figure]:
    """`figures` with a number behind each name that another has, too."""
    counts: Counter[str] = Counter()
    for figure in figures:
        counts[figure.name] += 1
        number = counts[figure.name]
        yield figure if number == 1 else replace(figure, name=f"{figure.name}--{number}")
