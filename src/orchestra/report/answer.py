"""The first sentences of a report: which strategy, by how much, did distributing pay, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from orchestra.records.record import RunRecord
from orchestra.report.conditions import unequal_shares
from orchestra.report.numbers import (
    THIN,
    count,
    decimals_for,
    figure_text,
    fixed,
    pairs_of,
    percent,
    places_of,
    significant,
    some,
    times,
    uncertain,
)
from orchestra.report.rows import (
    FINAL_LOSS,
    PACE,
    SENT,
    STALENESS,
    TIME_TO_TARGET,
    Difference,
    Measure,
    Row,
    known_to,
)
from orchestra.report.study import Study


@dataclass(frozen=True)
class Conclusion:
    """`headline` is the answer; the rest adds to it, says why it is so, and what to mind."""

    headline: str
    detail: Sequence[str] = ()
    why: Sequence[str] = ()
    mind: Sequence[str] = ()


def answer(study: Study) -> Conclusion:
    """What the runs of `study` say, with no more certainty than they give."""
    rows = [row for row in study.ranked if row.completed]
    if not rows:
        return Conclusion(_nothing_completed(study))
    reached = [row for row in rows if study.target and study.reached(row)]
    if study.only_time:
        headline, detail = _fastest_of_all(study, rows), _fastest(study, rows)
    elif reached:
        headline, detail = _first_to_target(study, rows, reached), _next_to_target(study, reached)
    else:
        headline, detail = _best_in_the_end(study, rows), _fastest(study, rows)
    if study.differing:
        differing = some(list(study.differing))
        headline = (
            f"this is not one fair comparison, for the runs differ in {differing}: {headline}"
        )
    parts = (detail, why(study), _to_mind(study))
    return Conclusion(_sentence(headline), *([_sentence(text) for text in part] for part in parts))


def why(study: Study) -> Iterator[str]:
    """Where the time of the best distributed strategy went, beside that of one process."""
    row = next((row for row in study.ranked if row.completed and not row.single), None)
    if row is None:
        return
    parts = {name: row.mean(_part(name)) or 0.0 for name in ("compute", "communicate", "wait")}
    total = sum(parts.values())
    if total:
        compute, communicate, wait = (percent(part / total) for part in parts.values())
        yield (
            f"a worker of {row.name} spent {compute} of its time computing, {communicate} sending "
            f"and receiving, and {wait} waiting{_compute_beside(study, row)}"
        )
    yield from _traffic(row)


def row_text(study: Study, row: Row) -> str:
    """A row in a sentence: "ring on 4 ranks", with its batch where rows have unlike ones."""
    batch = f" (batch {row.global_batch})"
    unlike = len({other.global_batch for other in study.rows if other.completed}) > 1
    if row.single:
        return "one process with all cores" + batch * (unlike or row.name != row.label)
    plain = row.name in (row.label, f"{row.label} ({count('rank', row.ranks)})")
    name = f"{row.label} on {count('rank', row.ranks)}" if plain else row.name
    return name + batch * unlike


def told_apart(difference: Difference | None) -> bool | None:
    """Whether the interval excludes zero; None where no spread is known, and the snapshots are
    close enough to say who was first."""
    if difference is None or (difference.low is None and not difference.too_coarse):
        return None
    return difference.certain


def interval(difference: Difference, measure: Measure) -> str:
    """A difference in words: "+2.10 s (95 % interval +1.71 to +2.49 s, n = 3)"."""
    coarse = max(difference.below, difference.above)
    unit = f"{THIN}{measure.unit}" if measure.unit else ""

    def text(value: float) -> str:
        if coarse:
            return fixed(value, max(0, places_of(coarse)), sign=True)
        return significant(value, sign=True)

    mean = text(difference.mean) + unit
    if difference.low is None or difference.high is None:
        return f"{mean} ({pairs_of(1)})"
    low, high = text(difference.low), text(difference.high) + unit
    return f"{mean} (95{THIN}% interval {low} to {high}, {pairs_of(difference.n)})"


def _first_to_target(study: Study, rows: Sequence[Row], reached: Sequence[Row]) -> str:
    first = reached[0]
    soonest = all(_time(first) <= _time(row) for row in reached)
    how = "first" if soonest else "most often"
    opening = f"{row_text(study, first)} reached {study.target} {how}, {_after(study, first)}"
    others = [row for row in reached if row.single is not first.single]
    if others:
        return f"{opening}; {_compared(study, first, others[0])}"
    rivals = [row for row in rows if row.single is not first.single]
    if not rivals:
        return f"{opening}; {_no_rival(first)}"
    whom = (
        "no distributed strategy reached it"
        if first.single
        else f"{row_text(study, rivals[0])} did not reach it in {_runs(rivals[0])}"
    )
    return f"{opening}; {whom}: {_verdict(study, first, rivals[0])}"


def _compared(study: Study, first: Row, other: Row) -> str:
    """How long `other` took, and what follows for distributing."""
    ours, theirs = _time(first), _time(other)
    who = f"the fastest of the distributed strategies, {row_text(study, other)}," * first.single
    took = f"{who or row_text(study, other)} took {_seconds(other)}{_share(study, other)}"
    took += f", {times(theirs / ours)} as long" if 0 < ours < theirs else ""
    difference = study.between(other, first, TIME_TO_TARGET)
    if difference is not None and told_apart(difference) is False:
        over = f"over {count('seed', difference.n)}"
        if difference.too_coarse:
            over = "with snapshots so far apart"
        took += f", but {over} the two cannot be told apart"
    elif theirs >= ours:
        return f"{took}: {_verdict(study, first, other)}"
    return f"{took}: whether distributing pays {_here(study)} stays open"


def _next_to_target(study: Study, reached: Sequence[Row]) -> Iterator[str]:
    """How certain the first sentence is, and who was second if it has not named it."""
    first = reached[0]
    named = next((row for row in reached if row.single is not first.single), None)
    second = reached[1] if len(reached) > 1 else None
    if named is not None and (difference := study.between(named, first, TIME_TO_TARGET)):
        yield f"{named.name} minus {first.name} is {interval(difference, TIME_TO_TARGET)}"
    yield from _at_the_same_batch(study, reached, named)
    if second is None or second is named:
        return
    text = f"the next after {first.name} was {row_text(study, second)}, {_after(study, second)}"
    if difference := study.between(second, first, TIME_TO_TARGET):
        text += f", a difference of {interval(difference, TIME_TO_TARGET)}"
        text += ": the two cannot be told apart" * (told_apart(difference) is False)
    yield text


def _at_the_same_batch(study: Study, reached: Sequence[Row], named: Row | None) -> Iterator[str]:
    """Where the first sentence compares unlike batches, the rows that have the first one's."""
    first = reached[0]
    if named is None or named.global_batch == first.global_batch:
        return
    alike = [row for row in reached if row.global_batch == first.global_batch]
    rival = next((row for row in alike if row.single is not first.single), None)
    if rival is None:
        return
    took = figure_text(_time(rival), "s")
    text = f"at the same batch, {first.global_batch}, {rival.name} took {took}"
    if difference := study.between(rival, first, TIME_TO_TARGET):
        text += f", a difference of {interval(difference, TIME_TO_TARGET)}"
    yield text


def _best_in_the_end(study: Study, rows: Sequence[Row]) -> str:
    measure = study.chief
    best = rows[0]
    opening = (
        f"{row_text(study, best)} ended with the best {_noun(measure)}, {_figure(best, measure)}"
    )
    if study.target:
        samples = max(run.record.samples for row in rows for run in row.completed)
        budget = count("sample", samples)
        opening = f"no strategy reached {study.target} within {budget}; {opening}"
    others = [row for row in rows[1:] if row.values(measure.read)]
    if not others:
        return opening
    second = others[0]
    text = f"{opening}; the next was {row_text(study, second)} with {_figure(second, measure)}"
    unlike = ""
    if best.global_batch != second.global_batch:
        unlike = ": with unlike batches, that is a difference of batch and strategy together"
    verdict = told_apart(study.between(best, second, measure))
    if verdict is None:
        return f"{text}{unlike}"
    if verdict:
        return f"{text}, a difference beyond the spread over the seeds{unlike}"
    alike = [row for row in others if told_apart(study.between(best, row, measure)) is False]
    whom = some([row.name for row in alike])
    return f"{text}, but over the seeds {best.name} cannot be told from {whom}{unlike}"


def _fastest_of_all(study: Study, rows: Sequence[Row]) -> str:
    """Where only time passed: who is first, and who next."""
    first, *others = rows
    text = f"{row_text(study, first)} was the fastest with {_figure(first, PACE)}"
    if others:
        text += f", and the next {row_text(study, others[0])} with {_figure(others[0], PACE)}"
        if first.global_batch != others[0].global_batch:
            text += ", in steps of unlike batches"
    return f"{text}; these runs tell of time alone, and of no result"


def _fastest(study: Study, rows: Sequence[Row]) -> Iterator[str]:
    """By samples a second: the best distributed one beside one process."""
    by_pace = sorted(
        (r for r in rows if r.values(PACE.read)), key=lambda r: -(r.mean(PACE.read) or 0)
    )
    single = next((row for row in by_pace if row.single), None)
    spread_out = next((row for row in by_pace if not row.single), None)
    for row in (single, spread_out):
        if row is not None and (single is None or spread_out is None):
            yield (
                f"{row_text(study, row)} was the fastest with {_figure(row, PACE)}; "
                f"{_no_rival(row)}"
            )
    if single is None or spread_out is None:
        return
    fast, slow = sorted((single, spread_out), key=lambda row: -(row.mean(PACE.read) or 0))
    ratio = (fast.mean(PACE.read) or 0) / (slow.mean(PACE.read) or 1)
    verdict = told_apart(study.between(fast, slow, PACE))
    end = "the two cannot be told apart" if verdict is False else _verdict(study, fast, slow)
    yield (
        f"by speed, {row_text(study, fast)} came to {_figure(fast, PACE)}, {times(ratio)} as "
        f"many as {row_text(study, slow)} ({_figure(slow, PACE)}): {end}"
    )


def _to_mind(study: Study) -> Iterator[str]:
    """What a reader has to know before trusting the rest."""
    if study.seeds == 1:
        yield "each row is one run: the spread over seeds is not known"
    yield from unequal_shares(study)
    ended = [run.record.status for row in study.rows for run in row.runs]
    for status in ("failed", "stopped"):
        if number := ended.count(status):
            was = "was" if number == 1 else "were"
            verb = "failed" if status == "failed" else f"{was} stopped"
            yield f"{number} of {count('run', len(ended))} {verb}"


def _nothing_completed(study: Study) -> str:
    records = [run.record for row in study.rows for run in row.runs]
    failed = [record for record in records if record.status == "failed"]
    text = f"There is no answer: none of {count('run', len(records))} was completed"
    if failed:
        cause = (failed[0].failure or "unknown").partition("\n")[0].removesuffix(".")
        text += f"; the first failure, of {failed[0].name}: {cause}"
    return f"{text}."


def _verdict(study: Study, first: Row, other: Row | None = None) -> str:
    """Whether distributing paid, given who was first, and before whom."""
    if study.differing:
        return "whether distributing pays does not follow"
    if other is not None and other.global_batch != first.global_batch:
        return "with unlike batches, whether distributing pays does not follow"
    paid = "did not pay" if first.single else "paid"
    where = _here(study) if study.seeds > 1 else "in these runs, one of each,"
    return f"{where} distributing {paid}"


def _here(study: Study) -> str:
    """Where that was."""
    engines = {run.record.engine for row in study.rows for run in row.runs}
    return "on the simulated cluster" if engines == {"simulation"} else "on this machine"


def _no_rival(row: Row) -> str:
    if row.single:
        return "no distributed strategy stands beside it"
    return "whether distributing paid is not known, without a run of one process with all cores"


def _compute_beside(study: Study, row: Row) -> str:
    """Its computing beside that of one process on the same samples."""
    compute = _part("compute")
    single = next((other for other in study.ranked if other.single and other.completed
                   and other.ranks == row.ranks), None)  # fmt: skip
    cores = row.source.environment.get("cores")
    shared = ""
    real = row.completed[0].record.engine == "processes"
    if real and isinstance(cores, int) and row.ranks > cores:
        shared = f"its {count('rank', row.ranks)} share {count('core', cores)}"
    ours = row.mean(compute)
    theirs = single.mean(compute) if single is not None else None
    if ours and theirs:
        own, other = figure_text(ours, "s"), figure_text(theirs, "s")
        beside = f"each computed for {own}, one process for {other}"
        shared = f"{shared}, and {beside}" if shared else beside
    return f"; {shared}" if shared else ""


def _traffic(row: Row) -> Iterator[str]:
    sent = row.mean(SENT.read)
    stale = row.mean(STALENESS.read)
    if not sent:
        return
    estimated = " (in part an estimate)" * any(run.record.bytes_estimated for run in row.completed)
    text = f"its ranks sent {figure_text(sent, 'MB')}{estimated}"
    if stale:
        text += f", and its gradients were {significant(stale)} updates old in the mean"
    yield text


def _after(study: Study, row: Row) -> str:
    number = study.reached(row)
    mean = f"after {_seconds(row)}"
    if number == len(row.runs):
        return mean + (f" (mean of {count('seed', number)})" if number > 1 else "")
    return f"{mean}, though in {number} of {count('run', len(row.runs))} only"


def _share(study: Study, row: Row) -> str:
    number = study.reached(row)
    return f" where it got there, in {number} of {_runs(row)}" if number < len(row.runs) else ""


def _figure(row: Row, measure: Measure) -> str:
    mean, spread = row.mean(measure.read), row.spread(measure.read)
    assert mean is not None
    if spread is None:
        return figure_text(mean, measure.unit, measure.digits)
    places = decimals_for([mean], measure.digits)
    text = f"{fixed(mean, places)} ± {fixed(spread, places)}"
    return f"{text}{THIN}{measure.unit}" if measure.unit else text


def _noun(measure: Measure) -> str:
    return "loss" if measure is FINAL_LOSS else measure.title.removeprefix("final ")


def _runs(row: Row) -> str:
    return count("run", len(row.runs))


def _time(row: Row) -> float:
    time = row.mean(TIME_TO_TARGET.read)
    assert time is not None
    return time


def _seconds(row: Row) -> str:
    """Until the target, with no more digits than are known."""
    known = known_to(row, TIME_TO_TARGET)
    if known is None:
        return figure_text(_time(row), "s")
    return f"{uncertain(_time(row), known)}{THIN}s"


def _part(name: str) -> Callable[[RunRecord], float | None]:
    return lambda record: record.seconds.get(name)


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."
