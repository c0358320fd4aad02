"""How speed and time to target change with the number of ranks."""

from __future__ import annotations

from collections.abc import Callable

import altair as alt

from orchestra.records.record import RunRecord
from orchestra.report.figures.figure import Figure
from orchestra.report.figures.frame import FAINT, SI, Look, Values, figure, marks, numbers
from orchestra.report.figures.subject import Subject

_Read = Callable[[RunRecord], float | None]


def scaling(subject: Subject) -> list[Figure]:
    """Samples a second and time to target against ranks, where there are several numbers."""
    if len({row.ranks for row in subject.rows}) < 2:
        return []
    speed = _scaling(
        subject,
        lambda record: record.samples_per_second,
        name="speed-against-ranks",
        title="Speed against ranks",
        axis="samples a second, mean of seeds",
        grows=True,
        caption="Samples that all workers trained on in a second, set-up and evaluation apart.",
    )
    target = subject.target
    time = _scaling(
        subject,
        lambda record: record.time_to_target_seconds,
        name="time-to-target-against-ranks",
        title="Time to target against ranks",
        axis="seconds to target, mean of seeds",
        grows=False,
        caption=(
            "Training seconds until the target was reached, as the mean of the seeds that did. "
            "With more ranks the global batch is larger, and a step may be worth less."
        ),
    )
    return [*speed, *(time if target else [])]


def _scaling(
    subject: Subject, read: _Read, *, name: str, title: str, axis: str, grows: bool, caption: str
) -> list[Figure]:
    values = _values(subject, read)
    ranks = sorted({value["ranks"] for value in values})
    if len(ranks) < 2:
        return []
    lines = {value["line"]: subject.styles[value["strategy"]] for value in values}
    look = Look(lines, field="line")
    x = alt.X(
        "ranks:Q",
        title="ranks (logarithmic)",
        scale=alt.Scale(type="log", base=2, nice=False, padding=14),
        axis=alt.Axis(values=ranks, format="d", grid=False),
    )
    y = alt.Y(
        "value:Q",
        title=axis,
        scale=alt.Scale(type="log", nice=False, padding=9),
        axis=alt.Axis(tickCount=5, labelExpr=SI) if grows else alt.Axis(tickCount=5),
    )
    base = marks(values).encode(x, y, look.colour())
    tooltip = [
        alt.Tooltip("line:N", title="strategy"),
        alt.Tooltip("ranks:Q"),
        alt.Tooltip("value:Q", title=axis, format=",.4~g"),
    ]
    points = base.mark_point(filled=True, size=70, opacity=1)
    layers = [
        *_ideal(values, ranks, grows, x, y),
        base.mark_line(strokeWidth=2).encode(look.dash()),
        points.encode(look.shape(), tooltip=tooltip),
    ]
    ideal = "The dotted line is the ideal: in proportion to the ranks, from the best on the fewest."
    if not grows:
        ideal = "The dotted line is the ideal: twice the ranks, half the time of the best."
    return [figure(name, title, f"{caption} {ideal}", "scaling", layers)]


def _values(subject: Subject, read: _Read) -> Values:
    found = {row.name: row.mean(read) for row in subject.rows}
    return [
        {
            "strategy": row.name,
            "line": subject.lines[row.name],
            "ranks": row.ranks,
            "value": numbers(found[row.name]),
            "single": row.single,
        }
        for row in subject.rows
        if found[row.name]
    ]


def _ideal(values: Values, ranks: list[int], grows: bool, x: alt.X, y: alt.Y) -> list[alt.Chart]:
    """In proportion to the ranks, from the best on the fewest; it belongs to no strategy."""
    fewest, most = ranks[0], ranks[-1]
    first = [value for value in values if value["ranks"] == fewest]
    spread_out = [value for value in first if not value["single"]]  # one process does not scale
    best = (max if grows else min)(value["value"] for value in spread_out or first)
    last = best * most / fewest if grows else best * fewest / most
    ends = [{"ranks": fewest, "value": best}, {"ranks": most, "value": numbers(last)}]
    line = alt.Chart(alt.InlineData(values=ends)).encode(x, y)
    return [line.mark_line(strokeDash=[2, 3], strokeWidth=1.5, color=FAINT)]
