"""The loss of the training steps themselves, from what the ranks wrote down."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from statistics import fmean
from typing import Any

import altair as alt

from orchestra.report.collect import RunData
from orchestra.report.figures.frame import (
    Figure,
    Look,
    Values,
    along,
    figure,
    height_scale,
    marks,
    rounded,
    spans_much,
    zoomable,
)
from orchestra.report.figures.subject import FigureData
from orchestra.report.rows import Row

_BINS = 200
_SIGNS = 8
_BATCHES = 4  # in a part at the least: a single batch says little


def training_loss(subject: FigureData) -> list[Figure]:
    """Training loss against samples: means of up to 200 equal parts of the run."""
    width = _width(subject)
    values = [value for row in subject.widest for value in _means(row, width)] if width else []
    if not values:
        return []
    several = any(len(row.completed) > 1 for row in subject.widest)
    caption = (
        f"The loss on the batches just trained on, averaged over the workers and over {width:,} "
        "samples at a time"
        + ("; the band is from the lowest to the highest seed." if several else ".")
    )
    shown = dict.fromkeys(value["strategy"] for value in values)
    look = Look({name: subject.styles[name] for name in shown})
    layers = _layers(values, [*_signs(values, [*shown])], look)
    return [
        figure("training-loss", "Training loss against samples", caption, "convergence", layers)
    ]


def _layers(values: Values, signs: Values, look: Look) -> list[alt.Chart]:
    x = along("samples")
    base = marks(values).encode(x, look.colour())
    tooltip = [
        alt.Tooltip("strategy:N"),
        alt.Tooltip("samples:Q", format=",.0f"),
        alt.Tooltip("value:Q", title="training loss", format=".4~g"),
        alt.Tooltip("low:Q", title="lowest seed", format=".4~g"),
        alt.Tooltip("high:Q", title="highest seed", format=".4~g"),
    ]
    y = alt.Y(
        "value:Q",
        title="training loss, lower is better",
        scale=height_scale(log=spans_much([value["value"] for value in values])),
        axis=alt.Axis(tickCount=6),
    )
    line = base.mark_line(strokeWidth=1.8).encode(y, look.dash(), tooltip=tooltip)
    band = base.mark_area(opacity=0.16, line=False).encode(alt.Y("low:Q"), alt.Y2("high:Q"))
    points = marks(signs).mark_point(filled=True, size=55, opacity=1)
    return [zoomable(line), band, points.encode(x, y, look.colour(), look.shape())]


def _signs(values: Values, names: list[str]) -> Iterator[dict[str, Any]]:
    """Where a line shows the shape of its strategy: a few places, not the same for any two.

    So lines that are equal, of strategies with the same arithmetic, show the shapes of each.
    """
    for place, name in enumerate(names):
        line = [value for value in values if value["strategy"] == name]
        every = max(len(names), len(line) // _SIGNS)
        yield from line[place * every // len(names) :: every]


def _width(subject: FigureData) -> int:
    """Samples in one part: a whole number of the largest global batch; 0 without steps."""
    runs = [run for row in subject.widest for run in row.completed if run.steps]
    if not runs:
        return 0
    batch = max(run.record.global_batch for run in runs)
    longest = max(run.record.samples for run in runs)
    return batch * max(_BATCHES, round(longest / batch / _BINS))


def _means(row: Row, width: int) -> Values:
    """The mean over the seeds in each part, with the lowest and the highest of them."""
    by_part: dict[int, list[float]] = defaultdict(list)
    for run in row.completed:
        for part, loss in _parts(run, width).items():
            by_part[part].append(loss)
    return [
        {
            "strategy": row.name,
            "samples": part * width + width // 2,
            "value": rounded(fmean(losses)),
            "low": rounded(min(losses)),
            "high": rounded(max(losses)),
        }
        for part, losses in sorted(by_part.items())
    ]


def _parts(run: RunData, width: int) -> dict[int, float]:
    """The mean loss of the samples in each part, by its number; a rank's loss by its samples.

    What is left over at the end counts for the last whole part.
    """
    last = max(0, run.record.samples // width - 1)
    totals: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for lines in run.steps.values():
        for line in lines:
            if rounded(line["loss"]) is not None:
                total = totals[min(last, max(0, line["consumed"] - 1) // width)]
                total[0] += line["loss"] * line["samples"]
                total[1] += line["samples"]
    return {part: loss / samples for part, (loss, samples) in totals.items() if samples}
