"""How stale the updates were."""

from __future__ import annotations

from collections import Counter

import altair as alt

from orchestra.report.figures.figure import Figure
from orchestra.report.figures.frame import Look, Values, figure, marks, numbers, zoomable
from orchestra.report.figures.subject import Subject
from orchestra.report.rows import Row

_FEW = 0.005


def staleness(subject: Subject) -> list[Figure]:
    """The share of updates at each staleness, for strategies with any that is not zero."""
    counts = {row.name: _counts(row) for row in subject.widest}
    stale = {name: of_row for name, of_row in counts.items() if any(of_row)}
    if not stale:
        return []
    end, largest = max(map(_nearly_all, stale.values())), max(map(max, stale.values()))
    caption = (
        "How many updates of others came between reading the parameters and writing to them, as "
        "shares of the updates of all seeds."
    )
    if largest > end + 1:
        caption += f" The last point is {end + 1} or more; the largest was {largest}."
    if len(stale) < len(counts):
        caption += " Strategies without a stale update are not drawn."
    values = [value for name, of_row in stale.items() for value in _shares(name, of_row, end + 1)]
    layers = _layers(values, Look({name: subject.styles[name] for name in stale}))
    return [figure("staleness", "Staleness of the updates", caption, "staleness", layers, 240)]


def _layers(values: Values, look: Look) -> list[alt.Chart]:
    x = alt.X(
        "staleness:Q",
        title="staleness (updates)",
        axis=alt.Axis(format="d", tickMinStep=1, grid=False),
        scale=alt.Scale(nice=False, zero=True, padding=12),
    )
    y = alt.Y("share:Q", title="share of the updates", axis=alt.Axis(format="~%", tickCount=5))
    base = marks(values).encode(x, y, look.colour())
    tooltip = [
        alt.Tooltip("strategy:N"),
        alt.Tooltip("updates_between:N", title="staleness (updates)"),
        alt.Tooltip("share:Q", title="share of updates", format=".3~%"),
        alt.Tooltip("updates:Q", title="updates, all seeds", format=","),
    ]
    line = base.mark_line(strokeWidth=2).encode(look.dash())
    points = base.mark_point(filled=True, size=60, opacity=1).encode(look.shape(), tooltip=tooltip)
    return [zoomable(line), points]


def _counts(row: Row) -> Counter[int]:
    """Updates by staleness, over all seeds."""
    counts: Counter[int] = Counter()
    for run in row.completed:
        for value, count in run.record.staleness_histogram.items():
            counts[int(value)] += count
    return counts


def _nearly_all(counts: Counter[int]) -> int:
    """The staleness that all but a few updates do not exceed: a paused rank leaves a long tail."""
    left = _FEW * sum(counts.values())
    for value in sorted(counts, reverse=True):
        left -= counts[value]
        if left < 0:
            return value
    raise AssertionError("more is left out than there is")


def _shares(name: str, counts: Counter[int], last: int) -> Values:
    """The share at each staleness, those that never occurred included; `last` stands for more."""
    total, largest = sum(counts.values()), max(counts)
    beyond = sum(count for value, count in counts.items() if value >= last)
    values = []
    for value in range(min(largest, last) + 1):
        updates = beyond if value == last else counts[value]
        more = " or more" if value == last < largest else ""
        values.append(
            {
                "strategy": name,
                "staleness": value,
                "updates_between": f"{value}{more}",
                "share": numbers(updates / total),
                "updates": updates,
            }
        )
    return values
