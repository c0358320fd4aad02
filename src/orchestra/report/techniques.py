"""Which techniques paid: rows that differ in one setting, side by side."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from orchestra.report.numbers import percent, times
from orchestra.report.rows import TIME_TO_TARGET, TRAIN, Measure, Row
from orchestra.report.study import Study


@dataclass(frozen=True)
class Verdict:
    """Whether one technique paid.

    Attributes:
        row: with it.
        plain: without it.
        setting: what differs, "compression=BF16()".
        answer: "paid", "did not pay" or "open".
        because: why.
        seconds: of both, to the target or for all samples; "not reached" among them.
        finals: the primary figure of both; none where only time passed.
        break_even: at which bandwidth it pays, in words; none where nobody searched.
    """

    row: Row
    plain: Row
    setting: str
    answer: str
    because: str
    seconds: tuple[str, str]
    finals: tuple[str, str] | None
    break_even: str


def verdicts(study: Study) -> Iterator[Verdict]:
    """One for each technique of the comparisons in `study`, on the most ranks that it ran on."""
    for source in study.sources:
        rows = {(r.label, r.ranks): r for r in study.completed if r.source is source}
        for judged in source.techniques:
            names = judged["technique"]
            row, plain = (rows.get((names[key], judged["ranks"])) for key in ("name", "plain"))
            if row is not None and plain is not None:
                yield _verdict(study, row, plain, names["setting"], judged["text"])


def _verdict(study: Study, row: Row, plain: Row, setting: str, break_even: str) -> Verdict:
    reached = [study.reached(each) / len(each.runs) for each in (row, plain)]
    measure = TIME_TO_TARGET if study.target and not study.only_time else TRAIN
    seconds = _text(row, measure), _text(plain, measure)
    if measure is TIME_TO_TARGET and reached[0] != reached[1]:
        answer = "paid" if reached[0] > reached[1] else "did not pay"
        share, other = map(percent, reached)
        because = f"it reached the target in {share} of its runs, {plain.name} in {other}"
    elif measure is TIME_TO_TARGET and not any(reached):
        answer, because = "open", "neither reached the target"
    else:
        answer, because = _by_time(study, row, plain, measure)
    finals = None if study.only_time else (_text(row, study.primary), _text(plain, study.primary))
    return Verdict(row, plain, setting, answer, because, seconds, finals, break_even)


def _by_time(study: Study, row: Row, plain: Row, measure: Measure) -> tuple[str, str]:
    """Return the answer by the seconds of both, and the reason."""
    difference = study.between(row, plain, measure)
    ours, theirs = row.mean(measure.read), plain.mean(measure.read)
    if difference is None or not ours or not theirs:
        return "open", "they share no seed"
    ratio = f"it took {times(ours / theirs)} as long"
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
