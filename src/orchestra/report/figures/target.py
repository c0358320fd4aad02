"""Seconds until the target was reached."""

from __future__ import annotations

from statistics import fmean

import altair as alt

from orchestra.report.figures.figure import Figure
from orchestra.report.figures.frame import Look, figure, marks, numbers
from orchestra.report.figures.lanes import BAR, LANE, POINT, lane, words
from orchestra.report.figures.subject import Subject
from orchestra.report.measures import TIME_TO_TARGET, known_to
from orchestra.report.numbers import THIN, quantity, uncertain
from orchestra.report.rows import Row


def time_to_target(subject: Subject) -> list[Figure]:
    """A dot for each seed, a bar for their mean; the first strategy reached it soonest."""
    target, rows = subject.target, sorted(subject.rows, key=_rank)
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
    layers = [*_marks(subject, rows, reached), *words({row.name: _text(row) for row in rows})]
    height = LANE * len(rows)
    return [figure("time-to-target", "Time to target", caption, "target", layers, height)]


def _marks(subject: Subject, rows: list[Row], reached: str) -> list[alt.Chart]:
    x = alt.X(
        "seconds:Q",
        title=f"seconds of training until {reached}",
        scale=alt.Scale(zero=True),
    )
    y = lane([row.name for row in rows])
    look = Look({row.name: subject.styles[row.name] for row in rows})
    colour, shape = look.colour(legend=False), look.shape(legend=False)
    means = [
        {"strategy": row.name, "seconds": numbers(fmean(_times(row).values()))}
        for row in rows
        if _times(row)
    ]
    seeds = [
        {
            "strategy": row.name,
            "seed": seed,
            "seconds": numbers(seconds),
            "after": numbers(row.values(lambda r: r.time_to_target_after_seconds).get(seed)),
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


def _rank(row: Row) -> tuple[int, float]:
    """First those whose every seed reached it, by their mean; last those of which none did."""
    times = list(_times(row).values())
    if not times:
        return 2, 0.0
    return int(len(times) < len(row.completed)), fmean(times)


def _text(row: Row) -> str:
    times, n = list(_times(row).values()), len(row.completed)
    if not times:
        return "not reached"
    part = "" if len(times) == n else f" ({len(times)} of {n} seeds)"
    known = known_to(row, TIME_TO_TARGET)
    if known is None:
        return quantity(fmean(times), "s") + part
    return f"{uncertain(fmean(times), known)}{THIN}s{part}"
