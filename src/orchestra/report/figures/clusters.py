"""The clusters that runs were simulated on."""

from __future__ import annotations

from dataclasses import replace

from orchestra.report.collect import RunData
from orchestra.report.figures.cluster import cluster_figure
from orchestra.report.figures.figure import Figure
from orchestra.report.figures.subject import Subject


def clusters(subject: Subject) -> list[Figure]:
    """One for each cluster, with the ranks of the run that has most there."""
    widest: dict[str, RunData] = {}
    for run in subject.runs:
        name = run.record.cluster
        if name and (name not in widest or _flows(run) > _flows(widest[name])):
            widest[name] = run
    found = []
    for run in widest.values():
        if run.cluster is not None:
            drawn, width = cluster_figure(run.cluster, _flows(run))
            found.append(replace(drawn, least_width=width))
    return found


def _flows(run: RunData) -> int:
    """Its processes: `Single` is one, whatever the budget."""
    record = run.record
    return record.ranks if record.workers + record.servers > 1 else 1
