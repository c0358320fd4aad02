"""Paired differences to a baseline, with their confidence intervals."""

from __future__ import annotations

from typing import Any

import altair as alt

from orchestra.report.figures.figure import Figure
from orchestra.report.figures.frame import FAINT, Look, Values, figure, marks, numbers
from orchestra.report.figures.lanes import LANE, POINT, lane, words
from orchestra.report.figures.subject import Subject
from orchestra.report.measures import TIME_TO_TARGET, TRAIN, Measure
from orchestra.report.numbers import decimals_for, fixed, places_of
from orchestra.report.rows import Row
from orchestra.report.statistics import CONFIDENCE, Difference

_COARSE = ", to which the spacing of the snapshots is added"


def differences(subject: Subject) -> list[Figure]:
    """A forest plot for each figure that decides; only where several seeds give an interval."""
    first = TIME_TO_TARGET if subject.target else TRAIN
    return [
        found for measure in (first, subject.study.chief) for found in _forest(subject, measure)
    ]


def _forest(subject: Subject, measure: Measure) -> list[Figure]:
    found = {row.name: subject.study.difference(row, measure) for row in subject.rows}
    known = {name: each for name, each in found.items() if each and each.low is not None}
    if not known:
        return []
    rows = [row for row in subject.rows if row.name in known]
    unit = f" ({measure.unit})" if measure.unit else ""
    name = measure.title
    texts = {name: _text(difference, measure) for name, difference in known.items()}
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
            [*_marks(subject, known, f"difference in {name}{unit}{_better(measure)}"),
             *words(texts)],
            LANE * len(rows),
        )
    ]  # fmt: skip


def _marks(subject: Subject, known: dict[str, Difference], title: str) -> list[alt.Chart]:
    values: Values = [
        {
            "strategy": name,
            "mean": numbers(difference.mean),
            "low": numbers(difference.low),
            "high": numbers(difference.high),
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


def _text(difference: Difference, measure: Measure) -> str:
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


def _baseline(subject: Subject, rows: list[Row]) -> str:
    """What the differences are to, where it has one name."""
    rivals = {rival.label for row in rows if (rival := subject.study.rival(row)) is not None}
    return rivals.pop() if len(rivals) == 1 else "the baseline"
