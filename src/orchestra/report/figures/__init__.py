"""The figures of a report."""

from __future__ import annotations

from dataclasses import replace

from orchestra.report.figures import bars, cluster, curves, results, timeline
from orchestra.report.figures.frame import Figure
from orchestra.report.rows import numbered
from orchestra.report.study import Study

_FAMILIES = (
    cluster.clusters, results.time_to_target, curves.trade, curves.curves, curves.in_steps,
    results.differences, bars.seconds, bars.batches, bars.traffic, bars.links, bars.staleness,
    results.scaling, results.combinations, timeline.timelines,
)  # fmt: skip


def figures(study: Study) -> list[Figure]:
    """Return all figures that the runs of `study` hold data for, in the order of a report."""
    found = [figure for family in _FAMILIES for figure in family(study)]
    names = numbered([figure.name for figure in found], "--")
    return [replace(figure, name=name) for figure, name in zip(found, names, strict=True)]
