"""A figure, its image files, and what all figures share: their frame, lanes, and how they react."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar, Unpack

import altair as alt
import vl_convert

from orchestra.errors import visible
from orchestra.records.files import write_atomically
from orchestra.report.study import INK, Style

WIDTH = 680
"""The width of an image file, in pixels before scaling; on a page it is that of the container."""
PAPER, _NIGHT = "white", "#1c1c1e"


@dataclass(frozen=True)
class Figure:
    """A figure that a page shows and that `save` writes into files.

    `spec` is Vega-Lite as plain data, without the title, on a transparent ground. Its parameter
    `hidden` lists the strategies (names of rows) to leave out, and `dark` says that the ground is;
    a page may set both at any time. `section` is the part of the report that it belongs to:
    convergence, target, time, traffic, staleness, logged, scaling, differences or timeline;
    those of "cluster" stand at its head.
    """

    name: str
    title: str
    caption: str
    spec: Mapping[str, Any]
    section: str
    least_width: int = 0  # in pixels, where its words are placed by hand


def _visible(part: Any) -> Any:
    """Return a part of a specification with the texts that the renderer can draw."""
    if isinstance(part, Mapping):
        return {key: _visible(item) for key, item in part.items()}
    if isinstance(part, list | tuple):
        return [_visible(item) for item in part]
    return visible(part) if isinstance(part, str) else part


def save(figure: Figure, folder: Path) -> None:
    """Write NAME.png and NAME.svg, on white and under their title."""
    save_as(figure, folder / f"{figure.name}.png", folder / f"{figure.name}.svg")


def save_as(figure: Figure, *paths: Path, width: int = WIDTH) -> None:
    """Write the figure into each of the files `paths`: SVG by that suffix, else PNG."""
    # Vega draws once: the PNG is made from the SVG.
    drawing = vl_convert.vegalite_to_svg(for_image(figure, width))
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        svg = path.suffix.lower() == ".svg"
        write_atomically(path, drawing if svg else vl_convert.svg_to_png(drawing, scale=2))


def for_image(figure: Figure, width: int = WIDTH, dark: bool = False) -> dict[str, Any]:
    """Return the specification of `figure` to be drawn alone, `width` pixels wide."""
    width = max(width, figure.least_width)
    fixed = {"dark": dark, "room": width}
    params = [
        {"name": param["name"], "value": fixed[param["name"]]} if param["name"] in fixed else param
        for param in figure.spec["params"]
        # Marks that can be zoomed are clipped, which took most of the time of the PNG files. Nobody
        # can zoom in an image.
        if param["name"] != "zoom"
    ]
    config = figure.spec["config"]
    view = {**config["view"], "continuousWidth": width}  # of a container that is not there
    about = {"background": _NIGHT if dark else PAPER, "title": figure.title}
    return {**figure.spec, "params": params, "config": {**config, "view": view}, **about}


def for_page(part: Any) -> Any:
    """Return a part of a specification without a legend of strategies: a page has one for all."""
    if isinstance(part, list):
        return [for_page(item) for item in part]
    if not isinstance(part, Mapping):
        return part
    # Data is long, and may have fields of these names
    inside = {key: item if key == "datasets" else for_page(item) for key, item in part.items()}
    strategies = "legend" in part and part.get("field") in ("strategy", "line")
    return {**inside, "legend": None} if strategies else inside


Values = list[dict[str, Any]]
C = TypeVar("C")

SI = "format(datum.value, '~s')"
"""The label of a tick with a prefix of its own (0, 500, 1.5k); a format has one for all ticks."""
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
_WORDS = {"labelColor": {"expr": INK}, "titleColor": {"expr": INK}, "labelFontSize": 11}
_CONFIG = {
    "font": "Helvetica Neue, Helvetica, Arial, sans-serif",
    "background": None,
    "padding": 4,
    "view": {"stroke": None},
    "title": {
        "color": {"expr": INK}, "anchor": "start", "fontSize": 14, "offset": 10,
        "limit": {"expr": "room"},
    },
    "axis": {
        **_WORDS, "titleFontSize": 11, "titleFontWeight": "normal", "titlePadding": 8,
        "gridColor": {"expr": "grid"}, "domainColor": {"expr": "faint"},
        "tickColor": {"expr": "faint"}, "labelOverlap": "greedy", "labelBound": True,
    },
    "axisX": {"tickCount": {"expr": "max(3, floor(room / 90))"}, "labelFlush": True},
    "legend": {
        **_WORDS, "labelLimit": 260, "orient": "bottom", "direction": "horizontal",
        "symbolSize": 70, "columnPadding": 18,
    },
}  # fmt: skip


def rounded(value: float | None) -> float | None:
    """Return `value` to five significant digits, more than an eye can tell; None if not finite."""
    return float(f"{value:.5g}") if value is not None and math.isfinite(value) else None


class MarkStyle(TypedDict, total=False):
    """Properties of a mark that are the same for all values, by their names in Vega-Lite."""

    align: Literal["left", "center", "right"]
    baseline: Literal["top", "middle", "bottom"]
    clip: bool
    color: str | alt.ExprRef
    cornerRadiusEnd: float
    dx: float
    dy: float
    fill: str | alt.ExprRef
    filled: bool
    fontSize: float
    fontWeight: Literal["normal", "bold"]
    height: float
    interpolate: Literal["linear", "step-after"]
    limit: float | alt.ExprRef
    line: bool
    opacity: float
    shape: str
    size: float
    stroke: str | alt.ExprRef
    strokeDash: list[float]
    strokeJoin: Literal["miter", "round", "bevel"]
    strokeOpacity: float
    strokeWidth: float
    thickness: float
    yOffset: float


def layer(
    values: Iterable[Mapping[str, Any]], mark: str, *channels: Any, **style: Unpack[MarkStyle]
) -> alt.Chart:
    """Draw a mark for each of `values`, with its channels; a list of tooltips is one of these.

    Those of strategies that are hidden, by their "strategy", are not drawn. Floats are rounded.
    """
    # 15 digits a number would double a page; an eye tells five apart
    data = [
        {key: rounded(item) if isinstance(item, float) else item for key, item in value.items()}
        for value in values
    ]
    chart = alt.Chart(alt.InlineData(values=data))
    # A page can hide a strategy; marks that belong to none, such as the target, stay
    if all("strategy" in value for value in data):
        chart = chart.transform_filter("indexof(hidden, datum.strategy) < 0")
    chart.mark = alt.MarkDef(type=mark, **style)  # type: ignore[arg-type]
    return chart.encode(*channels)


def spans_much(values: Sequence[float]) -> bool:
    """Return whether a logarithmic axis shows `values` better."""
    return min(values) > 0 and max(values) / min(values) > _LOG_FROM


def along(axis: str, keys: Sequence[str] = ()) -> alt.X:
    """Return the horizontal axis of a run, "seconds" or "samples"; `keys` are lines below it."""
    title = "seconds of training" if axis == "seconds" else "samples seen by all workers"
    look = alt.Axis(grid=False, labelExpr=SI) if axis == "samples" else alt.Axis(grid=False)
    # nice would end the axis after the run, at a round number
    scale = alt.Scale(nice=False, zero=True, padding=7)
    return alt.X(f"{axis}:Q", title=[title, *keys] if keys else title, axis=look, scale=scale)


def zoomable(chart: alt.Chart, channels: Sequence[Literal["x", "y"]] = ("x", "y")) -> alt.Chart:
    """Return `chart`, whose axes zoom by Ctrl or Shift and the wheel, or are dragged by a mouse.

    The wheel alone and the finger scroll the page that the figure is on. A double click resets.
    """
    # Only a mouse drags, and the wheel zooms only with a key: finger and plain wheel scroll the
    # page.
    mouse = "[pointerdown[event.pointerType === 'mouse' && !event.button], window:pointerup]"
    drag, wheel = f"{mouse} > window:pointermove!", "wheel![event.ctrlKey || event.shiftKey]"
    of: dict[str, Any] = {"encodings": list(channels), "on": drag, "translate": drag, "zoom": wheel}
    zoom = alt.selection_interval(name="zoom", bind="scales", clear="dblclick", **of)
    return chart.properties(name="zoomed").add_params(zoom)


def value_axis(title: str, log: bool = False, axis: alt.Axis | None = None) -> alt.Y:
    """Return the vertical axis of "value": its range is that of the values, not from zero."""
    kind: dict[str, Any] = {"type": "log"} if log else {"zero": False}
    scale = alt.Scale(nice=False, padding=9, **kind)
    return alt.Y("value:Q", title=title, scale=scale, axis=axis or alt.Axis(tickCount=6))


def tips(*fields: str | tuple[str, ...]) -> list[alt.Tooltip]:
    """Return the tooltip of a mark: fields with their types, titles and formats."""
    found = []
    for field in fields:
        name, *more = [field] if isinstance(field, str) else field
        texts: dict[str, Any] = dict(zip(("title", "format"), more, strict=False))
        found.append(alt.Tooltip(name, **{key: text for key, text in texts.items() if text}))
    return found


def kinds(
    field: str,
    values: Values,
    colours: Mapping[str, str],
    columns: alt.ExprRef,
    label: alt.typing.Optional[str] = alt.Undefined,
) -> alt.Color:
    """Return the colours of those kinds that are in `field` of `values`, in their order; `columns`
    are those of the legend, and `label` is Vega's expression of a kind's name in it."""
    # A legend of kinds that no bar has would be looked for in vain
    used = [kind for kind in colours if any(value[field] == kind for value in values)]
    scale = alt.Scale(domain=used, range=[colours[kind] for kind in used])
    shown = alt.Legend(symbolType="square", columns=columns, labelExpr=label)
    return alt.Color(f"{field}:N", title=None, scale=scale, legend=shown)


class Look:
    """The channels that tell strategies apart, over the `styles` of `names`, of all by default.

    `colour` is for lines and points, `dash` for lines, and `shape` for points.
    """

    def __init__(
        self,
        styles: Mapping[str, Style],
        names: Iterable[str] | None = None,
        field: str = "strategy",
        legend: bool = True,
    ) -> None:
        chosen = {name: styles[name] for name in (styles if names is None else names)}
        longest = max((len(name) for name in chosen), default=1)
        # The columns follow `room`: `width` shrinks only after the legend was laid out, which cut
        # off its last entries.
        columns = f"max(1, floor(room / {min(260, round(6.2 * longest) + 22) + 20}))"
        # Dashes would fray the outline of a shape
        symbol: dict[str, Any] = {"symbolLimit": 0, "symbolOpacity": 1, "symbolStrokeWidth": 0}
        shown = alt.Legend(title=None, columns=alt.ExprRef(columns), **symbol)

        def channel(kind: Callable[..., C], values: list[Any]) -> C:
            scale = alt.Scale(domain=list(chosen), range=values)
            return kind(f"{field}:N", scale=scale, legend=shown if legend else None)

        looks = chosen.values()
        # Ink depends on the ground, which the page may change at any time
        inks = [{"expr": INK} if look.colour == INK else look.colour for look in looks]
        self.colour: alt.Color = channel(alt.Color, inks)
        self.dash: alt.StrokeDash = channel(alt.StrokeDash, [list(look.dash) for look in looks])
        self.shape: alt.Shape = channel(alt.Shape, [look.shape for look in looks])


def figure(
    name: str,
    title: str,
    caption: str,
    section: str,
    layers: Iterable[alt.Chart],
    height: int | alt.Step = 300,
    least_width: int = 0,
) -> Figure:
    """Return the figure of `layers`, drawn one over the other, as wide as its container.

    Layers without a value are left out: an axis over nothing is a warning in the browser. Its name
    is `name` as far as that can stand in the name of a file.
    """
    chart = alt.layer(*(part for part in layers if part.data.values)).properties(
        width="container", height=height, description=f"{title}. {caption}"
    )
    spec = _visible(chart.to_dict())
    spec |= {"params": [*_PARAMS, *spec.get("params", ())], "config": _CONFIG}
    # A row's name has brackets, commas and perhaps a path in it
    file_name = re.sub(r"[^\w.]+", "-", name).strip("-")
    return Figure(file_name, title, caption, spec, section, least_width)


# A fixed height: with a height in steps Vega-Lite warns about `width: container`, and the page
# would jump when a strategy is hidden.
LANE = 40  # the height of a lane, in pixels
POINT: dict[str, Any] = {"yOffset": 8}
"""The offset of marks in the lower part of a lane; its upper part is for text."""
BAR: dict[str, Any] = {"height": 15, **POINT}
_HEADED_LANE = 17
_SEPARATOR = "\u2063"  # that of Unicode which nobody sees, and nobody types


def haloed(
    values: Values, width: float, *channels: Any, **style: Unpack[MarkStyle]
) -> list[alt.Chart]:
    """Draw texts, and below them their halo, so that no line runs through them."""
    # A layer of its own: a stroke of the text itself would be drawn over its letters
    halo: MarkStyle = {**style, "stroke": GROUND, "strokeWidth": width}
    letters: MarkStyle = {**style, "color": INK_NOW}
    return [layer(values, "text", *channels, **each) for each in (halo, letters)]


def _words(texts: Mapping[str, str], y: alt.Y, dy: float) -> list[alt.Chart]:
    """Draw the name of each strategy on the left, and its text on the right."""
    values = [
        {"strategy": name, "lane": lane_key(name), "text": text} for name, text in texts.items()
    ]
    longest = max(map(len, texts.values()))
    room = alt.ExprRef(f"max(60, width - {round(6.4 * longest) + 12})")
    style: dict[str, Any] = {"baseline": "middle", "dy": dy, "fontSize": 11.5}
    return [
        *haloed(values, 4, y, LEFT, alt.Text("strategy:N"), align="left", limit=room, **style),
        *haloed(values, 4, y, RIGHT, alt.Text("text:N"), align="right", **style),
    ]


def lanes(layers: Sequence[alt.Chart], texts: Mapping[str, str]) -> tuple[list[alt.Chart], int]:
    """Return `layers` in one lane per strategy, and the height of all lanes. The strategy's name is
    above its lane on the left, its text on the right; `texts` are in the order of the lanes.

    The lane has room for a long name, which would take a phone's whole width in a column of its
    own. A hidden strategy leaves its lane empty: the others stay where the reader saw them.
    """
    scale = alt.Scale(domain=list(texts), paddingInner=0, paddingOuter=0)
    y = alt.Y("strategy:N", axis=None, scale=scale)
    return [*(part.encode(y) for part in layers), *_words(texts, y, -9)], LANE * len(texts)


def lane_key(strategy: str, name: str = "") -> str:
    """Return the "lane" of a value in its strategy's lane `name`; without one, of its heading."""
    return f"{strategy}{_SEPARATOR}{name}"


def headed_lanes(
    layers: Sequence[alt.Chart],
    texts: Mapping[str, str],
    title: str | None = None,
    label_limit: alt.typing.Optional[float] = alt.Undefined,
) -> tuple[list[alt.Chart], int]:
    """Return `layers` in several lanes for each strategy, below its name and its text, and the
    height of all. Lanes are those of the first layer's values, each with the key of its "lane"."""
    domain: dict[str, None] = {}
    for strategy in texts:
        own = [v["lane"] for v in layers[0].data.values if v["strategy"] == strategy]
        # The heading is a lane without a name of its own
        domain |= dict.fromkeys([lane_key(strategy), *own])
    scale = alt.Scale(domain=list(domain), paddingInner=0.15, paddingOuter=0)
    label = f"split(datum.value, '{_SEPARATOR}')[1]"
    names = alt.Axis(labelExpr=label, ticks=False, domain=False, labelLimit=label_limit)
    y = alt.Y("lane:N", title=title, scale=scale, axis=names)
    return [*_words(texts, y, 3), *(part.encode(y) for part in layers)], _HEADED_LANE * len(domain)
