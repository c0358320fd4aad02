"""A figure, its image files, and what all figures share: their frame, lanes, and how they react."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import altair as alt
import vl_convert

from orchestra.records.record import write_atomically
from orchestra.report.study import INK, Style

WIDTH = 680
"""Of an image file, in pixels before it is scaled; on a page it is that of the container."""

PAPER = "white"
_NIGHT = "#1c1c1e"


@dataclass(frozen=True)
class Figure:
    """What a page shows in one place, and `save` writes into files.

    `spec` is Vega-Lite as plain data, without the title, on a transparent ground. Its parameter
    `hidden` lists the strategies (names of rows) to leave out, and `dark` says that the ground is;
    a page may set both at any time. `section` is the part of the report that it belongs to:
    convergence, target, time, traffic, staleness, scaling, differences or timeline; those of
    "cluster" stand at its head. `least_width` is how many pixels it needs, where its words are
    placed by hand.
    """

    name: str
    title: str
    caption: str
    spec: Mapping[str, Any]
    section: str
    least_width: int = 0


def save(figure: Figure, folder: Path) -> None:
    """Write NAME.png and NAME.svg, on white and under their title."""
    save_as(figure, folder / f"{figure.name}.png", folder / f"{figure.name}.svg")


def save_as(figure: Figure, *paths: Path, width: int = WIDTH) -> None:
    """Write the figure into each of the files `paths`: SVG by that suffix, else PNG."""
    drawing = vl_convert.vegalite_to_svg(for_image(figure, width))
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        svg = path.suffix.lower() == ".svg"
        write_atomically(path, drawing if svg else vl_convert.svg_to_png(drawing, scale=2))


def for_image(figure: Figure, width: int = WIDTH, dark: bool = False) -> dict[str, Any]:
    """The specification of `figure` to be drawn alone, `width` pixels wide."""
    width = max(width, figure.least_width)
    fixed = {"dark": dark, "room": width}
    params = [
        {"name": param["name"], "value": fixed[param["name"]]} if param["name"] in fixed else param
        for param in figure.spec["params"]
        if param["name"] != "zoom"  # which nobody can do in an image, and which costs time
    ]
    config = figure.spec["config"]
    view = {**config["view"], "continuousWidth": width}  # of a container that is not there
    return {
        **figure.spec,
        "params": params,
        "config": {**config, "view": view},
        "background": _NIGHT if dark else PAPER,
        "title": figure.title,
    }


def for_page(part: Any) -> Any:
    """A part of a specification without a legend of the strategies: a page has one for all its
    figures."""
    if isinstance(part, list):
        return [for_page(item) for item in part]
    if not isinstance(part, Mapping):
        return part
    inside = {key: item if key == "datasets" else for_page(item) for key, item in part.items()}
    strategies = "legend" in part and part.get("field") in ("strategy", "line")
    return {**inside, "legend": None} if strategies else inside


Values = list[dict[str, Any]]
C = TypeVar("C")

SI = "format(datum.value, '~s')"
"""The label of a tick with a prefix of its own: 0, 500, 1.5k; a format gives all ticks the same."""

SHOWN = "indexof(hidden, datum.strategy) < 0"
"""Every mark of data is filtered by this, so that a page can hide a strategy everywhere."""

INK_NOW = alt.ExprRef(INK)
FAINT = alt.ExprRef("faint")
GROUND = alt.ExprRef("ground")
LEFT, RIGHT = (alt.XValue(edge) for edge in (1, "width"))  # type: ignore[no-untyped-call]
_PARAMS = (
    {"name": "hidden", "value": []},
    {"name": "dark", "value": False},
    {"name": INK, "expr": "dark ? '#ececec' : '#222222'"},
    {"name": "faint", "expr": "dark ? '#8e8e93' : '#757575'"},
    {"name": "ground", "expr": "dark ? '#1c1c1e' : '#ffffff'"},
    {"name": "grid", "expr": "dark ? '#3a3a3c' : '#e3e3e3'"},
    # The container's width. `width` itself shrinks as the axes take their part of it, after the
    # legend was laid out; it stands here so that this is evaluated again when a window changes.
    {"name": "room", "expr": "isFinite(containerSize()[0]) ? containerSize()[0] : width"},
)
_LOG_FROM = 10.0  # largest over smallest value
_FONT = "Helvetica Neue, Helvetica, Arial, sans-serif"
_CONFIG = {
    "font": _FONT,
    "background": None,
    "padding": 4,
    "view": {"stroke": None},
    "title": {
        "color": {"expr": INK},
        "anchor": "start",
        "fontSize": 14,
        "offset": 10,
        "limit": {"expr": "room"},
    },
    "axis": {
        "labelColor": {"expr": INK},
        "titleColor": {"expr": INK},
        "labelFontSize": 11,
        "titleFontSize": 11,
        "titleFontWeight": "normal",
        "titlePadding": 8,
        "gridColor": {"expr": "grid"},
        "domainColor": {"expr": "faint"},
        "tickColor": {"expr": "faint"},
        "labelOverlap": "greedy",
        "labelBound": True,
    },
    "axisX": {"tickCount": {"expr": "max(3, floor(room / 90))"}, "labelFlush": True},
    "legend": {
        "labelColor": {"expr": INK},
        "titleColor": {"expr": INK},
        "labelFontSize": 11,
        "labelLimit": 260,
        "orient": "bottom",
        "direction": "horizontal",
        "symbolSize": 70,
        "columnPadding": 18,
    },
}


def rounded(value: float | None) -> float | None:
    """`value` to five significant digits, more than an eye can tell; None if not finite."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.5g}")


def layer(values: Values, mark: str, *channels: Any, **look: Any) -> alt.Chart:
    """Draw a mark for each of `values`, with its channels; a list of tooltips is one of these.

    Those of the strategies that are hidden, by their "strategy", are not drawn.
    """
    chart = alt.Chart(alt.InlineData(values=values))
    if all("strategy" in value for value in values):
        chart = chart.transform_filter(SHOWN)
    chart.mark = alt.MarkDef(type=mark, **look)  # type: ignore[arg-type]
    return chart.encode(*channels)


def spans_much(values: Sequence[float]) -> bool:
    """Whether a logarithmic axis shows `values` better."""
    return min(values) > 0 and max(values) / min(values) > _LOG_FROM


def along(axis: str, keys: Sequence[str] = ()) -> alt.X:
    """The horizontal axis of a run's course: "seconds" or "samples"; `keys` are lines below."""
    titles = {"seconds": "seconds of training", "samples": "samples seen by all workers"}
    return alt.X(
        f"{axis}:Q",
        title=[titles[axis], *keys] if keys else titles[axis],
        axis=alt.Axis(grid=False, labelExpr=SI) if axis == "samples" else alt.Axis(grid=False),
        scale=alt.Scale(nice=False, zero=True, padding=7),
    )


def zoomable(chart: alt.Chart, channels: Sequence[Literal["x", "y"]] = ("x", "y")) -> alt.Chart:
    """`chart`, whose axes zoom by Ctrl or Shift and the wheel, or are dragged by a mouse.

    The wheel alone and the finger scroll the page that the figure is on. A double click resets.
    """
    mouse = "[pointerdown[event.pointerType === 'mouse' && !event.button], window:pointerup]"
    drag = f"{mouse} > window:pointermove!"
    zoom = alt.selection_interval(
        name="zoom",
        bind="scales",
        encodings=list(channels),
        on=drag,
        translate=drag,
        zoom="wheel![event.ctrlKey || event.shiftKey]",
        clear="dblclick",
    )
    return chart.properties(name="zoomed").add_params(zoom)


def value_axis(title: str, log: bool = False, axis: alt.Axis | None = None) -> alt.Y:
    """The vertical axis of "value": its range is that of the values, not from zero."""
    kind: dict[str, Any] = {"type": "log"} if log else {"zero": False}
    scale = alt.Scale(nice=False, padding=9, **kind)
    return alt.Y("value:Q", title=title, scale=scale, axis=axis or alt.Axis(tickCount=6))


def tips(*fields: str | tuple[str, ...]) -> list[alt.Tooltip]:
    """What stands beside a mark that is pointed at: fields with their types, titles and formats."""
    found = []
    for field in fields:
        name, *more = [field] if isinstance(field, str) else field
        texts: dict[str, Any] = dict(zip(("title", "format"), more, strict=False))
        found.append(alt.Tooltip(name, **{key: text for key, text in texts.items() if text}))
    return found


class Look:
    """The channels that tell strategies apart, over the `styles` of `names`, of all by default."""

    def __init__(
        self,
        styles: Mapping[str, Style],
        names: Iterable[str] | None = None,
        field: str = "strategy",
    ) -> None:
        self._field = f"{field}:N"
        self._styles = {name: styles[name] for name in (styles if names is None else names)}
        longest = max((len(name) for name in self._styles), default=1)
        columns = f"max(1, floor(room / {min(260, round(6.2 * longest) + 22) + 20}))"
        self._legend = alt.Legend(
            title=None,
            columns=alt.ExprRef(columns),
            symbolLimit=0,
            symbolOpacity=1,
            symbolStrokeWidth=0,  # dashes would fray the outline of a shape
        )

    def colour(self, legend: bool = True) -> alt.Color:
        """Its colour, on lines and points."""
        inks = {name: {"expr": INK} for name, s in self._styles.items() if s.colour == INK}
        return self._channel(
            alt.Color, [inks.get(name, s.colour) for name, s in self._styles.items()], legend
        )

    def dash(self) -> alt.StrokeDash:
        """Its dash, on lines."""
        return self._channel(alt.StrokeDash, [list(s.dash) for s in self._styles.values()])

    def shape(self, legend: bool = True) -> alt.Shape:
        """Its shape, on points."""
        return self._channel(alt.Shape, [s.shape for s in self._styles.values()], legend)

    def _channel(self, channel: Callable[..., C], values: list[Any], legend: bool = True) -> C:
        scale = alt.Scale(domain=list(self._styles), range=values)
        return channel(self._field, scale=scale, legend=self._legend if legend else None)


def figure(
    name: str,
    title: str,
    caption: str,
    section: str,
    layers: Iterable[alt.Chart],
    height: int | alt.Step = 300,
    least_width: int = 0,
) -> Figure:
    """The figure of `layers`, drawn one over the other, as wide as its container.

    Its name is `name` as far as that can stand in the name of a file.
    """
    chart = alt.layer(*layers).properties(
        width="container", height=height, description=f"{title}. {caption}"
    )
    spec = chart.to_dict()
    spec["params"] = [*_PARAMS, *spec.get("params", ())]
    spec["config"] = _CONFIG
    file_name = re.sub(r"[^\w.]+", "-", name).strip("-")
    return Figure(file_name, title, caption, spec, section, least_width)


LANE = 40
"""Height of a lane."""
BAR: dict[str, Any] = {"height": 15, "yOffset": 8}
"""A bar, or a point, in the lower part of its lane; the upper is that of the text."""
SEPARATOR = "\u2063"
"""Between the parts of a lane's key: that of Unicode which nobody sees, and nobody types."""
POINT: dict[str, Any] = {"yOffset": BAR["yOffset"]}


def haloed(values: Values, width: float, *channels: Any, **style: Any) -> list[alt.Chart]:
    """Draw texts, and below them their halo, so that no line runs through them."""
    halo = layer(values, "text", *channels, **style, stroke=GROUND, strokeWidth=width)
    return [halo, layer(values, "text", *channels, **style, color=INK_NOW)]


def lane(names: Iterable[str]) -> alt.Y:
    """The lanes of `names`, from the top; without an axis, since the name stands in its lane.

    In the lane there is room for a long name, which beside it would take a phone's whole width.
    A hidden strategy leaves its lane empty: the others stay where the reader saw them.
    """
    scale = alt.Scale(domain=list(names), paddingInner=0, paddingOuter=0)
    return alt.Y("strategy:N", axis=None, scale=scale)


def lanes(
    name: str,
    title: str,
    caption: str,
    section: str,
    layers: Sequence[alt.Chart],
    texts: Mapping[str, str],
) -> Figure:
    """The figure of `layers` in the lanes of strategies, above each on the left its name, on the
    right its text; `texts` are in the order of the lanes."""
    values = [{"strategy": name, "text": text} for name, text in texts.items()]
    longest = max(len(text) for text in texts.values())
    room = alt.ExprRef(f"max(60, width - {round(6.4 * longest) + 12})")
    style: dict[str, Any] = {"baseline": "middle", "dy": -9, "fontSize": 11.5}
    left = lane(texts), LEFT, alt.Text("strategy:N")
    right = lane(texts), RIGHT, alt.Text("text:N")
    words = [
        *haloed(values, 4, *left, align="left", limit=room, **style),
        *haloed(values, 4, *right, align="right", **style),
    ]
    return figure(name, title, caption, section, [*layers, *words], LANE * len(texts))


def headed_lane(strategy: str, name: str = "") -> str:
    """The key of the lane `name` of a strategy, without one of its heading."""
    return f"{strategy}{SEPARATOR}{name}"


def headed_lanes(
    domain: Sequence[str], texts: Mapping[str, str], **axis: Any
) -> tuple[alt.Y, list[alt.Chart]]:
    """The lanes `domain`, and their headings: the name of each strategy, on the right its text."""
    y = alt.Y(
        "lane:N",
        title=axis.pop("title", None),
        scale=alt.Scale(domain=list(domain), paddingInner=0.15, paddingOuter=0),
        axis=alt.Axis(
            labelExpr=f"split(datum.value, '{SEPARATOR}')[1]", ticks=False, domain=False, **axis
        ),
    )
    heads = [
        {"strategy": name, "lane": headed_lane(name), "text": text} for name, text in texts.items()
    ]
    style: dict[str, Any] = {"baseline": "middle", "fontSize": 11.5, "dy": 3, "color": INK_NOW}
    left = y, LEFT, alt.Text("strategy:N")
    right = y, RIGHT, alt.Text("text:N")
    return y, [
        layer(heads, "text", *left, align="left", **style),
        layer(heads, "text", *right, align="right", **style),
    ]
