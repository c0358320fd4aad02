"""Where each node has a model of its own: from their mean to the worst, and their average."""

from __future__ import annotations

import altair as alt

from orchestra.report.figures.frame import Look, Values, marks

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
    return layers


def key(means: Values) -> list[str]:
    """What is what, in a line; none without any."""
    if not any(value.get("average") is not None for value in means):
        return []
    worst = any(value.get("worst") is not None for value in means)
    return ["line: mean of nodes" + ", band: to the worst" * worst + ", dashed: their average"]


def caption(means: Values) -> str:
    """What the layers are; empty without any."""
    if not any(value.get("average") is not None for value in means):
        return ""
    some = any(value["judged"] < value["replicas"] for value in means if "judged" in value)
    return (
        "Where each node has a model of its own the line is the mean of the nodes"
        + (" (of 16 of them, drawn by the seed)" * some)
        + ", the band goes to the worst node, and the dashed line is the average of the replicas "
        "(under Elastic their centre), a model that no node has."
    )
