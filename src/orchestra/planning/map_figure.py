"""The figure of a map: regions of the first strategy, lines of equal time, emulated points."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import altair as alt
import numpy as np
from numpy.typing import NDArray

from orchestra.cluster.units import BANDWIDTH
from orchestra.experiments.experiment import ONE_PROCESS
from orchestra.planning.answer import target_text
from orchestra.planning.axes import Axis
from orchestra.planning.map import Map
from orchestra.report.figures import frame
from orchestra.report.figures.frame import Figure, Look, Values, figure, haloed, layer, tips
from orchestra.report.numbers import or_dash
from orchestra.report.study import COLOURS, DASHES, Style

Floats = NDArray[np.float64]

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
    checked = [check for check in drawn.checks if check.agrees is not None]
    title = f"Who reaches {target} first: {drawn.experiment}, {drawn.plane.text}"
    caption = (
        f"Which strategy reaches {target} first; lines are the seconds that it takes, as simulated."
    )
    if checked:
        agreed = sum(check.agrees is True for check in checked)
        caption += (
            f" Dots were emulated: the predicted first of two was first at {agreed} of "
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
    for row in range(len(ys)):
        for column in range(len(xs)):
            # Contours and borders need a value in every cell.
            near = np.abs(places - (row, column)).sum(axis=1).argmin()
            known = drawn.points[int(near)].seconds
            # Logarithms: times differ by factors, and so do the values of the sides (decision 104).
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
    for check in drawn.checks:
        if check.agrees is not None:
            scale = [8 if axis.unit is BANDWIDTH else 1 for axis in (drawn.plane.x, drawn.plane.y)]
            real = (f"{name} {or_dash(value)} s" for name, value in check.measured.items())
            values[check.agrees].append(
                {"x": check.x * scale[0], "y": check.y * scale[1], "measured": ", ".join(real)}
            )
    hint = tips("measured:N")
    style: dict[str, Any] = {"size": 90, "opacity": 1, "strokeWidth": 2, "clip": False}
    return [
        layer(
            values[agrees], "point", across, up, hint, color=frame.INK_NOW, filled=agrees, **style
        )
        for agrees in (True, False)
    ]
