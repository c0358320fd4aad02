"""Who held up the others in the runs of a study."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from orchestra.records.record import RunRecord
from orchestra.records.stragglers import Straggler
from orchestra.report.numbers import count, figure_text, listed, significant, times
from orchestra.report.rows import Row
from orchestra.report.study import Study
from orchestra.settings.base import from_plain

MOST = 5
"""Stragglers of a run that have lines of their own."""


@dataclass(frozen=True)
class Line:
    """One straggler in one run; or how many more there were, where `factor` is empty."""

    row: Row
    seed: int
    who: str
    factor: str = ""
    cause: str = ""
    since: str = ""
    until: str = ""
    lost: str = ""


def lines(study: Study) -> Iterator[Line]:
    """The stragglers of all completed runs, in each run those first that cost most."""
    for row in study.completed:
        for record in (run.record for run in row.completed):
            found = stragglers_of(record)
            for each in found[:MOST]:
                yield _line(row, record, each)
            if more := found[MOST:]:
                yield Line(row, record.seed, f"and {len(more)} more", lost=_lost(more))


def _line(row: Row, record: RunRecord, found: Straggler) -> Line:
    return Line(
        row,
        record.seed,
        found.who,
        times(found.factor),
        found.cause,
        _moment(found.since_seconds, found.since_step),
        "the end"
        if found.until_seconds is None
        else _moment(found.until_seconds, found.until_step),
        _lost([found]),
    )


def _moment(seconds: float, step: int | None) -> str:
    return figure_text(seconds, "s") + (f", step {step}" if step is not None else "")


def _lost(found: list[Straggler]) -> str:
    lost = sum(each.lost_seconds for each in found)
    return figure_text(lost, "s") if lost else "nothing"


def stragglers_of(record: RunRecord) -> list[Straggler]:
    """Those of one run, the one that cost most first."""
    found: list[Straggler] = from_plain(list[Straggler], list(record.stragglers))
    return found


def sentence(row: Row) -> str:
    """Who held up whom in the first run of `row`; empty where nobody did."""
    found = stragglers_of(row.record)
    if not found:
        return ""
    if len(found) > 1:
        lost = sum(each.lost_seconds for each in found)
        cause = listed(sorted({each.cause for each in found}))
        whom = f"{found[0].who} and {count('other', len(found) - 1)} were slower than the rest"
        return f"{whom} ({cause}), and {_cost(lost)}"
    first = found[0]
    when = "all the time"
    if first.since_seconds > 0 or first.until_seconds is not None:
        when = f"from {significant(first.since_seconds)} s on"
    if first.until_seconds is not None:
        when = when.removesuffix(" on") + f" to {significant(first.until_seconds)} s"
    slower = f"took {times(first.factor)} as long as its peers ({first.cause}) {when}"
    return f"{first.who} {slower}, and {_cost(first.lost_seconds)}"


def _cost(lost: float) -> str:
    if not lost:
        return "nobody waited for it"
    return f"the other workers lost {figure_text(lost, 's')} to that, all together"
