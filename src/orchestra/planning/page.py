"""The page of a plan, in one HTML file that needs nothing else; its figures, and that of a map."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np
from numpy.typing import NDArray

from orchestra.cluster.units import BANDWIDTH
from orchestra.errors import InputError
from orchestra.experiments.experiment import ONE_PROCESS
from orchestra.planning.answer import CandidateRow, PlanAnswer, target_text, time_text
from orchestra.planning.map import Axis, Map
from orchestra.planning.table import candidates_sheet, verified_sheet
from orchestra.records.files import write_atomically
from orchestra.report.figures import frame
from orchestra.report.figures.frame import BAR, Figure, Look, Values, figure, haloed, layer, tips
from orchestra.report.numbers import or_dash
from orchestra.report.page import library, templates
from orchestra.report.study import COLOURS, DASHES, INK, SIGNS, Style
from orchestra.trainer.settings import Target

PAGE = "plan.html"
DRAWN = 10
"""The most candidates in a figure."""
FINE = 96
"""The cells along each side. Times between points are interpolated, so borders are smooth."""
NAMED_FROM = 0.04
"""The smallest part of the plane for which a region has its name drawn."""
ROUND: dict[str, Any] = {"strokeJoin": "round"}
GREY = "#dadada"
PALE = {
    "#0072B2": "#8fbfdd",
    "#D55E00": "#eeb48c",
    "#009E73": "#8fd3bf",
    "#CC79A7": "#e8c3d8",
    "#E69F00": "#f5d490",
    "#56B4E9": "#b9def6",
}
"""The colours of reports, light enough for words on them."""

Floats = NDArray[np.float64]


def write_page(plan: PlanAnswer, title: str) -> Path:
    """Write `plan.html` and its figures into the plan's folder; return its path."""
    figures = list(_figures(plan))
    try:
        (plan.folder / "figures").mkdir(exist_ok=True)
    except OSError as error:
        raise InputError(f"{plan.folder}: cannot be used: {error.strerror}") from None
    for each in figures:
        frame.save(each, plan.folder / "figures")
    template = templates().get_template("plan.html")
    text = template.render(
        title=title,
        plan=plan,
        target=None if plan.target is None else target_text(plan.target),
        candidates=candidates_sheet(plan),
        verified=verified_sheet(plan),
        figures=figures,
        specs={each.name: frame.for_page(each.spec) for each in figures},
        library=library(),
    )
    write_atomically(plan.folder / PAGE, text)
    return plan.folder / PAGE


def _figures(plan: PlanAnswer) -> Iterator[Figure]:
    timed = [row for row in plan.rows if row.seconds is not None][:DRAWN]
    if timed and plan.target is not None:
        yield _times(timed, plan.target)
    if len(plan.scaling) > 1 and plan.scaled is not None:
        yield _scaling(plan, plan.scaled)
    if plan.curves and plan.target is not None:
        yield _curves(plan, plan.target)


def _styles(names: Sequence[str]) -> dict[str, Style]:
    """Return a look for each name; one process, with the batch as given, has the text's colour."""
    shapes = list(SIGNS)
    found = {}
    for number, name in enumerate(names):
        turn, place = divmod(number, len(COLOURS))
        colour, dash = COLOURS[place], DASHES[turn % len(DASHES)]
        if name == ONE_PROCESS:
            colour, dash = INK, DASHES[0]
        found[name] = Style(colour, dash, shapes[number % len(shapes)])
    return found


def _times(rows: Sequence[CandidateRow], target: Target) -> Figure:
    """Return a bar for each candidate that reaches the target."""
    values = [
        {"strategy": row.name, "seconds": row.seconds, "low": max(0.0, time - about),
         "high": time + about}
        for row in rows
        for time, about in [(row.seconds or 0.0, row.uncertainty or 0.0)]
    ]  # fmt: skip
    look = Look(_styles([row.name for row in rows]), legend=False)
    title = f"seconds until {target_text(target)}"
    x = alt.X("seconds:Q", title=title, scale=alt.Scale(zero=True))
    tooltip = tips("strategy:N", ("seconds:Q", "seconds", ".4~g"))
    layers = [
        layer(values, "bar", x, look.colour, tooltip, **BAR, opacity=0.45, cornerRadiusEnd=2),
        layer(values, "rule", alt.X("low:Q"), alt.X2("high:Q"), look.colour, **frame.POINT),
    ]
    caption = "Predicted seconds to the target, soonest first; lines are their uncertainty."
    texts = {row.name: f"{time_text(row)} s" for row in rows}
    lanes = frame.lanes(layers, texts)
    return figure("time-to-target", "Time to target", caption, "target", *lanes)


def _scaling(plan: PlanAnswer, name: str) -> Figure:
    """Return samples/s of a strategy over nodes; the knee is a ring."""
    values = [
        {"strategy": name, "nodes": nodes, "value": speed} for nodes, speed in plan.scaling.items()
    ]
    x = alt.X("nodes:Q", title=plan.places, axis=alt.Axis(tickMinStep=1, grid=False))
    y = alt.Y("value:Q", title="samples/s", scale=alt.Scale(zero=True))
    look = Look(_styles([name]), legend=False)
    tooltip = tips(("nodes:Q", plan.places, "d"), ("value:Q", "samples/s", ",.4~g"))
    knees = [value for value in values if value["nodes"] == plan.knee]
    layers = [
        layer(values, "line", x, y, look.colour),
        layer(values, "point", x, y, look.colour, tooltip, filled=True, size=55, opacity=1),
        layer(knees, "point", x, y, look.colour, size=190, filled=False, strokeWidth=2, opacity=1),
    ]
    ring = f" The ring is the knee, where speed squared over {plan.places} is largest."
    on = "the fastest nodes" if plan.places == "nodes" else "one node"
    caption = f"{name}: samples/s on {on}, one process for 1.{ring * bool(knees)}"
    return figure("scaling", "Scaling", caption, "scaling", layers)


def _curves(plan: PlanAnswer, target: Target) -> Figure:
    """Return the metric of the target over the seconds of the cluster."""
    metric = target.metric
    values = [
        {"strategy": name, "seconds": seconds, "value": value}
        for name, line in plan.curves.items()
        for seconds, value in line
    ]
    look = Look(_styles(list(plan.curves)))
    x, y = frame.along("seconds"), frame.value_axis(metric)
    aim = [{"target": target.bound}]
    tooltip = tips("strategy:N", ("seconds:Q", "seconds", ".4~g"), ("value:Q", metric, ".4~g"))
    layers = [
        frame.zoomable(layer(values, "line", x, y, look.colour, look.dash, strokeWidth=2)),
        layer(values, "point", x, y, look.colour, look.shape, tooltip, filled=True, size=30),
        layer(aim, "rule", alt.Y("target:Q"), color=frame.FAINT, strokeDash=[3, 3]),
    ]
    caption = (
        f"The {metric} of the candidates that went furthest, with the first seed, over seconds of "
        "the cluster. The dashed rule is the target."
    )
    return figure(
        "curves", f"{metric[0].upper()}{metric[1:]} over time", caption, "convergence", layers
    )


# Maps


def map_figure(drawn: Map) -> Figure:
    """Return regions coloured by the first strategy; one process is grey."""
    x, y = drawn.plane.x, drawn.plane.y
    names, seconds = _grid(drawn)
    edges = [np.linspace(0, len(axis.values) - 1, FINE + 1) for axis in (x, y)]
    middles = [(side[:-1] + side[1:]) / 2 for side in edges]
    fine = np.stack([_between(values, *middles) for values in seconds])
    first = fine.argmin(axis=0)
    sides = [_values(axis, place) for axis, place in zip((x, y), edges, strict=True)]
    centres = [_values(axis, place) for axis, place in zip((x, y), middles, strict=True)]
    look = Look(_fills([name for name in drawn.winners if name in names]))
    across, up = _channel(alt.X, x, "x"), _channel(alt.Y, y, "y")
    regions = _regions(first, names, sides)
    best = fine.min(axis=0)
    layers = [
        layer(regions, "rect", across, alt.X2("x2:Q"), up, alt.Y2("y2:Q"), look.colour,
              tips("strategy:N"), opacity=1, strokeWidth=0),
        layer(list(_contours(best, centres)), "rule", across, alt.X2("x2:Q"), up, alt.Y2("y2:Q"),
              color=frame.INK_NOW, strokeWidth=0.8, opacity=0.75),
        *haloed(_levels(best, centres), 3, across, up, alt.Text("text:N"), fontSize=10, **ROUND),
        *haloed(_names(first, names, centres), 4, across, up, alt.Text("text:N"), fontSize=12.5,
                fontWeight="bold", **ROUND),
        *_checks(drawn, across, up),
    ]  # fmt: skip
    target = "the target" if drawn.target is None else target_text(drawn.target)
    title = f"Who reaches {target} first: {drawn.experiment}, {drawn.plane.text}"
    caption = (
        f"Which strategy reaches {target} first; lines are the seconds that it takes, as simulated."
    )
    if checked := [check.agrees for check in drawn.checks if check.agrees is not None]:
        caption += (
            f" Dots were emulated: the predicted first of two was first at {sum(checked)} of "
            f"{len(checked)} (filled)."
        )
    return figure("map", title, caption, "target", layers, height=460)


def _grid(drawn: Map) -> tuple[list[str], Floats]:
    """Return the strategies, and the logarithms of their seconds, shape [strategy, y, x].

    A point whose times are not known has those of the known one next to it.
    """
    names = sorted({name for point in drawn.points for name in point.seconds})
    xs, ys = drawn.plane.x.values, drawn.plane.y.values
    places = np.array([(ys.index(p.y), xs.index(p.x)) for p in drawn.points])
    grid = np.full((len(names), len(ys), len(xs)), np.inf)
    for row, column in np.ndindex(len(ys), len(xs)):
        # Contours and borders need a value in every cell.
        near = np.abs(places - (row, column)).sum(axis=1).argmin()
        known = drawn.points[int(near)].seconds
        # Logarithms, because times and the values of the sides differ by factors.
        grid[:, row, column] = [math.log(known.get(name, math.inf)) for name in names]
    return names, grid


def _between(values: Floats, across: Floats, up: Floats) -> Floats:
    """Return `values` of a grid at fractional places: bilinear."""
    rows = np.stack([np.interp(across, np.arange(len(row)), row) for row in values])
    return np.stack([np.interp(up, np.arange(len(c)), c) for c in rows.T], axis=1)


def _values(axis: Axis, places: Floats) -> Floats:
    """Return what the figure has at fractional places of an axis: bit/s for bandwidths."""
    logs = np.interp(places, np.arange(len(axis.values)), np.log(axis.values))
    return np.exp(logs) * (8 if axis.unit is BANDWIDTH else 1)


def _channel(kind: Any, axis: Axis, field: str) -> Any:
    unit = "" if axis.unit is None else "bit/s" if axis.unit is BANDWIDTH else axis.unit.base
    whole = axis.key == "nodes"
    ends = _values(axis, np.array([0.0, len(axis.values) - 1]))
    ticks: dict[str, Any] = {"values": list(axis.values)} if len(axis.values) < 12 and whole else {}
    return kind(
        f"{field}:Q",
        title=f"{axis.title} ({unit})" if unit else axis.title,
        scale=alt.Scale(type="log", domain=[float(end) for end in ends], nice=False),
        axis=alt.Axis(labelExpr="format(datum.value, '~s')" if unit else "datum.value",
                      grid=False, **ticks),
    )  # fmt: skip


def _fills(names: Sequence[str]) -> dict[str, Style]:
    """Return a pale area for each strategy; that of one process is grey."""
    others = [name for name in names if name != ONE_PROCESS]
    colours = {name: PALE[COLOURS[place % len(COLOURS)]] for place, name in enumerate(others)}
    return {name: Style(colours.get(name, GREY), DASHES[0], "square") for name in names}


def _regions(first: NDArray[np.int64], names: Sequence[str], sides: Sequence[Floats]) -> Values:
    """Return rectangles, each a run of cells of a row in which the same strategy is first.

    They reach below the next row, so that no seam shows between the two.
    """
    across, up = sides
    found: Values = []
    for row, line in enumerate(first):
        changes = np.flatnonzero(np.diff(line)) + 1
        for begin, end in zip([0, *changes], [*changes, len(line)], strict=True):
            found.append({
                "strategy": names[int(line[begin])],
                "x": float(across[begin]), "x2": float(across[end]),
                "y": float(up[row]), "y2": float(up[min(row + 2, len(up) - 1)]),
            })  # fmt: skip
    return found


def _nice(best: Floats) -> list[float]:
    """Round seconds between the least and the most: 1, 2, 5, 10, ..."""
    low, high = float(np.exp(best.min())), float(np.exp(best.max()))
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    digits = (1, 2, 5) if high > 10 * low else (1, 1.5, 2, 3, 4, 5, 6, 7, 8)
    found = [digit * 10.0**power for power in decades for digit in digits]
    return [level for level in found if low < level < high]


def _contours(best: Floats, centres: Sequence[Floats]) -> Iterator[dict[str, float]]:
    """Yield segments of the lines on which the logarithm `best` is that of a round time.

    Each triangle of three neighbours is cut by the plane of the level.
    """
    across, up = (np.log(side) for side in centres)
    for level in _nice(best):
        above = best - math.log(level)
        for row, column in zip(*np.nonzero(_crossed(above)), strict=True):
            corners = [(row, column), (row, column + 1), (row + 1, column + 1), (row + 1, column)]
            # A plane through three corners is cut in one segment; four may be cut in two ways.
            for triangle in (corners[:3], [corners[0], *corners[2:]]):
                cuts = []
                for (a, b), (c, d) in zip(triangle, [*triangle[1:], triangle[0]], strict=True):
                    one, other = above[a, b], above[c, d]
                    if (one < 0) != (other < 0):
                        part = one / (one - other)
                        cuts.append((across[b] + part * (across[d] - across[b]),
                                     up[a] + part * (up[c] - up[a])))  # fmt: skip
                if len(cuts) == 2:
                    (x, y), (x2, y2) = np.exp(cuts).tolist()
                    yield {"x": x, "y": y, "x2": x2, "y2": y2}


def _crossed(above: Floats) -> NDArray[np.bool_]:
    """Return the squares of neighbours in which the sign changes."""
    signs = np.stack([above[:-1, :-1], above[:-1, 1:], above[1:, :-1], above[1:, 1:]]) < 0
    return np.asarray(signs.any(axis=0) & ~signs.all(axis=0))


def _levels(best: Floats, centres: Sequence[Floats]) -> Values:
    """Return a label for each line, where it is nearest to a diagonal of the plane."""
    found: Values = []
    rows, columns = np.indices(best.shape)
    inside = (np.minimum(rows, columns) > 4) & (np.maximum(rows, columns) < FINE - 5)
    for level in _nice(best):
        # The small term prefers the diagonal, where labels of several lines lie apart.
        distance = np.abs(best - math.log(level)) + 0.002 * np.abs(rows - columns)
        row, column = np.unravel_index(np.where(inside, distance, np.inf).argmin(), best.shape)
        if abs(best[row, column] - math.log(level)) < 0.1:
            found.append({"x": float(centres[0][column]), "y": float(centres[1][row]),
                          "text": f"{level:.4g} s"})  # fmt: skip
    return found


def _names(first: NDArray[np.int64], names: Sequence[str], centres: Sequence[Floats]) -> Values:
    """Return the name of each large region, at the cell nearest to the mean of its cells."""
    found: Values = []
    for number, name in enumerate(names):
        cells = np.argwhere(first == number)
        if len(cells) >= NAMED_FROM * first.size:
            inside = cells[np.abs(cells[:, 1] / FINE - 0.5) < 0.38]  # so that words have room
            cells = inside if len(inside) else cells
            row, column = cells[np.abs(cells - cells.mean(axis=0)).sum(axis=1).argmin()]
            found.append({"x": float(centres[0][column]), "y": float(centres[1][row]),
                          "text": name})  # fmt: skip
    return found


def _checks(drawn: Map, across: Any, up: Any) -> list[alt.Chart]:
    """Return a dot for each emulated point: filled where the prediction was right."""
    values: dict[bool, Values] = {True: [], False: []}
    x, y = (8 if axis.unit is BANDWIDTH else 1 for axis in (drawn.plane.x, drawn.plane.y))
    for check in drawn.checks:
        if check.agrees is not None:
            real = ", ".join(f"{n} {or_dash(value)} s" for n, value in check.measured.items())
            values[check.agrees].append({"x": check.x * x, "y": check.y * y, "measured": real})
    hint = tips("measured:N")
    style: dict[str, Any] = {"size": 90, "opacity": 1, "strokeWidth": 2, "clip": False}
    style["color"] = frame.INK_NOW
    return [
        layer(values[agrees], "point", across, up, hint, filled=agrees, **style)
        for agrees in (True, False)
    ]
