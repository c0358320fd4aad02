"""How the batches of workers changed, where a rule balanced them."""

from __future__ import annotations

from collections.abc import Iterator

import altair as alt

from orchestra.report.figures.frame import Figure, Look, Values, figure, haloed, layer, tips
from orchestra.report.rows import Row
from orchestra.report.study import Study

LABELLED = 8
"""Lines that can be told apart by the names of their workers."""
APART = 0.03
"""Of the global batch: lines that lie closer have one name."""


def batches(study: Study) -> Iterator[Figure]:
    """The samples of each worker in a step, over the steps of the best row with such a rule."""
    row = next((row for row in study.widest if row.record.batches), None)
    if row is None:
        return
    values, last = _values(row)
    caption = (
        f"Samples of each worker in a step under {row.name}, with seed {row.record.seed}: a line "
        "for each, which steps where the rule has changed its batch. Their sum stays the same."
    )
    x = alt.X("step:Q", title="step", scale=alt.Scale(nice=False))
    y = alt.Y("batch:Q", title="samples in a step", scale=alt.Scale(zero=True))
    look = Look(study.styles, [row.name], legend=False)
    lines = layer(
        values, "line", x, y, look.colour, alt.Detail("rank:N"),
        tips("rank:N", "step:Q", "batch:Q"), interpolate="step-after",
    )  # fmt: skip
    words = haloed(last, 3, x, y, alt.Text("rank:N"), align="right", dx=-2, dy=-7, fontSize=11)
    named = words if len(last) <= LABELLED else []
    title = "Batches that followed the speeds"
    yield figure("batches", title, caption, "time", [lines, *named], height=220)


def _values(row: Row) -> tuple[Values, Values]:
    """Return a point for each change and worker, and the names of lines at their end."""
    changes = [*row.record.batches, [row.record.steps, *row.record.batches[-1][1:]]]
    values = [
        {"strategy": row.name, "rank": f"rank {rank}", "step": step, "batch": batch}
        for step, *of_ranks in changes
        for rank, batch in enumerate(of_ranks)
        if batch
    ]
    groups: list[tuple[int, list[str]]] = []
    for batch, rank in sorted((batch, rank) for rank, batch in enumerate(changes[-1][1:]) if batch):
        if not groups or batch - groups[-1][0] > APART * row.global_batch:
            groups.append((batch, []))
        groups[-1][1].append(str(rank))
    last = [
        {
            "strategy": row.name,
            "rank": f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}",
            "step": row.record.steps,
            "batch": batch,
        }
        for batch, ranks in groups
    ]
    return values, last
