"""The race of a plan: which simulation is worth most for the time that it takes, until one wins.

A pure core. `ask` returns the next simulation, `told` takes what it has found. Of each candidate
there is a belief, the logarithm of its seconds to the target and how uncertain that is. A
simulation is worth what it is expected to gain: the part of the time to the target by which the
choice becomes better.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Literal, NamedTuple

from orchestra.engines.simulation.trials import Tried
from orchestra.experiments.experiment import ONE_PROCESS
from orchestra.planning.beliefs import (
    BEHIND,
    OF_SPEEDS,
    UNKNOWN,
    UNTRAINED,
    Belief,
    fallen,
    gain_of,
    spread_of,
)
from orchestra.planning.candidates import Candidate, short, with_rates
from orchestra.planning.standing import (
    CUT_OFF,
    FEWEST_SEEDS,
    NO_TIME,
    OF_SEEDS,
    SPARED,
    Contender,
    Length,
    Standing,
    best_value,
    value_at,
)
from orchestra.report.numbers import CONFIDENCE
from orchestra.trainer.settings import Run, Target

RUNGS = (0.35, 0.65, 1.0)
"""The parts of the best known time to the target up to which a candidate learns in turn."""
PARTS = (0.25, 0.5, 1.0)
"""The parts of all samples up to which one process learns in turn, until it reaches the target."""
BEYOND = 1.1
"""A run that is to reach the target goes on for so many times the time that others needed."""
MOST_SEEDS = 8
"""The most seeds, if the experiment has fewer."""
CONFIRMED_STEPS = 100
"""The steps of a simulation that measures the speed of one of the first candidates again."""
ANYWHERE = "one_host(cores=1)"
"""The cluster on which one process learns for all candidates that learn the same."""
FIRST_SPEED, FIRST_RUN = 0.1, 2.0
"""Seconds that a simulation of a speed takes for each rank, and one of all samples, as long as none
is known."""
LEAST_SECONDS = 1e-3
"""Of a simulation, on the clock."""


class TrialOption(NamedTuple):
    """A simulation that the race may ask for: what is gained by it, and the seconds on the clock.

    With a `seed` an entry learns up to a `part` of its samples; without one its speed is measured,
    over `steps`, or 0 for a few.
    """

    entry: Contender
    gain: float
    seconds: float
    seed: int | None = None
    part: float = 1.0
    steps: int = 0


@dataclass(frozen=True, eq=False)
class TrialRequest:
    """A simulation that the race asks for.

    Attributes:
        entry: what it is about; where several learn alike, the one that learns for all.
        run: to simulate, up to `part` of its samples.
        learns: it is run with values for its curve, and not for its speed.
    """

    entry: Contender
    run: Run
    part: float
    learns: bool


@dataclass(frozen=True)
class SearchBudget:
    """Until when the search may go on, on the clock of `now`; `began` is when it did."""

    began: float
    until: float

    def part(self, fraction: float) -> float:
        """Return the moment at which this part of it is used up."""
        return self.began + fraction * (self.until - self.began)


class Race(Standing):
    """Finds out which of `candidates` reaches the target first.

    Args:
        target: what is to be reached; None: what one process reaches in 3/4 of the samples.

    Attributes:
        notes: what there was no time for.
        asked: the seeds of the experiment, of all `seeds` that confirm a winner.
        under_way: the simulations that were asked for, and whose outcome is not known yet.
        ending: why no further simulation was asked for.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        target: Target | None,
        length: Length,
        budget: SearchBudget,
        seeds: Sequence[int] = (0, 1, 2),
    ) -> None:
        further = range(max(seeds) + 1, max(seeds) + 1 + max(0, MOST_SEEDS - len(seeds)))
        # They follow the experiment's, so that a plan can be repeated
        super().__init__(candidates, target, length, (*seeds, *further))
        self.notes: list[str] = []
        self.asked, self._budget = tuple(seeds), budget
        self.under_way: list[TrialRequest] = []
        self.ending: Literal["confirmed", "out of time", "nothing left"] = "out of time"

    # The loop

    def ask(self, now: float) -> TrialRequest | None:
        """Return the simulation that is worth most for its time. None if the best candidate is
        confirmed, or no simulation fits into the time that is left."""
        best = self.best()
        if self._is_confirmed(best):
            return None
        left = self._budget.until - now
        options = (each for each in self._options(best) if each.seconds <= left)
        chosen = max(options, key=lambda each: each.gain / each.seconds, default=None)
        return None if chosen is None else self._begun(self._request(chosen))

    def request_speed(self, entry: Contender, steps: int = 0) -> TrialRequest:
        """Return the simulation that finds an entry's speed, from a few steps or from `steps`."""
        return self._begun(self._request(self._speed(entry, 0.0, steps)))

    def request_run(self, source: Contender, seed: int, part: float = 0.0) -> TrialRequest:
        """Return the run in which an entry learns with a seed, up to a part of its samples, by
        default the next of `PARTS`."""
        part = part or self._next_part(source, seed)
        return self._begun(self._request(self._run(source, 0.0, seed, part)))

    def _begun(self, request: TrialRequest) -> TrialRequest:
        self.under_way.append(request)
        return request

    def told(self, request: TrialRequest, tried: Tried) -> None:
        """Take what the simulation of `request` has found."""
        self.under_way.remove(request)
        if request.learns:
            self.take_curve(request, tried)
        else:
            self.take_speed(request, tried)
            self._add_rates()
            self.drop_slower_twins()
        if (best := self.best()) is not None:
            self.drop_by_bound(*best)
            self._drop_dominated(*best)

    def over(self) -> None:
        """Note how the race ended, what there was no time for, and why those that are still in are
        not simulated."""
        best, is_confirmed = self.best(), self.is_confirmed()
        if is_confirmed:
            self.ending = "confirmed"
        elif not any(True for _ in self._options(best)):
            self.ending = "nothing left"
        first = None if best is None else self.belief(best[0])
        if self.alive and (self.target is None or not self.reference_is_over()):
            self.notes.append("no time to train one process to the target")
        for entry in self.alive:
            if entry.speed is None:
                entry.dropped = NO_TIME
            elif not self.times(entry):
                # Who has learned with all samples is known as well as can be
                if self.source(entry).is_over(self.seeds[0]) and self.curve(entry):
                    continue
                unlikely = self.belief(entry).is_hopeless(first)
                about = math.exp(self.belief(entry).log)
                entry.dropped = f"unlikely to win: about {about:.3g} s" if unlikely else CUT_OFF
        for reason, what in ((NO_TIME, "the speed"), (CUT_OFF, "the race")):
            if names := [each.name for each in self.entries.values() if each.dropped == reason]:
                example = f"of {names[0]}" if len(names) == 1 else f"of {len(names)} candidates"
                self.notes.append(f"no time for {what} {example}")
        if best is not None and not is_confirmed:
            known = {*self.times(best[0]), *self.missed(best[0])}
            if missing := [seed for seed in self.asked if seed not in known]:
                self.notes.append(f"no time for seed {missing[0]} of {best[0].name}")

    # What is worth most

    def _options(self, found: tuple[Contender, float] | None) -> Iterator[TrialOption]:
        """Yield all simulations that tell something new, each with what is gained by it.

        `found` is the best so far, and its time.
        """
        busy = {each.entry.name for each in self.under_way}
        reference, is_known = self.entries[ONE_PROCESS], self.reference_is_over()
        if self.alive and not is_known and reference.name not in busy:
            # Without it nothing else can be judged
            if reference.speed is None:
                yield self._speed(reference, math.inf)
            else:
                part = self._next_part(reference, self.seeds[0])
                yield self._run(reference, math.inf, self.seeds[0], part)
        best = None if found is None else self.belief(found[0])
        horizon = self.horizon(found)
        beliefs = {each.name: self.belief(each) for each in self.alive if each.speed is not None}
        order = sorted(belief.log for belief in beliefs.values())
        for entry in self.alive:
            if entry.name in busy or self.source(entry).name in busy:
                continue
            if (own := beliefs.get(entry.name)) is None:
                yield self._speed(entry, gain_of(BEHIND, UNKNOWN))
            elif is_known and self.target is not None and not own.is_hopeless(best):
                # The first one is compared with the second, all others with the first
                first, second = order[0], order[1] if len(order) > 1 else math.inf
                behind = own.log - (first if own.log > first else second)
                yield from self._next_of(entry, own, behind, horizon)

    def _next_of(
        self, entry: Contender, own: Belief, behind: float, horizon: float
    ) -> Iterator[TrialOption]:
        """Yield what would be known next of an entry that is `behind` its rival."""
        source = self.source(entry)
        times = self.times(entry)
        if not times:
            done = source.done.get(self.seeds[0], 0.0)
            parts = (self.length.part(part * horizon * (entry.speed or 0.0)) for part in RUNGS)
            if source.is_over(self.seeds[0]):
                return
            part = self.length.following(done, parts) or self._further(done, OF_SEEDS)
            then = self._untrained(self.length.samples * part)
            # A run that takes longer than expected still tells as much as a seed differs
            change = max(fallen(own.deviation, then), OF_SEEDS)
            yield self._run(source, gain_of(behind, change), self.seeds[0], part)
            return
        if self.missed(entry):
            return
        if entry.candidate.exact and entry.steps < CONFIRMED_STEPS:
            yield self._speed(entry, gain_of(behind, OF_SPEEDS), CONFIRMED_STEPS)
        open_ones = (s for s in self.seeds if s not in times and not source.is_over(s))
        if (seed := next(open_ones, None)) is not None:
            longest = max(each.samples for each in times.values())
            done, spread, n = source.done.get(seed, 0.0), spread_of(times), len(times)
            first = self.length.part(BEYOND * longest)
            part = self.length.following(done, (first,)) or self._further(done, spread)
            # By so much the mean of n seeds is expected to change with one more
            change = spread / math.sqrt(n * (n + 1))
            yield self._run(source, gain_of(behind, change), seed, part)

    def _further(self, done: float, spread: float) -> float:
        """Return the part up to which a run goes on that takes longer than expected: by one
        deviation of a seed."""
        return self.length.part(self.length.samples * done * math.exp(spread))

    def _next_part(self, source: Contender, seed: int) -> float:
        return self.length.following(source.done.get(seed, 0.0), PARTS) or 1.0

    def _speed(self, entry: Contender, gain: float, steps: int = 0) -> TrialOption:
        """Return the option of a speed, from a few steps or from `steps`."""
        known = [e.speed_wall for e in self.entries.values() if e.speed_wall is not None]
        # In proportion to the ranks and steps of those that are known
        of_rank = fmean(known) if known else FIRST_SPEED
        times = steps / entry.steps if steps and entry.steps else 1.0
        seconds = of_rank * entry.candidate.run.training.ranks * times
        return TrialOption(entry, gain, max(seconds, LEAST_SECONDS), steps=steps)

    def _run(self, source: Contender, gain: float, seed: int, part: float) -> TrialOption:
        """Return the option of what an entry learns with a seed, up to a part of its samples."""
        seconds = self._whole(source) * (part - source.done.get(seed, 0.0))
        return TrialOption(source, gain, max(seconds, LEAST_SECONDS), seed, part)

    def _request(self, option: TrialOption) -> TrialRequest:
        entry, run = option.entry, option.entry.candidate.run
        if option.seed is None:
            run = short(run, option.steps, values=entry.needs_values)
            return TrialRequest(entry, run, 1.0, learns=False)
        training = replace(run.training, snapshots=self.length.snapshots)
        # The time of an exact candidate comes from shapes on the plan's cluster.
        if entry.candidate.exact:
            training = replace(training, cluster=ANYWHERE)
        run = replace(run, training=training, seed=option.seed)
        return TrialRequest(entry, run, option.part, learns=True)

    def _whole(self, source: Contender) -> float:
        """Estimate the seconds on the clock of a run of all samples."""
        if own := source.seconds_of_all:
            return own
        rates = [
            (e.candidate.exact, each) for e in self.entries.values() if (each := e.seconds_of_all)
        ]
        if alike := [each for exact, each in rates if exact == source.candidate.exact]:
            return fmean(alike)
        ranks = source.candidate.run.training.ranks
        return fmean(each for _, each in rates) * ranks if rates else FIRST_RUN

    # What is believed

    def belief(self, entry: Contender) -> Belief:
        """Return what is thought of the time of an entry with a speed."""
        if (time := self.time(entry)) is not None:
            times = self.times(entry)
            deviation = spread_of(times) / math.sqrt(len(times))
            if entry.candidate.exact and entry.steps < CONFIRMED_STEPS:
                deviation = math.hypot(deviation, OF_SPEEDS)
            return Belief(math.log(time), deviation)
        points, elapsed, needed = self.curve(entry), self.elapsed(entry), self._needed()
        if not points or not elapsed:
            return Belief(math.log(needed / (entry.speed or 1.0)), self._untrained(0.0))
        samples = points[-1].samples
        # It needs as many times the samples of one process as it has needed until here
        like = self._like_reference(entry)
        ratio = min(max(samples / like, 0.4), 10.0) if like > 0 else 10.0
        time = max(elapsed, elapsed * needed * ratio / samples)
        return Belief(math.log(time), self._untrained(samples))

    def _needed(self) -> float:
        """Return the samples in which one process reaches the target, or all where it does not."""
        times = self.times(self.entries[ONE_PROCESS])
        return fmean(at.samples for at in times.values()) if times else float(self.length.samples)

    def _like_reference(self, entry: Contender) -> float:
        """Return the samples after which one process was as good as `entry` is now."""
        target, points = self.target, self.curve(self.entries[ONE_PROCESS])
        if target is None or not points:
            return 0.0
        value = best_value(self.curve(entry), target)
        if value is None or not math.isfinite(value):
            return 0.0
        goal, before, last = target.penalty(value), math.inf, 0.0
        for point in points:
            known = point.metrics.get(target.metric)
            if known is None or not (penalty := target.penalty(known)) < before:
                continue
            if penalty <= goal:
                part = (before - goal) / (before - penalty) if math.isfinite(before) else 1.0
                return last + part * (point.samples - last)
            before, last = penalty, point.samples
        return last

    def _untrained(self, samples: float) -> float:
        """Return the deviation of a belief once an entry has learned from `samples`."""
        return OF_SEEDS + UNTRAINED * max(0.0, 1 - samples / self._needed())

    # What was found

    def take_speed(self, request: TrialRequest, tried: Tried) -> None:
        """Take an entry's speed; one that fails without values is to be measured with them."""
        entry = request.entry
        if tried.failure is not None:
            # A strategy that reads a value, or calls what shapes lack, is timed with real tensors.
            if request.run.training.tensors == "shapes":
                entry.needs_values = True
            else:
                self.drop(entry, tried.failure)
        elif tried.record is not None and tried.record.time.samples_per_second:
            if entry.speed is None:
                entry.speed_wall = tried.seconds / entry.candidate.run.training.ranks
            entry.record, entry.steps = tried.record, request.run.training.steps or 0
        elif entry.speed is not None:
            # There was no time to measure it again
            entry.steps = CONFIRMED_STEPS

    def _add_rates(self) -> None:
        """Give the fastest exact candidate with the experiment's batch other learning rates, and
        one process, which learns for it."""
        single = self.entries[ONE_PROCESS]
        if single.speed is None:
            return
        first = max(self.alike(single), key=lambda each: each.speed or 0.0)
        for known in {first.name: first, single.name: single}.values():
            for other in with_rates(known.candidate):
                if other.name not in self.entries:
                    self.entries[other.name] = Contender(other)
                entry = self.entries[other.name]
                if entry.steps < known.steps:
                    entry.record, entry.steps = known.record, known.steps

    def take_curve(self, request: TrialRequest, tried: Tried) -> None:
        """Take what an entry has learned."""
        entry, seed = request.entry, request.run.seed
        before = entry.done.get(seed, 0.0)
        entry.wall += tried.seconds
        if tried.failure is not None:
            # Without its run nothing is known of those that learn the same
            for alike in (entry, *self.alike(entry)):
                self.drop(alike, f"failed: {tried.failure}")
        elif tried.record is not None:
            # Rounding of steps may leave a completed run a little below all samples
            whole = tried.record.ending.status == "completed"
            share = min(request.part, tried.record.learned.samples / self.length.samples)
            entry.done[seed] = 1.0 if whole else max(before, share)
            if tried.points:
                entry.curves[seed] = tried.points
            self._choose_target(entry)
            for alike in self.alike(entry):
                self._note_rung(alike)
        if entry.done.get(seed, 0.0) <= before:
            # There was no time for it, and is none for a second try
            entry.done[seed] = request.part

    def drop(self, entry: Contender, failure: str) -> None:
        """Drop `entry`, which failed; of a strategy that the user named, the notes say so."""
        if entry.dropped is None:
            entry.dropped = failure
            if entry.candidate.own:
                self.notes.append(f"{entry.name} is left out: {failure}")

    def _note_rung(self, entry: Contender) -> None:
        """Note in words how far an entry has come that has not reached the target yet."""
        if entry.speed is None or entry.dropped is not None or self.target is None:
            return
        text = f"{self._text_of(entry)} after {self.elapsed(entry):.3g} s"
        if self.time(entry) is None and text not in entry.rungs:
            entry.rungs.append(text)

    def _text_of(self, entry: Contender) -> str:
        assert self.target is not None
        value = best_value(self.curve(entry), self.target)
        return f"{self.target.metric} {'not known' if value is None else f'{value:.4g}'}"

    def _drop_dominated(self, best: Contender, time: float) -> None:
        """Drop who has not reached the target in the time in which the best one has, and is too
        far behind for luck with its seed."""
        horizon, first = self._horizon_of(best, time), self.belief(best)
        for entry in self.alive:
            if entry.speed is None or self.times(entry):
                continue
            elapsed = self.elapsed(entry)
            if elapsed >= horizon and self.belief(entry).is_hopeless(first):
                entry.dropped = (
                    f"{self._text_of(entry)} after {elapsed:.3g} s, when {best.name} had "
                    "reached the target"
                )

    # The target and the end

    def reference_is_over(self) -> bool:
        """Return whether one process has reached the target, or can learn no more."""
        entry, seed = self.entries[ONE_PROCESS], self.seeds[0]
        if entry.is_over(seed) or (entry.speed is None and entry.dropped is not None):
            return True
        return self.reached_by(entry.curves.get(seed, ())) is not None

    def _choose_target(self, entry: Contender) -> None:
        """Choose a target where none was given: what one process reaches in 3/4 of the samples."""
        points = entry.curves.get(self.seeds[0], ())
        if self.target is not None or entry.name != ONE_PROCESS or not points:
            return
        if entry.is_over(self.seeds[0]):
            value = value_at(points, "loss", 0.75 * points[-1].samples)
            if value is not None and math.isfinite(value):
                self.target = Target("loss", at_most=float(f"{value:.3g}"))

    def horizon(self, found: tuple[Contender, float] | None) -> float:
        """Return the seconds after which no candidate can win any more, if it has not yet; where
        none has reached the target, those of the slowest candidate for all samples."""
        if found is not None:
            return self._horizon_of(*found)
        seconds = (self.length.samples / each.speed for each in self.alive if each.speed)
        return max(seconds, default=0.0)

    def _horizon_of(self, best: Contender, time: float) -> float:
        # Seeds share initial parameters and the order of samples, so luck is shared, too
        same = self.times(best).get(self.seeds[0])
        return BEYOND * max(time, same.seconds if same else 0.0)

    def is_confirmed(self) -> bool:
        """Return whether the first one is first for certain, at 95 % for all rivals together."""
        return self._is_confirmed(self.best())

    def _is_confirmed(self, found: tuple[Contender, float] | None) -> bool:
        if found is None or len(self.times(found[0])) < FEWEST_SEEDS:
            return False
        best, first = found[0], self.belief(found[0])
        if self.source(best).curves.keys() - self.times(best).keys():
            return False  # its slowest seed is still under way, and would be left out
        others = [each for each in self.alive if each is not best]
        if any(each.speed is None for each in others):
            return False
        rivals = [
            each for each in others
            if not self.missed(each) and not self.belief(each).is_hopeless(first)
        ]  # fmt: skip
        if any(each.candidate.exact and each.steps < CONFIRMED_STEPS for each in (best, *rivals)):
            return False
        return all(self._is_behind(each, best, len(rivals)) for each in rivals)

    def _is_behind(self, rival: Contender, best: Contender, rivals: int) -> bool:
        """Return whether a rival takes longer than the best one by paired seeds, or is faster by
        less than what counts as equal."""
        times = {seed: at.seconds for seed, at in self.times(rival).items()}
        # A run that has not reached the target takes at least as long as it has taken
        bounds = {seed: self.elapsed(rival, seed) for seed in self.source(rival).curves}
        known = bounds | times
        logs = [
            math.log(known[seed] / at.seconds)
            for seed, at in self.times(best).items()
            if known.get(seed)
        ]
        if len(logs) < FEWEST_SEEDS:
            return False
        from scipy.special import stdtrit

        n = len(logs)
        quantile = float(stdtrit(n - 1, 1 - (1 - CONFIDENCE) / rivals))
        return fmean(logs) - quantile * stdev(logs) / math.sqrt(n) > -math.log1p(SPARED)
