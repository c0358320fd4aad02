"""Figures of results: time to target, paired differences to a baseline, speed against the number
of ranks, and how well unlike machines were used.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import altair as alt

from orchestra.report import measures, numbers
from orchestra.report.figures import frame
from orchestra.report.figures.frame import BAR, POINT, Figure, Look, Values, figure, layer, tips
from orchestra.report.measures import TIME_TO_TARGET, Measure, Read
from orchestra.report.numbers import Difference, count, listed
from orchestra.report.rows import Row, grouped
from orchestra.report.study import Study

Known = Sequence[tuple[Row, Difference]]  # those that have an interval
_POWERS = 5  # of ten that an axis has room for, with ticks between
_ALONE = "A rank that is alone has all cores of its machine, of several each has one."


def time_to_target(study: Study) -> Iterator[Figure]:
    """Yield a dot for each seed, a bar for their mean; the first strategy reached it soonest."""
    target = study.target
    if target is None or not any(study.reached(row) for row in study.completed):
        return
    reached = f"{target.metric} {'≥' if target.rising else '≤'} {target.bound:g}"
    caption = (
        f"Training seconds at the first snapshot with {reached}, soonest first: a dot for each "
        "seed, a bar for their mean; a line from the snapshot before, for it was reached between "
        "the two. ± is the spacing of the snapshots, or the spread over the seeds if that is "
        "larger. Where each node has a model of its own, the mean of the nodes reached it. Set-up "
        "is not in it."
    )

    def rank(row: Row) -> tuple[int, float]:
        """Return a key to sort by: rows whose every seed reached it first, those of none last."""
        mean = row.mean(TIME_TO_TARGET.read)
        # Unlike the ranking of rows, which goes by shares: a bar is as long as the mean of those
        # that reached it, so rows with all seeds stand first, in order of length.
        return (2, 0.0) if mean is None else (int(study.reached(row) < len(row.completed)), mean)

    rows = sorted(study.completed, key=rank)
    layers = _target_marks(study, rows, f"seconds of training until {reached}")
    texts = dict.fromkeys((row.name for row in rows), "not reached")
    for row in rows:
        if number := study.reached(row):
            some = f" ({number} of {len(row.completed)} seeds)" * (number < len(row.completed))
            texts[row.name] = row.text(TIME_TO_TARGET) + some
    yield figure("time-to-target", "Time to target", caption, "target", *frame.lanes(layers, texts))


def _target_marks(study: Study, rows: Sequence[Row], title: str) -> list[alt.Chart]:
    seeds = [
        {
            "strategy": row.name, "seed": r.asked.seed, "seconds": r.to_target.seconds,
            "after": r.to_target.after,
        }
        for row in rows
        for r in (run.record for run in row.completed)
        if r.to_target.seconds is not None
    ]  # fmt: skip
    zero = alt.Scale(zero=True)
    x, mean = (alt.X(of, title=title, scale=zero) for of in ("seconds:Q", "mean(seconds):Q"))
    ends = alt.X("after:Q"), alt.X2("seconds:Q")
    look = Look(study.styles, [row.name for row in rows], legend=False)
    known = [seed for seed in seeds if seed["after"] is not None]  # an old record does not say
    tooltip = tips(
        "strategy:N", "seed:N", ("after:Q", "reached after, in seconds", ".4~g"),
        ("seconds:Q", "and by", ".4~g"),
    )  # fmt: skip
    dot = {**POINT, "filled": True, "size": 50, "opacity": 1}
    return [
        layer(seeds, "bar", mean, look.colour, **BAR, opacity=0.45, cornerRadiusEnd=2),
        layer(known, "rule", *ends, look.colour, **POINT, strokeWidth=1.5),
        layer(seeds, "point", x, look.colour, look.shape, tooltip, **dot),
    ]


def differences(study: Study) -> Iterator[Figure]:
    """Yield a forest plot for each figure that decides, if several seeds give an interval."""
    for measure in (TIME_TO_TARGET if study.target else measures.TRAIN, study.primary):
        pairs = [(row, study.difference(row, measure)) for row in study.completed]
        known = [(row, each) for row, each in pairs if each and each.low is not None]
        if known:
            yield _forest(study, measure, known)


def _forest(study: Study, measure: Measure, known: Known) -> Figure:
    rivals = {rival.label for row, _ in known if (rival := study.rival(row)) is not None}
    baseline = rivals.pop() if len(rivals) == 1 else "the baseline"
    coarse = ", to which the spacing of the snapshots is added" * (measure.resolution is not None)
    caption = (
        f"Mean of the differences between runs of the same seed, with its {numbers.CONFIDENCE:.0%} "
        f"interval (Student's t){coarse}. An interval across the line (hollow point) means that "
        "these seeds do not tell the two apart."
    )
    name = f"difference in {measure.title}"
    unit = f" ({measure.unit})" if measure.unit else ""
    side = {True: ", right is better", False: ", left is better", None: ""}[measure.rising]
    layers = _difference_marks(study, known, f"{name}{unit}{side}")
    texts = {}
    for row, difference in known:
        mean, *ends = difference.texts()
        text = f"{mean} [{', '.join(ends)}] {measure.unit}".rstrip()
        # A deterministic simulation may give exactly equal figures
        texts[row.name] = "none" if difference.low == difference.high == 0 else text
    title = f"Difference in {measure.title} to {baseline}"
    return figure(name, title, caption, "differences", *frame.lanes(layers, texts))


def _difference_marks(study: Study, known: Known, title: str) -> list[alt.Chart]:
    values = [
        {
            "strategy": row.name, "mean": each.mean, "low": each.low, "high": each.high,
            "pairs": each.n, "certain": each.certain,
        }
        for row, each in known
    ]  # fmt: skip
    look = Look(study.styles, [row.name for row, _ in known], legend=False)
    x = alt.X("mean:Q", title=title, scale=alt.Scale(zero=True, padding=12))
    ends = alt.X("low:Q"), alt.X2("high:Q")
    tooltip = tips(
        "strategy:N", ("mean:Q", "mean difference", "+.4~g"), ("low:Q", "interval from", "+.4~g"),
        ("high:Q", "to", "+.4~g"), ("pairs:Q", "pairs of runs"),
    )  # fmt: skip
    channels = x, look.colour, look.shape, tooltip
    zeros = [{"strategy": row.name, "mean": 0} for row, _ in known]
    tick = {**POINT, "thickness": 1.5, "size": frame.LANE / 2, "opacity": 1}
    point: dict[str, Any] = {**POINT, "size": 110, "opacity": 1}
    hollow: dict[str, Any] = {**point, "filled": False, "fill": frame.GROUND, "strokeWidth": 2}
    return [
        layer(zeros, "tick", x, **tick, color=frame.FAINT),
        layer(values, "rule", *ends, look.colour, **POINT, strokeWidth=2.5),
        # Filled or hollow, not red or green: readable in print
        layer([v for v in values if v["certain"]], "point", *channels, **point, filled=True),
        layer([v for v in values if not v["certain"]], "point", *channels, **hollow),
    ]


def scaling(study: Study) -> Iterator[Figure]:
    """Yield samples a second and time to target against ranks, where there are several numbers."""
    if speeds := _values(study, measures.PACE.read):
        yield _speed(study, speeds)
    if study.target and (times := _values(study, TIME_TO_TARGET.read)):
        caption = (
            "Training seconds until the target was reached, as the mean of the seeds that did. "
            "With more ranks the global batch is larger, and a step may be worth less. The dotted "
            "line is the ideal: twice the ranks, half the time of the best."
        )
        tooltip = tips(("value:Q", "s", ",.4~g"))
        layers = _against_ranks(study, times, "seconds to target", tooltip, False, {})
        title = "Time to target against ranks"
        yield figure("time-to-target-against-ranks", title, caption, "scaling", layers)


def _speed(study: Study, values: Values) -> Figure:
    knees = {}
    for line, own in grouped(values, lambda value: value["line"]).items():
        speeds = {value["ranks"]: value["value"] for value in own}
        for value in own:
            value["percent"] = 100 * efficiency(speeds)[value["ranks"]]
        if len(speeds) > 1 and not all(value["single"] for value in own):
            knees[line] = knee(speeds)
    distributed = [value for value in values if not value["single"]]
    percent = ("percent:Q", "percent of a rank's speed on the fewest", ".3~g")
    tooltip = tips(("value:Q", "", ",.4~g"), percent)
    texts = [
        "Samples that all workers trained on in a second, set-up and evaluation apart.",
        "The dotted line is the ideal: in proportion to the ranks, from the best on the fewest.",
        *([_ALONE] if any(value["ranks"] == 1 for value in distributed) else []),
        *_about(knees, max(value["ranks"] for value in values)),
    ]
    layers = _against_ranks(study, values, "samples a second", tooltip, True, knees)
    return figure("speed-against-ranks", "Speed against ranks", " ".join(texts), "scaling", layers)


def _values(study: Study, read: Read) -> Values:
    """Return the mean of each row; none where all are on one number of ranks."""
    values = [
        {
            "strategy": row.name, "line": study.lines[row.name], "ranks": row.ranks,
            "value": mean, "single": row.single,
        }
        for row in study.completed
        if (mean := row.mean(read))
    ]  # fmt: skip
    return values if len({value["ranks"] for value in values}) > 1 else []


def _against_ranks(
    study: Study,
    values: Values,
    title: str,
    tooltip: Sequence[alt.Tooltip],
    grows: bool,
    knees: Mapping[str, int | None],
) -> list[alt.Chart]:
    """Draw a line of each strategy and its points on two logarithmic axes, with the ideal below
    them and rings around `knees`."""
    ranks = sorted({value["ranks"] for value in values})
    scale = alt.Scale(type="log", base=2, nice=False, padding=14)
    # Vega drops every other explicit tick until they are fewer than its count for the width.
    label = "format(datum.value, 'd')"
    axis = alt.Axis(values=ranks, tickCount=len(ranks), labelExpr=label, grid=False)
    x = alt.X("ranks:Q", title="ranks (logarithmic)", scale=scale, axis=axis)
    ideal = _ideal(values, grows)
    label = frame.SI if grows else "datum.value"  # a logarithmic axis leaves some out else
    ticks = _ticks([value["value"] for value in (*values, *ideal)], label)
    y = frame.value_axis(f"{title}, mean of seeds", True, ticks)
    look = Look({v["line"]: study.styles[v["strategy"]] for v in values}, field="line")
    about = [*tips(("line:N", "strategy"), "ranks:Q"), *tooltip]
    ring: dict[str, Any] = {"shape": "circle", "filled": False, "size": 240, "strokeWidth": 1.5}
    ringed = [value for value in values if knees.get(value["line"]) == value["ranks"]]
    return [
        layer(ideal, "line", x, y, strokeDash=[2, 3], strokeWidth=1.5, color=frame.FAINT),
        *_lines(values, x, y, look, about),
        layer(ringed, "point", x, y, color=frame.INK_NOW, **ring),
        *frame.haloed(ringed, 3, x, y, alt.TextValue("knee"), dy=19, fontSize=10.5),
    ]


def _lines(
    values: Values, x: alt.X, y: alt.Y, look: Look, tooltip: list[alt.Tooltip]
) -> list[alt.Chart]:
    point: frame.MarkStyle = {"filled": True, "size": 70, "opacity": 1}
    return [
        layer(values, "line", x, y, look.colour, look.dash, strokeWidth=2),
        layer(values, "point", x, y, look.colour, look.shape, tooltip, **point),
    ]


def _ideal(values: Values, grows: bool) -> Values:
    """Return two points in proportion to the ranks, from the best on the fewest.

    They belong to no strategy.
    """
    fewest, most = (edge(value["ranks"] for value in values) for edge in (min, max))
    first = [value for value in values if value["ranks"] == fewest]
    spread_out = [value for value in first if not value["single"]]  # one process does not scale
    best = (max if grows else min)(value["value"] for value in spread_out or first)
    last = best * most / fewest if grows else best * fewest / most
    return [{"ranks": fewest, "value": best}, {"ranks": most, "value": last}]


def _ticks(heights: Sequence[float], label: str) -> alt.Axis:
    """Return an axis with ticks at 1, 2 and 5 times powers of ten; at the powers alone if there
    are many, and at Vega's choice if there are fewer than three."""
    least, most = min(heights), max(heights)
    powers = range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)
    # More than these would overlap on a phone
    digits = (1, 2, 5) if len(powers) <= _POWERS else (1,)
    ticks = [float(f"{digit}e{power}") for power in powers for digit in digits]
    inside = [tick for tick in ticks if least <= tick <= most]
    # Speeds within a factor of two may have no such tick between them
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
    """Return the number of ranks with the most benefit for its cost; None if more may be better.

    `speeds` are samples a second by number of ranks. At the knee of execution time against
    efficiency (Eager, Zahorjan and Lazowska, "Speedup Versus Efficiency in Parallel Systems", IEEE
    Transactions on Computers 38(3), 1989) efficiency over time, speed^2 / ranks, is largest.
    """
    # A single number of ranks has no trade to make
    if len(speeds) < 2:
        return None
    # Of equal ones the fewest ranks
    best = max(sorted(speeds), key=lambda ranks: speeds[ranks] ** 2 / ranks)
    # At the edge of what was measured the largest value may lie beyond
    return best if best < max(speeds) else None


def efficiency(speeds: Mapping[int, float]) -> dict[int, float]:
    """Return, by number of ranks, the speed of each rank relative to that on the fewest ranks."""
    fewest = min(speeds)
    alone = speeds[fewest] / fewest
    return {ranks: speed / ranks / alone for ranks, speed in speeds.items()}


CAPTIONS = {
    measures.HETEROGENEOUS.key: (
        "Samples a second over the sum of what each node does alone, against the nodes that were "
        "used, the slowest combination first. 100 % would be a cluster that loses nothing."
    ),
    measures.CONVERGENCE.key: (
        "(Time to target of one process on the fastest node / of the cluster) over (the sum of "
        "what its nodes do alone / what that one does). 100 % would be a time to target that falls "
        "in proportion to the speed that is added."
    ),
}


EFFICIENCIES: Mapping[str, Read] = {  # of any nodes; the table has those of unlike ones only
    "heterogeneous_efficiency": lambda record: record.machine.heterogeneous_efficiency,
    "convergence_efficiency": lambda record: record.machine.convergence_efficiency,
}


def combinations(study: Study) -> Iterator[Figure]:
    """Yield the two efficiencies against the nodes that runs used, where there are several
    combinations of nodes, unlike ones among them."""
    for measure in study.of_machines:
        if measure.key in CAPTIONS:
            yield from _against_machines(study, measure)


def _against_machines(study: Study, measure: Measure) -> Iterator[Figure]:
    values: Values = [
        {
            "strategy": row.name,
            "line": row.label,  # comparisons of several clusters make one line
            "machines": combination(row.record.machine.alone),
            "alone": sum(row.record.machine.alone.values()),
            "value": 100 * found,
        }
        for row in study.completed
        if (found := row.mean(EFFICIENCIES[measure.key])) is not None
        # Real ranks have speeds of their own, too, but no named nodes to combine
        and row.record.asked.cluster is not None and not row.single
    ]  # fmt: skip
    values.sort(key=lambda value: value["alone"])
    order = list(dict.fromkeys(value["machines"] for value in values))
    if len(order) < 2:
        return
    x = alt.X("machines:N", title="nodes", sort=order, axis=alt.Axis(grid=False, labelAngle=0))
    y = frame.value_axis(f"{measure.title}, %")
    styles = {value["line"]: study.styles[value["strategy"]] for value in reversed(values)}
    look = Look(styles, field="line")
    about = tips(
        ("line:N", "strategy"), "machines:N", ("alone:Q", "samples/s of all alone", ",.4~g"),
        ("value:Q", measure.title, ".3~g"),
    )  # fmt: skip
    layers = _lines(values, x, y, look, about)
    title = f"{measure.title.capitalize()} of combinations of machines"
    yield figure(f"{measure.key}-of-machines", title, CAPTIONS[measure.key], "scaling", layers)


def combination(nodes: Mapping[str, float]) -> str:
    """Return the nodes in words, those that differ in number only together: "fast + 3 slow"."""
    # Nodes of a group are named fast-0, fast-1 and so on
    kinds = Counter(re.sub(r"-\d+$", "", name) for name in nodes)
    return " + ".join(f"{n} {kind}" if n > 1 else kind for kind, n in kinds.items())
