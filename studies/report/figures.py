"""The figures of the report, drawn from the answers; legible in black and white."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import altair as alt
import vl_convert

Answer = Mapping[str, Any]
Chart = Any  # altair's methods have no types
DASHES = [[1, 0], [6, 3], [2, 2], [8, 2, 2, 2], [4, 1], [1, 3], [10, 3]]
SHAPES = ["circle", "square", "triangle-up", "cross", "diamond", "triangle-down", "stroke"]
FONT = "DejaVu Sans"


def draw(data: Path, folder: Path) -> list[Path]:
    """Draw the figures of all answers in `data` that have rows, as SVG files in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    band = json.loads((data / "measured.json").read_text())["step_time_error"]["value"] / 100
    charts: dict[int, Callable[[Answer], Chart]] = {
        1: lambda answer: _lines(answer, "seconds to the target", "cluster", "comparison"),
        2: lambda answer: _lines(answer, "training seconds", "ranks", "cluster"),
        3: lambda answer: _dots(answer, "seconds to the target"),
        4: lambda answer: _dots(answer, "accuracy"),
        5: lambda answer: _dots(answer, "seconds to the target"),
        6: lambda answer: _lines(answer, "seconds to the target", "cluster", "comparison"),
        7: lambda answer: _dots(answer, "training seconds"),
        9: lambda answer: _lines(answer, "training seconds", "ranks", "cluster", band),
    }
    made = []
    for number, chart in charts.items():
        answer = json.loads((data / f"question-{number:02d}.json").read_text())
        path = folder / f"question-{number:02d}.svg"
        path.unlink(missing_ok=True)
        if answer["rows"]:
            path.write_text(vl_convert.vegalite_to_svg(_styled(chart(answer)).to_dict()))
            made.append(path)
    return made


def _styled(chart: Chart) -> Chart:
    return (
        chart.configure(background="white", font=FONT)
        .configure_axis(grid=True, gridColor="#ddd", labelFontSize=11, titleFontSize=11)
        .configure_legend(labelFontSize=11, titleFontSize=11, symbolSize=70, labelLimit=240)
        .configure_header(labelFontSize=11, title=None)
        .configure_view(stroke="#888")
    )


def _values(answer: Answer, figure: str) -> Iterator[dict[str, Any]]:
    """Yield a point for each row that has the figure in at least half of its runs."""
    for row in answer["rows"]:
        known = row["figures"].get(figure)
        if known is not None and isinstance(known["median"], float):
            several = len({other["comparison"] for other in answer["rows"]}) > 1
            yield {
                "comparison": row["comparison"],
                "cluster": row["cluster"],
                "ranks": row["ranks"],
                "label": row["label"],
                "name": f"{row['label']}, {row['comparison']}" if several else row["label"],
                "median": known["median"],
                "least": known["least"],
                "most": known["most"] if isinstance(known["most"], float) else known["median"],
                "missed": known["n"] < row["runs"],
            }


def _lines(answer: Answer, figure: str, x: str, panel: str, band: float | None = None) -> Chart:
    """Return a panel of lines for each `panel`: medians over `x`, one dash and shape a strategy."""
    values = list(_values(answer, figure))
    if not values:
        return _nothing(figure)
    labels = list(dict.fromkeys(value["label"] for value in values))
    for value in values:
        value |= {
            "low": value["median"] * (1 - (band or 0)),
            "high": value["median"] * (1 + (band or 0)),
        }
    order = list(dict.fromkeys(value[x] for value in values))
    if x == "ranks":
        order.sort()
    across = alt.X(f"{x}:O", title=x if x == "ranks" else "bandwidth", sort=order,
                   axis=alt.Axis(labelAngle=0))  # fmt: skip
    scale = alt.Scale(type="log", nice=False)
    up = alt.Y("median:Q", title=figure, scale=scale)
    dash = alt.StrokeDash("label:N", title=None, sort=labels,
                          scale=alt.Scale(domain=labels, range=DASHES[: len(labels)]))  # fmt: skip
    shape = alt.Shape("label:N", title=None, sort=labels,
                      scale=alt.Scale(domain=labels, range=SHAPES[: len(labels)]))  # fmt: skip
    layers: list[alt.Chart] = []
    if band is not None:
        area = alt.Chart().mark_area(color="#000", opacity=0.2)
        layers.append(
            area.encode(
                across, alt.Y("low:Q", scale=scale, title=figure), y2="high:Q", detail="label:N"
            )
        )
    layers.append(alt.Chart().mark_line(color="black", strokeWidth=1).encode(across, up, dash))
    layers.append(
        alt.Chart().mark_point(color="black", size=45, fill="white").encode(across, up, shape)
    )
    panels = list(dict.fromkeys(value[panel] for value in values))
    columns = 2 if len(panels) > 1 else 1
    layered = alt.layer(*layers, data=alt.InlineData(values=values))
    layered = layered.properties(width=520 / columns - 20, height=210)
    return layered.facet(facet=alt.Facet(f"{panel}:N", sort=panels, title=None), columns=columns)


def _dots(answer: Answer, figure: str) -> Chart:
    """Return a panel for each cluster: the median of each strategy, and a rule over all runs."""
    values = list(_values(answer, figure))
    if not values:
        return _nothing(figure)
    names = list(dict.fromkeys(value["name"] for value in values))
    clusters = list(dict.fromkeys(value["cluster"] for value in values))
    y = alt.Y("name:N", sort=names, title=None, axis=alt.Axis(labelLimit=240))
    scale = alt.Scale(zero=False)
    rule = alt.Chart().mark_rule(color="black").encode(
        alt.X("least:Q", title=figure, scale=scale), y, x2="most:Q"
    )  # fmt: skip
    dot = alt.Chart().mark_point(color="black", filled=True, size=50)
    dots = dot.encode(alt.X("median:Q", title=figure, scale=scale), y)
    layered = alt.layer(rule, dots, data=alt.InlineData(values=values))
    layered = layered.properties(width=420 / len(clusters), height=24 * len(names))
    return layered.facet(
        facet=alt.Facet("cluster:N", sort=clusters, title=None), columns=len(clusters)
    ).resolve_scale(x="independent")


def _nothing(figure: str) -> Chart:
    """Return a line in place of a figure: no row has it in half of its runs."""
    text = alt.InlineData(values=[{"text": f"No strategy has {figure} in half of its runs."}])
    return (
        alt.Chart(text)
        .mark_text(fontSize=12)
        .encode(text="text:N")
        .properties(width=420, height=30)
    )
