"""Figures of loss and metric: at the snapshots and their nodes, in the steps, and at the end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from statistics import fmean
from typing import Any

import altair as alt
import numpy as np

from orchestra.records.report import Point
from orchestra.records.store import RunFolder
from orchestra.report.figures import frame
from orchestra.report.figures.frame import Figure, Look, Values, figure, layer, rounded, tips
from orchestra.report.rows import Row, grouped
from orchestra.report.study import Study

_SECTION = "convergence"
_POINTS = 10  # on a line, so that they can be told apart
_FOUR = ".4~g"
_POINT: frame.MarkStyle = {"filled": True, "size": 55, "opacity": 1}
_RING: frame.MarkStyle = {
    "size": 130, "strokeWidth": 2, "shape": "circle", "filled": False, "opacity": 1,
}  # fmt: skip
_BINS = 200  # parts of a run, of which each has a mean training loss
_SIGNS = 8  # on a line of training loss
_BATCHES = 4  # in a part at the least: a single batch says little


def curves(study: Study) -> Iterator[Figure]:
    """Yield loss and metric of the snapshots against seconds and against samples."""
    for axis in ("seconds", "samples"):
        for metric in filter(None, ("loss", study.metric)):
            if any(_points(run, metric) for run in study.runs):
                yield _curve(study, metric, axis)


def _curve(study: Study, metric: str, axis: str) -> Figure:
    rows = [row for row in study.widest if any(_points(run, metric) for run in row.completed)]
    each = [
        {"strategy": row.name, "seed": run.record.asked.seed, **_place([point], metric)}
        for row in rows
        for run in row.completed
        for point in _points(run, metric)
    ]
    target = study.target if study.target and study.target.metric == metric else None
    lines = [_means(row, metric, target.rising if target else None) for row in rows]
    means = [value for line in lines for value in line]
    # On a linear axis, a loss that spans more than a factor of ten would look flat at its end.
    log = metric == "loss" and frame.spans_much([value["value"] for value in each])
    switches = [value for row in rows for value in _switches(row, metric, axis, log)]
    keys = [f"grey rule: target {target.bound:g}"] if target else []
    keys += ["rings: switches"] if switches else []
    x = frame.along(axis, [*([", ".join(keys)] if keys else []), *_node_key(means)])
    y = frame.value_axis(f"{metric} at the snapshots{study.better(metric)}", log)
    look = Look(study.styles, [row.name for row in rows])
    place = x, y, look.colour
    rule = [{"target": target.bound}] if target else []  # it belongs to no strategy
    tooltip = [*tips(("step:Q", "switched after step")), *_tooltip(metric, "seed")]
    layers = [
        *_nodes(means, place),
        *_lines(each, lines, place, look, _tooltip(metric, "mean of seeds")),
        layer(rule, "rule", alt.Y("target:Q"), color=frame.FAINT, strokeDash=[3, 3]),
        layer(switches, "point", *place, tooltip, **_RING),
    ]
    several = any(len(row.completed) > 1 for row in rows)
    caption = " ".join(_caption(axis, several, means))
    title = f"{metric[0].upper()}{metric[1:]} against {axis}"
    return figure(f"{metric}-against-{axis}", title, caption, _SECTION, layers)


def _lines(
    each: Values,
    means: Sequence[Values],
    place: Sequence[Any],
    look: Look,
    tooltip: list[alt.Tooltip],
) -> list[alt.Chart]:
    """Draw a thin line for each seed; over them a thick one with points, which is their mean."""
    # so many points that they do not touch, the last one among them
    pointed = [v for line in means for v in line[:: -max(1, len(line) // _POINTS)][::-1]]
    if any("average" in value for value in pointed):
        average = ("average:Q", "average of the replicas", _FOUR)
        tooltip += tips(("worst:Q", "worst node", _FOUR), average)
    thin: frame.MarkStyle = {"strokeWidth": 1, "strokeOpacity": 0.35}
    return [
        frame.zoomable(layer(each, "line", *place, alt.Detail("seed:N"), **thin)),
        layer([v for line in means for v in line], "line", *place, look.dash, strokeWidth=2),
        layer(pointed, "point", *place, look.shape, tooltip, **_POINT),
    ]


def _nodes(means: Values, place: Sequence[Any]) -> list[alt.Chart]:
    """Draw a band from the nodes' mean to the worst node, and the replicas' average, dashed."""
    worst = [value for value in means if value.get("worst") is not None]
    averages = [{**v, "value": v["average"]} for v in means if v.get("average") is not None]
    return [
        layer(worst, "area", *place, alt.Y2("worst:Q"), opacity=0.16, line=False),
        layer(averages, "line", *place, strokeWidth=1.5, strokeDash=[4, 3]),
    ]


def _tooltip(metric: str, seed: str) -> list[alt.Tooltip]:
    return tips(
        "strategy:N", ("seed:N", seed), ("value:Q", metric, _FOUR),
        ("seconds:Q", "seconds", _FOUR), ("samples:Q", "samples", ",.0f"),
    )  # fmt: skip


def _points(run: RunFolder, metric: str) -> list[Point]:
    """Return the snapshots of `run` that have a finite `metric`."""
    # The loss of a run that diverged is infinite or none, which has no place on an axis
    return [point for point in run.curve if rounded(point.metrics.get(metric)) is not None]


def _place(points: Sequence[Point], metric: str) -> dict[str, Any]:
    """Return the mean position of `points`."""
    return {
        "seconds": fmean(point.seconds for point in points),
        "samples": round(fmean(point.samples for point in points)),
        "value": fmean(point.metrics[metric] for point in points),
    }


def _means(row: Row, metric: str, rising: bool | None) -> Values:
    """Return the mean over the seeds of the first snapshots, of the second ones, and so on.

    Where every run has nodes with models of their own, with the worst one and the average.
    """
    values: Values = []
    # Runs of one row may have ended after different numbers of snapshots
    for at_once in zip_longest(*(_points(run, metric) for run in row.completed)):
        points: list[Point] = [point for point in at_once if point is not None]
        value = {"strategy": row.name, "seed": len(points), **_place(points, metric)}
        worst = [point.worst(metric, rising) for point in points]
        averages = [point.average[metric] for point in points if point.average is not None]
        # A mean over some of the runs would jump where the others have no such figure
        if None not in worst:
            value["worst"] = rounded(fmean(w for w in worst if w is not None))
        if len(averages) == len(points) and None not in averages:
            value["average"] = rounded(fmean(averages))
            value["judged"] = min(len(point.nodes) for point in points)
            value["replicas"] = max(point.replicas for point in points)
        values.append(value)
    return values


def _switches(row: Row, metric: str, axis: str, log: bool) -> Iterator[dict[str, Any]]:
    """Yield where the runs of `row` switched, each on the line between two of its snapshots.

    The seconds are those at which the last step before the switch was over.
    """
    for run in row.completed:
        samples, points = run.record.switching.at_sample, _points(run, metric)
        lines = [line for steps in run.steps.values() for line in steps]
        before = [line["seconds"] for line in lines if samples and line["consumed"] <= samples]
        if not samples or not before or not points:
            continue
        at = {"seconds": max(before), "samples": samples}
        places = [getattr(point, axis) for point in points]
        heights = np.array([point.metrics[metric] for point in points])
        if log:  # where the line is straight on a logarithmic axis
            value = np.exp(np.interp(at[axis], places, np.log(heights)))
        else:
            value = np.interp(at[axis], places, heights)
        about = {"seed": run.record.asked.seed, "step": run.record.switching.at_step}
        yield {"strategy": row.name, **about, **at, "value": float(value)}


def _node_key(means: Values) -> list[str]:
    """Return the key of the lines and the band below the figure; empty without nodes."""
    if not any(value.get("average") is not None for value in means):
        return []
    worst = any(value.get("worst") is not None for value in means)
    return ["line: mean of nodes" + ", band: to the worst" * worst + ", dashed: their average"]


def _caption(axis: str, several: bool, means: Values) -> Iterator[str]:
    """Yield the sentences that the key below the axis leaves out."""
    thick = " (thick: mean over the seeds; thin: each seed)" * several
    yield f"Copies of the model were taken in passing, and evaluated after the run{thick}."
    yield {
        "seconds": "Further left is sooner.",
        "samples": "At equal samples curves differ by what the steps were worth, not by how long "
        "they took; strategies with the same arithmetic lie on one another.",
    }[axis]
    if _node_key(means):
        some = any(value["judged"] < value["replicas"] for value in means if "judged" in value)
        drawn = " (of 16 of them, drawn by the seed)" * some
        yield (
            f"Where each node has a model of its own the line is the mean of the nodes{drawn}, the "
            "band goes to the worst node, and the dashed line is the average of the replicas "
            "(under Elastic their centre), a model that no node has."
        )


def in_steps(study: Study) -> Iterator[Figure]:
    """Yield the training loss, and what strategies logged by each name, against samples."""
    lines = (line for run in study.runs for own in run.steps.values() for line in own)
    names = dict.fromkeys(name for line in lines for name in line.get("logged", ()))
    for name in (None, *names):
        yield from _in_steps(study, name)


def _in_steps(study: Study, name: str | None) -> Iterator[Figure]:
    """Yield the training loss, or the values logged as `name`, as means over up to 200 parts."""
    runs = [run for row in study.widest for run in row.completed if run.steps]
    if not runs:
        return
    batch = max(run.record.batching.global_batch for run in runs)
    longest = max(run.record.learned.samples for run in runs)
    # Whole batches of the largest row: parts of all rows have the same bounds
    width = batch * max(_BATCHES, round(longest / batch / _BINS))
    values = [value for row in study.widest for value in _mean_values(row, width, name)]
    if not values:
        return
    several = any(len(row.completed) > 1 for row in study.widest)
    band = "; the band is from the lowest to the highest seed" * several
    what = name or "training loss"
    about = f"{name} as strategies log it" if name else "The loss on the batches just trained on"
    caption = f"{about}, averaged over the workers and over {width:,} samples at a time{band}."
    strategies = list(dict.fromkeys(value["strategy"] for value in values))
    look = Look(study.styles, strategies)
    log = frame.spans_much([v["value"] for v in values])
    y = frame.value_axis(what if name else f"{what}, lower is better", log)
    place = frame.along("samples"), look.colour
    tooltip = tips(
        "strategy:N", ("samples:Q", "", ",.0f"), ("value:Q", what, _FOUR),
        ("low:Q", "lowest seed", _FOUR), ("high:Q", "highest seed", _FOUR),
    )  # fmt: skip
    ends = alt.Y("low:Q"), alt.Y2("high:Q")
    layers = [
        frame.zoomable(layer(values, "line", *place, y, look.dash, tooltip, strokeWidth=1.8)),
        layer(values, "area", *place, *ends, opacity=0.16, line=False),
        layer(_signs(values, strategies), "point", *place, y, look.shape, **_POINT),
    ]
    file, section = (f"logged-{name}", "logged") if name else ("training-loss", _SECTION)
    title = f"{what if name else what.capitalize()} against samples"
    yield figure(file, title, caption, section, layers)


def _signs(values: Values, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield where a line shows the shape of its strategy: a few places, not the same for any two.

    So lines that are equal, of strategies with the same arithmetic, show the shapes of each.
    """
    for place, name in enumerate(names):
        line = [value for value in values if value["strategy"] == name]
        # No fewer than there are names, each of which needs places of its own
        every = max(len(names), len(line) // _SIGNS)
        yield from line[place * every // len(names) :: every]


def _mean_values(row: Row, width: int, name: str | None) -> Values:
    """Return the mean over the seeds in each part, with the lowest and the highest of them."""
    by_part: dict[int, list[float]] = defaultdict(list)
    for run in row.completed:
        for part, value in _parts(run, width, name).items():
            by_part[part].append(value)
    return [
        {
            "strategy": row.name, "samples": part * width + width // 2, "value": fmean(values),
            "low": min(values), "high": max(values),
        }
        for part, values in sorted(by_part.items())
    ]  # fmt: skip


def _parts(run: RunFolder, width: int, name: str | None) -> dict[int, float]:
    """Return by part the mean loss of its samples, or of the values logged as `name` in its steps.

    What is left over at the end counts for the last whole part.
    """
    # A part of a few samples at the end would be mostly noise
    last = max(0, run.record.learned.samples // width - 1)
    totals: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for lines in run.steps.values():
        for line in lines:
            value = line.get("logged", {}).get(name) if name else line["loss"]
            if rounded(value) is not None:
                # `consumed` counts the step's own samples, which lie before it
                total = totals[min(last, max(0, line["consumed"] - 1) // width)]
                # Workers with larger parts of the batch count for more, as in the gradient
                weight = 1 if name else line["samples"]
                total[0] += value * weight
                total[1] += weight
    return {part: total / weight for part, (total, weight) in totals.items() if weight}


def trade(study: Study) -> Iterator[Figure]:
    """Yield the final metric against the seconds of training, a point for each seed."""
    metric = study.metric or "loss"
    seeds: Values = [
        {
            "strategy": row.name,
            "seed": str(run.record.asked.seed),
            "seconds": seconds,
            "value": value,
        }
        for row in study.widest
        for run in row.completed
        if (seconds := run.record.time.training) is not None
        and (value := rounded(run.record.learned.figures.get(metric))) is not None
    ]
    if not seeds:
        return
    splits = {run.record.asked.judged_on for run in study.runs}
    # Runs of several sources may be judged on different splits
    judged = f" on the {splits.pop()} data" if len(splits) == 1 else ""
    caption = (
        f"Each small point is one seed, each large one their mean: {metric}{judged} after the same "
        "number of samples, against the seconds that these took. Set-up is not in it."
    )
    of_rows = grouped(seeds, lambda value: value["strategy"])
    means = [
        {"strategy": name, "seed": f"mean of {len(values)}"}
        | {key: fmean(value[key] for value in values) for key in ("seconds", "value")}
        for name, values in of_rows.items()
    ]
    look = Look(study.styles, of_rows)
    scale = alt.Scale(zero=True, nice=False, padding=12)
    x = alt.X("seconds:Q", title="seconds of training, the whole budget", scale=scale)
    y = frame.value_axis(f"final {metric}{study.better(metric)}")
    tooltip = tips(
        "strategy:N", "seed:N", ("seconds:Q", "training seconds", _FOUR),
        ("value:Q", f"final {metric}", _FOUR),
    )  # fmt: skip
    channels = x, y, look.colour, look.shape, tooltip
    small = layer(seeds, "point", *channels, filled=True, size=45, opacity=0.5)
    large = layer(means, "point", *channels, filled=True, size=170, opacity=1)
    title = f"Final {metric} against training seconds"
    yield figure("metric-against-time", title, caption, _SECTION, [frame.zoomable(small), large])
