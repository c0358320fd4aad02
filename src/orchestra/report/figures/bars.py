"""Figures of what runs spent: seconds by part, rank and set-up, batches that followed the
speeds, bytes, the load of links, and staleness.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

import altair as alt

from orchestra.cluster.units import BYTES
from orchestra.records.links import Links
from orchestra.report.figures import frame
from orchestra.report.figures.frame import BAR, Figure, Look, Values, figure, haloed, layer, tips
from orchestra.report.measures import TRAIN
from orchestra.report.numbers import bytes_text, count, figure_text
from orchestra.report.rows import Row, grouped
from orchestra.report.study import Study

Parts = Mapping[str, float]

# From dark to light, so that the order is that of the greys, too.
# Colours of Okabe and Ito for what ranks do, greys for what they do not
TRAINING = {"compute": "#0072B2", "communicate": "#E69F00", "wait": "#c9c9c9", "other": "#8c8c8c"}
SETUP = {
    "processes": "#2f6fa5", "connections": "#5d9fce", "task": "#93c6e3", "group": "#c9e3ef",
    "first_step": "#E69F00",
}  # fmt: skip
LABELLED = 8  # the most lines of batches that are labelled with their workers
APART = 0.03  # the part of the global batch within which lines share a label
MAX_LINKS = 6  # the most links of each strategy
_FEW = 0.005  # the part of the updates that may be staler than the axis is long
_BARS = 24  # of staleness, so that they stay apart on a phone


def seconds(study: Study) -> Iterator[Figure]:
    """Yield training seconds by what they went to, the same by rank, and set-up seconds by part."""
    training, setup = {}, {}
    for row in study.completed:
        setup[row.name] = _mean_parts([run.record.time.setup_parts for run in row.completed])
        parts = _mean_parts([run.record.time.worker for run in row.completed])
        # Without the rest, a bar would be shorter than the time on the stopwatch.
        rest = (row.mean(TRAIN.read) or 0.0) - sum(parts.values())
        # Rounding, or parts that overlap, must not draw a bar to the left
        training[row.name] = {**parts, "other": max(0.0, rest)}
    caption = (
        "Seconds of the stopwatch, as the mean of the workers and of the seeds. Compute is "
        "forward, backward and update; communicate is moving bytes; wait is having nothing "
        "to move yet; other is what is left. Background flows are not in it."
    )
    title = "Where the training time went"
    yield from _stacked("seconds-by-part", title, caption, training, TRAINING)
    yield from _by_rank(study)
    caption = (
        "Seconds from the launch to the first step, as the mean of the seeds: starting "
        "processes, connecting them, data and model (task), the strategy's start (group), "
        "and a warm-up step. What the first run of a command waits for, the import of "
        "torch in the process that all others are forked from, is not in it."
    )
    yield from _stacked("setup-seconds", "Set-up before the first step", caption, setup, SETUP)


def _stacked(
    name: str, title: str, caption: str, of_rows: Mapping[str, Parts], colours: Mapping[str, str]
) -> Iterator[Figure]:
    """Yield a figure with a bar per row, its parts one after the other; nothing without parts."""
    values: Values = []
    totals = {}
    for row, parts in of_rows.items():
        values += _pieces(parts, colours, {"strategy": row})
        totals[row] = figure_text(sum(parts[part] for part in parts if part in colours), "s")
    if values:
        tooltip = tips("strategy:N", "part:N", ("seconds:Q", "", ".4~g"))
        bars = [layer(values, "bar", *_bar(colours, values), tooltip, **BAR)]
        yield figure(name, title, caption, "time", *frame.lanes(bars, totals))


def _pieces(parts: Parts, colours: Mapping[str, str], about: Mapping[str, Any]) -> Values:
    return [
        {**about, "part": part, "place": place, "seconds": parts[part]}
        for place, part in enumerate(colours)
        if parts.get(part, 0) > 0
    ]


def _bar(colours: Mapping[str, str], values: Values) -> tuple[Any, ...]:
    columns = alt.ExprRef("max(2, floor(room / 105))")
    label = "replace(datum.label, '_', ' ')"
    colour = frame.kinds("part", values, colours, columns, label)
    x = alt.X("seconds:Q", title="seconds", scale=alt.Scale(nice=False))
    return x, colour, alt.Order("place:O")


def _mean_parts(of_runs: Sequence[Parts]) -> Parts:
    """Return the mean of each part over those runs that report any."""
    # A part that a run does not tell of took no time in it; a run that tells of none is left out
    telling = [parts for parts in of_runs if parts]
    names = {name for parts in telling for name in parts}
    return {name: fmean(parts.get(name, 0.0) for parts in telling) for name in names}


def _by_rank(study: Study) -> Iterator[Figure]:
    values: Values = []
    for row in study.widest:
        entries = [entry for run in row.completed for entry in run.record.machine.by_rank]
        by_rank = grouped(entries, lambda entry: entry.rank)
        # A single rank's bar stands in the figure above
        for rank in sorted(by_rank) if len(by_rank) > 1 else ():
            role = by_rank[rank][0].role
            key = frame.lane_key(row.name, f"{rank}{' server' if role == 'server' else ''}")
            parts = _mean_parts([entry.seconds for entry in by_rank[rank]])
            about = {"strategy": row.name, "lane": key, "rank": rank, "role": role}
            values += _pieces(parts, TRAINING, about)
    if values:
        caption = (
            "The same for every rank, as the mean of the seeds. A rank that waits while another "
            "computes is waiting for it; a server's wait is time in which nobody asked it."
        )
        tooltip = tips("strategy:N", "rank:O", "role:N", "part:N", ("seconds:Q", "", ".4~g"))
        bars = [layer(values, "bar", *_bar(TRAINING, values), tooltip)]
        lanes = frame.headed_lanes(bars, {value["strategy"]: "" for value in values}, "rank")
        title = "Where each rank's training time went"
        yield figure("seconds-by-rank", title, caption, "time", *lanes)


def batches(study: Study) -> Iterator[Figure]:
    """Yield each worker's samples in a step, over the steps of the best row with such a rule."""
    row = next((row for row in study.widest if row.record.batching.changes), None)
    if row is None:
        return
    values, last = _batch_values(row)
    caption = (
        f"Samples of each worker in a step under {row.name}, with seed {row.record.asked.seed}: a "
        "line for each, which steps where the rule has changed its batch. Their sum stays the same."
    )
    x = alt.X("step:Q", title="step", scale=alt.Scale(nice=False))
    y = alt.Y("batch:Q", title="samples in a step", scale=alt.Scale(zero=True))
    colour = Look(study.styles, [row.name], legend=False).colour
    channels = x, y, colour, alt.Detail("rank:N"), tips("rank:N", "step:Q", "batch:Q")
    layers = [layer(values, "line", *channels, interpolate="step-after")]
    if len(last) <= LABELLED:
        style: frame.MarkStyle = {"align": "right", "dx": -2, "dy": -7, "fontSize": 11}
        layers += haloed(last, 3, x, y, alt.Text("rank:N"), **style)
    yield figure("batches", "Batches that followed the speeds", caption, "time", layers, 220)


def _batch_values(row: Row) -> tuple[Values, Values]:
    """Return a point for each change and worker, and the names of lines at their end."""
    # The last change again, at the end: else its lines would have no length
    changes = [
        *row.record.batching.changes,
        [row.record.learned.steps, *row.record.batching.changes[-1][1:]],
    ]
    values = [
        {"strategy": row.name, "rank": f"rank {rank}", "step": step, "batch": batch}
        for step, *of_ranks in changes
        for rank, batch in enumerate(of_ranks)
        if batch
    ]
    groups: list[tuple[int, list[str]]] = []
    for batch, rank in sorted((batch, rank) for rank, batch in enumerate(changes[-1][1:]) if batch):
        # Equal workers have nearly equal batches, and their names would lie on one another
        if not groups or batch - groups[-1][0] > APART * row.global_batch:
            groups.append((batch, []))
        groups[-1][1].append(str(rank))
    named = [(f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}", batch) for batch, ranks in groups]
    last = [
        {"strategy": row.name, "rank": name, "step": row.record.learned.steps, "batch": batch}
        for name, batch in named
    ]
    return values, last


def traffic(study: Study) -> Iterator[Figure]:
    """Yield mean bytes of a run, and for each sample, by strategy."""
    sent = {row.name: row.mean(lambda r: float(r.traffic.sent)) or 0.0 for row in study.completed}
    if not any(sent.values()):
        return
    # One unit on the axis: that of the longest bar
    unit = BYTES.name_for(max(sent.values()))
    size = float(BYTES.factors[unit])
    values: Values = []
    texts = {}
    formula = ""
    for row in study.completed:
        total, samples = sent[row.name], row.mean(lambda record: float(record.learned.samples))
        each = total / samples if samples else None
        text = bytes_text(total) + (f" · {bytes_text(each)} a sample" if each is not None else "")
        known = "counted"
        if any(run.record.traffic.estimated for run in row.completed):
            text, known, formula = f"≈ {text}", "by a formula", " ≈: by a formula, not counted."
        texts[row.name] = text if total else "none"
        value = {"strategy": row.name, "sent": total / size, "per_sample": each, "known": known}
        values.append(value)
    caption = (
        "Payload and headers that all ranks sent while the stopwatch ran, as the mean of the "
        f"seeds, and divided by the samples.{formula}"
    )
    tooltip = tips(
        "strategy:N", ("sent:Q", unit, ",.4~g"), ("per_sample:Q", "bytes a sample", ",.4~g"),
        ("known:N", "how it is known"),
    )  # fmt: skip
    x = alt.X("sent:Q", title=f"{unit} sent in a run")
    # The name stands above the bar; a legend of names beside it would say it twice
    colour = Look(study.styles, texts, legend=False).colour
    bars = layer(values, "bar", x, colour, tooltip, **BAR, opacity=0.8, cornerRadiusEnd=2)
    yield figure("bytes-sent", "Bytes sent", caption, "traffic", *frame.lanes([bars], texts))


def links(study: Study) -> Iterator[Figure]:
    """Yield the busiest links of each strategy, on a described cluster whose links had traffic."""
    carried = {row.name: found for row in study.widest
               if (found := row.completed[0].links) is not None and found.busiest}  # fmt: skip
    values: Values = [
        {
            "strategy": name, "lane": frame.lane_key(name, link.name), "link": link.name,
            "percent": 100 * link.share, "bytes": link.bytes,
            "text": f"{figure_text(100 * link.share, '%', 2)} · {bytes_text(link.bytes)}",
        }
        for name, of_row in carried.items()
        for link in of_row.busiest[:MAX_LINKS]
    ]  # fmt: skip
    if not values:
        return
    caption = (
        "Of what each link could have carried while the stopwatch ran, the part that it did, and "
        "the bytes of the messages that crossed it (first seed). Up leads from a node or switch "
        "to the switch above, down the other way, and loopback joins the ranks of a node. "
        f"Shown are the {MAX_LINKS} busiest links of each strategy. A link that is far from 100 % "
        "may still be what everybody waits for, if it is idle while the ranks compute."
    )
    most = max(value["percent"] for value in values)
    # Less than the figure's width, so that the words behind the longest bar are inside
    scale = alt.Scale(domain=[0, most], nice=True, range=[0, alt.ExprRef("width - 92")])
    x = alt.X("percent:Q", title="percent of what the link could have carried", scale=scale)
    tooltip = tips(
        "strategy:N", "link:N", ("percent:Q", "percent of its capacity", ".4~g"),
        ("bytes:Q", "", ",d"),
    )  # fmt: skip
    colour = Look(study.styles, carried, legend=False).colour
    style: dict[str, Any] = {"align": "left", "baseline": "middle", "dx": 4, "fontSize": 10.5}
    layers = [
        layer(values, "bar", x, colour, tooltip, opacity=0.8, cornerRadiusEnd=2),
        layer(values, "text", x, alt.Text("text:N"), color=frame.INK_NOW, **style),
    ]
    texts = {name: _other_links(of_row) for name, of_row in carried.items()}
    lanes = frame.headed_lanes(layers, texts, label_limit=110)
    yield figure("link-utilisation", "Busiest links", caption, "traffic", *lanes)


def _other_links(carried: Links) -> str:
    """Return a note on the links that are not shown."""
    rest = carried.count - min(MAX_LINKS, len(carried.busiest))
    if not rest:
        return ""
    idle = f", {carried.unused} of them unused" if carried.unused else ""
    return f"and {count('more link', rest)}{idle}"


def staleness(study: Study) -> Iterator[Figure]:
    """Yield the share of updates at each staleness, for strategies with any that is not zero."""
    counts: dict[str, Counter[int]] = defaultdict(Counter)
    for row in study.widest:
        for run in row.completed:
            counts[row.name].update({int(v): n for v, n in run.record.updates.histogram.items()})
    stale = {name: of_row for name, of_row in counts.items() if any(of_row)}
    if not stale:
        return
    end, largest = max(map(_nearly_all, stale.values())), max(map(max, stale.values()))
    # One more bar sums up the tail: a rank that paused would stretch the axis to hundreds.
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
        {"strategy": name, **value}
        for name, of_row in stale.items()
        for value in _shares(of_row, last, largest > last)
    ]
    title = "staleness (updates)"
    axis = alt.Axis(grid=False, labelAngle=0, labelOverlap="greedy", labelSeparation=8)
    # Empty ranges, too, so that the axis is one of numbers although its values are texts
    domain = list(dict.fromkeys(value["updates_between"] for value in values))
    scale = alt.Scale(domain=domain, paddingInner=0.2)
    x = alt.X("updates_between:N", title=title, sort=None, axis=axis, scale=scale)
    y = alt.Y("share:Q", title="share of the updates", axis=alt.Axis(format="~%", tickCount=5))
    beside = alt.XOffset("strategy:N", scale=alt.Scale(domain=list(stale)))
    tooltip = tips(
        "strategy:N", ("updates_between:N", title), ("share:Q", "share of updates", ".3~%"),
        ("updates:Q", "updates, all seeds", ","),
    )  # fmt: skip
    channels = x, y, beside, Look(study.styles, stale).colour, tooltip
    bars = layer(values, "bar", *channels, cornerRadiusEnd=1)
    yield figure("staleness", "Staleness of the updates", caption, "staleness", [bars], 240)


def _nearly_all(counts: Counter[int]) -> int:
    """Return the smallest staleness that nearly all updates are within; pauses make long tails."""
    left = _FEW * counts.total()
    for value in sorted(counts, reverse=True):
        left -= counts[value]
        if left < 0:
            return value
    raise AssertionError("more is left out than there is")


def _shares(counts: Counter[int], last: int, more: bool) -> Iterator[dict[str, Any]]:
    """Yield the share in each of up to `_BARS` ranges of staleness, empty ones included.

    The one that ends with `last` is open where some strategy has `more`.
    """
    # Rounded up: no more than _BARS of them
    width = -(-(last + 1) // _BARS)
    for low in range(0, last + 1, width):
        high = min(low + width - 1, last)
        inside = sum(n for value, n in counts.items() if low <= min(value, last) <= high)
        end = " or more" if more and high == last else f"–{high}" * (high > low)
        about = {"staleness": low, "updates_between": f"{low}{end}"}
        yield {**about, "share": inside / counts.total(), "updates": inside}
