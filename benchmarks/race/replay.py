"""Plans on a clock of their own, with what an oracle has recorded in place of simulations."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.race.oracle import Oracle, curve_key, length_of_pair, speed_key
from benchmarks.race.pairs import SEEDS, RacePair
from orchestra.engines.simulation.trials import GRACE, Tried
from orchestra.experiments.experiment import ONE_PROCESS
from orchestra.planning.candidates import Candidate, with_rates
from orchestra.planning.race import CONFIRMED_STEPS, Race, SearchBudget, TrialRequest
from orchestra.planning.standing import Length, Standing, chosen, pessimistic, reached
from orchestra.records.record import RunRecord, by_topic
from orchestra.records.report import Point
from orchestra.settings.base import from_plain, to_plain

LAUNCH = 0.4
"""Seconds until processes take simulations, once they are asked for."""
JUDGING = 0.25
"""The part of a simulation's seconds that its snapshots take at its end."""


@dataclass
class Clock:
    """A clock that is set."""

    seconds: float = 0.0

    def __call__(self) -> float:
        return self.seconds


@dataclass(frozen=True)
class Known:
    """What the oracle knows of a pair."""

    pair: RacePair
    oracle: Oracle
    candidates: Sequence[Candidate]
    length: Length
    truths: dict[str, float]

    @classmethod
    def of(cls, pair: RacePair, oracle: Oracle, candidates: Sequence[Candidate]) -> Known:
        return cls(pair, oracle, candidates, length_of_pair(pair), {})

    def speed(self, candidate: Candidate, steps: int = CONFIRMED_STEPS) -> float:
        """Return the recorded samples/s of a candidate."""
        base = replace(candidate, name=candidate.name.partition(", rate x")[0])
        return self.oracle.speeds[speed_key(self.pair, base, steps)].speed

    def wall(self, candidate: Candidate, steps: int) -> float:
        """Return the seconds that it took to find a speed."""
        base = replace(candidate, name=candidate.name.partition(", rate x")[0])
        return self.oracle.speeds[speed_key(self.pair, base, steps)].wall

    def curve(self, candidate: Candidate, seed: int) -> list[Point]:
        """Return what a candidate learns with a recorded seed; seconds are those of the pair."""
        key = curve_key(self.pair, candidate, seed)
        recorded = self.oracle.curves[key]
        target = self.pair.experiment.training.target
        assert target is not None
        own = key.startswith(f"{self.pair.number}|")
        speed = self.speed(candidate) or 1.0
        return [
            Point(int(samples), seconds if own else samples / speed, {target.metric: value})
            for samples, seconds, value in recorded.points
        ]

    def truth(self, candidate: Candidate) -> float:
        """Return the mean seconds to the target over all seeds.

        A seed that misses it counts with the seconds of its whole run, which is then begun again
        (the expected running time of Hansen et al., 2010).
        """
        if candidate.name not in self.truths:
            target = self.pair.experiment.training.target
            assert target is not None
            speed, seconds, successes = self.speed(candidate), 0.0, 0
            for seed in SEEDS if speed else ():
                points = self.curve(candidate, seed)
                at = reached(points, target)
                successes += at is not None
                if at is not None:
                    seconds += at.samples / speed if candidate.exact else at.seconds
                elif points:
                    end = points[-1]
                    seconds += end.samples / speed if candidate.exact else end.seconds
            self.truths[candidate.name] = seconds / successes if successes else math.inf
        return self.truths[candidate.name]


def record_of_trial(speed: float, samples: int, *, is_whole: bool) -> RunRecord:
    """Return the record of a simulation with these figures."""
    figures = {
        "name": "", "strategy": "", "engine": "simulation", "ranks": 1, "workers": 1, "servers": 0,
        "seed": 0, "status": "completed" if is_whole else "stopped",
        "samples": samples, "samples_per_second": speed,
    }  # fmt: skip
    found: RunRecord = from_plain(RunRecord, by_topic(to_plain(figures)))
    return found


@dataclass
class Play:
    """Simulations that are looked up: how long they take, and what they find.

    `seeds` are the recorded ones, by those of the plan.
    """

    known: Known
    seeds: Mapping[int, int]
    done: dict[tuple[str, int], float]

    def speed(self, candidate: Candidate, steps: int, left: float) -> tuple[float, Tried]:
        """Return the seconds of measuring a speed, of which `left` remain; the outcome."""
        speed = self.known.speed(candidate, steps)
        failure = None if speed else "refused"
        if (wall := self.known.wall(candidate, steps)) > left:
            return left + GRACE, Tried(seconds=left + GRACE)
        record = record_of_trial(speed, 0, is_whole=True) if speed else None
        return wall, Tried(record, (), failure, wall)

    def learn(
        self, candidate: Candidate, seed: int, part: float, left: float
    ) -> tuple[float, Tried]:
        """Return the seconds of a simulation up to a part of its samples, of which `left` are
        left, and its outcome."""
        before = self.done.get((candidate.name, seed), 0.0)
        recorded = self.known.oracle.curves[curve_key(self.known.pair, candidate, self.seeds[seed])]
        wall = recorded.wall * max(part - before, 0.0)
        if wall > left:
            judging = JUDGING * left
            if judging > GRACE:
                return left + GRACE, Tried(seconds=left + GRACE)
            part, wall = before + left / recorded.wall, left + judging
        self.done[candidate.name, seed] = max(before, part)
        samples = part * self.known.length.samples
        points = [
            point for point in self.known.curve(candidate, self.seeds[seed])
            if point.samples <= samples + 1
        ]  # fmt: skip
        record = record_of_trial(1.0, round(samples), is_whole=part >= 1)
        return wall, Tried(record, points, None, wall)


@dataclass(frozen=True)
class Played:
    """The end of a plan: its choice, None where there is none, and when it was over."""

    choice: Candidate | None
    seconds: float


def choice_of(standing: Standing) -> Candidate | None:
    """Return what a plan would recommend."""
    times = {e.name: t for e in standing.ranking() if (t := standing.time(e)) is not None}
    if not times:
        return None
    times = pessimistic(times, {e.name: len(standing.times(e)) for e in standing.ranking()})
    nodes = {name: len(e.candidate.nodes) for name, e in standing.entries.items()}
    return standing.entries[chosen(times, nodes)].candidate


def raced(known: Known, seeds: Mapping[int, int], budget: float, processes: int) -> Played:
    """Carry out the race on a virtual clock, by so many processes."""
    play = Play(known, seeds, {})
    some = [each for each in known.candidates if ", rate x" not in each.name]
    target = known.pair.experiment.training.target
    race = Race(some, target, known.length, SearchBudget(0.0, budget))
    clock, waiting, number = LAUNCH, processes, 0
    ends: list[tuple[float, int, TrialRequest, Tried]] = []
    while True:
        while waiting and (request := race.ask(clock)) is not None:
            candidate, left = request.entry.candidate, budget - clock
            if request.learns:
                wall, tried = play.learn(candidate, request.run.seed, request.part, left)
            else:
                steps = 0 if request.entry.speed is None else CONFIRMED_STEPS
                wall, tried = play.speed(candidate, steps, left)
            number, waiting = number + 1, waiting - 1
            heapq.heappush(ends, (clock + wall, number, request, tried))
        if not ends:
            break
        clock, _, request, tried = heapq.heappop(ends)
        waiting += 1
        race.told(request, tried)
    race.over()
    return Played(choice_of(race), clock)


Plan = Callable[[Known, Mapping[int, int], float, int], Played]


def draws(number: int, chance: random.Random) -> list[dict[int, int]]:
    """Return so many maps from a plan's seeds to recorded ones, drawn by chance."""
    return [dict(enumerate(chance.sample(SEEDS, len(SEEDS)))) for _ in range(number)]


@dataclass(frozen=True)
class Regrets:
    """What the plans of a pair found.

    Attributes:
        best: the best candidate.
        regrets: of each plan, what its choice takes more than the best.
        overruns: seconds by which each plan's search was over after its budget.
        seconds: that each took.
        rules: by rule, what its candidate takes more than the best.
    """

    pair: RacePair
    best: Candidate
    regrets: Sequence[float]
    overruns: Sequence[float]
    seconds: Sequence[float]
    rules: Mapping[str, float]
    choices: Mapping[str, int]


def regrets_of(
    known: Known, plan: Plan, seeds: Sequence[Mapping[int, int]], budget: float, processes: int
) -> Regrets:
    """Plan a pair once with each of the maps of seeds."""
    every = [*known.candidates, *fastest_with_rates(known)]
    best = min(every, key=known.truth)
    least = known.truth(best)

    def regret(candidate: Candidate | None) -> float:
        return math.inf if candidate is None else known.truth(candidate) / least - 1

    found = [plan(known, each, budget, processes) for each in seeds]
    choices: dict[str, int] = {}
    for each in found:
        name = "none" if each.choice is None else each.choice.name
        choices[name] = choices.get(name, 0) + 1
    nodes = len(known.pair.on.speeds)
    names = {
        "DDP": f"ring on {nodes} nodes",
        "one process": ONE_PROCESS,
        "DiLoCo": f"DiLoCo, H=32 on {nodes} nodes",
    }
    by_name = {each.name: each for each in every}
    return Regrets(
        known.pair, best, [regret(each.choice) for each in found],
        [max(0.0, each.seconds - budget) for each in found], [each.seconds for each in found],
        {rule: regret(by_name.get(name)) for rule, name in names.items()}, choices,
    )  # fmt: skip


def fastest_with_rates(known: Known) -> list[Candidate]:
    """Return the fastest of the candidates that learn as one process, with other rates."""
    alike = [c for c in known.candidates if c.exact and c.batch == 1 and c.rate == 1]
    return with_rates(max(alike, key=known.speed))


def quantile(values: Sequence[float], part: float) -> float:
    """Return the value that this part of all do not exceed."""
    order = sorted(values)
    return order[min(len(order) - 1, math.ceil(part * len(order)) - 1)]
