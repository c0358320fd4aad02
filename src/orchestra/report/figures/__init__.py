"""The figures of a report."""

from __future__ import annotations

from dataclasses import replace

from orchestra.report.figures.bars import links, seconds, staleness, traffic
from orchestra.report.figures.cluster import clusters
from orchestra.report.figures.curves import curves, trade, training_loss
from orchestra.report.figures.frame import Figure
from orchestra.report.figures.messages import messages
from orchestra.report.figures.results import differences, scaling, time_to_target
from orchestra.report.figures.timeline import timelines
from orchestra.report.rows import numbered
from orchestra.report.study import Study

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


def figures(study: Study) -> list[Figure]:
    """All figures that the runs of `study` hold data for, in the order of a report."""
    found = [figure for family in _FAMILIES for figure in family(study)]
    names = numbered([figure.name for figure in found], "--")
    return [replace(figure, name=name) for figure, name in zip(found, names, strict=True)]
