"""A figure, its image files, and what all figures share: their frame, lanes, and how they react."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import altair as alt
import vl_convert

from orchestra.report.figures.subject import INK, Style

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


def save(figure: Figure, folder: Path) -> tuple[Path, Path]:
    """Write NAME.png and NAME.svg, on white and under their title; their paths."""
    drawing = vl_convert.vegalite_to_svg(for_image(figure))
    png, svg = folder / f"{figure.name}.png", folder / f"{figure.name}.svg"
    _write(png, vl_convert.svg_to_png(drawing, scale=2))
    _write(svg, drawing.encode())
    return png, svg


def save_as(figure: Figure, path: Path, width: int = WIDTH) -> None:
    """Write the figure into the one file `path`: SVG by that suffix, else PNG."""
    drawing = vl_convert.vegalite_to_svg(for_image(figure, width))
    svg = path.suffix.lower() == ".svg"
    _write(path, drawing.encode() if svg else vl_convert.svg_to_png(drawing, scale=2))


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


def for_page(figure: Figure) -> dict[str, Any]:
    """The specification without a legend of the strategies: a page has one for all its figures."""
    spec: dict[str, Any] = _without_legend(figure.spec)
    return spec


def _without_legend(part: Any) -> Any:
    if isinstance(part, list):
        return [_without_legend(item) for item in part]
    if not isinstance(part, Mapping):
        return part
    legend = {"legend": None} if _tells_strategies_apart(part) else {}
    inside = {
        key: item if key == "datasets" else _without_legend(item) for key, item in part.items()
    }
    return inside | legend


def _tells_strategies_apart(channel: Mapping[str, Any]) -> bool:
    return "legend" in channel and channel.get("field") in ("strategy", "line")


def _write(path: Path, content: bytes) -> None:
    """Write a file so that it is there whole, or as it was before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        error.filename = str(path)  # a full disk names no file
        raise


Values = list[dict[str, Any]]

SI = "format(datum.value, '~s')"
"""The label of a tick with a prefix of its own: 0, 500, 1.5k; a format gives all ticks the same."""

SHOWN = "indexof(hidden, datum.strategy) < 0"
"""Every mark of data is filtered by this, so that a page can hide a strategy everywhere."""

INK_NOW = alt.ExprRef(INK)
FAINT = alt.ExprRef("faint")
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


def marks(values: Values) -> alt.Chart:
    """A chart of `values`, each with its "strategy"; those of hidden ones are not drawn."""
    return alt.Chart(alt.InlineData(values=values)).transform_filter(SHOWN)


def spans_much(values: Sequence[float]) -> bool:
    """Whether a logarithmic axis shows `values` better."""
    return min(values) > 0 and max(values) / min(values) > _LOG_FROM


def height_scale(log: bool = False) -> alt.Scale:
    """The range of the values, not from zero; logarithmic with `log`."""
    if log:
        return alt.Scale(type="log", nice=False, padding=9)
    return alt.Scale(zero=False, nice=False, padding=9)


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


class Look:
    """The channels that tell strategies apart, over `styles` by name."""

    def __init__(self, styles: Mapping[str, Style], field: str = "strategy") -> None:
        self._field = f"{field}:N"
        self._styles = dict(styles)
        longest = max((len(name) for name in styles), default=1)
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
        colours = [
            {"expr": INK} if style.colour == INK else style.colour
            for style in self._styles.values()
        ]
        return alt.Color(self._field, scale=self._scale(colours), legend=self._shown(legend))

    def dash(self) -> alt.StrokeDash:
        """Its dash, on lines."""
        dashes = [list(style.dash) for style in self._styles.values()]
        return alt.StrokeDash(self._field, scale=self._scale(dashes), legend=self._legend)

    def shape(self, legend: bool = True) -> alt.Shape:
        """Its shape, on points."""
        shapes = [style.shape for style in self._styles.values()]
        return alt.Shape(self._field, scale=self._scale(shapes), legend=self._shown(legend))

    def _scale(self, values: Sequence[Any]) -> alt.Scale:
        return alt.Scale(domain=list(self._styles), range=list(values))

    def _shown(self, legend: bool) -> alt.Legend | None:
        return self._legend if legend else None


def figure(
    name: str,
    title: str,
    caption: str,
    section: str,
    layers: Iterable[alt.Chart],
    height: int | alt.Step = 300,
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
    return Figure(file_name, title, caption, spec, section)


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


def lane_words(texts: Mapping[str, str]) -> list[alt.Chart]:
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
