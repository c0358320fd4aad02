"""What came out: time to target, final metric against time, paired differences to a baseline."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import altair as alt

from orchestra.records.record import RunRecord
from orchestra.report.figures.frame import (
    BAR,
    FAINT,
    LANE,
    POINT,
    Figure,
    Look,
    Values,
    figure,
    height_scale,
    lane,
    lane_words,
    marks,
    rounded,
    zoomable,
)
from orchestra.report.figures.subject import FigureData
from orchestra.report.numbers import THIN, decimals_for, figure_text, fixed, places_of, uncertain
from orchestra.report.rows import (
    CONFIDENCE,
    TIME_TO_TARGET,
    TRAIN,
    Difference,
    Measure,
    Row,
    known_to,
)


def time_to_target(subject: FigureData) -> list[Figure]:
    """A dot for each seed, a bar for their mean; the first strategy reached it soonest."""
    target, rows = subject.target, sorted(subject.rows, key=_target_rank)
    if target is None or not any(_times(row) for row in rows):
        return []
    sign = "≥" if target.rising else "≤"
    reached = f"{target.metric} {sign} {target.bound:g}"
    caption = (
        f"Training seconds at the first snapshot with {reached}, soonest first: a dot for each "
        "seed, a bar for their mean; a line from the snapshot before, for it was reached between "
        "the two. ± is the spacing of the snapshots, or the spread over the seeds if that is "
        "larger. Where each node has a model of its own, the mean of the nodes reached it. Set-up "
        "is not in it."
    )
    layers = [
        *_target_marks(subject, rows, reached),
        *lane_words({row.name: _target_text(row) for row in rows}),
    ]
    height = LANE * len(rows)
    return [figure("time-to-target", "Time to target", caption, "target", layers, height)]


def _target_marks(subject: FigureData, rows: list[Row], reached: str) -> list[alt.Chart]:
    x = alt.X(
        "seconds:Q",
        title=f"seconds of training until {reached}",
        scale=alt.Scale(zero=True),
    )
    y = lane([row.name for row in rows])
    look = Look({row.name: subject.styles[row.name] for row in rows})
    colour, shape = look.colour(legend=False), look.shape(legend=False)
    means = [
        {"strategy": row.name, "seconds": rounded(fmean(_times(row).values()))}
        for row in rows
        if _times(row)
    ]
    seeds = [
        {
            "strategy": row.name,
            "seed": seed,
            "seconds": rounded(seconds),
            "after": rounded(row.values(lambda r: r.time_to_target_after_seconds).get(seed)),
        }
        for row in rows
        for seed, seconds in _times(row).items()
    ]
    tooltip = [
        alt.Tooltip("strategy:N"),
        alt.Tooltip("seed:N"),
        alt.Tooltip("after:Q", title="reached after, in seconds", format=".4~g"),
        alt.Tooltip("seconds:Q", title="and by", format=".4~g"),
    ]
    bars = marks(means).mark_bar(**BAR, opacity=0.45, cornerRadiusEnd=2).encode(x, y, colour)
    known = [seed for seed in seeds if seed["after"] is not None]
    between = marks(known).mark_rule(**POINT, strokeWidth=1.5)
    layers = [bars]
    if known:  # a record from before does not say
        layers.append(between.encode(alt.X("after:Q"), alt.X2("seconds:Q"), y, colour))
    dots = marks(seeds).mark_point(**POINT, filled=True, size=50, opacity=1)
    return [*layers, dots.encode(x, y, colour, shape, tooltip=tooltip)]


def _times(row: Row) -> dict[int, float]:
    return row.values(lambda record: record.time_to_target_seconds)


def _target_rank(row: Row) -> tuple[int, float]:
    """First those whose every seed reached it, by their mean; last those of which none did."""
    times = list(_times(row).values())
    if not times:
        return 2, 0.0
    return int(len(times) < len(row.completed)), fmean(times)


def _target_text(row: Row) -> str:
    times, n = list(_times(row).values()), len(row.completed)
    if not times:
        return "not reached"
    part = "" if len(times) == n else f" ({len(times)} of {n} seeds)"
    known = known_to(row, TIME_TO_TARGET)
    if known is None:
        return figure_text(fmean(times), "s") + part
    return f"{uncertain(fmean(times), known)}{THIN}s{part}"


def trade(subject: FigureData) -> list[Figure]:
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
    return [
        figure("metric-against-time", title, caption, "convergence", _trade_layers(subject, metric))
    ]


def _trade_layers(subject: FigureData, metric: str) -> list[alt.Chart]:
    values = [value for row in subject.widest for value in _seeds(row, metric)]
    means = [value for row in subject.widest for value in _trade_mean(row, metric)]
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
            "seconds": rounded(seconds[seed]),
            "value": rounded(value),
        }
        for seed, value in found.items()
        if seed in seconds
    ]


def _trade_mean(row: Row, metric: str) -> Values:
    values = _seeds(row, metric)
    if not values:
        return []
    about = {"strategy": row.name, "seed": f"mean of {len(values)}"}
    means = {name: rounded(fmean(v[name] for v in values)) for name in ("seconds", "value")}
    return [{**about, **means}]


def _final(record: RunRecord, metric: str) -> float | None:
    value = record.metrics.get(metric, record.final_loss if metric == "loss" else None)
    return rounded(value)


_COARSE = ", to which the spacing of the snapshots is added"


def differences(subject: FigureData) -> list[Figure]:
    """A forest plot for each figure that decides; only where several seeds give an interval."""
    first = TIME_TO_TARGET if subject.target else TRAIN
    return [
        found for measure in (first, subject.study.chief) for found in _forest(subject, measure)
    ]


def _forest(subject: FigureData, measure: Measure) -> list[Figure]:
    found = {row.name: subject.study.difference(row, measure) for row in subject.rows}
    known = {name: each for name, each in found.items() if each and each.low is not None}
    if not known:
        return []
    rows = [row for row in subject.rows if row.name in known]
    unit = f" ({measure.unit})" if measure.unit else ""
    name = measure.title
    texts = {name: _difference_text(difference, measure) for name, difference in known.items()}
    return [
        figure(
            f"difference-in-{name}",
            f"Difference in {name} to {_baseline(subject, rows)}",
            (
                f"Mean of the differences between runs of the same seed, with its {CONFIDENCE:.0%} "
                "interval (Student's t)"
                f"{_COARSE * (measure.resolution is not None)}. An interval across the line "
                "(hollow point) means that these seeds do not tell the two apart."
            ),
            "differences",
            [*_difference_marks(subject, known, f"difference in {name}{unit}{_better(measure)}"),
             *lane_words(texts)],
            LANE * len(rows),
        )
    ]  # fmt: skip


def _difference_marks(
    subject: FigureData, known: dict[str, Difference], title: str
) -> list[alt.Chart]:
    values: Values = [
        {
            "strategy": name,
            "mean": rounded(difference.mean),
            "low": rounded(difference.low),
            "high": rounded(difference.high),
            "pairs": difference.n,
            "certain": difference.certain,
        }
        for name, difference in known.items()
    ]
    look = Look({name: subject.styles[name] for name in known})
    x = alt.X("mean:Q", title=title, scale=alt.Scale(zero=True, padding=12))
    y, colour = lane(list(known)), look.colour(legend=False)
    tooltip = [
        alt.Tooltip("strategy:N"),
        alt.Tooltip("mean:Q", title="mean difference", format="+.4~g"),
        alt.Tooltip("low:Q", title="interval from", format="+.4~g"),
        alt.Tooltip("high:Q", title="to", format="+.4~g"),
        alt.Tooltip("pairs:Q", title="pairs of runs"),
    ]
    zeros = marks([{"strategy": name, "mean": 0} for name in known])
    zero = zeros.mark_tick(**POINT, color=FAINT, thickness=1.5, size=LANE / 2, opacity=1)
    interval = marks(values).mark_rule(**POINT, strokeWidth=2.5)
    layers = [zero.encode(x, y), interval.encode(alt.X("low:Q"), alt.X2("high:Q"), y, colour)]
    for certain in (True, False):
        alike = [value for value in values if value["certain"] is certain]
        hollow: dict[str, Any] = (
            {} if certain else {"fill": alt.ExprRef("ground"), "strokeWidth": 2}
        )
        if alike:
            points = marks(alike).mark_point(**POINT, filled=certain, size=110, opacity=1, **hollow)
            layers.append(points.encode(x, y, colour, look.shape(legend=False), tooltip=tooltip))
    return layers


def _better(measure: Measure) -> str:
    if measure.rising is None:
        return ""
    return f", {'right' if measure.rising else 'left'} is better"


def _difference_text(difference: Difference, measure: Measure) -> str:
    assert difference.low is not None
    assert difference.high is not None
    if difference.low == difference.high == 0:
        return "none"
    low, high = difference.low, difference.high
    decimals = decimals_for([low, high, difference.mean], 3)
    if coarse := max(difference.below, difference.above):
        decimals = max(0, places_of(coarse))
    mean, first, last = (fixed(v, decimals, sign=True) for v in (difference.mean, low, high))
    return f"{mean} [{first}, {last}] {measure.unit}".rstrip()


def _baseline(subject: FigureData, rows: list[Row]) -> str:
    """What the differences are to, where it has one name."""
    rivals = {rival.label for row in rows if (rival := subject.study.rival(row)) is not None}
    return rivals.pop() if len(rivals) == 1 else "the baseline"
