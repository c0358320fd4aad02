"""What came out: time to target, paired differences to a baseline, and both against the ranks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import altair as alt

from orchestra.report.figures.frame import (
    BAR,
    FAINT,
    GROUND,
    INK_NOW,
    LANE,
    POINT,
    SI,
    Figure,
    Look,
    Values,
    figure,
    haloed,
    lane,
    lanes,
    layer,
    rounded,
    tips,
    value_axis,
)
from orchestra.report.numbers import (
    count,
    decimals_for,
    figure_text,
    fixed,
    listed,
    places_of,
    uncertain,
)
from orchestra.report.rows import CONFIDENCE, TIME_TO_TARGET, TRAIN, Difference, Measure, Read, Row
from orchestra.report.study import Study


def time_to_target(study: Study) -> list[Figure]:
    """A dot for each seed, a bar for their mean; the first strategy reached it soonest."""
    target = study.target
    if target is None or not any(study.reached(row) for row in study.completed):
        return []
    reached = f"{target.metric} {'≥' if target.rising else '≤'} {target.bound:g}"
    caption = (
        f"Training seconds at the first snapshot with {reached}, soonest first: a dot for each "
        "seed, a bar for their mean; a line from the snapshot before, for it was reached between "
        "the two. ± is the spacing of the snapshots, or the spread over the seeds if that is "
        "larger. Where each node has a model of its own, the mean of the nodes reached it. Set-up "
        "is not in it."
    )
    rows = sorted(study.completed, key=_target_rank)
    layers = _target_marks(study, rows, f"seconds of training until {reached}")
    texts = {row.name: _target_text(row) for row in rows}
    return [lanes("time-to-target", "Time to target", caption, "target", layers, texts)]


def _target_marks(study: Study, rows: Sequence[Row], title: str) -> list[alt.Chart]:
    x = alt.X("seconds:Q", title=title, scale=alt.Scale(zero=True))
    y = lane([row.name for row in rows])
    look = Look(study.styles, [row.name for row in rows])
    colour, shape = look.colour(legend=False), look.shape(legend=False)
    means: Values = []
    seeds: Values = []
    for row in rows:
        mean = row.mean(TIME_TO_TARGET.read)
        means += [] if mean is None else [{"strategy": row.name, "seconds": rounded(mean)}]
        after = row.values(lambda record: record.time_to_target_after_seconds)
        seeds += [
            {
                "strategy": row.name,
                "seed": seed,
                "seconds": rounded(seconds),
                "after": rounded(after.get(seed)),
            }
            for seed, seconds in row.values(TIME_TO_TARGET.read).items()
        ]
    layers = [layer(means, "bar", x, y, colour, **BAR, opacity=0.45, cornerRadiusEnd=2)]
    known = [seed for seed in seeds if seed["after"] is not None]
    if known:  # a record from before does not say
        ends = alt.X("after:Q"), alt.X2("seconds:Q")
        layers.append(layer(known, "rule", *ends, y, colour, **POINT, strokeWidth=1.5))
    tooltip = tips(
        "strategy:N", "seed:N", ("after:Q", "reached after, in seconds", ".4~g"),
        ("seconds:Q", "and by", ".4~g"),
    )  # fmt: skip
    channels = x, y, colour, shape, tooltip
    return [*layers, layer(seeds, "point", *channels, **POINT, filled=True, size=50, opacity=1)]


def _target_rank(row: Row) -> tuple[int, float]:
    """Sort first those whose every seed reached it, by their mean; last those of which none did."""
    times = list(row.values(TIME_TO_TARGET.read).values())
    return (int(len(times) < len(row.completed)), fmean(times)) if times else (2, 0.0)


def _target_text(row: Row) -> str:
    times, n = list(row.values(TIME_TO_TARGET.read).values()), len(row.completed)
    if not times:
        return "not reached"
    known, mean = row.known_to(TIME_TO_TARGET), fmean(times)
    text = figure_text(mean, "s") if known is None else uncertain(mean, known, "s")
    return text if len(times) == n else f"{text} ({len(times)} of {n} seeds)"


def differences(study: Study) -> list[Figure]:
    """A forest plot for each figure that decides; only where several seeds give an interval."""
    first = TIME_TO_TARGET if study.target else TRAIN
    return [found for measure in (first, study.primary) for found in _forest(study, measure)]


def _forest(study: Study, measure: Measure) -> list[Figure]:
    found = {row.name: study.difference(row, measure) for row in study.completed}
    known = {name: each for name, each in found.items() if each and each.low is not None}
    if not known:
        return []
    rivals = {rival.label for row in study.completed if row.name in known
              and (rival := study.rival(row)) is not None}  # fmt: skip
    baseline = rivals.pop() if len(rivals) == 1 else "the baseline"
    coarse = ", to which the spacing of the snapshots is added" * (measure.resolution is not None)
    caption = (
        f"Mean of the differences between runs of the same seed, with its {CONFIDENCE:.0%} "
        f"interval (Student's t){coarse}. An interval across the line (hollow point) means that "
        "these seeds do not tell the two apart."
    )
    name = f"difference in {measure.title}"
    unit = f" ({measure.unit})" if measure.unit else ""
    better = ""
    if measure.rising is not None:
        better = f", {'right' if measure.rising else 'left'} is better"
    layers = _difference_marks(study, known, f"{name}{unit}{better}")
    texts = {row: _difference_text(difference, measure) for row, difference in known.items()}
    title = f"Difference in {measure.title} to {baseline}"
    return [lanes(name, title, caption, "differences", layers, texts)]


def _difference_marks(study: Study, known: Mapping[str, Difference], title: str) -> list[alt.Chart]:
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
    look = Look(study.styles, known)
    x = alt.X("mean:Q", title=title, scale=alt.Scale(zero=True, padding=12))
    y, colour = lane(known), look.colour(legend=False)
    tooltip = tips(
        "strategy:N", ("mean:Q", "mean difference", "+.4~g"), ("low:Q", "interval from", "+.4~g"),
        ("high:Q", "to", "+.4~g"), ("pairs:Q", "pairs of runs"),
    )  # fmt: skip
    zeros = [{"strategy": name, "mean": 0} for name in known]
    tick = {"color": FAINT, "thickness": 1.5, "size": LANE / 2, "opacity": 1}
    ends = alt.X("low:Q"), alt.X2("high:Q")
    layers = [
        layer(zeros, "tick", x, y, **POINT, **tick),
        layer(values, "rule", *ends, y, colour, **POINT, strokeWidth=2.5),
    ]
    channels = x, y, colour, look.shape(legend=False), tooltip
    point = {**POINT, "size": 110, "opacity": 1}
    hollow: dict[str, Any] = {"fill": GROUND, "strokeWidth": 2}
    for certain in (True, False):
        alike = [value for value in values if value["certain"] is certain]
        if alike:
            inside = {} if certain else hollow
            layers.append(layer(alike, "point", *channels, **point, filled=certain, **inside))
    return layers


def _difference_text(difference: Difference, measure: Measure) -> str:
    low, high = difference.low, difference.high
    assert low is not None
    assert high is not None
    if low == high == 0:
        return "none"
    decimals = decimals_for([low, high, difference.mean], 3)
    if coarse := max(difference.below, difference.above):
        decimals = max(0, places_of(coarse))
    mean, first, last = (fixed(v, decimals, sign=True) for v in (difference.mean, low, high))
    return f"{mean} [{first}, {last}] {measure.unit}".rstrip()


# Against the number of ranks, and from where on more pay less

_POWERS = 5  # of ten that an axis has room for, with ticks between
_ALONE = "A rank that is alone has all cores of its machine, of several each has one."


def scaling(study: Study) -> list[Figure]:
    """Samples a second and time to target against ranks, where there are several numbers."""
    return [*_speed(study), *(_time(study) if study.target else [])]


def _speed(study: Study) -> list[Figure]:
    values = _values(study, lambda record: record.samples_per_second)
    if not values:
        return []
    by_line, spread_out = _by_line(values), [value for value in values if not value["single"]]
    for value in values:
        value["percent"] = rounded(100 * efficiency(by_line[value["line"]])[value["ranks"]])
    knees = {line: knee(own) for line, own in _by_line(spread_out).items() if len(own) > 1}
    percent = ("percent:Q", "percent of a rank's speed on the fewest", ".3~g")
    tooltip = tips(("value:Q", "", ",.4~g"), percent)
    layers = _against_ranks(
        study, values, True, "samples a second, mean of seeds", SI, tooltip, knees
    )
    texts = [
        "Samples that all workers trained on in a second, set-up and evaluation apart.",
        "The dotted line is the ideal: in proportion to the ranks, from the best on the fewest.",
        *([_ALONE] if any(value["ranks"] == 1 for value in spread_out) else []),
        *_about(knees, max(value["ranks"] for value in values)),
    ]
    name, title = "speed-against-ranks", "Speed against ranks"
    return [figure(name, title, " ".join(texts), "scaling", layers)]


def _time(study: Study) -> list[Figure]:
    values = _values(study, TIME_TO_TARGET.read)
    if not values:
        return []
    title, tooltip = "seconds to target, mean of seeds", tips(("value:Q", "s", ",.4~g"))
    layers = _against_ranks(study, values, False, title, "datum.value", tooltip, {})
    caption = (
        "Training seconds until the target was reached, as the mean of the seeds that did. With "
        "more ranks the global batch is larger, and a step may be worth less. The dotted line is "
        "the ideal: twice the ranks, half the time of the best."
    )
    name, title = "time-to-target-against-ranks", "Time to target against ranks"
    return [figure(name, title, caption, "scaling", layers)]


def _values(study: Study, read: Read) -> Values:
    """Return the mean of each row; none where all are on one number of ranks."""
    values = [
        {
            "strategy": row.name,
            "line": study.lines[row.name],
            "ranks": row.ranks,
            "value": rounded(mean),
            "single": row.single,
        }
        for row in study.completed
        if (mean := row.mean(read))
    ]
    return values if len({value["ranks"] for value in values}) > 1 else []


def _by_line(values: Values) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for value in values:
        found[value["line"]][value["ranks"]] = value["value"]
    return found


def _against_ranks(
    study: Study,
    values: Values,
    grows: bool,
    title: str,
    label: str,
    tooltip: Sequence[alt.Tooltip],
    knees: Mapping[str, int | None],
) -> list[alt.Chart]:
    """Draw a line of each strategy and its points, on two logarithmic axes, with the ideal below.

    `label` is the text of a tick; a logarithmic axis leaves some out else. Rings are round `knees`.
    """
    ranks = sorted({value["ranks"] for value in values})
    x = alt.X(
        "ranks:Q",
        title="ranks (logarithmic)",
        scale=alt.Scale(type="log", base=2, nice=False, padding=14),
        axis=alt.Axis(
            values=ranks, tickCount=len(ranks), labelExpr="format(datum.value, 'd')", grid=False
        ),
    )
    ideal = _ideal(values, grows)
    y = value_axis(title, True, _ticks([value["value"] for value in (*values, *ideal)], label))
    look = Look({v["line"]: study.styles[v["strategy"]] for v in values}, field="line")
    channels = x, y, look.colour()
    about = [*tips(("line:N", "strategy"), "ranks:Q"), *tooltip]
    point = {"filled": True, "size": 70, "opacity": 1}
    layers = [
        layer(ideal, "line", x, y, strokeDash=[2, 3], strokeWidth=1.5, color=FAINT),
        layer(values, "line", *channels, look.dash(), strokeWidth=2),
        layer(values, "point", *channels, look.shape(), about, **point),
    ]
    ringed = [value for value in values if knees.get(value["line"]) == value["ranks"]]
    if ringed:
        ring = {"shape": "circle", "filled": False, "size": 240, "strokeWidth": 1.5}
        layers.append(layer(ringed, "point", x, y, color=INK_NOW, **ring))
        layers += haloed(ringed, 3, x, y, alt.TextValue("knee"), dy=19, fontSize=10.5)
    return layers


def _ideal(values: Values, grows: bool) -> Values:
    """Return two points in proportion to the ranks, from the best on the fewest.

    They belong to no strategy.
    """
    fewest, most = (edge(value["ranks"] for value in values) for edge in (min, max))
    first = [value for value in values if value["ranks"] == fewest]
    spread_out = [value for value in first if not value["single"]]  # one process does not scale
    best = (max if grows else min)(value["value"] for value in spread_out or first)
    last = best * most / fewest if grows else best * fewest / most
    return [{"ranks": fewest, "value": best}, {"ranks": most, "value": rounded(last)}]


def _ticks(heights: Sequence[float], label: str) -> alt.Axis:
    """Return an axis with ticks at 1, 2 and 5 times powers of ten, at the powers alone if there are
    many; as Vega likes where there are hardly any."""
    least, most = min(heights), max(heights)
    powers = range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)
    digits = (1, 2, 5) if len(powers) <= _POWERS else (1,)
    ticks = [float(f"{digit}e{power}") for power in powers for digit in digits]
    inside = [tick for tick in ticks if least <= tick <= most]
    if len(inside) < 3:
        return alt.Axis(tickCount=5, labelExpr=label)
    return alt.Axis(values=inside, tickCount=len(inside), labelExpr=label)


def _about(knees: Mapping[str, int | None], most: int) -> list[str]:
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
