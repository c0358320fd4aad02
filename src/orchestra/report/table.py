"""The tables of a report: one line for each row, best first; and which techniques paid."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from orchestra.report import measures, numbers
from orchestra.report.fairness import worker_batch
from orchestra.report.measures import TIME_TO_TARGET, Measure
from orchestra.report.numbers import Difference, count, fixed, listed
from orchestra.report.rows import Row
from orchestra.report.sheet import NONE, Cell, Column, Sheet
from orchestra.report.study import Study


@dataclass(frozen=True)
class ResultTable:
    """All figures of a study: the columns that are not empty, and what is to say about them."""

    sheet: Sheet
    beside: str  # what the differences are from
    pairs: int  # the seeds that most differences are over
    compared: int  # the differences with an interval, of which chance marks one in twenty
    runs: int  # of each row, all completed; 0 where that differs and a column says it


def table(study: Study) -> ResultTable:
    """Return the table with all figures of `study`."""
    pairs, runs = _pairs(study), {len(row.runs) for row in study.rows}
    all_done = all(row.completed == row.runs for row in study.rows)
    alike = runs.pop() if all_done and len(runs) == 1 else 0
    steps = len({row.record.learned.steps for row in study.completed}) > 1

    def completed(row: Row) -> Cell:
        done = len(row.completed)
        return Cell(NONE) if alike else Cell(f"{done} of {len(row.runs)}", value=done)

    columns: list[tuple[Column, Callable[[Row], Cell | str]]] = [
        (Column("strategy", "strategy", words=True), _name),
        (Column("ranks", "ranks"), _ranks),
        (Column("global_batch", "global batch", "samples"), lambda row: _batch(row, steps)),
        (Column("completed", "seeds completed", rising=True), completed),
    ]
    for m in study.measures:
        if m is not measures.STALEST:
            title = "staleness" if m is measures.STALENESS else m.title
            cell = partial(_measured, study, m, _decimals(study.rows, m), pairs)
            columns.append((Column(m.key, title, m.unit, bool(m.rising)), cell))
    columns.append((Column("switched_at_step", "switched", "step"), _switched))
    filled = Sheet.of(columns, study.ranked).only(
        lambda _, cells: any(cell.text != NONE for cell in cells)
    )
    compared = sum(
        difference is not None and difference.low is not None
        for row in study.rows
        for measure in _compared(study)
        if measure.rising is not None
        for difference in [study.difference(row, measure)]
    )
    return ResultTable(filled, _beside(study), pairs, compared, alike)


def figures_sheet(study: Study) -> Sheet:
    """Return the table for CSV, a line for each row, best first. For each figure it has the mean
    over the seeds, the sample standard deviation (_sd), the number of seeds (_n), and the paired
    difference from the rival with its 95 % interval (_difference, _low, _high). Unknown fields
    are empty."""

    plain = {row.name: plain_figures(study, row) for row in study.ranked}
    columns: list[tuple[Column, Callable[[Row], Cell | str]]] = [
        (Column("name", "name"), lambda row: row.name),
        (Column("strategy", "strategy"), lambda row: row.record.asked.strategy),
        (Column("ranks", "ranks"), lambda row: str(row.ranks)),
        (Column("workers", "workers"), lambda row: str(row.record.asked.workers)),
        (Column("servers", "servers"), lambda row: str(row.record.asked.servers)),
        (Column("global_batch", "global batch"), lambda row: str(row.global_batch)),
        (Column("runs", "runs"), lambda row: str(len(row.runs))),
        (Column("completed", "completed"), lambda row: str(len(row.completed))),
    ]
    columns += [
        (Column(f"{measure.key}{end}", measure.title), partial(_part, plain, measure.key, read))
        for measure in study.measures
        for end, read in _PARTS.items()
    ]
    return Sheet.of(columns, study.ranked)


_PARTS: Mapping[str, Callable[[dict[str, Any]], object]] = {
    "": lambda figure: figure["mean"],
    "_sd": lambda figure: figure["spread"],
    "_n": lambda figure: figure["n"],
    "_difference": lambda figure: (figure["difference"] or {}).get("mean"),
    "_low": lambda figure: (figure["difference"] or {}).get("low"),
    "_high": lambda figure: (figure["difference"] or {}).get("high"),
}
"""By the end of a column's key, which part of a plain figure it has."""


def _part(
    plain: Mapping[str, dict[str, Any]],
    key: str,
    read: Callable[[dict[str, Any]], object],
    row: Row,
) -> Cell:
    return Cell("", value=read(plain[row.name][key]))


def plain_figures(study: Study, row: Row) -> dict[str, Any]:
    """Return the figures of `row` as plain data: mean, spread, seeds and difference of each."""
    return {
        measure.key: {
            "mean": row.mean(measure.read),
            "spread": row.spread(measure.read),
            "n": len(row.values(measure.read)),
            "unit": measure.unit,
            "known_to": row.known_to(measure),
            "difference": vars(found) if (found := study.difference(row, measure)) else None,
        }
        for measure in study.measures
    }


def _name(row: Row) -> Cell:
    return Cell(row.name, notation=row.record.asked.strategy)


def _ranks(row: Row) -> Cell:
    details = [count("worker", row.record.asked.workers).replace(" ", numbers.THIN)]
    if row.record.asked.servers:
        details.append(count("server", row.record.asked.servers).replace(" ", numbers.THIN))
    return Cell(str(row.ranks), details, row.ranks)


def _batch(row: Row, steps: bool) -> Cell:
    """Return the global batch with each worker's part, and with `steps` if rows differ in them."""
    details = [worker_batch(row.record.batching.worker_batches)]
    details += [count("step", row.record.learned.steps)] if steps else []
    return Cell(str(row.global_batch), list(filter(None, details)), row.global_batch)


def _measured(study: Study, measure: Measure, places: int, pairs: int, row: Row) -> Cell:
    mean = row.mean(measure.read)
    if mean is None:
        # For a row whose runs all failed "not reached" would be a claim
        missed = measure is TIME_TO_TARGET and bool(row.completed)
        return Cell("not reached" if missed else NONE)
    spread = row.spread(measure.read)
    text = fixed(mean, places)
    if (known := row.known_to(measure)) is not None:
        text, places = numbers.uncertain(mean, known), max(0, numbers.places_of(known))
    elif spread is not None:
        text += f" ± {fixed(round(spread, places), places)}"
    details = []
    if measure is TIME_TO_TARGET and study.reached(row) < len(row.runs):
        details.append(f"in {study.reached(row)} of {len(row.runs)} runs")
    if measure is measures.SENT and any(run.record.traffic.estimated for run in row.completed):
        details.append("estimated")
    if measure is measures.STALENESS:
        details.append(f"at most {max(row.values(measures.STALEST.read).values()):g}")
    difference = study.difference(row, measure) if measure in _compared(study) else None
    verdict = ""
    if difference is not None:
        details += _difference(difference, places, pairs)
        # A difference is marked only where the seeds tell the two rows apart.
        if difference.certain and measure.rising is not None:
            verdict = "better" if (difference.mean > 0) is measure.rising else "worse"
    return Cell(text, details, mean, spread, verdict)


def _compared(study: Study) -> list[Measure]:
    return [TIME_TO_TARGET, measures.TRAIN, *study.finals]


def _difference(difference: Difference, places: int, pairs: int) -> Iterator[str]:
    mean, *ends = difference.texts(places)
    yield mean if difference.n == pairs else f"{mean}, {numbers.pairs_of(difference.n)}"
    if ends:
        yield f"[{', '.join(ends)}]"


def _pairs(study: Study) -> int:
    """Return the most common number of pairs of the differences in the table."""
    counts = Counter(
        difference.n
        for row in study.rows
        for measure in _compared(study)
        if (difference := study.difference(row, measure))
    )
    return counts.most_common(1)[0][0] if counts else 0


def _switched(row: Row) -> Cell:
    if not row.record.pacing.switches or not row.completed:
        return Cell(NONE)
    fired = [step for run in row.completed if (step := run.record.switching.at_step) is not None]
    if not fired:
        return Cell("never switched")
    never = ["never in the others"] if len(fired) < len(row.completed) else []
    return Cell(listed(list(map(str, fired))), never, sum(fired) / len(fired))


def _decimals(rows: Sequence[Row], measure: Measure) -> int:
    """Return enough decimals for the smallest mean, but at most one more than the largest needs."""
    means = [mean for row in rows if (mean := row.mean(measure.read))] or [0.0]
    most = numbers.decimals_for(means, measure.digits) + 1
    # One tiny mean must not give a column of seconds ten decimals
    return min(most, numbers.decimals_for([min(means, key=abs)], measure.digits))


def _beside(study: Study) -> str:
    if study.baseline is not None:
        return f"the row {study.baseline} of the same seed"
    pairs = [(row, rival) for row in study.rows if (rival := study.rival(row))]
    if not pairs:
        return ""
    if all(row.global_batch == rival.global_batch for row, rival in pairs):
        return "one process with all cores, the same global batch and the same seed"
    return "one process with all cores and the same seed, though not every row has its global batch"


# Which techniques paid: rows that differ in one setting, side by side


def techniques_sheet(study: Study) -> Sheet:
    """Return a line for each technique: the row with it, the row without it, and the effect."""
    found = list(verdicts(study))
    columns: list[tuple[Column, Callable[[TechniqueVerdict], Cell | str]]] = [
        (Column("technique", "technique", words=True),
         lambda it: Cell(it.row.label, notation=it.setting)),
        (Column("beside", "beside", words=True), lambda it: it.plain.label),
        (Column("ranks", "ranks"), lambda it: str(it.row.ranks)),
        (Column("seconds", "seconds, with and without", words=True),
         lambda it: ", ".join(it.seconds)),
    ]  # fmt: skip
    if not study.only_time:
        title = f"{study.primary.title}, with and without"
        columns.append((Column("finals", title, words=True), lambda it: ", ".join(it.finals or ())))
    columns.append((Column("here", "here it", words=True), _answer_text))
    if any(verdict.break_even for verdict in found):
        pays = Column("break_even", "it pays", words=True)
        columns.append((pays, lambda it: it.break_even or NONE))
    return Sheet.of(columns, found)


def _answer_text(it: TechniqueVerdict) -> str:
    return f"{it.answer if it.answer != 'open' else 'stays open'}: {it.because}"


@dataclass(frozen=True)
class TechniqueVerdict:
    """The verdict on one technique: whether it paid."""

    row: Row  # with it
    plain: Row  # without it
    setting: str  # what differs, "compression=BF16()"
    answer: str  # "paid", "did not pay" or "open"
    because: str
    seconds: tuple[str, str]  # of both, to the target ("not reached", too) or for all samples
    finals: tuple[str, str] | None  # the primary figure of both; None where only time passed
    break_even: str  # at which bandwidth it pays; empty where nobody searched


def verdicts(study: Study) -> Iterator[TechniqueVerdict]:
    """Yield a verdict for each technique of the comparisons, on the most ranks that it ran on."""
    for source in study.sources:
        rows = {(r.label, r.ranks): r for r in study.completed if r.source is source}
        for judged in source.techniques:
            names = judged["technique"]
            row, plain = (rows.get((names[key], judged["ranks"])) for key in ("name", "plain"))
            # One of the two failed or was not run under this report's sources
            if row is not None and plain is not None:
                yield _verdict(study, row, plain, names["setting"], judged["text"])


def _verdict(study: Study, row: Row, plain: Row, setting: str, break_even: str) -> TechniqueVerdict:
    # How often a row reaches the target counts before how soon, as in the ranking of rows.
    reached = [study.reached(each) / len(each.runs) for each in (row, plain)]
    measure = TIME_TO_TARGET if study.target and not study.only_time else measures.TRAIN
    seconds = _text(row, measure), _text(plain, measure)
    if measure is TIME_TO_TARGET and reached[0] != reached[1]:
        answer = "paid" if reached[0] > reached[1] else "did not pay"
        share, other = map(numbers.percent, reached)
        because = f"it reached the target in {share} of its runs, {plain.name} in {other}"
    elif measure is TIME_TO_TARGET and not any(reached):
        answer, because = "open", "neither reached the target"
    else:
        answer, because = _by_time(study, row, plain, measure)
    finals = None if study.only_time else (_text(row, study.primary), _text(plain, study.primary))
    return TechniqueVerdict(row, plain, setting, answer, because, seconds, finals, break_even)


def _by_time(study: Study, row: Row, plain: Row, measure: Measure) -> tuple[str, str]:
    """Return the answer by the seconds of both, and the reason."""
    difference = study.between(row, plain, measure)
    ours, theirs = row.mean(measure.read), plain.mean(measure.read)
    if difference is None or not ours or not theirs:
        return "open", "they share no seed"
    ratio = f"it took {numbers.times(ours / theirs)} as long"
    # One pair of runs gives no interval; then its two times are compared, and the reason says so.
    known = difference.low is not None or difference.too_coarse
    if known and not difference.certain:
        return "open", f"{ratio}, but the two cannot be told apart"
    answer = "paid" if difference.mean < 0 else "did not pay"
    if ours == theirs:
        return "did not pay", "it took as long"
    return answer, ratio if difference.low is not None else f"{ratio}, in one run of each"


def _text(row: Row, measure: Measure) -> str:
    if row.mean(measure.read) is None:
        return "not reached" if measure is TIME_TO_TARGET else "none"
    return row.text(measure)
