"""What the project is about: how good, against how soon."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import altair as alt

from orchestra.records.record import RunRecord
from orchestra.report.figures.figure import Figure
from orchestra.report.figures.frame import (
    Look,
    Values,
    figure,
    height_scale,
    marks,
    numbers,
    zoomable,
)
from orchestra.report.figures.subject import Subject
from orchestra.report.rows import Row


def trade(subject: Subject) -> list[Figure]:
    """The final metric against the seconds of training, a point for each seed."""
    metric = subject.metric or "loss"
    if not any(_seeds(row, metric) for row in subject.widest):
        return []
    splits = {run.record.judged_on for run in subject.runs}
    judged = f" on the {splits.pop()} data" if len(splits) == 1 else ""
    caption = (
        f"Each small point is one seed, each large one their mean: {metric}{judged} after the same "
        "number of samples, against the seconds that these took. Set-up is not in it."
    )
    title = f"Final {metric} against training seconds"
    return [figure("metric-against-time", title, caption, "convergence", _layers(subject, metric))]


def _layers(subject: Subject, metric: str) -> list[alt.Chart]:
    values = [value for row in subject.widest for value in _seeds(row, metric)]
    means = [value for row in subject.widest for value in _mean(row, metric)]
    look = Look({value["strategy"]: subject.styles[value["strategy"]] for value in means})
    x = alt.X(
        "seconds:Q",
        title="seconds of training, the whole budget",
        scale=alt.Scale(zero=True, nice=False, padding=12),
    )
    y = alt.Y(
        "value:Q",
        title=f"final {metric}{subject.better(metric)}",
        axis=alt.Axis(tickCount=6),
        scale=height_scale(),
    )
    tooltip = [
        alt.Tooltip("strategy:N"),
        alt.Tooltip("seed:N"),
        alt.Tooltip("seconds:Q", title="training seconds", format=".4~g"),
        alt.Tooltip("value:Q", title=f"final {metric}", format=".4~g"),
    ]
    channels: dict[str, Any] = {"color": look.colour(), "shape": look.shape(), "tooltip": tooltip}
    small = marks(values).mark_point(filled=True, size=45, opacity=0.5)
    large = marks(means).mark_point(filled=True, size=170, opacity=1)
    return [zoomable(small.encode(x, y, **channels)), large.encode(x, y, **channels)]


def _seeds(row: Row, metric: str) -> Values:
    seconds = row.values(lambda record: record.train_seconds)
    found = row.values(lambda record: _final(record, metric))
    return [
        {
            "strategy": row.name,
            "seed": str(seed),
            "seconds": numbers(seconds[seed]),
            "value": numbers(value),
        }
        for seed, value in found.items()
        if seed in seconds
    ]


def _mean(row: Row, metric: str) -> Values:
    values = _seeds(row, metric)
    if not values:
        return []
    about = {"strategy": row.name, "seed": f"mean of {len(values)}"}
    means = {name: numbers(fmean(v[name] for v in values)) for name in ("seconds", "value")}
    return [{**about, **means}]


def _final(record: RunRecord, metric: str) -> float | None:
    value = record.metrics.get(metric, record.final_loss if metric == "loss" else None)
    return numbers(value)
