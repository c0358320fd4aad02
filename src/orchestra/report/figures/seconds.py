"""Where the seconds went, by part, rank and set-up; and how stale the updates were."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import altair as alt

from orchestra.report.figures.frame import (
    BAR,
    INK_NOW,
    LANE,
    SEPARATOR,
    Figure,
    Look,
    Values,
    figure,
    lane,
    lane_words,
    marks,
    rounded,
)
from orchestra.report.figures.subject import FigureData
from orchestra.report.numbers import figure_text
from orchestra.report.rows import Row

# From dark to light, so that the order is that of the greys, too.
TRAINING = {"compute": "#0072B2", "communicate": "#E69F00", "wait": "#c9c9c9", "other": "#8c8c8c"}
SETUP = {
    "processes": "#2f6fa5",
    "connections": "#5d9fce",
    "task": "#93c6e3",
    "group": "#c9e3ef",
    "first_step": "#E69F00",
}
_RANK_STEP = 17
_LEGEND = alt.Legend(
    symbolType="square",
    columns=alt.ExprRef("max(2, floor(room / 105))"),
    labelExpr="replace(datum.label, '_', ' ')",
)


def seconds(subject: FigureData) -> list[Figure]:
    """Training seconds by what they went to, the same by rank, and set-up seconds by part."""
    return [
        *_stacked(
            subject.rows,
            {row.name: _training(row) for row in subject.rows},
            TRAINING,
            name="seconds-by-part",
            title="Where the training time went",
            caption=(
                "Seconds of the stopwatch, as the mean of the workers and of the seeds. Compute is "
                "forward, backward and update; communicate is moving bytes; wait is having nothing "
                "to move yet; other is what is left. Background flows are not in it."
            ),
        ),
        *_by_rank(subject),
        *_stacked(
            subject.rows,
            {row.name: _setup(row) for row in subject.rows},
            SETUP,
            name="setup-seconds",
            title="Set-up before the first step",
            caption=(
                "Seconds from the launch to the first step, as the mean of the seeds: starting "
                "processes, connecting them, data and model (task), the strategy's start (group), "
                "and a warm-up step. What the first run of a command waits for, the import of "
                "torch in the process that all others are forked from, is not in it."
            ),
        ),
    ]


def _stacked(
    rows: Sequence[Row],
    parts: Mapping[str, Mapping[str, float]],
    colours: Mapping[str, str],
    **about: str,
) -> list[Figure]:
    """One bar for each of `rows`: its `parts` one after the other; nothing where there are none."""
    values = [
        {
            "strategy": name,
            "part": part,
            "place": list(colours).index(part),
            "seconds": rounded(of_row[part]),
        }
        for name, of_row in parts.items()
        for part in colours
        if of_row.get(part, 0) > 0
    ]
    if not values:
        return []
    bars = marks(values).mark_bar(**BAR).encode(*_bar(colours, values), lane(list(parts)))
    totals = {name: figure_text(sum(of_row.values()), "s") for name, of_row in parts.items()}
    layers = [bars.encode(tooltip=_tooltip()), *lane_words(totals)]
    return [figure(section="time", layers=layers, height=LANE * len(rows), **about)]


def _bar(colours: Mapping[str, str], values: Values) -> list[Any]:
    """The channels of a stacked bar, in the order of `colours`."""
    used = [part for part in colours if any(value["part"] == part for value in values)]
    scale = alt.Scale(domain=used, range=[colours[part] for part in used])
    return [
        alt.X("seconds:Q", title="seconds", scale=alt.Scale(nice=False)),
        alt.Color("part:N", title=None, scale=scale, legend=_LEGEND),
        alt.Order("place:O"),
    ]


def _tooltip(*more: alt.Tooltip) -> list[alt.Tooltip]:
    return [
        alt.Tooltip("strategy:N"),
        *more,
        alt.Tooltip("part:N"),
        alt.Tooltip("seconds:Q", format=".4~g"),
    ]


def _training(row: Row) -> dict[str, float]:
    """Mean seconds by part; "other" is the rest of the stopwatch."""
    parts = _mean_parts([run.record.seconds for run in row.completed])
    total = row.mean(lambda record: record.train_seconds) or 0.0
    return {**parts, "other": max(0.0, total - sum(parts.values()))}


def _setup(row: Row) -> dict[str, float]:
    parts = _mean_parts([run.record.setup for run in row.completed])
    return {name: parts[name] for name in parts if name in SETUP}


def _mean_parts(of_runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of each part, the mean over those runs that tell of any."""
    telling = [parts for parts in of_runs if parts]
    names = {name for parts in telling for name in parts}
    return {name: fmean(parts.get(name, 0.0) for parts in telling) for name in names}


def _by_rank(subject: FigureData) -> list[Figure]:
    """A bar for each rank, under a heading for each strategy."""
    values: Values = []
    domain: list[str] = []
    for row in subject.widest:
        ranks = _ranks(row)
        if len(ranks) < 2:
            continue
        domain.append(f"{row.name}{SEPARATOR}")
        for rank, (role, parts) in ranks.items():
            key = f"{row.name}{SEPARATOR}{rank}{' server' if role == 'server' else ''}"
            domain.append(key)
            about = {"strategy": row.name, "lane": key, "rank": rank, "role": role}
            values += [
                {**about, "part": part, "place": place, "seconds": rounded(parts[part])}
                for place, part in enumerate(TRAINING)
                if parts.get(part, 0) > 0
            ]
    return [_ranks_figure(values, domain)] if values else []


def _ranks(row: Row) -> dict[int, tuple[str, dict[str, float]]]:
    """By rank its role, and its seconds as the mean over the seeds."""
    told = [entry for run in row.completed for entry in run.record.by_rank]
    return {
        rank: (
            next(entry["role"] for entry in told if entry["rank"] == rank),
            _mean_parts([entry["seconds"] for entry in told if entry["rank"] == rank]),
        )
        for rank in sorted({entry["rank"] for entry in told})
    }


def _ranks_figure(values: Values, domain: list[str]) -> Figure:
    y = alt.Y(
        "lane:N",
        title="rank",
        scale=alt.Scale(domain=domain, paddingInner=0.15, paddingOuter=0),
        axis=alt.Axis(labelExpr=f"split(datum.value, '{SEPARATOR}')[1]", ticks=False, domain=False),
    )
    bars = marks(values).mark_bar().encode(*_bar(TRAINING, values), y)
    tooltip = _tooltip(alt.Tooltip("rank:O"), alt.Tooltip("role:N"))
    headings = [
        {"strategy": key.partition(SEPARATOR)[0], "lane": key}
        for key in domain
        if key.endswith(SEPARATOR)
    ]
    names = (
        marks(headings)
        .mark_text(align="left", baseline="middle", fontSize=11.5, dy=3, color=INK_NOW)
        .encode(y, x=alt.value(1), text="strategy:N")
    )
    return figure(
        name="seconds-by-rank",
        title="Where each rank's training time went",
        caption=(
            "The same for every rank, as the mean of the seeds. A rank that waits while another "
            "computes is waiting for it; a server's wait is time in which nobody asked it."
        ),
        section="time",
        layers=[bars.encode(tooltip=tooltip), names],
        height=_RANK_STEP * len(domain),
    )


_FEW = 0.005
_BARS = 24  # along the axis, so that they stay apart on a phone


def staleness(subject: FigureData) -> list[Figure]:
    """The share of updates at each staleness, for strategies with any that is not zero."""
    counts = {row.name: _stale_counts(row) for row in subject.widest}
    stale = {name: of_row for name, of_row in counts.items() if any(of_row)}
    if not stale:
        return []
    end, largest = max(map(_nearly_all, stale.values())), max(map(max, stale.values()))
    last = min(end + 1, largest)
    caption = (
        "How many updates of others came between reading the parameters and writing to them, as "
        "shares of the updates of all seeds."
    )
    if largest > last:
        caption += f" The last bar is {last} or more; the largest was {largest}."
    if len(stale) < len(counts):
        caption += " Strategies without a stale update are not drawn."
    values = [
        value
        for name, of_row in stale.items()
        for value in _shares(name, of_row, last, largest > last)
    ]
    bars = _stale_bars(values, Look({name: subject.styles[name] for name in stale}), [*stale])
    return [figure("staleness", "Staleness of the updates", caption, "staleness", [bars], 240)]


def _stale_bars(values: Values, look: Look, names: list[str]) -> alt.Chart:
    """At each staleness a bar of each strategy, side by side."""
    order = list(dict.fromkeys(value["updates_between"] for value in values))
    x = alt.X(
        "updates_between:N",
        title="staleness (updates)",
        sort=None,
        axis=alt.Axis(grid=False, labelAngle=0, labelOverlap="greedy", labelSeparation=8),
        scale=alt.Scale(domain=order, paddingInner=0.2),
    )
    y = alt.Y("share:Q", title="share of the updates", axis=alt.Axis(format="~%", tickCount=5))
    beside = alt.XOffset("strategy:N", scale=alt.Scale(domain=names))
    tooltip = [
        alt.Tooltip("strategy:N"),
        alt.Tooltip("updates_between:N", title="staleness (updates)"),
        alt.Tooltip("share:Q", title="share of updates", format=".3~%"),
        alt.Tooltip("updates:Q", title="updates, all seeds", format=","),
    ]
    bars: alt.Chart = marks(values).mark_bar(cornerRadiusEnd=1)
    return bars.encode(x, y, beside, look.colour(), tooltip=tooltip)


def _stale_counts(row: Row) -> Counter[int]:
    """Updates by staleness, over all seeds."""
    counts: Counter[int] = Counter()
    for run in row.completed:
        for value, count in run.record.staleness_histogram.items():
            counts[int(value)] += count
    return counts


def _nearly_all(counts: Counter[int]) -> int:
    """The staleness that all but a few updates do not exceed: a paused rank leaves a long tail."""
    left = _FEW * sum(counts.values())
    for value in sorted(counts, reverse=True):
        left -= counts[value]
        if left < 0:
            return value
    raise AssertionError("more is left out than there is")


def _shares(name: str, counts: Counter[int], last: int, more: bool) -> Values:
    """The share in each of up to `_BARS` ranges of staleness, empty ones included.

    The one that ends with `last` is open where some strategy has `more`.
    """
    width = -(-(last + 1) // _BARS)
    values = []
    for low in range(0, last + 1, width):
        high = min(low + width - 1, last)
        inside = [n for value, n in counts.items() if low <= min(value, last) <= high]
        end = f"–{high}" if high > low else ""
        values.append(
            {
                "strategy": name,
                "staleness": low,
                "updates_between": f"{low}{' or more' if more and high == last else end}",
                "share": rounded(sum(inside) / sum(counts.values())),
                "updates": sum(inside),
            }
        )
    return values
