"""The sections of a page around its figures: which techniques paid, which ranks held up others,
which strategies switched, what went wrong, and which rows ended with the same parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from orchestra.records.record import RunRecord
from orchestra.records.report import Straggler, changes_in
from orchestra.report.numbers import (
    TIME_TO_TARGET,
    TRAIN,
    Measure,
    count,
    figure_text,
    listed,
    percent,
    significant,
    times,
)
from orchestra.report.rows import Row, grouped
from orchestra.report.study import Study
from orchestra.settings.base import from_plain

MOST = 5
"""The most stragglers of a run that have rows of their own."""


# Which techniques paid: rows that differ in one setting, side by side


@dataclass(frozen=True)
class Verdict:
    """The verdict on one technique: whether it paid.

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
    """Yield a verdict for each technique of the comparisons, on the most ranks that it ran on."""
    for source in study.sources:
        rows = {(r.label, r.ranks): r for r in study.completed if r.source is source}
        for judged in source.techniques:
            names = judged["technique"]
            row, plain = (rows.get((names[key], judged["ranks"])) for key in ("name", "plain"))
            # One of the two failed or was not run under this report's sources
            if row is not None and plain is not None:
                yield _verdict(study, row, plain, names["setting"], judged["text"])


def _verdict(study: Study, row: Row, plain: Row, setting: str, break_even: str) -> Verdict:
    # How often goes before how soon, as in the ranking of rows (decision 14)
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


# Who held up the others


def stragglers(study: Study) -> Iterator[tuple[str, int, str, str, str, str, str, str]]:
    """Yield the stragglers of all completed runs, in each run those first that cost most.

    Of each the row, the seed, who it was, how many times as long it took, the cause, since and
    until when, and what the others lost; of those beyond the first few only how many they are.
    """
    for row in study.completed:
        for record in (run.record for run in row.completed):
            found = _stragglers_of(record)
            for each in found[:MOST]:
                since = _moment(each.since_seconds, each.since_step)
                end = each.until_seconds
                until = "the end" if end is None else _moment(end, each.until_step)
                about = each.who, times(each.factor), each.cause, since, until, _lost([each])
                yield row.name, record.seed, *about
            if more := found[MOST:]:
                yield row.name, record.seed, f"and {len(more)} more", "", "", "", "", _lost(more)


def _moment(seconds: float, step: int | None) -> str:
    return figure_text(seconds, "s") + (f", step {step}" if step is not None else "")


def _lost(found: Sequence[Straggler]) -> str:
    lost = sum(each.lost_seconds for each in found)
    return figure_text(lost, "s") if lost else "nothing"


def _stragglers_of(record: RunRecord) -> list[Straggler]:
    """Return the stragglers of one run, the most expensive first."""
    # Sorted when they were recorded
    found: list[Straggler] = from_plain(list[Straggler], list(record.stragglers))
    return found


def stragglers_sentence(row: Row) -> str:
    """Return a sentence on the stragglers of the first run of `row`; empty if there are none."""
    found = _stragglers_of(row.record)
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


# How runs ended


@dataclass(frozen=True)
class Event:
    """Something that befell a run: `what`, and a text, whose first line says most."""

    name: str
    seed: int | None
    what: str
    text: str = ""


def switched(study: Study) -> Iterator[Event]:
    """Yield the switches of each completed run of a strategy that may switch."""
    for row in study.rows:
        for record in (run.record for run in row.completed if row.record.switches is True):
            if changes := changes_in(record.decisions):
                yield from (Event(row.name, record.seed, f"switched {text}") for text in changes)
                continue
            what, consumed = "never switched", record.switched_at_sample
            if record.decisions:
                what += f" in {len(record.decisions)} decisions"
            if record.switched_at_step is not None:
                what = f"switched after step {record.switched_at_step}"
                if consumed and record.samples:
                    what += f", after {percent(consumed / record.samples)} of the samples"
            yield Event(row.name, record.seed, what)


def troubles(study: Study) -> Iterator[Event]:
    """Yield failures, stops, rows that were not run, and notices."""
    records = [(row.name, run.record) for row in study.rows for run in row.runs]
    for name, record in records:
        if record.status == "failed":
            yield Event(name, record.seed, "failed", record.failure or "unknown")
        elif record.status != "completed":
            yield Event(name, record.seed, record.status, "before its end")
    for entry in (entry for source in study.sources for entry in source.not_run):
        yield Event(f"{entry['name']} ({entry['ranks']} ranks)", None, "not run", entry["reason"])
    for name, record in records:
        for rank, reason in record.left_out.items():
            yield Event(name, record.seed, f"went on without rank {rank}", reason)
        yield from (Event(name, record.seed, "notice", notice) for notice in record.notices)


def endings(study: Study) -> dict[int, dict[str, tuple[str, ...]]]:
    """Return by seed the hashes of the final parameters, with the rows that share each."""
    known = [
        (run.record.seed, digest, row.name)
        for row in study.rows
        for run in row.completed
        if (digest := run.record.parameters_sha256)
    ]
    return {
        seed: {
            digest: tuple(name for *_, name in sharing)
            for digest, sharing in grouped(of_seed, lambda entry: entry[1]).items()
        }
        for seed, of_seed in sorted(grouped(known, lambda entry: entry[0]).items())
    }


def agreement(endings: Sequence[Mapping[str, tuple[str, ...]]]) -> str:
    """Return which rows ended with the same parameters, bit for bit, under every seed."""
    shared = [{names for names in groups.values() if len(names) > 1} for groups in endings]
    always = set.intersection(*shared) if shared else set()
    if not always:
        return (
            "No two rows ended with the same bits under every seed. Strategies that add in "
            "different orders differ in the last bits, asynchronous ones from run to run."
        )
    text = "; ".join(map(listed, sorted(always)))
    return f"Bit for bit the same final parameters under every seed: {text}."
