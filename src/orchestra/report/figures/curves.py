"""How the validation figures came about, against seconds and against samples; of nodes as well."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from statistics import fmean
from typing import Any

import altair as alt

from orchestra.records.report import Point
from orchestra.report.collect import RunData
from orchestra.report.figures.frame import (
    FAINT,
    Figure,
    Look,
    Values,
    along,
    figure,
    height_scale,
    marks,
    rounded,
    spans_much,
    zoomable,
)
from orchestra.report.figures.subject import FigureData
from orchestra.report.rows import ReportTarget, Row

SECTION = "convergence"
_AXES = ("seconds", "samples")
_POINTS = 10  # on a line, so that they can be told apart


def curves(subject: FigureData) -> list[Figure]:
    """Loss and metric of the snapshots against seconds and against samples."""
    found = []
    for axis in _AXES:
        for metric in ("loss", subject.metric):
            if metric is not None and any(_points(run, metric) for run in subject.runs):
                found.append(_curve(subject, metric, axis))
    return found


def _curve(subject: FigureData, metric: str, axis: str) -> Figure:
    rows = [row for row in subject.widest if any(_points(run, metric) for run in row.completed)]
    each = [value for row in rows for value in _each(row, metric)]
    log = metric == "loss" and spans_much([value["value"] for value in each])
    switches = [value for row in rows for value in _switches(row, metric, axis, log)]
    target = subject.target if subject.target and subject.target.metric == metric else None
    y = alt.Y(
        "value:Q",
        title=f"{metric} at the snapshots{subject.better(metric)}",
        scale=height_scale(log),
        axis=alt.Axis(tickCount=6),
    )
    look = Look({row.name: subject.styles[row.name] for row in rows})
    rising = target.rising if target else None
    means = {row.name: _mean(row, metric, rising) for row in rows}
    every = [value for values in means.values() for value in values]
    x = along(axis, [*_keys(target, bool(switches)), *key(every)])
    layers = [*node_layers(every, x, y, look), *_lines(each, means, x, y, look, metric)]
    layers += [_rule(target)] if target else []
    layers += [_marked(switches, x, y, look, metric)] if switches else []
    several = max(len(row.completed) for row in rows) > 1
    return figure(
        f"{metric}-against-{axis}",
        f"{metric[0].upper()}{metric[1:]} against {axis}",
        " ".join([_caption(axis, several, target, bool(switches)), caption(every)]),
        SECTION,
        layers,
    )


def _lines(
    each: Values, means: Mapping[str, Values], x: alt.X, y: alt.Y, look: Look, metric: str
) -> list[alt.Chart]:
    """A thin line for each seed; over them a thick one with points, which is their mean."""
    every = [value for values in means.values() for value in values]
    pointed = [value for values in means.values() for value in _thinned(values)]
    seeds = (
        marks(each)
        .mark_line(strokeWidth=1, strokeOpacity=0.35)
        .encode(x, y, look.colour(), detail="seed:N")
    )
    mean = marks(every).mark_line(strokeWidth=2).encode(x, y, look.colour(), look.dash())
    tooltip = [*_tooltip(metric, "mean of seeds"), *_node_tooltips(pointed)]
    points = marks(pointed).mark_point(filled=True, size=55, opacity=1)
    points = points.encode(x, y, look.colour(), look.shape(), tooltip=tooltip)
    return [zoomable(seeds), mean, points]


def _thinned(values: Values) -> Values:
    """So many of them that points do not touch, the last one among them."""
    return values[:: -max(1, len(values) // _POINTS)][::-1]


def _node_tooltips(values: Values) -> list[alt.Tooltip]:
    if not any("average" in value for value in values):
        return []
    return [
        alt.Tooltip("worst:Q", title="worst node", format=".4~g"),
        alt.Tooltip("average:Q", title="average of the replicas", format=".4~g"),
    ]


def _rule(target: ReportTarget) -> alt.Chart:
    """The target across the figure; it belongs to no strategy."""
    place = alt.Chart(alt.InlineData(values=[{"target": target.bound}]))
    rule: alt.Chart = place.mark_rule(color=FAINT, strokeDash=[3, 3])
    return rule.encode(alt.Y("target:Q"))


def _marked(switches: Values, x: alt.X, y: alt.Y, look: Look, metric: str) -> alt.Chart:
    """Where each seed's switch happened, on its own line."""
    rings: alt.Chart = marks(switches).mark_point(
        size=130, strokeWidth=2, shape="circle", filled=False, opacity=1
    )
    fields = [
        alt.Tooltip("step:Q", title="switched after step"),
        *_tooltip(metric, "seed"),
    ]
    return rings.encode(x, y, look.colour(), tooltip=fields)


def _tooltip(metric: str, seed: str) -> list[alt.Tooltip]:
    return [
        alt.Tooltip("strategy:N"),
        alt.Tooltip("seed:N", title=seed),
        alt.Tooltip("value:Q", title=metric, format=".4~g"),
        alt.Tooltip("seconds:Q", title="seconds", format=".4~g"),
        alt.Tooltip("samples:Q", title="samples", format=",.0f"),
    ]


def _points(run: RunData, metric: str) -> list[Point]:
    """The snapshots of `run` that have a finite `metric`."""
    found = (point for point in run.curve if rounded(point.metrics.get(metric)) is not None)
    return list(found)


def _each(row: Row, metric: str) -> Values:
    return [
        {"strategy": row.name, "seed": run.record.seed, **_place(point, metric)}
        for run in row.completed
        for point in _points(run, metric)
    ]


def _place(point: Point, metric: str) -> dict[str, Any]:
    return {
        "seconds": rounded(point.seconds),
        "samples": point.samples,
        "value": rounded(point.metrics[metric]),
    }


def _mean(row: Row, metric: str, rising: bool | None) -> Values:
    """The mean over the seeds of the first snapshots, of the second ones, and so on."""
    of_runs = [_points(run, metric) for run in row.completed]
    values = []
    for at_once in zip_longest(*of_runs):
        points = [point for point in at_once if point is not None]
        values.append(
            {
                "strategy": row.name,
                "seed": len(points),
                "seconds": rounded(fmean(point.seconds for point in points)),
                "samples": round(fmean(point.samples for point in points)),
                "value": rounded(fmean(point.metrics[metric] for point in points)),
                **_of_nodes(points, metric, rising),
            }
        )
    return values


def _of_nodes(points: Sequence[Point], metric: str, rising: bool | None) -> dict[str, Any]:
    """The worst node and the average of the replicas, where there are some in every run."""
    worst = [value for point in points if (value := point.worst(metric, rising)) is not None]
    averages = [point.average[metric] for point in points if point.average is not None]
    found: dict[str, Any] = {}
    if len(worst) == len(points):
        found["worst"] = rounded(fmean(worst))
    if len(averages) == len(points) and None not in averages:
        judged = min(len(point.nodes) for point in points)
        replicas = max(point.replicas for point in points)
        found |= {"average": rounded(fmean(averages)), "judged": judged, "replicas": replicas}
    return found


def _switches(row: Row, metric: str, axis: str, log: bool) -> Values:
    """Where the runs of `row` switched, each between two snapshots of its own."""
    values: Values = []
    for run in row.completed:
        step, points = run.record.switched_at_step, _points(run, metric)
        at = _switch_of(run)
        if at is None or not points:
            continue
        places = [getattr(point, axis) for point in points]
        heights = [point.metrics[metric] for point in points]
        value = _between(at[axis], places, heights, log)
        values.append(
            {
                "strategy": row.name,
                "seed": run.record.seed,
                "step": step,
                "seconds": rounded(at["seconds"]),
                "samples": at["samples"],
                "value": rounded(value),
            }
        )
    return values


def _switch_of(run: RunData) -> dict[str, float] | None:
    """After how many samples `run` switched, and when its last step before that was over."""
    samples = run.record.switched_at_sample
    lines = [line for steps in run.steps.values() for line in steps]
    before = [line["seconds"] for line in lines if samples and line["consumed"] <= samples]
    return {"seconds": max(before), "samples": samples} if samples and before else None


def _between(at: float, places: Sequence[float], heights: Sequence[float], log: bool) -> float:
    """The height at `at` of the line through `places` and `heights`; beyond them, of its end.

    With `log` the line is straight on a logarithmic axis.
    """
    if log:
        return math.exp(_between(at, places, [math.log(height) for height in heights], False))
    for left, right, low, high in zip(places, places[1:], heights, heights[1:], strict=False):
        if left <= at <= right and right > left:
            return low + (high - low) * (at - left) / (right - left)
    return heights[0] if at < places[0] else heights[-1]


def _keys(target: ReportTarget | None, switch: bool) -> list[str]:
    """What is what, below the figure, where no line is in the way."""
    keys = [f"grey rule: target {target.bound:g}"] if target else []
    keys += ["rings: switches"] if switch else []
    return [", ".join(keys)] if keys else []


def _caption(axis: str, several: bool, target: ReportTarget | None, switch: bool) -> str:
    parts = [
        "Copies of the model were taken in passing, and evaluated after the run"
        + (" (thick: mean over the seeds; thin: each seed)." if several else ".")
    ]
    if axis == "seconds":
        parts.append("Further left is sooner.")
    else:
        parts.append(
            "At equal samples curves differ by what the steps were worth, not by how long they "
            "took; strategies with the same arithmetic lie on one another."
        )
    if target:
        parts.append("The grey rule is the target.")
    if switch:
        parts.append("Rings mark where a switch happened.")
    return " ".join(parts)


DASH = [4, 3]


def node_layers(means: Values, x: alt.X, y: alt.Y, look: Look) -> list[alt.Chart]:
    """A band from the nodes' mean to the worst node, and the average of the replicas, dashed.

    Args:
        means: the points of the curves; those of nodes have the fields "worst" and "average".
    """
    worst = [value for value in means if value.get("worst") is not None]
    averages = [
        {**value, "value": value["average"]} for value in means if value.get("average") is not None
    ]
    layers = []
    if worst:
        band = marks(worst).mark_area(opacity=0.16, line=False)
        layers.append(band.encode(x, y, alt.Y2("worst:Q"), look.colour()))
    if averages:
        line = marks(averages).mark_line(strokeWidth=1.5, strokeDash=DASH)
        layers.append(line.encode(x, y, look.colour()))
    return layers


def key(means: Values) -> list[str]:
    """What is what, in a line; none without any."""
    if not any(value.get("average") is not None for value in means):
        return []
    worst = any(value.get("worst") is not None for value in means)
    return ["line: mean of nodes" + ", band: to the worst" * worst + ", dashed: their average"]


def caption(means: Values) -> str:
    """What the layers are; empty without any."""
    if not any(value.get("average") is not None for value in means):
        return ""
    some = any(value["judged"] < value["replicas"] for value in means if "judged" in value)
    return (
        "Where each node has a model of its own the line is the mean of the nodes"
        + (" (of 16 of them, drawn by the seed)" * some)
        + ", the band goes to the worst node, and the dashed line is the average of the replicas "
        "(under Elastic their centre), a model that no node has."
    )
