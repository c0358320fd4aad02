"""How stale the updates were."""

from __future__ import annotations

from collections import Counter

import altair as alt

from orchestra.report.figures.figure import Figure
from orchestra.report.figures.frame import Look, Values, figure, marks, numbers
from orchestra.report.figures.subject import Subject
from orchestra.report.rows import Row

_FEW = 0.005
_BARS = 24  # along the axis, so that they stay apart on a phone


def staleness(subject: Subject) -> list[Figure]:
    """The share of updates at each staleness, for strategies with any that is not zero."""
    counts = {row.name: _counts(row) for row in subject.widest}
    stale = {name: of_row for name, of_row in counts.items() if any(of_row)}
    if not stale:
        return []
    end, largest = max(map(_nearly_all, stale.values())), max(map(max, stale.values()))
    last = min(end + 1, largest)
    caption = (
        "How many updates of others came between reading the parameters and writing to them, as "
        "shares of the updates of all seeds."
    )
    if largest > last:
        caption += f" The last bar is {last} or more; the largest was {largest}."
    if len(stale) < len(counts):
        caption += " Strategies without a stale update are not drawn."
    values = [
        value
        for name, of_row in stale.items()
        for value in _shares(name, of_row, last, largest > last)
    ]
    bars = _bars(values, Look({name: subject.styles[name] for name in stale}), [*stale])
    return [figure("staleness", "Staleness of the updates", caption, "staleness", [bars], 240)]


def _bars(values: Values, look: Look, names: list[str]) -> alt.Chart:
    """At each staleness a bar of each strategy, side by side."""
    order = list(dict.fromkeys(value["updates_between"] for value in values))
    x = alt.X(
        "updates_between:N",
        title="staleness (updates)",
        sort=None,
        axis=alt.Axis(grid=False, labelAngle=0, labelOverlap="greedy", labelSeparation=8),
        scale=alt.Scale(domain=order, paddingInner=0.2),
    )
    y = alt.Y("share:Q", title="share of the updates", axis=alt.Axis(format="~%", tickCount=5))
    beside = alt.XOffset("strategy:N", scale=alt.Scale(domain=names))
    tooltip = [
        alt.Tooltip("strategy:N"),
        alt.Tooltip("updates_between:N", title="staleness (updates)"),
        alt.Tooltip("share:Q", title="share of updates", format=".3~%"),
        alt.Tooltip("updates:Q", title="updates, all seeds", format=","),
    ]
    bars: alt.Chart = marks(values).mark_bar(cornerRadiusEnd=1)
    return bars.encode(x, y, beside, look.colour(), tooltip=tooltip)


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


def _shares(name: str, counts: Counter[int], last: int, more: bool) -> Values:
    """The share in each of up to `_BARS` ranges of staleness, empty ones included.

    The one that ends with `last` is open where some strategy has `more`.
    """
    width = -(-(last + 1) // _BARS)
    values = []
    for low in range(0, last + 1, width):
        high = min(low + width - 1, last)
        inside = [n for value, n in counts.items() if low <= min(value, last) <= high]
        end = f"–{high}" if high > low else ""
        values.append(
            {
                "strategy": name,
                "staleness": low,
                "updates_between": f"{low}{' or more' if more and high == last else end}",
                "share": numbers(sum(inside) / sum(counts.values())),
                "updates": sum(inside),
            }
        )
    return values
