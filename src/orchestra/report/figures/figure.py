"""A figure: a Vega-Lite specification with its words, and its image files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import vl_convert

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
