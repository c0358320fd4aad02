"""Where each node has a model of its own: from their mean to the worst, and their average."""

from __future__ import annotations

import altair as alt

from orchestra.report.figures.frame import INK_NOW, Look, Values, marks

DASH = [4, 3]


def node_layers(means: Values, x: alt.X, y: alt.Y, look: Look) -> list[alt.Chart]:
    """A band from the nodes' mean to the worst node, and the average of the replicas, dashed.

    Args:
        means: the points of the curves; those of nodes have the fields "worst" and "average".
    """
    worst = [value for value in means if value.get("worst") is not None]
    averages = [
        {**value, "value": value["average"]} for value in means if value.get("average") is not None
    ]
    layers = []
    if worst:
        band = marks(worst).mark_area(opacity=0.16, line=False)
        layers.append(band.encode(x, y, alt.Y2("worst:Q"), look.colour()))
    if averages:
        line = marks(averages).mark_line(strokeWidth=1.5, strokeDash=DASH)
        layers.append(line.encode(x, y, look.colour()))
        layers.append(_key(worst))
    return layers


def _key(worst: Values) -> alt.Chart:
    """What is what, in the corner that curves leave free: below them if they rise."""
    below = not worst or worst[-1]["worst"] <= worst[-1]["value"]
    text = "line: mean of nodes" + ", band: to the worst" * bool(worst) + ", dashed: their average"
    chart = alt.Chart(alt.InlineData(values=[{"key": text}])).mark_text(
        align="right",
        baseline="bottom" if below else "top",
        dx=-4,
        dy=-4 if below else 4,
        fontSize=11,
        color=INK_NOW,
    )
    y = alt.value("height") if below else alt.value(0)
    key: alt.Chart = chart.encode(text="key:N", x=alt.value("width"), y=y)
    return key


def caption(means: Values, metric: str) -> str:
    """What the layers are; empty without any."""
    if not any(value.get("average") is not None for value in means):
        return ""
    some = any(value["judged"] < value["replicas"] for value in means if "judged" in value)
    return (
        f"Where each node has a model of its own the line is the mean of the nodes' {metric}"
        + (" (of 16 of them, drawn by the seed)" * some)
        + ", the band goes to the worst node, and the dashed line is the average of the replicas "
        "(under Elastic their centre), a model that no node has."
    )
