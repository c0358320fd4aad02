"""A report's first sentences: the best strategy, by how much and why, and did distributing pay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from orchestra.report.fairness import unequal_shares
from orchestra.report.numbers import (
    CONVERGENCE,
    HETEROGENEOUS,
    PACE,
    SENT,
    STALENESS,
    THIN,
    TIME_TO_TARGET,
    Difference,
    Read,
    count,
    figure_text,
    pairs_of,
    percent,
    significant,
    some,
    target_text,
    times,
    with_unit,
)
from orchestra.report.rows import Row, grouped
from orchestra.report.sections import stragglers_sentence
from orchestra.report.study import Study


@dataclass(frozen=True)
class Conclusion:
    """The `headline` answers the question; the rest adds details, reasons and caveats."""

    headline: str
    detail: Sequence[str] = ()
    why: Sequence[str] = ()
    caveats: Sequence[str] = ()


def answer(study: Study) -> Conclusion:
    """Return the conclusion from the runs of `study`, as certain as the seeds allow and no more."""
    rows = study.completed
    if not rows:
        return Conclusion(_nothing_completed(study))
    reached = [row for row in rows if study.target and study.reached(row)]
    if reached and not study.only_time:
        headline, detail = _first_to_target(study, reached), _next_to_target(study, reached)
    else:
        headline, detail = _best_in_the_end(study, rows), _fastest(study)
    if study.differing:
        differing = some(list(study.differing))
        headline = (
            f"this is not one fair comparison, for the runs differ in {differing}: {headline}"
        )
    parts = ([*detail, *_machines(study)], _why(study), _caveats(study))
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
    # Rows are ranked by how often they reached the target before how soon: a strategy that gets
    # there in one run of three is not first because that run was quick (decision 14).
    how = "first" if all(_time(first) <= _time(row) for row in reached) else "most often"
    assert study.target is not None
    target = target_text(study.target)
    opening = f"{_row_text(study, first)} reached {target} {how}, {_after(study, first)}"
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
    """Return how long `other` took, and what that says about distributing."""
    ours, theirs = _time(first), _time(other)
    who = _row_text(study, other)
    if first.single:
        who = f"the fastest of the distributed strategies, {who},"
    took = f"{who} took {other.text(TIME_TO_TARGET)}"
    if (number := study.reached(other)) < len(other.runs):
        took += f" where it got there, in {number} of {count('run', len(other.runs))}"
    took += f", {times(theirs / ours)} as long" if 0 < ours < theirs else ""
    difference = study.between(other, first, TIME_TO_TARGET)
    # The fastest mean is often luck; only an interval that excludes zero makes a row better
    if difference is not None and _told_apart(difference) is False:
        over = f"over {count('seed', difference.n)}"
        if difference.too_coarse:
            over = "with snapshots so far apart"
        took += f", but {over} the two cannot be told apart"
    elif theirs >= ours:
        return f"{took}: {_verdict(study, first, other)}"
    return f"{took}: whether distributing pays {_here(study)} stays open"


def _next_to_target(study: Study, reached: Sequence[Row]) -> Iterator[str]:
    """Yield how certain the first sentence is, and the second row unless that sentence names it."""
    first = reached[0]
    rivals = [row for row in reached if row.single is not first.single]
    apart = {row.name: study.between(row, first, TIME_TO_TARGET) for row in reached}

    def by(row: Row) -> str:
        difference = apart[row.name]
        return f", a difference of {_interval(difference)}" if difference else ""

    for named in rivals[:1]:
        if difference := apart[named.name]:
            yield f"{named.name} minus {first.name} is {_interval(difference)}"
        if named.global_batch != first.global_batch:
            # the first sentence compares unlike batches; this one has the same
            for rival in [row for row in rivals if row.global_batch == first.global_batch][:1]:
                took = f"{rival.name} took {figure_text(_time(rival), 's')}{by(rival)}"
                yield f"at the same batch, {first.global_batch}, {took}"
    # Whoever is second has been named already if it is the first of the rivals
    for second in [row for row in reached[1:2] if row not in rivals[:1]]:
        alike = ": the two cannot be told apart" * (_told_apart(apart[second.name]) is False)
        text = f"{_row_text(study, second)}, {_after(study, second)}{by(second)}{alike}"
        yield f"the next after {first.name} was {text}"


def _after(study: Study, row: Row) -> str:
    number = study.reached(row)
    mean = f"after {row.text(TIME_TO_TARGET)}"
    if number == len(row.runs):
        return mean + (f" (mean of {count('seed', number)})" if number > 1 else "")
    return f"{mean}, though in {number} of {count('run', len(row.runs))} only"


def _time(row: Row) -> float:
    time = row.mean(TIME_TO_TARGET.read)
    assert time is not None
    return time


# Where none did, or only time passed


def _best_in_the_end(study: Study, rows: Sequence[Row]) -> str:
    """Return the row with the best final figure, or the fastest if only time was simulated."""
    measure, best = study.primary, rows[0]
    noun = measure.title.removeprefix("final ")
    how = "was the fastest with" if study.only_time else f"ended with the best {noun},"
    text = f"{_row_text(study, best)} {how} {best.text(measure)}"
    if study.only_time:
        text = f"these runs tell of time alone, and of no result; {text}"
    elif study.target:
        samples = max(run.record.samples for run in study.runs)
        target = target_text(study.target)
        text = f"no strategy reached {target} within {count('sample', samples)}; {text}"
    others = [row for row in rows[1:] if row.values(measure.read)]
    if not others:
        return text
    second = others[0]
    text = f"{text}; the next was {_row_text(study, second)} with {second.text(measure)}"
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


def _fastest(study: Study) -> Iterator[str]:
    """Compare the best distributed strategy with one process by samples a second."""
    paced = [(row, pace) for row in study.completed if (pace := row.mean(PACE.read)) is not None]
    # The fastest row of either kind, whatever its batch: the harder rival (decision 14)
    paced.sort(key=lambda entry: -entry[1])
    sides = [own[0] for own in grouped(paced, lambda entry: entry[0].single).values()]
    if not sides:
        return
    (fast, pace), *others = sides
    text, own = _row_text(study, fast), fast.text(PACE)
    if not others:
        yield f"{text} was the fastest with {own}; {_no_rival(fast)}"
        return
    slow, slower = others[0]
    verdict = _told_apart(study.between(fast, slow, PACE))
    end = "the two cannot be told apart" if verdict is False else _verdict(study, fast, slow)
    yield (
        f"by speed, {text} came to {own}, {times(pace / (slower or 1))} as many as "
        f"{_row_text(study, slow)} ({slow.text(PACE)}): {end}"
    )


# What it made of the machines


def _machines(study: Study) -> Iterator[str]:
    """Yield how well the best row used unlike nodes, and which row was the cheapest."""
    row = next((row for row in study.completed if row.values(HETEROGENEOUS.read)), None)
    if row is not None:
        alone = row.record.alone
        text = (
            f"the {len(alone)} {'nodes' if row.record.cluster else 'ranks'} of "
            f"{_row_text(study, row)} do {figure_text(sum(alone.values()), 'samples/s')} if each "
            f"works alone; together they came to {row.text(HETEROGENEOUS)} of that (heterogeneous "
            "efficiency)"
        )
        if row.values(CONVERGENCE.read):
            text += (
                f", and in time to the target to {row.text(CONVERGENCE)} of what their speed is "
                "beside that of the fastest (convergence efficiency)"
            )
        yield text
    for measure in study.of_machines:
        rows = [row for row in study.completed if row.values(measure.read)]
        # The cost of the whole budget is no virtue: whoever spends least may have learnt least
        if measure.key.endswith("_to_target") and len(rows) > 1:
            least = min(rows, key=lambda row: row.mean(measure.read) or 0.0)
            what = measure.title.partition(" ")[0]
            whose = _row_text(study, least)
            yield f"the least {what} to the target was that of {whose}, {least.text(measure)}"


# Why, and with what caveats


def _why(study: Study) -> Iterator[str]:
    """Yield how the best distributed strategy spent its time, compared with one process."""
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
    if slow := stragglers_sentence(row):
        text = f"under {row.name}, {slow}"
        yield text if len(row.runs) == 1 else f"{text}, with seed {row.record.seed}"
    yield from _balanced(study)


def _balanced(study: Study) -> Iterator[str]:
    """Yield how a balancing rule changed the batches of the best row that has one."""
    row = next((row for row in study.completed if row.record.batches), None)
    if row is None:
        return
    (_, *first), *changes = row.record.batches
    if not changes:
        yield f"under {row.name} the workers were so alike that their batches stayed as they were"
        return
    before, after = _range(first), _range(changes[-1][1:])
    yield (
        f"under {row.name} batches followed the workers' speeds, and changed "
        f"{count('time', len(changes))}: from {before} samples a worker to {after}"
    )


def _range(batches: Sequence[int]) -> str:
    low, high = min(filter(None, batches)), max(batches)
    return str(low) if low == high else f"between {low} and {high}"


def _part(name: str) -> Read:
    return lambda record: record.seconds.get(name)


def _compute_beside(study: Study, row: Row) -> str:
    """Return the compute time of the row beside that of one process on the same samples."""
    alike = (other for other in study.completed if other.single and other.ranks == row.ranks)
    single = next(alike, None)
    cores = row.source.environment.get("cores")
    parts = []
    # Ranks that share cores compute more slowly than one process with all of them: without a word
    # on that, the seconds beside each other would puzzle a reader.
    if row.record.engine == "processes" and isinstance(cores, int) and row.ranks > cores:
        parts.append(f"its {count('rank', row.ranks)} share {count('core', cores)}")
    ours = row.mean(_part("compute"))
    theirs = single.mean(_part("compute")) if single is not None else None
    if ours and theirs:
        own, other = figure_text(ours, "s"), figure_text(theirs, "s")
        parts.append(f"each computed for {own}, one process for {other}")
    return f"; {', and '.join(parts)}" if parts else ""


def _caveats(study: Study) -> Iterator[str]:
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
    """Return a row as part of a sentence: "ring on 4 ranks", with its batch if batches differ."""
    batch = f" (batch {row.global_batch})"
    unlike = len({other.global_batch for other in study.completed}) > 1
    if row.single:
        return "one process with all cores" + batch * (unlike or row.name != row.label)
    plain = row.name in (row.label, f"{row.label} ({count('rank', row.ranks)})")
    name = f"{row.label} on {count('rank', row.ranks)}" if plain else row.name
    return name + batch * unlike


def _told_apart(difference: Difference | None) -> bool | None:
    """Return True if the interval excludes zero, False if it does not, and None if there is no
    interval and the snapshots are close enough to say who was first.
    """
    if difference is None or (difference.low is None and not difference.too_coarse):
        return None
    return difference.certain


def _interval(difference: Difference) -> str:
    """Return the difference in seconds: "+2.10 s (95 % interval +1.71 to +2.49 s, n = 3)"."""
    mean, *ends = difference.texts()
    interval = f"95{THIN}% interval {with_unit(' to '.join(ends), 's')}, " if ends else ""
    return f"{with_unit(mean, 's')} ({interval}{pairs_of(difference.n)})"


def _verdict(study: Study, first: Row, other: Row) -> str:
    """Return whether distributing paid, given that `first` was before `other`."""
    if study.differing:
        return "whether distributing pays does not follow"
    # Otherwise the difference is one of batch and strategy together (decision 43)
    if other.global_batch != first.global_batch:
        return "with unlike batches, whether distributing pays does not follow"
    paid = "did not pay" if first.single else "paid"
    # One run of each says nothing about another one, so the sentence is about these two alone
    where = _here(study) if study.seeds > 1 else "in these runs, one of each,"
    return f"{where} distributing {paid}"


def _here(study: Study) -> str:
    engines = {run.record.engine for row in study.rows for run in row.runs}
    if len(engines) > 1 or "processes" in engines:
        return "on this machine"
    return f"on the {'simulated' if 'simulation' in engines else 'emulated'} cluster"


def _no_rival(row: Row) -> str:
    if row.single:
        return "no distributed strategy stands beside it"
    return "whether distributing paid is not known, without a run of one process with all cores"
