"""Bytes that the ranks sent."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt

from orchestra.report.figures.figure import Figure
from orchestra.report.figures.frame import Look, figure, marks, numbers
from orchestra.report.figures.lanes import BAR, LANE, lane, words
from orchestra.report.figures.subject import Subject
from orchestra.report.numbers import quantity
from orchestra.report.rows import Row

_UNITS = {"TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3, "bytes": 1.0}


def traffic(subject: Subject) -> list[Figure]:
    """Mean bytes of a run, and for each sample, by strategy."""
    rows = subject.rows
    if not any(_sent(row) for row in rows):
        return []
    caption = (
        "Payload and headers that all ranks sent while the stopwatch ran, as the mean of the "
        "seeds, and divided by the samples."
        + (" ≈: by a formula, not counted." if any(map(_estimated, rows)) else "")
    )
    look = Look({row.name: subject.styles[row.name] for row in rows})
    layers = [_bars(rows, look), *words({row.name: _text(row) for row in rows})]
    return [figure("bytes-sent", "Bytes sent", caption, "traffic", layers, LANE * len(rows))]


def _bars(rows: Sequence[Row], look: Look) -> alt.Chart:
    unit = _unit(max(map(_sent, rows)))
    values = [
        {
            "strategy": row.name,
            "sent": numbers(_sent(row) / _UNITS[unit]),
            "per_sample": _per_sample(row),
            "known": "by a formula" if _estimated(row) else "counted",
        }
        for row in rows
    ]
    tooltip = [
        alt.Tooltip("strategy:N"),
        alt.Tooltip("sent:Q", title=unit, format=",.4~g"),
        alt.Tooltip("per_sample:Q", title="bytes a sample", format=",.4~g"),
        alt.Tooltip("known:N", title="how it is known"),
    ]
    bars: alt.Chart = marks(values).mark_bar(**BAR, opacity=0.8, cornerRadiusEnd=2)
    x = alt.X("sent:Q", title=f"{unit} sent in a run")
    y = lane([row.name for row in rows])
    return bars.encode(x, y, look.colour(legend=False), tooltip=tooltip)


def _unit(value: float) -> str:
    return next((unit for unit, size in _UNITS.items() if value >= size), "bytes")


def _sent(row: Row) -> float:
    return row.mean(lambda record: float(record.bytes_sent)) or 0.0


def _estimated(row: Row) -> bool:
    return any(run.record.bytes_estimated for run in row.completed)


def _per_sample(row: Row) -> float | None:
    samples = row.mean(lambda record: float(record.samples))
    return numbers(_sent(row) / samples) if samples else None


def _text(row: Row) -> str:
    """Both figures in words, each in a unit of its own."""
    sent, per_sample = _sent(row), _per_sample(row)
    if sent == 0:
        return "none"
    text = ("≈ " if _estimated(row) else "") + with_unit(sent)
    return text if per_sample is None else f"{text} · {with_unit(per_sample)} a sample"


def with_unit(value: float) -> str:
    """So many bytes, in the unit in which they are a short number."""
    unit = _unit(value)
    return quantity(value / _UNITS[unit], unit)
