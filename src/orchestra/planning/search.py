"""The search of a plan: speeds from shapes, a reference, a race in rungs, further seeds.

What each stage found, and why a candidate is out, stands in its `Entry`.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from orchestra.engines.processes.system import now
from orchestra.engines.simulation.trials import Tried
from orchestra.planning.candidates import Candidate, samples, with_rates
from orchestra.planning.judging import (
    best_value,
    better,
    cannot_win,
    halved,
    reached,
    value_at,
)
from orchestra.planning.simulating import Job, Simulator, processes, short
from orchestra.planning.standing import MISSED, Entry, Length, Standing
from orchestra.records.record import RunRecord
from orchestra.report.numbers import count, significant, some
from orchestra.strategies.single import Single
from orchestra.trainer.settings import Run, Target

PARTS = (0.25, 0.5, 1.0)
"""Of all samples, after which the reference is asked whether it has reached the target."""
RUNGS = (0.35, 0.65, 1.0)
"""Parts of the best known time to target after which the race is halved."""
FEWEST_RACING, FINALISTS = 4, 3
"""Who goes on to the next rung in any case, and is trained with further seeds."""
SPEED_PART, REFERENCE_PART, LATE_PART = 0.3, 0.6, 0.8
"""Of the budget, when the speeds have to be known, the reference be over, and late speeds known."""
CONFIRMED_STEPS = 100
NO_TIME = "left out: there was no time to find its speed"
CUT_OFF = "left out: there was no time for the race"
ANYWHERE = "one_host(cores=1)"
"""Where one process learns for all that learn the same."""


@dataclass(frozen=True)
class Budget:
    """Until when the search may go on, on the clock of `now`; `began` is when it did."""

    began: float
    until: float

    def part(self, fraction: float) -> float:
        """The moment at which this part of it is used up."""
        return self.began + fraction * (self.until - self.began)


class Search(Standing):
    """Finds out which of `candidates` reaches the target first.

    Args:
        target: what is to be reached; None: what one process reaches in 3/4 of the samples.
        folder: of the runs.
        tell: what is under way, and the part of the budget that is used up.

    Attributes:
        stopped: the user ended it.
        left_out: what there was no time for.
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
        super().__init__(candidates, target, length, seeds)
        self.stopped = False
        self.left_out: list[str] = []
        self._folder, self._budget, self._tell = folder, budget, tell
        self._simulator = Simulator(self._tell_part)
        self._what = ""

    def run(self) -> None:
        """All stages, until the budget is used up or Ctrl-C."""
        try:
            for stage in (
                self._speeds,
                self._reference,
                self._race,
                self._late_ones,
                self._confirm,
                self._more_seeds,
            ):
                if not self.stopped:
                    stage()
        except KeyboardInterrupt:
            self.stopped = True
        if self.stopped:
            self.left_out.append("the search was stopped before its end")

    # The stages

    def _speeds(self) -> None:
        """Samples/s of all candidates, from a few steps without values."""
        self._find_speeds(list(self.entries.values()), self._budget.part(SPEED_PART))
        self._drop_slower_twins()
        self._add_rates()

    def _late_ones(self) -> None:
        """Those whose speed there was no time for, if the race of the others was over early."""
        late = [entry for entry in self.entries.values() if entry.dropped == NO_TIME]
        if late and now() < self._budget.part(LATE_PART):
            for entry in late:
                entry.dropped = None
            self._find_speeds(late, self._budget.part(LATE_PART))
            self._drop_slower_twins()
            if any(entry.dropped is None for entry in late):
                self._race()
        unknown = [entry.name for entry in late if entry.dropped == NO_TIME]
        if unknown:
            self.left_out.append(f"the speed of {len(unknown)} candidates: {some(unknown)}")

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
        self._tell_part()
        with tempfile.TemporaryDirectory(prefix="orchestra-plan-") as place:
            trials = [
                (entry, short(entry.candidate.run, steps), Path(place) / str(number), 1.0)
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
        for entry in self.entries.values():
            if entry.speed is not None:
                groups.setdefault(entry.candidate.learns_as, []).append(entry)
        for group in groups.values():
            first = max(group, key=lambda entry: entry.speed or 0.0)
            for entry in group:
                if entry is not first and entry.dropped is None:
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
        seeds = self.seeds[: max(1, min(processes(), len(self.seeds)))]
        for part in PARTS:
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
        points = entry.curves.get(self.seeds[0], ())
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
                share = min(1.0, part * horizon * (entry.speed or 0.0) / self.length.samples)
                source = self.source(entry)
                if source.done < share and not self.times(entry):
                    wanted.append((source, self.seeds[0], share))
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
        seconds = (self.length.samples / entry.speed for entry in self.alive if entry.speed)
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
        best = self.best()
        limit = None if best is None else self.time(best)
        scores = {}
        for entry in racing:
            if entry.dropped is None:
                scores[entry.name] = self._score(entry, seconds)
                entry.dropped = self._reason(entry, number, limit)
        missed = [name for name in scores if self.entries[name].dropped == CUT_OFF]
        if missed:
            self.left_out.append(f"rung {number} of {some(missed)}")
        if number < len(RUNGS):
            going = {name: it for name, it in scores.items() if self.entries[name].dropped is None}
            _, out = halved(going, FEWEST_RACING)
            for name in out:
                entry = self.entries[name]
                entry.dropped = f"rung {number}: {entry.rungs[-1]}, in the worse half"

    def _score(self, entry: Entry, seconds: float) -> tuple[float, float]:
        """Smaller is better: the time to the target, else the metric after so many seconds, which
        is also written down."""
        assert self.target is not None
        time = self.time(entry)
        points = self.source(entry).curves.get(self.seeds[0], ())
        value = value_at(points, self.target.metric, seconds * (entry.speed or 0.0))
        text = f"{self.target.metric} {_text(value)} after {seconds:.3g} s"
        text = text if time is None else f"target after {time:.3g} s"
        entry.rungs += [text] * (text not in entry.rungs)
        if time is not None:
            return time, 0.0
        rising = better(self.target, 1.0, 0.0)
        return math.inf, math.inf if value is None else -value if rising else value

    def _reason(self, entry: Entry, number: int, limit: float | None) -> str | None:
        """Why `entry` is out after a rung; None if it may still win in time `limit`."""
        assert self.target is not None
        if self.time(entry) is not None:
            return None
        source = self.source(entry)
        if now() > self._budget.until or not source.done:
            return CUT_OFF
        elapsed = self.elapsed(entry)
        if limit is None or (number < len(RUNGS) and elapsed < limit):
            return None
        value = best_value(source.curves.get(self.seeds[0], ()), self.target)
        return (
            f"rung {number}: {self.target.metric} {_text(value)} after {elapsed:.3g} s, when the "
            "first had reached the target"
        )

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
        for seed in self.seeds[1:]:
            wanted = []
            for _, name in ranked[:FINALISTS]:
                source = self.source(self.entries[name])
                if seed not in source.curves:
                    wanted.append((source, seed, min(1.0, source.done * MISSED)))
            if not wanted or self.stopped:
                continue
            longest = max(source.wall for source, *_ in wanted)
            if now() + longest * math.ceil(len(wanted) / processes()) > self._budget.until:
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
            training = replace(entry.candidate.run.training, snapshots=self.length.snapshots)
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
                if run.seed == self.seeds[0]:
                    share = tried.record.samples / self.length.samples
                    entry.done = 1.0 if whole else max(entry.done, min(share, part))
                if tried.points:
                    entry.curves[run.seed] = tried.points

    def _failed(self, source: Entry, failure: str) -> None:
        """A run failed, and with it all that learn as it does."""
        for entry in self.entries.values():
            if entry.candidate.learns_as == source.candidate.learns_as and entry.dropped is None:
                entry.dropped = f"failed: {failure}"

    def _try(self, jobs: Sequence[Job], deadline: float) -> list[tuple[Entry, Tried]]:
        """What became of each job; those for which there was no time have no record."""
        found = self._simulator.carry_out(jobs, deadline)
        self.stopped = self.stopped or self._simulator.stopped
        return found

    def _tell_part(self) -> None:
        used = (now() - self._budget.began) / (self._budget.until - self._budget.began)
        self._tell(self._what, min(used, 1.0))


def _cost_rate(record: RunRecord) -> float | None:
    if record.cost is None or not record.train_seconds:
        return None
    return record.cost / record.train_seconds


def _folder_name(name: str) -> str:
    return name.replace(os.sep, "-").replace("%", "percent")


def _text(value: float | None) -> str:
    return "not known" if value is None else f"{value:.4g}"
