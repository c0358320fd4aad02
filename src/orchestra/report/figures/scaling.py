"""How speed and time to target change with the number of ranks, and from where on it pays less."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import altair as alt

from orchestra.records.record import RunRecord
from orchestra.report.figures.frame import (
    FAINT,
    INK_NOW,
    SI,
    Figure,
    Look,
    Values,
    figure,
    marks,
    rounded,
)
from orchestra.report.figures.subject import FigureData
from orchestra.report.numbers import count, listed

_POWERS = 5  # of ten that an axis has room for, with ticks between
_ALONE = "A rank that is alone has all cores of its machine, of several each has one."
_Read = Callable[[RunRecord], float | None]


def scaling(subject: FigureData) -> list[Figure]:
    """Samples a second and time to target against ranks, where there are several numbers."""
    return [*_speed(subject), *(_time(subject) if subject.target else [])]


def _speed(subject: FigureData) -> list[Figure]:
    values = _values(subject, lambda record: record.samples_per_second)
    ranks = sorted({value["ranks"] for value in values})
    if len(ranks) < 2:
        return []
    by_line = _by_line(values)
    for value in values:
        value["percent"] = rounded(100 * efficiency(by_line[value["line"]])[value["ranks"]])
    by_ranks = {value["ranks"] for value in values if not value["single"]}
    knees = _knees(values)
    ideal = _ideal(values, ranks, grows=True)
    x, y = _axes(values, ideal, "samples a second, mean of seeds", SI)
    percent = alt.Tooltip(
        "percent:Q", title="percent of a rank's speed on the fewest", format=".3~g"
    )
    layers = [
        _dotted(ideal, x, y),
        *_lines(subject, values, x, y, [alt.Tooltip("value:Q", format=",.4~g"), percent]),
        *_rings([v for v in values if knees.get(v["line"]) == v["ranks"]], x, y),
    ]
    texts = [
        "Samples that all workers trained on in a second, set-up and evaluation apart.",
        "The dotted line is the ideal: in proportion to the ranks, from the best on the fewest.",
        *([_ALONE] if 1 in by_ranks else []),
        *_about(knees, ranks[-1]),
    ]
    caption = " ".join(texts)
    return [figure("speed-against-ranks", "Speed against ranks", caption, "scaling", layers)]


def _time(subject: FigureData) -> list[Figure]:
    values = _values(subject, lambda record: record.time_to_target_seconds)
    ranks = sorted({value["ranks"] for value in values})
    if len(ranks) < 2:
        return []
    ideal = _ideal(values, ranks, grows=False)
    x, y = _axes(values, ideal, "seconds to target, mean of seeds", "datum.value")
    layers = [
        _dotted(ideal, x, y),
        *_lines(subject, values, x, y, [alt.Tooltip("value:Q", title="s", format=",.4~g")]),
    ]
    caption = (
        "Training seconds until the target was reached, as the mean of the seeds that did. With "
        "more ranks the global batch is larger, and a step may be worth less. The dotted line is "
        "the ideal: twice the ranks, half the time of the best."
    )
    name, title = "time-to-target-against-ranks", "Time to target against ranks"
    return [figure(name, title, caption, "scaling", layers)]


def _values(subject: FigureData, read: _Read) -> Values:
    found = {row.name: row.mean(read) for row in subject.rows}
    return [
        {
            "strategy": row.name,
            "line": subject.lines[row.name],
            "ranks": row.ranks,
            "value": rounded(found[row.name]),
            "single": row.single,
        }
        for row in subject.rows
        if found[row.name]
    ]


def _by_line(values: Values) -> dict[str, dict[int, float]]:
    """By strategy and number of ranks."""
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for value in values:
        found[value["line"]][value["ranks"]] = value["value"]
    return found


def _axes(values: Values, ideal: Values, title: str, label: str) -> tuple[alt.X, alt.Y]:
    """Both logarithmic. `label` is the text of a tick; a logarithmic axis leaves some out else."""
    ranks = sorted({value["ranks"] for value in values})
    number = "format(datum.value, 'd')"
    x = alt.X(
        "ranks:Q",
        title="ranks (logarithmic)",
        scale=alt.Scale(type="log", base=2, nice=False, padding=14),
        axis=alt.Axis(values=ranks, tickCount=len(ranks), labelExpr=number, grid=False),
    )
    heights = [value["value"] for value in (*values, *ideal)]
    scale = alt.Scale(type="log", nice=False, padding=9)
    axis = _ticks(min(heights), max(heights))
    axis.labelExpr = label
    return x, alt.Y("value:Q", title=title, scale=scale, axis=axis)


def _ticks(least: float, most: float) -> alt.Axis:
    """Of 1, 2 and 5 times powers of ten those between both, of the powers alone if many; as Vega
    likes where there are hardly any."""
    powers = range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)
    digits = (1, 2, 5) if len(powers) <= _POWERS else (1,)
    ticks = [float(f"{digit}e{power}") for power in powers for digit in digits]
    inside = [tick for tick in ticks if least <= tick <= most]
    if len(inside) < 3:
        return alt.Axis(tickCount=5)
    return alt.Axis(values=inside, tickCount=len(inside))


def _lines(
    subject: FigureData, values: Values, x: alt.X, y: alt.Y, tooltip: Sequence[alt.Tooltip]
) -> list[alt.Chart]:
    """A line of each strategy, and its points."""
    lines = {value["line"]: subject.styles[value["strategy"]] for value in values}
    look = Look(lines, field="line")
    base = marks(values).encode(x, y, look.colour())
    about = [alt.Tooltip("line:N", title="strategy"), alt.Tooltip("ranks:Q"), *tooltip]
    return [
        base.mark_line(strokeWidth=2).encode(look.dash()),
        base.mark_point(filled=True, size=70, opacity=1).encode(look.shape(), tooltip=about),
    ]


def _ideal(values: Values, ranks: Sequence[int], *, grows: bool) -> Values:
    """In proportion to the ranks, from the best on the fewest; it belongs to no strategy."""
    fewest, most = ranks[0], ranks[-1]
    first = [value for value in values if value["ranks"] == fewest]
    spread_out = [value for value in first if not value["single"]]  # one process does not scale
    best = (max if grows else min)(value["value"] for value in spread_out or first)
    last = best * most / fewest if grows else best * fewest / most
    return [{"ranks": fewest, "value": best}, {"ranks": most, "value": rounded(last)}]


def _dotted(ideal: Values, x: alt.X, y: alt.Y) -> alt.Chart:
    line: alt.Chart = alt.Chart(alt.InlineData(values=ideal)).mark_line(
        strokeDash=[2, 3], strokeWidth=1.5, color=FAINT
    )
    return line.encode(x, y)


def _knees(values: Values) -> dict[str, int | None]:
    """Of each distributed strategy on several numbers of ranks; None where it has none yet."""
    speeds = _by_line([value for value in values if not value["single"]])
    return {line: knee(of_line) for line, of_line in speeds.items() if len(of_line) > 1}


def _rings(values: Values, x: alt.X, y: alt.Y) -> list[alt.Chart]:
    """Round the knees."""
    if not values:
        return []
    base = marks(values).encode(x, y)
    ring = base.mark_point(shape="circle", filled=False, size=240, strokeWidth=1.5, color=INK_NOW)
    word = base.encode(text=alt.value("knee"))
    ground: dict[str, Any] = {"stroke": alt.ExprRef("ground"), "strokeWidth": 3}
    looks = (ground, {"color": INK_NOW})  # the first covers lines behind it
    return [ring, *(word.mark_text(dy=19, fontSize=10.5, **look) for look in looks)]


def _about(knees: Mapping[str, int | None], most: int) -> list[str]:
    """Which they are, and what that means."""
    if not knees:
        return []
    at = [f"{line} at {count('rank', ranks)}" for line, ranks in knees.items() if ranks is not None]
    none = [line for line, ranks in knees.items() if ranks is None]
    texts = [listed(at)] if at else []
    texts += [f"none up to {most}: {listed(none)}"] if none else []
    return [
        "A ring marks the knee: the number of ranks, of those measured, with the largest speed² / "
        "ranks, which is the most benefit for the cost; beyond it twice as many are less than 1.41 "
        f"times as fast. Knees: {'; '.join(texts)}."
    ]


def knee(speeds: Mapping[int, float]) -> int | None:
    """The number of ranks with the most benefit for its cost; None where more may be better still.

    `speeds` are samples a second by number of ranks. The knee of the profile of execution time
    against efficiency (Eager, Zahorjan and Lazowska, "Speedup Versus Efficiency in Parallel
    Systems", IEEE Transactions on Computers 38(3), 1989) is where efficiency over time is largest,
    that is speed^2 / ranks. Twice as many ranks are past it where they are less than sqrt(2) times
    as fast; under Amdahl's law it lies where about half of each rank is used.
    """
    if len(speeds) < 2:
        return None
    best = max(sorted(speeds), key=lambda ranks: speeds[ranks] ** 2 / ranks)
    return best if best < max(speeds) else None


def efficiency(speeds: Mapping[int, float]) -> dict[int, float]:
    """By number of ranks, the speed of each rank as a part of that on the fewest ranks."""
    fewest = min(speeds)
    alone = speeds[fewest] / fewest
    return {ranks: speed / ranks / alone for ranks, speed in speeds.items()}
