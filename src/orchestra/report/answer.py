"""A report's first sentences: the best strategy, by how much and why, and did distributing pay."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from orchestra.records.record import RunRecord
from orchestra.report import measures, numbers
from orchestra.report.fairness import unequal_shares
from orchestra.report.measures import TIME_TO_TARGET
from orchestra.report.numbers import count, figure_text, listed, some, times
from orchestra.report.rows import Row, grouped
from orchestra.report.study import Study
from orchestra.trainer.settings import Target


@dataclass(frozen=True)
class ComparisonAnswer:
    """The answer of a comparison, from which page, terminal and JSON speak.

    The `headline` answers the question, and `first` is the row that it names as the best, or None
    if it names no row; the rest adds details, reasons and caveats.
    """

    headline: str
    first: str | None = None
    detail: Sequence[str] = ()
    why: Sequence[str] = ()
    caveats: Sequence[str] = ()


def answer(study: Study) -> ComparisonAnswer:
    """Return the conclusion from the runs of `study`, as certain as the seeds allow and no more."""
    rows = study.completed
    if not rows:
        return ComparisonAnswer(_nothing_completed(study))
    target = study.target
    reached = [row for row in rows if target and study.reached(row)]
    if target and reached and not study.only_time:
        headline = _first_to_target(study, target, reached)
        detail = _next_to_target(study, reached)
    else:
        headline, detail = _best_in_the_end(study, rows), _fastest(study)
    if study.differing:
        unlike = f"the runs differ in {some(list(study.differing))}"
        headline = f"this is not one fair comparison, for {unlike}: {headline}"
    parts = ([*detail, *_machines(study)], _why(study), _caveats(study))
    first = (reached or rows)[0].name
    return ComparisonAnswer(
        _sentence(headline), first, *([_sentence(text) for text in part] for part in parts)
    )


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _nothing_completed(study: Study) -> str:
    records = [run.record for row in study.rows for run in row.runs]
    text = f"There is no answer: none of {count('run', len(records))} was completed"
    for record in [record for record in records if record.ending.status == "failed"][:1]:
        cause = (record.ending.failure or "unknown").partition("\n")[0].removesuffix(".")
        text += f"; the first failure, of {record.asked.name}: {cause}"
    return f"{text}."


# Where runs reached the target


def _first_to_target(study: Study, target: Target, reached: Sequence[Row]) -> str:
    first = reached[0]
    # Rows are ranked by how often they reached the target before how soon: a strategy that gets
    # there in one run of three is not first because that run was quick.
    how = "first" if all(_time(first) <= _time(row) for row in reached) else "most often"
    aim = measures.target_text(target)
    opening = f"{_row_text(study, first)} reached {aim} {how}, {_after(study, first)}"
    others = [row for row in reached if row.single is not first.single]
    if others:
        return f"{opening}; {_compared(study, first, others[0])}"
    rivals = [row for row in study.completed if row.single is not first.single]
    if not rivals:
        return f"{opening}; {_no_rival(first)}"
    runs = count("run", len(rivals[0].runs))
    whom = f"{_row_text(study, rivals[0])} did not reach it in {runs}"
    if first.single:
        whom = "no distributed strategy reached it"
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
        over = "with snapshots so far apart" if difference.too_coarse else over
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
    """Return the mean time to the target of a row that reached it."""
    return statistics.fmean(row.values(TIME_TO_TARGET.read).values())


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
        samples = max(run.record.learned.samples for run in study.runs)
        target = measures.target_text(study.target)
        text = f"no strategy reached {target} within {count('sample', samples)}; {text}"
    others = [row for row in rows[1:] if row.values(measure.read)]
    if not others:
        return text
    second = others[0]
    text = f"{text}; the next was {_row_text(study, second)} with {second.text(measure)}"
    apart = {row.name: _told_apart(study.between(best, row, measure)) for row in others}
    if apart[second.name]:
        text += ", a difference beyond the spread over the seeds"
    elif apart[second.name] is False:
        whom = some([name for name, known in apart.items() if known is False])
        text += f", but over the seeds {best.name} cannot be told from {whom}"
    if best.global_batch != second.global_batch:
        text += ": with unlike batches, that is a difference of batch and strategy together"
    return text


def _fastest(study: Study) -> Iterator[str]:
    """Compare the best distributed strategy with one process by samples a second."""
    speeds = ((row, row.mean(measures.PACE.read)) for row in study.completed)
    paced = [(row, speed) for row, speed in speeds if speed is not None]
    # The rival is the fastest row of either kind, whatever its batch: the harder comparison.
    paced.sort(key=lambda entry: -entry[1])
    sides = [own[0] for own in grouped(paced, lambda entry: entry[0].single).values()]
    texts = [(_row_text(study, row), row.text(measures.PACE)) for row, _ in sides]
    if len(sides) == 1:
        yield f"{texts[0][0]} was the fastest with {texts[0][1]}; {_no_rival(sides[0][0])}"
    if len(sides) == 2:
        (fast, pace), (slow, slower) = sides
        (first, own), (second, other) = texts
        verdict = _told_apart(study.between(fast, slow, measures.PACE))
        end = "the two cannot be told apart" if verdict is False else _verdict(study, fast, slow)
        ratio = times(pace / (slower or 1))
        yield f"by speed, {first} came to {own}, {ratio} as many as {second} ({other}): {end}"


def _machines(study: Study) -> Iterator[str]:
    """Yield how well the best row used unlike nodes, and which row was the cheapest."""
    for row in [row for row in study.completed if row.values(measures.HETEROGENEOUS.read)][:1]:
        alone, kind = row.record.machine.alone, "nodes" if row.record.asked.cluster else "ranks"
        text = (
            f"the {len(alone)} {kind} of {_row_text(study, row)} do "
            f"{figure_text(sum(alone.values()), 'samples/s')} if each works alone; together they "
            f"came to {row.text(measures.HETEROGENEOUS)} of that (heterogeneous efficiency)"
        )
        if row.values(measures.CONVERGENCE.read):
            text += (
                f", and in time to the target to {row.text(measures.CONVERGENCE)} of what their "
                "speed is beside that of the fastest (convergence efficiency)"
            )
        yield text
    for measure in study.of_machines:
        rows = [row for row in study.completed if row.values(measure.read)]
        # The cost of the whole budget is no virtue: whoever spends least may have learnt least
        if measure.key.endswith("_to_target") and len(rows) > 1:
            least = min(rows, key=lambda row: row.mean(measure.read) or 0.0)
            what, whose = measure.title.partition(" ")[0], _row_text(study, least)
            yield f"the least {what} to the target was that of {whose}, {least.text(measure)}"


def _why(study: Study) -> Iterator[str]:
    """Yield how the best distributed strategy spent its time, compared with one process."""
    row = next((row for row in study.completed if not row.single), None)
    if row is None:
        return
    parts = [row.mean(_part(name)) or 0.0 for name in ("compute", "communicate", "wait")]
    if total := sum(parts):
        compute, communicate, wait = (numbers.percent(part / total) for part in parts)
        yield (
            f"a worker of {row.name} spent {compute} of its time computing, {communicate} sending "
            f"and receiving, and {wait} waiting{_compute_beside(study, row)}"
        )
    if sent := row.mean(measures.SENT.read):
        estimated = any(run.record.traffic.estimated for run in row.completed)
        text = f"its ranks sent {figure_text(sent, 'MB')}{' (in part an estimate)' * estimated}"
        if stale := row.mean(measures.STALENESS.read):
            text += f", and its gradients were {numbers.significant(stale)} updates old in the mean"
        yield text
    if slow := _stragglers_sentence(row):
        text = f"under {row.name}, {slow}"
        yield text if len(row.runs) == 1 else f"{text}, with seed {row.record.asked.seed}"
    for balanced in [row for row in study.completed if row.record.batching.changes][:1]:
        yield f"under {balanced.name} {_balanced(balanced.record)}"


def _balanced(record: RunRecord) -> str:
    """Return how a balancing rule changed the batches of a run."""
    (_, *first), *changes = record.batching.changes
    if not changes:
        return "the workers were so alike that their batches stayed as they were"
    before, after = _range(first), _range(changes[-1][1:])
    return (
        "batches followed the workers' speeds, and changed "
        f"{count('time', len(changes))}: from {before} samples a worker to {after}"
    )


def _range(batches: Sequence[int]) -> str:
    low, high = min(filter(None, batches)), max(batches)
    return str(low) if low == high else f"between {low} and {high}"


def _part(name: str) -> measures.Read:
    return lambda record: record.time.worker.get(name)


def _compute_beside(study: Study, row: Row) -> str:
    """Return the compute time of the row, compared with one process on the same samples."""
    alike = (other for other in study.completed if other.single and other.ranks == row.ranks)
    single = next(alike, None)
    cores = row.source.environment.get("cores")
    parts = []
    # Ranks that share cores compute more slowly than one process with all of them: without a word
    # on that, the seconds beside each other would puzzle a reader.
    if row.record.asked.engine == "processes" and isinstance(cores, int) and row.ranks > cores:
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
    ended = [run.record.ending.status for row in study.rows for run in row.runs]
    runs = count("run", len(ended))
    if failed := ended.count("failed"):
        yield f"{failed} of {runs} failed"
    if stopped := ended.count("stopped"):
        yield f"{stopped} of {runs} {'was' if stopped == 1 else 'were'} stopped"


def _stragglers_sentence(row: Row) -> str:
    """Return a sentence on the stragglers of the first run of `row`; "" if it had no stragglers."""
    found = row.record.machine.stragglers
    if not found:
        return ""
    first, *others = found
    if others:
        cause = listed(sorted({each.cause for each in found}))
        text = f"and {count('other', len(others))} were slower than the rest ({cause})"
    else:
        since, until = first.since_seconds, first.until_seconds
        when = "all the time" if since <= 0 else f"from {numbers.significant(since)} s on"
        if until is not None:
            when = f"from {numbers.significant(since)} s to {numbers.significant(until)} s"
        text = f"took {times(first.factor)} as long as its peers ({first.cause}) {when}"
    cost = "nobody waited for it"
    if lost := sum(each.lost_seconds for each in found):
        cost = f"the other workers lost {figure_text(lost, 's')} to that, all together"
    return f"{first.who} {text}, and {cost}"


def _row_text(study: Study, row: Row) -> str:
    """Return a row as part of a sentence: "ring on 4 ranks", with its batch if batches differ."""
    batch = f" (batch {row.global_batch})"
    unlike = len({other.global_batch for other in study.completed}) > 1
    if row.single:
        return "one process with all cores" + batch * (unlike or row.name != row.label)
    ranks = count("rank", row.ranks)
    plain = row.name in (row.label, f"{row.label} ({ranks})")
    return (f"{row.label} on {ranks}" if plain else row.name) + batch * unlike


def _told_apart(difference: numbers.Difference | None) -> bool | None:
    """Return True if the interval excludes zero, False if it does not, and None if there is no
    interval and the snapshots are close enough to say who was first."""
    if difference is None or (difference.low is None and not difference.too_coarse):
        return None
    return difference.certain


def _interval(difference: numbers.Difference) -> str:
    """Return the difference in seconds: "+2.10 s (95 % interval +1.71 to +2.49 s, n = 3)"."""
    mean, *ends = difference.texts()
    pairs, both = numbers.pairs_of(difference.n), numbers.with_unit(" to ".join(ends), "s")
    interval = f"95{numbers.THIN}% interval {both}, " if ends else ""
    return f"{numbers.with_unit(mean, 's')} ({interval}{pairs})"


def _verdict(study: Study, first: Row, other: Row) -> str:
    """Return whether distributing paid, given that `first` was before `other`."""
    if study.differing:
        return "whether distributing pays does not follow"
    # With unlike batches, the difference would be one of batch and strategy together.
    if other.global_batch != first.global_batch:
        return "with unlike batches, whether distributing pays does not follow"
    paid = "did not pay" if first.single else "paid"
    # One run of each says nothing about another one, so the sentence is about these two alone
    where = _here(study) if study.seeds > 1 else "in these runs, one of each,"
    return f"{where} distributing {paid}"


def _here(study: Study) -> str:
    engines = {run.record.asked.engine for row in study.rows for run in row.runs}
    if len(engines) > 1 or "processes" in engines:
        return "on this machine"
    return f"on the {'simulated' if 'simulation' in engines else 'emulated'} cluster"


def _no_rival(row: Row) -> str:
    if row.single:
        return "no distributed strategy stands beside it"
    return "whether distributing paid is not known, without a run of one process with all cores"
