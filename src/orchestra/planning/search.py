"""The search of a plan: speeds from shapes, a reference, a race in rungs, further seeds.

What each stage found, and why a candidate is out, stands in its `Entry`.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import cast

from orchestra.engines.events import Event, Notice
from orchestra.engines.processes.launch import launch
from orchestra.engines.processes.system import now
from orchestra.engines.simulation.training import assigned
from orchestra.engines.simulation.trials import Trial, Trials, Tried, try_all
from orchestra.errors import InputError, RunFailed
from orchestra.planning.candidates import Candidate, samples, with_rates
from orchestra.planning.judging import (
    Reached,
    best_value,
    better,
    cannot_win,
    halved,
    reached,
    value_at,
)
from orchestra.records.record import RunRecord
from orchestra.records.report import Point
from orchestra.report.numbers import count, significant, some
from orchestra.strategies.local_sgd import LocalSGD
from orchestra.strategies.single import Single
from orchestra.trainer.settings import Run, Target
from orchestra.worker.threads import usable_cores

RUNGS = (0.25, 0.5, 1.0)
"""Parts of the best known time to target after which the race is halved."""
FINALISTS = 3
MISSED = 1.5
"""A seed has missed the target after so many times the samples that others needed."""
SPEED_PART, REFERENCE_PART = 0.25, 0.6
"""Of the budget, when the stages before the race have to be over."""
SPEED_STEPS, RANK_STEPS, FEWEST_STEPS = 20, 4000, 8
CONFIRMED_STEPS = 100
NO_TIME = "left out: there was no time to find its speed"
PATIENCE = 3600.0
ANYWHERE = "one_host(cores=1)"
"""Where one process learns for all that learn the same."""
MOST_PROCESSES = 8


@dataclass
class Entry:
    """What is known of a candidate.

    Attributes:
        speed: samples/s, from shapes; None where it is not known.
        seconds: of a step, by what a worker does in them: compute, communicate, wait.
        cost_rate: cost of a second, in the cluster's currency; None without prices.
        curves: by seed, its snapshots, with the seconds of its own run.
        done: the part of its samples that was simulated, with the first seed.
        dropped: why it is out; None while it is not.
        rungs: what each rung saw of it, in words.
    """

    candidate: Candidate
    speed: float | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    cost_rate: float | None = None
    currency: str | None = None
    curves: dict[int, Sequence[Point]] = field(default_factory=dict)
    done: float = 0.0
    wall: float = 0.0
    dropped: str | None = None
    rungs: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.candidate.name


@dataclass(frozen=True)
class Budget:
    """Until when the search may go on, on the clock of `now`; `began` is when it did."""

    began: float
    until: float

    def part(self, fraction: float) -> float:
        """The moment at which this part of it is used up."""
        return self.began + fraction * (self.until - self.began)


@dataclass(frozen=True)
class Length:
    """Of a whole run: samples; and snapshots, so that judging takes no longer than learning."""

    samples: int
    snapshots: int


class Search:
    """Finds out which of `candidates` reaches the target first.

    Args:
        target: what is to be reached; None: what one process reaches in 3/4 of the samples.
        folder: of the runs.
        tell: what is under way, and the part of the budget that is used up.

    Attributes:
        entries: of all candidates, by name.
        stopped: the user ended it.
        target: as given, or chosen.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        target: Target | None,
        length: Length,
        folder: Path,
        budget: Budget,
        tell: Callable[[str, float], None],
        *,
        seeds: Sequence[int] = (0, 1, 2),
    ) -> None:
        self.entries = {each.name: Entry(each) for each in candidates}
        self.target = target
        self.stopped = False
        self.left_out: list[str] = []
        self._length, self._folder, self._budget, self._tell = length, folder, budget, tell
        self._seeds = seeds
        self._what = ""

    def run(self) -> None:
        """All stages, until the budget is used up or Ctrl-C."""
        try:
            for stage in (
                self._speeds,
                self._reference,
                self._race,
                self._confirm,
                self._more_seeds,
            ):
                if not self.stopped:
                    stage()
        except KeyboardInterrupt:
            self.stopped = True
        if self.stopped:
            self.left_out.append("the search was stopped before its end")

    # What is known

    @property
    def alive(self) -> list[Entry]:
        """Those that are not out."""
        return [entry for entry in self.entries.values() if entry.dropped is None]

    def source(self, entry: Entry) -> Entry:
        """The entry whose runs say what `entry` learns: its own, or that of one process."""
        if not entry.candidate.exact:
            return entry
        key = entry.candidate.learns_as
        return next(
            other
            for other in self.entries.values()
            if other.candidate.learns_as == key and isinstance(other.candidate.run.strategy, Single)
        )

    def times(self, entry: Entry) -> dict[int, Reached]:
        """By seed, when `entry` reached the target."""
        if self.target is None or entry.speed is None:
            return {}
        source, found = self.source(entry), {}
        for seed, points in source.curves.items():
            at = reached(points, self.target)
            if at is not None:
                found[seed] = self._at_speed(at, entry, source)
        return found

    def _at_speed(self, at: Reached, entry: Entry, source: Entry) -> Reached:
        """What `source` reached in the seconds of `entry`, which learns the same."""
        if not entry.candidate.exact:
            return at
        assert entry.speed is not None
        seconds = at.samples / entry.speed
        return Reached(at.samples, seconds, at.spacing * seconds / max(at.seconds, 1e-12))

    def time(self, entry: Entry) -> float | None:
        """Seconds to the target, the mean over the seeds; None where one missed it, though it went
        further than those that reached it."""
        times = self.times(entry)
        if not times:
            return None
        far = MISSED * max(each.samples for each in times.values())
        missed = (
            points[-1].samples >= min(far, self._length.samples)
            for seed, points in self.source(entry).curves.items()
            if seed not in times and points
        )
        return None if any(missed) else fmean(each.seconds for each in times.values())

    def uncertainty(self, entry: Entry) -> float | None:
        """Of the time: the spread over the seeds, or half the spacing of the snapshots if that is
        larger."""
        times = list(self.times(entry).values())
        if not times:
            return None
        spread = stdev(each.seconds for each in times) if len(times) > 1 else 0.0
        return max(spread, fmean(each.spacing for each in times) / 2)

    def best(self) -> Entry | None:
        """The first to reach the target of all."""
        known = [(time, each) for each in self.entries.values() if (time := self.time(each))]
        return min(known, key=lambda pair: pair[0])[1] if known else None

    def elapsed(self, entry: Entry) -> float:
        """Virtual seconds of `entry` up to where its runs went."""
        source = self.source(entry)
        points = source.curves.get(self._seeds[0], ())
        if not points or entry.speed is None:
            return 0.0
        return points[-1].samples / entry.speed if entry.candidate.exact else points[-1].seconds

    # The stages

    def _speeds(self) -> None:
        """Samples/s of all candidates, from a few steps without values."""
        self._find_speeds(list(self.entries.values()), self._budget.part(SPEED_PART))
        unknown = [entry.name for entry in self.entries.values() if entry.dropped == NO_TIME]
        if unknown:
            self.left_out.append(f"the speed of {len(unknown)} candidates: {some(unknown)}")
        self._drop_slower_twins()
        self._add_rates()

    def add_speeds(self, candidates: Sequence[Candidate], until: float) -> None:
        """Find the speeds of further candidates, which are not raced, until a moment."""
        fresh = [Entry(each) for each in candidates if each.name not in self.entries]
        if not fresh or self.stopped:
            return
        self.entries |= {entry.name: entry for entry in fresh}
        self._find_speeds(fresh, until)
        for entry in fresh:
            entry.dropped = entry.dropped or "for the scaling curve alone"

    def _find_speeds(self, entries: Sequence[Entry], until: float, steps: int = 0) -> None:
        """From a few steps without values, or so many."""
        self._what = f"speeds of {count('candidate', len(entries))}, from shapes"
        self._on_event(None)
        with tempfile.TemporaryDirectory(prefix="orchestra-plan-") as place:
            trials = [
                (entry, _short(entry.candidate.run, steps), Path(place) / str(number), 1.0)
                for number, entry in enumerate(entries)
            ]
            found = self._try(trials, until)
        for entry, tried in found:
            self._take_speed(entry, tried)

    def _take_speed(self, entry: Entry, tried: Tried) -> None:
        if tried.failure is not None:
            entry.dropped = tried.failure
        elif tried.record is None or not tried.record.samples_per_second:
            entry.dropped = NO_TIME if entry.speed is None else entry.dropped
        else:
            record = tried.record
            entry.speed, entry.seconds = record.samples_per_second, dict(record.seconds)
            entry.cost_rate, entry.currency = _cost_rate(record), record.currency

    def _drop_slower_twins(self) -> None:
        """Of those that learn the same only the fastest stays."""
        groups: dict[str, list[Entry]] = {}
        for entry in self.alive:
            groups.setdefault(entry.candidate.learns_as, []).append(entry)
        for group in groups.values():
            first = max(group, key=lambda entry: entry.speed or 0.0)
            for entry in group:
                if entry is not first:
                    ratio = (first.speed or 0.0) / (entry.speed or math.inf)
                    entry.dropped = (
                        f"learns the same as {first.name} from each sample, which has "
                        f"{significant(ratio)} times the samples/s"
                    )

    def _add_rates(self) -> None:
        """The fastest exact candidate with the experiment's batch gets others' learning rates."""
        for entry in self.alive:
            each = entry.candidate
            if not each.exact or each.batch != 1:
                continue
            single = next(
                e for e in self.entries.values() if e.candidate.learns_as == each.learns_as
                and isinstance(e.candidate.run.strategy, Single)
            )  # fmt: skip
            for base in dict.fromkeys((entry.name, single.name)):
                known = self.entries[base]
                for other in with_rates(known.candidate):
                    fresh = replace(known, candidate=other, curves={}, rungs=[])
                    if base != entry.name:
                        fresh.dropped = "stands for what others learn"
                    self.entries[other.name] = fresh
            return

    def _reference(self) -> None:
        """What one process learns with the experiment's batch, until it reaches the target."""
        entry = next(
            e for e in self.entries.values()
            if isinstance(e.candidate.run.strategy, Single) and e.candidate.batch == 1
            and e.candidate.rate == 1
        )  # fmt: skip
        if not self.alive:
            return
        seeds = self._seeds[: max(1, min(_processes(), len(self._seeds)))]
        for part in RUNGS:
            self._what = f"what one process learns in {part:.0%} of the samples"
            self._learn([(entry, seed, part) for seed in seeds], self._budget.part(REFERENCE_PART))
            target = self._target_of(entry)
            if target and all(reached(entry.curves.get(seed, ()), target) for seed in seeds):
                return
            if self.stopped or now() > self._budget.part(REFERENCE_PART):
                self.left_out.append("the reference did not come to its end in its part of time")
                return

    def _target_of(self, entry: Entry) -> Target | None:
        """The target; where none was given, one is chosen at the end of the reference."""
        points = entry.curves.get(self._seeds[0], ())
        if self.target is None and points and (entry.done >= 1 or now() > self._budget.part(0.5)):
            value = value_at(points, "loss", 0.75 * points[-1].samples)
            if value is not None and math.isfinite(value):
                self.target = Target("loss", at_most=float(f"{value:.3g}"))
        return self.target

    def _race(self) -> None:
        """All that may still win, in rungs: after each, the better half goes on."""
        if self.target is None:
            return
        self._drop_by_bound()
        racing = self.alive
        horizon = self._horizon()
        for number, part in enumerate(RUNGS, 1):
            racing = [entry for entry in racing if entry.dropped is None]
            if self.stopped or now() > self._budget.until or not racing:
                break
            self._what = f"rung {number} of {len(RUNGS)}: {len(racing)} candidates"
            wanted = []
            for entry in racing:
                share = min(1.0, part * horizon * (entry.speed or 0.0) / self._length.samples)
                source = self.source(entry)
                if source.done < share and not self.times(entry):
                    wanted.append((source, self._seeds[0], share))
            self._learn(wanted, self._budget.until)
            self._judge(racing, number, part * horizon)
            horizon = min(horizon, self._horizon())

    def _horizon(self) -> float:
        """Virtual seconds after which nobody can win any more; without a time to target those of
        the fastest candidate for all samples."""
        best = self.best()
        time = None if best is None else self.time(best)
        if time is not None:
            return time * 1.02
        seconds = (self._length.samples / entry.speed for entry in self.alive if entry.speed)
        return max(seconds, default=0.0)

    def _drop_by_bound(self) -> None:
        best = self.best()
        time = None if best is None else self.time(best)
        if best is None or time is None:
            return
        needed = fmean(each.samples for each in self.times(best).values())
        for entry in self.alive:
            each = entry.candidate
            if entry is best or not entry.speed or self.times(entry):
                continue
            least = cannot_win(
                needed, samples(best.candidate), each.update_samples, entry.speed, time
            )
            if least is not None:
                entry.dropped = (
                    f"cannot win: {least:.3g} s at least, even if each of its updates were worth "
                    f"one of {best.name} ({time:.3g} s)"
                )

    def _judge(self, racing: Sequence[Entry], number: int, seconds: float) -> None:
        """After a rung: drop who cannot win any more, then the worse half."""
        assert self.target is not None
        best = self.best()
        limit = None if best is None else self.time(best)
        scores, missed = {}, list[str]()
        for entry in racing:
            source = self.source(entry)
            points = source.curves.get(self._seeds[0], ())
            if entry.dropped is not None:
                continue
            if not points:
                entry.dropped = f"left out: rung {number} had no time for it"
                missed.append(entry.name)
                continue
            time, value = self.time(entry), best_value(points, self.target)
            at = value_at(points, self.target.metric, seconds * (entry.speed or 0.0))
            text = f"{self.target.metric} {_text(at)} after {seconds:.3g} s"
            text = text if time is None else f"target after {time:.3g} s"
            entry.rungs += [text] * (text not in entry.rungs)
            if value is None:
                entry.dropped = f"rung {number}: no snapshot came about"
            elif time is None and limit is not None and self.elapsed(entry) >= limit * 0.999:
                entry.dropped = (
                    f"rung {number}: {self.target.metric} {_text(value)} after "
                    f"{self.elapsed(entry):.3g} s, when the first had reached the target"
                )
            else:
                sign = -1.0 if better(self.target, 1.0, 0.0) else 1.0
                shown = math.inf if at is None else sign * at
                scores[entry.name] = (math.inf, shown) if time is None else (time, 0.0)
        if missed:
            self.left_out.append(f"rung {number} of {some(missed)}")
        if number < len(RUNGS):
            _, out = halved(scores, FINALISTS)
            for name in out:
                entry = self.entries[name]
                entry.dropped = f"rung {number}: {entry.rungs[-1]}, in the worse half"

    def _confirm(self) -> None:
        """The speeds of the first ones again, over more steps: those of a few depend on chance."""
        ranked = sorted((t, each.name) for each in self.alive if (t := self.time(each)) is not None)
        first = [self.entries[name] for _, name in ranked[:FINALISTS]]
        exact = [entry for entry in first if entry.candidate.exact]
        if exact and now() < self._budget.part(0.9):
            self._find_speeds(exact, self._budget.part(0.95), CONFIRMED_STEPS)

    def _more_seeds(self) -> None:
        """The first ones again with further seeds, as far as the time goes."""
        ranked = sorted(
            (time, entry.name) for entry in self.alive if (time := self.time(entry)) is not None
        )
        for seed in self._seeds[1:]:
            wanted = []
            for _, name in ranked[:FINALISTS]:
                source = self.source(self.entries[name])
                if seed not in source.curves:
                    wanted.append((source, seed, min(1.0, source.done * MISSED)))
            if not wanted or self.stopped:
                continue
            longest = max(source.wall for source, *_ in wanted)
            if now() + longest * math.ceil(len(wanted) / _processes()) > self._budget.until:
                self.left_out.append(f"seed {seed} of the first ones: no time")
                break
            self._what = f"seed {seed} of {len(wanted)} candidates"
            self._learn(wanted, self._budget.until)

    # Simulations

    def _learn(self, wanted: Sequence[tuple[Entry, int, float]], deadline: float) -> None:
        """Simulate with values: each entry with a seed, up to a part of its samples."""
        jobs: dict[tuple[str, int], tuple[Entry, Run, Path, float]] = {}
        for entry, seed, part in wanted:
            before = jobs.get((entry.name, seed))
            part = part if before is None else max(part, before[-1])
            training = replace(entry.candidate.run.training, snapshots=self._length.snapshots)
            if entry.candidate.exact:  # its time comes from shapes, on the real cluster
                training = replace(training, cluster=ANYWHERE)
            run = replace(entry.candidate.run, training=training, seed=seed)
            folder = self._folder / _folder_name(entry.name) / f"seed-{seed}"
            jobs[entry.name, seed] = (entry, run, folder, part)
        found = self._try(list(jobs.values()), deadline)
        for (entry, run, _, part), (_, tried) in zip(jobs.values(), found, strict=True):
            entry.wall += tried.seconds
            if tried.failure is not None:
                self._failed(entry, tried.failure)
            elif tried.record is not None:
                whole = tried.record.status == "completed"
                if run.seed == self._seeds[0]:
                    share = tried.record.samples / self._length.samples
                    entry.done = 1.0 if whole else max(entry.done, min(share, part))
                if tried.points:
                    entry.curves[run.seed] = tried.points

    def _failed(self, source: Entry, failure: str) -> None:
        """A run failed, and with it all that learn as it does."""
        for entry in self.entries.values():
            if entry.candidate.learns_as == source.candidate.learns_as and entry.dropped is None:
                entry.dropped = f"failed: {failure}"

    def _try(
        self, jobs: Sequence[tuple[Entry, Run, Path, float]], deadline: float
    ) -> list[tuple[Entry, Tried]]:
        """What became of each job; those for which there was no time have no record."""
        found: dict[int, Tried] = {}
        trials: dict[int, Trial] = {}
        for place, (_, run, folder, part) in enumerate(jobs):
            try:
                trials[place] = Trial(assigned(run, folder), part)
            except InputError as error:
                found[place] = Tried(failure=str(error))
        places = list(trials)
        if places and now() < deadline and not self.stopped:
            for number, tried in self._launched([trials[place] for place in places], deadline):
                found[places[number]] = tried
        return [(entry, found.get(place, Tried())) for place, (entry, *_) in enumerate(jobs)]

    def _launched(self, trials: Sequence[Trial], deadline: float) -> list[tuple[int, Tried]]:
        """Carry out the trials, shared out among processes; alone, if one took all with it."""
        processes = min(_processes(), len(trials))
        threads = max(1, len(usable_cores()) // (2 * processes))  # others are at work, too
        work = Trials(trials, deadline, threads)
        try:
            launched = launch(try_all, work, processes, patience=PATIENCE, on_event=self._on_event)
        except RunFailed as failure:
            if len(trials) == 1:
                return [(0, Tried(failure=str(failure).splitlines()[0]))]
            return [
                (place, tried)
                for place, trial in enumerate(trials)
                for _, tried in self._launched([trial], deadline)
            ]
        self.stopped = self.stopped or launched.stopped
        lists = cast("tuple[list[tuple[int, Tried]] | None, ...]", launched.results)
        return [each for own in lists if own is not None for each in own]

    def _on_event(self, event: Event | Notice | None) -> None:
        used = (now() - self._budget.began) / (self._budget.until - self._budget.began)
        self._tell(self._what, min(used, 1.0))


def _processes() -> int:
    return max(1, min(len(usable_cores()), MOST_PROCESSES))


def _short(run: Run, steps: int = 0) -> Run:
    """A few steps of `run`, without values, or so many."""
    training = run.training
    steps = steps or max(FEWEST_STEPS, min(SPEED_STEPS, RANK_STEPS // training.ranks))
    if isinstance(run.strategy, LocalSGD) and run.strategy.every is not None:
        steps = 2 * run.strategy.every
    training = replace(
        training, epochs=None, steps=steps, tensors="shapes", clip_norm=None, target=None,
        snapshots=0,
    )  # fmt: skip
    return replace(run, training=training)


def _cost_rate(record: RunRecord) -> float | None:
    if record.cost is None or not record.train_seconds:
        return None
    return record.cost / record.train_seconds


def _folder_name(name: str) -> str:
    return name.replace(os.sep, "-").replace("%", "percent")


def _text(value: float | None) -> str:
    return "not known" if value is None else f"{value:.4g}"
