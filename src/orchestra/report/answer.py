"""The first sentences of a report: which strategy, by how much, did distributing pay, and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from orchestra.report.fairness import unequal_shares
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
    with_unit,
)
from orchestra.report.rows import (
    FINAL_LOSS,
    PACE,
    SENT,
    STALENESS,
    TIME_TO_TARGET,
    Difference,
    Measure,
    Read,
    Row,
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
    rows = study.completed
    if not rows:
        return Conclusion(_nothing_completed(study))
    reached = [row for row in rows if study.target and study.reached(row)]
    if study.only_time:
        headline, detail = _fastest_of_all(study, rows), _fastest(study)
    elif reached:
        headline, detail = _first_to_target(study, reached), _next_to_target(study, reached)
    else:
        headline, detail = _best_in_the_end(study, rows), _fastest(study)
    if study.differing:
        differing = some(list(study.differing))
        headline = (
            f"this is not one fair comparison, for the runs differ in {differing}: {headline}"
        )
    parts = (detail, _why(study), _to_mind(study))
    return Conclusion(_sentence(headline), *([_sentence(text) for text in part] for part in parts))


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _nothing_completed(study: Study) -> str:
    records = [run.record for row in study.rows for run in row.runs]
    text = f"There is no answer: none of {count('run', len(records))} was completed"
    for record in records:
        if record.status == "failed":
            cause = (record.failure or "unknown").partition("\n")[0].removesuffix(".")
            return f"{text}; the first failure, of {record.name}: {cause}."
    return f"{text}."


# Where runs reached the target


def _first_to_target(study: Study, reached: Sequence[Row]) -> str:
    first = reached[0]
    soonest = all(_time(first) <= _time(row) for row in reached)
    how = "first" if soonest else "most often"
    opening = f"{_row_text(study, first)} reached {study.target} {how}, {_after(study, first)}"
    others = [row for row in reached if row.single is not first.single]
    if others:
        return f"{opening}; {_compared(study, first, others[0])}"
    rivals = [row for row in study.completed if row.single is not first.single]
    if not rivals:
        return f"{opening}; {_no_rival(first)}"
    whom = (
        "no distributed strategy reached it"
        if first.single
        else f"{_row_text(study, rivals[0])} did not reach it in "
        f"{count('run', len(rivals[0].runs))}"
    )
    return f"{opening}; {whom}: {_verdict(study, first, rivals[0])}"


def _compared(study: Study, first: Row, other: Row) -> str:
    """Return how long `other` took, and what follows for distributing."""
    ours, theirs = _time(first), _time(other)
    who = _row_text(study, other)
    if first.single:
        who = f"the fastest of the distributed strategies, {who},"
    took = f"{who} took {_seconds(other)}"
    if (number := study.reached(other)) < len(other.runs):
        took += f" where it got there, in {number} of {count('run', len(other.runs))}"
    took += f", {times(theirs / ours)} as long" if 0 < ours < theirs else ""
    difference = study.between(other, first, TIME_TO_TARGET)
    if difference is not None and _told_apart(difference) is False:
        over = f"over {count('seed', difference.n)}"
        if difference.too_coarse:
            over = "with snapshots so far apart"
        took += f", but {over} the two cannot be told apart"
    elif theirs >= ours:
        return f"{took}: {_verdict(study, first, other)}"
    return f"{took}: whether distributing pays {_here(study)} stays open"


def _next_to_target(study: Study, reached: Sequence[Row]) -> Iterator[str]:
    """Yield how certain the first sentence is, and who was second if it has not named it."""
    first = reached[0]
    rivals = [row for row in reached if row.single is not first.single]
    named = rivals[0] if rivals else None
    if named is not None and (difference := study.between(named, first, TIME_TO_TARGET)):
        yield f"{named.name} minus {first.name} is {_interval(difference, TIME_TO_TARGET)}"
    if named is not None and named.global_batch != first.global_batch:
        # the first sentence compares unlike batches; this one has the same
        for rival in [row for row in rivals if row.global_batch == first.global_batch][:1]:
            took = figure_text(_time(rival), "s")
            text = f"at the same batch, {first.global_batch}, {rival.name} took {took}"
            if difference := study.between(rival, first, TIME_TO_TARGET):
                text += f", a difference of {_interval(difference, TIME_TO_TARGET)}"
            yield text
    for second in [row for row in reached[1:2] if row is not named]:
        text = f"the next after {first.name} was {_row_text(study, second)}, "
        text += _after(study, second)
        if difference := study.between(second, first, TIME_TO_TARGET):
            text += f", a difference of {_interval(difference, TIME_TO_TARGET)}"
            text += ": the two cannot be told apart" * (_told_apart(difference) is False)
        yield text


def _after(study: Study, row: Row) -> str:
    number = study.reached(row)
    mean = f"after {_seconds(row)}"
    if number == len(row.runs):
        return mean + (f" (mean of {count('seed', number)})" if number > 1 else "")
    return f"{mean}, though in {number} of {count('run', len(row.runs))} only"


def _time(row: Row) -> float:
    time = row.mean(TIME_TO_TARGET.read)
    assert time is not None
    return time


def _seconds(row: Row) -> str:
    """Return the seconds until the target, with no more digits than are known."""
    known = row.known_to(TIME_TO_TARGET)
    return figure_text(_time(row), "s") if known is None else uncertain(_time(row), known, "s")


# Where none did, or only time passed


def _best_in_the_end(study: Study, rows: Sequence[Row]) -> str:
    measure = study.primary
    best = rows[0]
    noun = "loss" if measure is FINAL_LOSS else measure.title.removeprefix("final ")
    text = f"{_row_text(study, best)} ended with the best {noun}, {_figure(best, measure)}"
    if study.target:
        samples = max(run.record.samples for run in study.runs)
        text = f"no strategy reached {study.target} within {count('sample', samples)}; {text}"
    others = [row for row in rows[1:] if row.values(measure.read)]
    if not others:
        return text
    second = others[0]
    text = f"{text}; the next was {_row_text(study, second)} with {_figure(second, measure)}"
    unlike = ""
    if best.global_batch != second.global_batch:
        unlike = ": with unlike batches, that is a difference of batch and strategy together"
    verdict = _told_apart(study.between(best, second, measure))
    if verdict is None:
        return f"{text}{unlike}"
    if verdict:
        return f"{text}, a difference beyond the spread over the seeds{unlike}"
    alike = [row for row in others if _told_apart(study.between(best, row, measure)) is False]
    whom = some([row.name for row in alike])
    return f"{text}, but over the seeds {best.name} cannot be told from {whom}{unlike}"


def _fastest_of_all(study: Study, rows: Sequence[Row]) -> str:
    """Return who is first, and who next, where only time passed."""
    first, *others = rows
    text = f"{_row_text(study, first)} was the fastest with {_figure(first, PACE)}"
    if others:
        text += f", and the next {_row_text(study, others[0])} with {_figure(others[0], PACE)}"
        if first.global_batch != others[0].global_batch:
            text += ", in steps of unlike batches"
    return f"{text}; these runs tell of time alone, and of no result"


def _fastest(study: Study) -> Iterator[str]:
    """Compare the best distributed strategy with one process by samples a second."""
    paces = {row.name: pace for row in study.completed if (pace := row.mean(PACE.read)) is not None}
    by_pace = sorted(
        (row for row in study.completed if row.name in paces), key=lambda row: -paces[row.name]
    )
    best = {row.single: row for row in reversed(by_pace)}
    if len(best) < 2:
        for row in best.values():
            yield (
                f"{_row_text(study, row)} was the fastest with {_figure(row, PACE)}; "
                f"{_no_rival(row)}"
            )
        return
    fast, slow = sorted((best[True], best[False]), key=lambda row: -paces[row.name])
    ratio = paces[fast.name] / (paces[slow.name] or 1)
    verdict = _told_apart(study.between(fast, slow, PACE))
    end = "the two cannot be told apart" if verdict is False else _verdict(study, fast, slow)
    yield (
        f"by speed, {_row_text(study, fast)} came to {_figure(fast, PACE)}, {times(ratio)} as "
        f"many as {_row_text(study, slow)} ({_figure(slow, PACE)}): {end}"
    )


def _figure(row: Row, measure: Measure) -> str:
    mean, spread = row.mean(measure.read), row.spread(measure.read)
    assert mean is not None
    if spread is None:
        return figure_text(mean, measure.unit, measure.digits)
    places = decimals_for([mean], measure.digits)
    return with_unit(f"{fixed(mean, places)} ± {fixed(spread, places)}", measure.unit)


# Why, and what to mind


def _why(study: Study) -> Iterator[str]:
    """Compare where the time of the best distributed strategy went with one process."""
    row = next((row for row in study.completed if not row.single), None)
    if row is None:
        return
    parts = [row.mean(_part(name)) or 0.0 for name in ("compute", "communicate", "wait")]
    if total := sum(parts):
        compute, communicate, wait = (percent(part / total) for part in parts)
        yield (
            f"a worker of {row.name} spent {compute} of its time computing, {communicate} sending "
            f"and receiving, and {wait} waiting{_compute_beside(study, row)}"
        )
    if sent := row.mean(SENT.read):
        estimated = any(run.record.bytes_estimated for run in row.completed)
        text = f"its ranks sent {figure_text(sent, 'MB')}{' (in part an estimate)' * estimated}"
        if stale := row.mean(STALENESS.read):
            text += f", and its gradients were {significant(stale)} updates old in the mean"
        yield text


def _part(name: str) -> Read:
    return lambda record: record.seconds.get(name)


def _compute_beside(study: Study, row: Row) -> str:
    """Return its computing beside that of one process on the same samples."""
    alike = (other for other in study.completed if other.single and other.ranks == row.ranks)
    single = next(alike, None)
    cores = row.source.environment.get("cores")
    parts = []
    if row.record.engine == "processes" and isinstance(cores, int) and row.ranks > cores:
        parts.append(f"its {count('rank', row.ranks)} share {count('core', cores)}")
    ours = row.mean(_part("compute"))
    theirs = single.mean(_part("compute")) if single is not None else None
    if ours and theirs:
        own, other = figure_text(ours, "s"), figure_text(theirs, "s")
        parts.append(f"each computed for {own}, one process for {other}")
    return f"; {', and '.join(parts)}" if parts else ""


def _to_mind(study: Study) -> Iterator[str]:
    if study.seeds == 1:
        yield "each row is one run: the spread over seeds is not known"
    yield from unequal_shares(study)
    ended = [run.record.status for row in study.rows for run in row.runs]
    for status in ("failed", "stopped"):
        if number := ended.count(status):
            was = "was " if number == 1 else "were "
            verb = "failed" if status == "failed" else f"{was}stopped"
            yield f"{number} of {count('run', len(ended))} {verb}"


# Words of all of them


def _row_text(study: Study, row: Row) -> str:
    """Return a row in a sentence: "ring on 4 ranks", with its batch where rows have unlike ones."""
    batch = f" (batch {row.global_batch})"
    unlike = len({other.global_batch for other in study.completed}) > 1
    if row.single:
        return "one process with all cores" + batch * (unlike or row.name != row.label)
    plain = row.name in (row.label, f"{row.label} ({count('rank', row.ranks)})")
    name = f"{row.label} on {count('rank', row.ranks)}" if plain else row.name
    return name + batch * unlike


def _told_apart(difference: Difference | None) -> bool | None:
    """Return whether the interval excludes zero; None where no spread is known, and the snapshots
    are close enough to say who was first."""
    if difference is None or (difference.low is None and not difference.too_coarse):
        return None
    return difference.certain


def _interval(difference: Difference, measure: Measure) -> str:
    """Return a difference in words: "+2.10 s (95 % interval +1.71 to +2.49 s, n = 3)"."""
    coarse = max(difference.below, difference.above)

    def text(value: float) -> str:
        if coarse:
            return fixed(value, max(0, places_of(coarse)), sign=True)
        return significant(value, sign=True)

    mean = with_unit(text(difference.mean), measure.unit)
    if difference.low is None or difference.high is None:
        return f"{mean} ({pairs_of(1)})"
    low, high = text(difference.low), with_unit(text(difference.high), measure.unit)
    return f"{mean} (95{THIN}% interval {low} to {high}, {pairs_of(difference.n)})"


def _verdict(study: Study, first: Row, other: Row) -> str:
    """Return whether distributing paid, given who was first, and before whom."""
    if study.differing:
        return "whether distributing pays does not follow"
    if other.global_batch != first.global_batch:
        return "with unlike batches, whether distributing pays does not follow"
    paid = "did not pay" if first.single else "paid"
    where = _here(study) if study.seeds > 1 else "in these runs, one of each,"
    return f"{where} distributing {paid}"


def _here(study: Study) -> str:
    engines = {run.record.engine for row in study.rows for run in row.runs}
    return "on the simulated cluster" if engines == {"simulation"} else "on this machine"


def _no_rival(row: Row) -> str:
    if row.single:
        return "no distributed strategy stands beside it"
    return "whether distributing paid is not known, without a run of one process with all cores"
