"""The tables of a plan: its candidates, and what was predicted and measured of some."""

from __future__ import annotations

from collections.abc import Callable

from orchestra.planning.answer import CandidateRow, PlanAnswer, Verified, time_text
from orchestra.report.measures import PACE, TIME_TO_TARGET
from orchestra.report.numbers import significant
from orchestra.report.sheet import NONE, Cell, Column, Sheet

ON_TERMINALS = (
    "name", "nodes", "batch", "rate", "speed", "seconds", "best", "cost", "bottleneck"
)  # fmt: skip
"""The keys of the columns of candidates that a terminal has room for."""


def candidates_sheet(plan: PlanAnswer) -> Sheet:
    """Return a line for each candidate, in the order of the answer."""
    priced = next((row.currency for row in plan.rows if row.cost is not None), None)
    columns: list[tuple[Column, Callable[[CandidateRow], Cell | str]]] = [
        (Column("name", "candidate", words=True), lambda it: Cell(it.name, notation=it.strategy)),
        (Column("nodes", "nodes"), lambda it: str(len(it.nodes))),
        (Column("batch", "batch"), lambda it: str(it.batch)),
        (Column("rate", "rate"), lambda it: NONE if it.rate is None else f"{it.rate:.3g}"),
        (Column("speed", PACE.heading), lambda it: _figure(it.speed)),
        (Column("seconds", TIME_TO_TARGET.heading), time_text),
        (Column("seeds", "seeds"), lambda it: str(it.seeds or NONE)),
    ]
    if plan.target is not None:
        # Left out of a narrow terminal, where names would be broken inside of words
        best = Column("best", plan.target.metric, "best", order=1)
        columns.append((best, lambda it: NONE if it.best is None else f"{it.best:.4g}"))
    if priced is not None:
        columns.append((Column("cost", priced), lambda it: _figure(it.cost)))
    columns += [
        (Column("bottleneck", "bottleneck", words=True), _bottleneck),
        (Column("rungs", "in the race", words=True), lambda it: "; ".join(it.rungs)),
        (Column("dropped", "out, because", words=True), lambda it: it.dropped or ""),
    ]
    return Sheet.of(columns, plan.rows)


def verified_sheet(plan: PlanAnswer) -> Sheet:
    """Return what was predicted and measured of the candidates that were carried out."""
    columns: list[tuple[Column, Callable[[Verified], Cell | str]]] = [
        (Column("name", "candidate", words=True), lambda it: it.name),
        (Column("predicted", "predicted", "s"), lambda it: significant(it.mean_predicted)),
        (Column("measured", "measured", "s"), lambda it: _figure(it.mean_measured)),
        (Column("on", "on", words=True), _carried_out),
    ]
    return Sheet.of(columns, plan.verified)


def _figure(value: float | None) -> str:
    return NONE if value is None else significant(value)


def _bottleneck(row: CandidateRow) -> Cell:
    """Return what most of a worker's time goes into; below it the share, which would make a column
    of a terminal as wide as the names."""
    what = row.bottleneck.rstrip("0123456789 %")
    share = row.bottleneck.removeprefix(what).strip()
    return Cell(what, [f"{share} of a worker's time"] if share else [])


def _carried_out(it: Verified) -> str:
    text: str = it.engine if it.mean_measured is not None else it.outcome
    if it.computing is not None:
        text += f", computing {significant(it.computing)} times as long as predicted"
    return text
