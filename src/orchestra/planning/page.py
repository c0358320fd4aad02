"""The page of a plan, in one HTML file that needs nothing else, and its figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import altair as alt

from orchestra.errors import InputError
from orchestra.planning.answer import Plan, Row, target_text, time_text
from orchestra.records.record import write_atomically
from orchestra.report.figures import frame
from orchestra.report.figures.frame import BAR, Figure, Look, figure, layer, tips
from orchestra.report.page import library, templates
from orchestra.report.study import COLOURS, DASHES, INK, SIGNS, Style

PAGE = "plan.html"
DRAWN = 10
"""The most candidates in a figure."""


def write_page(plan: Plan, title: str) -> Path:
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
        currency=next((row.currency for row in plan.rows if row.cost is not None), None),
        times={row.name: time_text(row) for row in plan.rows},
        figures=figures,
        specs={each.name: frame.for_page(each.spec) for each in figures},
        library=library(),
    )
    write_atomically(plan.folder / PAGE, text)
    return plan.folder / PAGE


def _figures(plan: Plan) -> Iterator[Figure]:
    timed = [row for row in plan.rows if row.seconds is not None][:DRAWN]
    if timed:
        yield _times(plan, timed)
    if len(plan.scaling) > 1 and plan.scaled is not None:
        yield _scaling(plan)
    if plan.curves and plan.target is not None:
        yield _curves(plan)


def _styles(names: Sequence[str]) -> dict[str, Style]:
    """Return a look for each name; one process has the colour of the text."""
    shapes = list(SIGNS)
    found = {}
    for number, name in enumerate(names):
        single = name.startswith("one process")  # with whatever batch
        found[name] = Style(
            INK if single else COLOURS[number % len(COLOURS)],
            DASHES[number // len(COLOURS) % len(DASHES)] if not single else DASHES[0],
            shapes[number % len(shapes)],
        )
    return found


def _times(plan: Plan, rows: Sequence[Row]) -> Figure:
    """Return a bar for each candidate that reaches the target."""
    assert plan.target is not None
    values = [
        {
            "strategy": row.name,
            "seconds": row.seconds,
            "low": max(0.0, (row.seconds or 0.0) - (row.uncertainty or 0.0)),
            "high": (row.seconds or 0.0) + (row.uncertainty or 0.0),
        }
        for row in rows
    ]
    look = Look(_styles([row.name for row in rows]), legend=False)
    title = f"seconds until {target_text(plan.target)}"
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


def _scaling(plan: Plan) -> Figure:
    """Return samples/s of a strategy over nodes; the knee is a ring."""
    assert plan.scaled is not None
    name = plan.scaled
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


def _curves(plan: Plan) -> Figure:
    """Return the metric of the target over the seconds of the cluster."""
    assert plan.target is not None
    metric = plan.target.metric
    values = [
        {"strategy": name, "seconds": seconds, "value": value}
        for name, line in plan.curves.items()
        for seconds, value in line
    ]
    look = Look(_styles(list(plan.curves)))
    x, y = frame.along("seconds"), frame.value_axis(metric)
    aim = [{"target": plan.target.bound}]
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
