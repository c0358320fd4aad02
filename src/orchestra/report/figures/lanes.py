"""Horizontal lanes, one for each strategy: its name and a figure above its bar."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt

from orchestra.report.figures.frame import INK_NOW, marks

LANE = 40
"""Height of a lane."""
BAR: dict[str, Any] = {"height": 15, "yOffset": 8}
"""A bar, or a point, in the lower part of its lane; the upper is that of the text."""
SEPARATOR = "\u2063"
"""Between the parts of a lane's key: that of Unicode which nobody sees, and nobody types."""
HALO: dict[str, Any] = {"stroke": alt.ExprRef("ground"), "strokeWidth": 4}
"""Of a text that is drawn first, so that no line runs through the one over it."""
POINT: dict[str, Any] = {"yOffset": BAR["yOffset"]}


def lane(names: Sequence[str]) -> alt.Y:
    """The lanes of `names`, from the top; without an axis, since the name stands in its lane.

    In the lane there is room for a long name, which beside it would take a phone's whole width.
    A hidden strategy leaves its lane empty: the others stay where the reader saw them.
    """
    scale = alt.Scale(domain=list(names), paddingInner=0, paddingOuter=0)
    return alt.Y("strategy:N", axis=None, scale=scale)


def words(texts: Mapping[str, str]) -> list[alt.Chart]:
    """Above each bar on the left its strategy, on the right its text; the keys in order."""
    values = [{"strategy": name, "text": text} for name, text in texts.items()]
    base = marks(values).encode(lane(list(texts)))
    longest = max(len(text) for text in texts.values())
    room = alt.ExprRef(f"max(60, width - {round(6.4 * longest) + 12})")
    shared: dict[str, Any] = {"baseline": "middle", "dy": -9, "fontSize": 11.5}
    left = base.encode(x=alt.value(1), text="strategy:N")
    right = base.encode(x=alt.value("width"), text="text:N")
    return [
        layer
        for look in (HALO, {"color": INK_NOW})
        for layer in (
            left.mark_text(align="left", limit=room, **shared, **look),
            right.mark_text(align="right", **shared, **look),
        )
    ]
