"""The search of a plan: speeds from shapes, a reference, a race in rungs, further seeds.

What each stage found, and why a candidate is out, stands in its `Entry`.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from orchestra.engines.processes.system import now
from orchestra.engines.simulation.training import assigned
from orchestra.engines.simulation.trials import Trial, Tried, shared_out
from orchestra.errors import InputError
from orchestra.experiments.experiment import ONE_PROCESS
from orchestra.planning.candidates import Candidate, short, with_rates
from orchestra.planning.standing import (
    CUT_OFF,
    MISSED,
    NO_TIME,
    RUNGS,
    Entry,
    Length,
    Standing,
    reached,
    value_at,
)
from orchestra.report.numbers import count
from orchestra.trainer.settings import Run, Target
from orchestra.worker.runtime import usable_cores

PARTS = (0.25, 0.5, 1.0)
"""The parts of all samples after which it is checked whether the reference reached the target."""
NEARLY = 0.9
"""The part of a rung that counts as reaching it, since steps may not divide it evenly."""
FINALISTS = 3
"""The number of candidates that are trained with further seeds."""
FEWEST_SEEDS, MOST_SEEDS = 4, 8
"""The seeds for these, as time allows, if the experiment has fewer; the most if the first ones are
close."""
SPEED_PART, REFERENCE_PART, LATE_PART = 0.3, 0.6, 0.8
"""The parts of the budget by which speeds are known, the reference ends, late speeds are known."""
RACE_PART = 0.85
"""The part of the budget by which candidates have raced: the rest is for seeds of the first."""
EARLY_PART = 0.25
"""The part of the time left in which the first candidates may get further seeds before late speeds:
those of large clusters can take all that is left."""
CONFIRMED_STEPS = 100
"""The steps of a simulation that measures the speed of one of the first candidates again."""
MOST_PROCESSES = 8
ANYWHERE = "one_host(cores=1)"
"""The cluster on which one process learns for all candidates that learn the same."""

Job = tuple[Entry, Run, Path, float]
"""A run of a candidate, its folder, and the part of its samples after which it is stopped."""
Learning = tuple[Entry, int, float]
"""An entry to simulate with a seed, up to a part of its samples."""
Tell = Callable[[str, float], None]
"""Tells what is under way, and the part of the budget that is used up."""


@dataclass(frozen=True)
class Budget:
    """Until when the search may go on, on the clock of `now`; `began` is when it did."""

    began: float
    until: float

    def part(self, fraction: float) -> float:
        """Return the moment at which this part of it is used up."""
        return self.began + fraction * (self.until - self.began)


class Search(Standing):
    """Finds out which of `candidates` reaches the target first.

    Args:
        target: what is to be reached; None: what one process reaches in 3/4 of the samples.
        folder: of the runs.
        tell: what is under way, and the part of the budget that is used up.

    Attributes:
        stopped: the user ended it.
        notes: what there was no time for.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        target: Target | None,
        length: Length,
        folder: Path,
        budget: Budget,
        tell: Tell,
        *,
        seeds: Sequence[int] = (0, 1, 2),
    ) -> None:
        super().__init__(candidates, target, length, seeds)
        self.stopped = False
        self.notes: list[str] = []
        self._asked = tuple(seeds)
        self._folder, self._budget, self._tell = folder, budget, tell
        self._what = ""

    def run(self) -> None:
        """Carry out all stages, until the budget is used up or Ctrl-C."""
        stages = (
            self._speeds, self._reference, self._race, self._early_seeds, self._late_ones,
            self._confirm, self._more_seeds,
        )  # fmt: skip
        try:
            for stage in stages:
                if not self.stopped:
                    stage()
        except KeyboardInterrupt:
            self.stopped = True
        if self.stopped:
            self.notes.append("the search was stopped before its end")

    # The stages

    def _speeds(self) -> None:
        """Find the samples/s of all candidates, from a few steps without values."""
        self._find_speeds(list(self.entries.values()), self._budget.part(SPEED_PART))
        self.drop_slower_twins()
        self._add_rates()

    def _late_ones(self) -> None:
        """Find speeds for which there was no time before, if the others' race was over early."""
        late = [entry for entry in self.entries.values() if entry.dropped == NO_TIME]
        if late and now() < (until := self._budget.part(LATE_PART)):
            for entry in late:
                entry.dropped = None
            self._find_speeds(late, until)
            self.drop_slower_twins()
            if any(entry.dropped is None for entry in late):
                self._race()
        self._note_dropped(NO_TIME, "the speed", late)

    def _note_dropped(self, reason: str, what: str, entries: Sequence[Entry]) -> None:
        """Note for how many of `entries` there was no time."""
        if names := [entry.name for entry in entries if entry.dropped == reason]:
            example = f"of {names[0]}" if len(names) == 1 else f"of {len(names)} candidates"
            self.notes.append(f"no time for {what} {example}")

    def add_speeds(self, candidates: Sequence[Candidate], until: float) -> None:
        """Find the speeds of further candidates, which are not raced, until a moment."""
        fresh = [Entry(each) for each in candidates if each.name not in self.entries]
        if fresh and not self.stopped:
            self.entries |= {entry.name: entry for entry in fresh}
            self._find_speeds(fresh, until)
            for entry in fresh:
                entry.dropped = entry.dropped or "for the scaling curve alone"

    def _find_speeds(self, entries: Sequence[Entry], until: float, steps: int = 0) -> None:
        """Find the speeds of `entries` from a few steps without values, or from `steps`."""
        self._what = f"speeds of {count('candidate', len(entries))}, from shapes"
        self._tell_part()
        with tempfile.TemporaryDirectory(prefix="orchestra-plan-") as place:
            jobs: list[Job] = [
                (entry, short(entry.candidate.run, steps), Path(place) / str(number), 1.0)
                for number, entry in enumerate(entries)
            ]
            found = {entry.name: tried for entry, tried in self._try(jobs, until)}
            # A strategy that reads a value, or calls what shapes lack, is timed with real tensors.
            again: list[Job] = [
                (entry, short(entry.candidate.run, steps, values=True), folder / "real", part)
                for entry, run, folder, part in jobs
                if run.training.tensors == "shapes" and found[entry.name].failure is not None
            ]
            found |= {entry.name: tried for entry, tried in self._try(again, until)}
        for entry in entries:
            tried = found[entry.name]
            if tried.failure is not None:
                self._drop(entry, tried.failure)
            elif tried.record is not None and tried.record.samples_per_second:
                entry.record = tried.record
            elif entry.record is None:
                entry.dropped = NO_TIME

    def _add_rates(self) -> None:
        """Give the fastest exact candidate with the experiment's batch other learning rates."""
        exact = (each for each in self.alive if each.candidate.exact and each.candidate.batch == 1)
        if (entry := next(exact, None)) is None:
            return
        single = self.source(entry)
        for known in [entry] if entry is single else [entry, single]:
            for other in with_rates(known.candidate):
                fresh = replace(known, candidate=other, curves={}, done={}, rungs=[])
                if known is not entry:
                    # It is in no race: the process that learns with this rate is needed as the
                    # source of the others.
                    fresh.dropped = "stands for what others learn"
                self.entries[other.name] = fresh

    def _reference(self) -> None:
        """Train one process with the experiment's batch until it reaches the target."""
        entry = self.entries[ONE_PROCESS]
        if not self.alive:
            return
        # As many seeds as are simulated at the same time: further ones would double the time.
        seeds = self.seeds[: processes()]
        deadline = self._budget.part(REFERENCE_PART)
        for part in PARTS:
            self._what = f"what one process learns in {part:.0%} of the samples"
            self._learn([(entry, seed, part) for seed in seeds], deadline)
            target = self._target_of(entry)
            if target and all(reached(entry.curves.get(seed, ()), target) for seed in seeds):
                return
            if self.stopped or now() > deadline:
                self.notes.append("no time to train one process to the target")
                return

    def _target_of(self, entry: Entry) -> Target | None:
        """Return the target; where none was given, one is chosen at the end of the reference."""
        points = entry.curves.get(self.seeds[0], ())
        ended = entry.done.get(self.seeds[0], 0.0) >= 1 or now() > self._budget.part(0.5)
        if self.target is None and points and ended:
            # One process reaches it for certain, and with some samples to spare for the others
            value = value_at(points, "loss", 0.75 * points[-1].samples)
            if value is not None and math.isfinite(value):
                self.target = Target("loss", at_most=float(f"{value:.3g}"))
        return self.target

    def _race(self) -> None:
        """Train all that may still win, in rungs: after each, the better half goes on."""
        if self.target is None:
            return
        self.drop_by_bound()
        racing, horizon = self.alive, self.horizon()
        for number, part in enumerate(RUNGS, 1):
            racing = [entry for entry in racing if entry.dropped is None]
            if not racing:
                break
            self._what = f"rung {number} of {len(RUNGS)}: {count('candidate', len(racing))}"
            shares = {
                entry.name: self.length.part(part * horizon * (entry.speed or 0.0))
                for entry in racing
            }
            wanted = self._missing(shares, self.seeds[:1])
            further = self._missing(shares, self.seeds[1 : processes()])
            # The first rung has one seed, so that each candidate is seen; from the second one on
            # chance is averaged out, as far as half of the time left allows (decision 117).
            if number > 1 and self._cost([*wanted, *further]) < 0.5 * (self._budget.until - now()):
                wanted += further
            self._learn(wanted, self._budget.part(RACE_PART))
            for name, share in shares.items():
                entry = self.entries[name]
                done = self.source(entry).done.get(self.seeds[0], 0.0)
                if done < NEARLY * share and not self.times(entry):
                    # A run that was cut short cannot be compared at this rung.
                    entry.dropped = entry.dropped or CUT_OFF
            self._note_dropped(CUT_OFF, f"rung {number}", racing)
            self.judge(racing, number, part * horizon)
            # A candidate that reached the target sooner than known shortens the rungs that follow.
            horizon = min(horizon, self.horizon())

    def _missing(self, shares: Mapping[str, float], seeds: Sequence[int]) -> list[Learning]:
        """Return the runs still needed up to the shares of a rung, by the entries that learn."""
        return [
            (source, seed, share)
            for name, share in shares.items()
            for seed in seeds
            if seed not in self.times(self.entries[name])
            and (source := self.source(self.entries[name])).done.get(seed, 0.0) < share
        ]

    def _cost(self, wanted: Sequence[Learning]) -> float:
        """Estimate the seconds that `wanted` takes, by the seconds that each entry took so far."""
        seconds = 0.0
        for entry, seed, part in wanted:
            done = sum(entry.done.values())
            seconds += entry.wall / done * (part - entry.done.get(seed, 0.0)) if done else math.inf
        return seconds / processes()

    def _finalists(self) -> list[Entry]:
        return [entry for entry in self.ranking() if entry.dropped is None][:FINALISTS]

    def _confirm(self) -> None:
        """Find the first ones' speeds again, over more steps: those of a few depend on chance."""
        exact = [entry for entry in self._finalists() if entry.candidate.exact]
        if exact and now() < self._budget.part(0.9):
            self._find_speeds(exact, self._budget.part(0.95), CONFIRMED_STEPS)

    def _early_seeds(self) -> None:
        """Give the first ones further seeds at once, if these cost little."""
        self._train_first(now() + EARLY_PART * (self._budget.until - now()))

    def _more_seeds(self) -> None:
        """Give the first ones further seeds, as time allows."""
        missing = self._train_first(self._budget.until)
        if missing in self._asked:
            self.notes.append(f"no time for seed {missing} of the first ones")

    def _train_first(self, until: float) -> int | None:
        """Train the first ones with all seeds and a few more, and with still more while they are
        close; return the seed for which there was no time before `until`, if any.
        """
        while not self.stopped:
            if not (unfinished := self._unfinished()):
                enough = MOST_SEEDS if self.is_close() else FEWEST_SEEDS
                if len(self.seeds) >= enough or not self._finalists():
                    break
                # They follow the experiment's, so that a plan can be repeated
                self.seeds = (*self.seeds, max(self.seeds) + 1)
                continue
            seed = unfinished[0][1]
            wanted = [each for each in unfinished if each[1] == seed]
            if now() + self._cost(wanted) > until:
                return seed
            self._what = f"seed {seed} of {count('candidate', len(wanted))}"
            self._learn(wanted, until)
        return None

    def _unfinished(self) -> list[Learning]:
        """Runs of the finalists that have neither reached the target nor missed it, by seed."""
        found = []
        for source in {each.name: each for each in map(self.source, self._finalists())}.values():
            # A seed counts as missed only that far, so a run that is shorter would decide nothing.
            part = self.length.part(MISSED * self.length.samples * max(source.done.values()))
            known = {*self.times(source), *self.missed(source)}
            open_ones = (seed for seed in self.seeds if seed not in known)
            short_ones = (seed for seed in open_ones if source.done.get(seed, 0.0) < NEARLY * part)
            found += [(source, seed, part) for seed in short_ones]
        return sorted(found, key=lambda each: self.seeds.index(each[1]))

    # Simulations

    def _learn(self, wanted: Sequence[Learning], deadline: float) -> None:
        """Simulate with values: each entry with a seed, up to a part of its samples."""
        jobs: dict[tuple[str, int], Job] = {}
        for entry, seed, part in wanted:
            if before := jobs.get((entry.name, seed)):
                # Several candidates may ask for the run of one that learns for all
                part = max(part, before[-1])
            training = replace(entry.candidate.run.training, snapshots=self.length.snapshots)
            # The time of an exact candidate comes from shapes on the plan's cluster.
            if entry.candidate.exact:
                training = replace(training, cluster=ANYWHERE)
            run = replace(entry.candidate.run, training=training, seed=seed)
            name = entry.name.replace(os.sep, "-").replace("%", "percent")
            jobs[entry.name, seed] = (entry, run, self._folder / name / f"seed-{seed}", part)
        found = self._try(list(jobs.values()), deadline)
        for (entry, run, _, part), (_, tried) in zip(jobs.values(), found, strict=True):
            entry.wall += tried.seconds
            if tried.failure is not None:
                # Without its run nothing is known of those that learn the same
                for alike in (entry, *self.alike(entry)):
                    self._drop(alike, f"failed: {tried.failure}")
            elif tried.record is not None:
                # Rounding of steps may leave a completed run a little below all samples
                whole = tried.record.status == "completed"
                share = min(part, tried.record.samples / self.length.samples)
                entry.done[run.seed] = 1.0 if whole else max(entry.done.get(run.seed, 0.0), share)
                if tried.points:
                    entry.curves[run.seed] = tried.points

    def _try(self, jobs: Sequence[Job], deadline: float) -> list[tuple[Entry, Tried]]:
        """Return the outcome of each job; jobs for which there was no time have no record.

        Those with few ranks are over sooner, and so come first.
        """
        found: dict[int, Tried] = {}
        trials: dict[int, Trial] = {}
        # Cheap ones first: else one process with a small batch waits behind 16 ranks (decision 117)
        for place in sorted(range(len(jobs)), key=lambda place: jobs[place][1].training.ranks):
            _, run, folder, part = jobs[place]
            try:
                trials[place] = Trial(assigned(run, folder), part)
            except InputError as error:
                found[place] = Tried(failure=str(error))
        if trials and now() < deadline and not self.stopped:
            waiting = list(trials.values())
            outcomes, self.stopped = shared_out(waiting, deadline, processes(), self._tell_part)
            found |= {list(trials)[number]: tried for number, tried in outcomes}
        return [(entry, found.get(place, Tried())) for place, (entry, *_) in enumerate(jobs)]

    def _drop(self, entry: Entry, failure: str) -> None:
        """Drop `entry`, which failed; of a strategy that the user named, the notes say so."""
        if entry.dropped is None:
            entry.dropped = failure
            if entry.candidate.own:
                self.notes.append(f"{entry.name} is left out: {failure}")

    def _tell_part(self) -> None:
        used = (now() - self._budget.began) / (self._budget.until - self._budget.began)
        self._tell(self._what, min(used, 1.0))


def processes() -> int:
    """Return how many simulations may go on at the same time."""
    return max(1, min(len(usable_cores()), MOST_PROCESSES))
