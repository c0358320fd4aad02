"""The strategy that is predicted to reach the target first, chosen while the run goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING

from orchestra import exchange
from orchestra.errors import InputError
from orchestra.settings import MAX_STEPS, setting
from orchestra.settings.base import COMMON, REQUIRED
from orchestra.strategies.base import Phased, Roles, Strategy
from orchestra.strategies.traits import Footprint, Rehearsal, Traits, WorkMode

if TYPE_CHECKING:
    from orchestra.exchange import Stopwatch
    from orchestra.worker.worker import Worker

OFTEN = 0.02
"""The part of the time that rehearsals may take while nothing changes."""
AFTER_CHANGE = 0.2
"""The same where the seconds of a step have changed by more than the margin."""
FIRST = 3
"""Steps before the first decision, if `every` is more: on slow links ten of a ring are dear."""


@dataclass(frozen=True, repr=False)
class Auto(Phased):
    """Train under the candidate that is predicted to reach the target first, as things are now.

    It begins with the first of `candidates`. After 3 steps, and then at least every `every` steps,
    at the end of a round where the strategy under way has rounds, all workers compare the
    candidates, and go on with another one if that is predicted to reach the target sooner by the
    `margin`. What is compared is

        samples to the target x seconds a step,

    `samples` being what `orchestra plan` has found; without them every candidate is taken to need
    as many, which favours those that exchange least. Seconds a step are predicted from what each
    worker computes, measured in each step of this run, and from the exchange of each candidate,
    which is rehearsed on a copy of the parameters: when the run begins, when the seconds of a step
    change by more than the margin, and now and then, for at most 2 % of the time. A
    candidate that has been under way is corrected by what was measured over what was predicted.

    Candidates train on all ranks: AllReduce without `shard` and `backup`, LocalSGD with plain
    rounds of steps, ParameterServer if synchronous and with servers on the workers' ranks. The
    optimizer's moments go over where the workers have them, as their mean where they differ.
    """

    use = "where links or nodes change during a run, or are not known before it"
    variants = (
        (
            'Auto([AllReduce("ring"), LocalSGD(16)], samples=[1.0, 1.2])',
            "for links that others use, too",
        ),
    )

    candidates: tuple[Strategy, ...] = setting(
        REQUIRED, "the strategies to choose from; the run begins with the first"
    )
    _: KW_ONLY
    samples: tuple[float, ...] = setting(
        (), "of each candidate to the target, in any unit; empty: as many of each", low=1e-12,
        high=1e18, above=0,
    )  # fmt: skip
    margin: float = setting(
        0.15, "by which another candidate has to be sooner: 0.15 is 1.15 times", low=0.0, high=1e3
    )
    every: int = setting(10, "steps from one decision to the next, at least", low=1, high=MAX_STEPS)

    def check(self) -> None:
        if len({repr(each) for each in self.candidates}) < max(2, len(self.candidates)):
            raise InputError("Auto: candidates are two or more strategies, each of them once")
        if self.samples and len(self.samples) != len(self.candidates):
            raise InputError(
                f"Auto: samples={list(self.samples)!r} is not one number for each of "
                f"{len(self.candidates)} candidates"
            )
        for each in self.candidates:
            if each.traits().exchange is None:
                raise InputError(
                    f"Auto: {each!r} cannot be a candidate: only AllReduce without shard and "
                    "backup, LocalSGD(every) without fragments and overlap, and a synchronous "
                    "ParameterServer beside the workers tell what their exchange takes"
                )

    @property
    def phases(self) -> tuple[Strategy, ...]:
        return self.candidates

    def traits(self, work: WorkMode = "shared") -> Traits:
        # What workers measure travels as values.
        return replace(
            super().traits(work), memory=self._memory, depends_on_speed=True, reads_values=True
        )

    def roles(self, ranks: int) -> Roles:
        """Return the roles of the first candidate; the others need the same workers."""
        roles = [each.roles(ranks) for each in self.candidates]
        for each, own in zip(self.candidates, roles, strict=True):
            if own.shares != (1.0,) * ranks:
                raise InputError(f"Auto: {each!r} does not train on all ranks alike")
        return roles[0]

    def _memory(self, rank: int, ranks: int) -> Footprint:
        """Return the largest of each part, and add the copy that rehearsals exchange."""
        largest = super().traits().memory(rank, ranks)
        return replace(largest, copies=largest.copies + 1)


@dataclass(eq=False)
class CandidateChoice:
    """What one rank knows of the candidates, in seconds, and the choice between them."""

    strategy: Auto
    worker: Worker
    current: int = field(default=0, metadata=COMMON)  # the candidate under way
    steps: int = field(default=0, metadata=COMMON)  # of the run so far
    walls: list[float] = field(default_factory=list)  # of own steps since the last decision
    own: list[float] = field(default_factory=list)  # without communication and waiting
    exchanges: list[float] = field(default_factory=list)  # of each candidate, as rehearsed last
    ratios: list[float] = field(default_factory=list)  # measured over predicted; 1 if unknown
    usual: float = 0.0  # of a step at the last decision; 0 if there was none in this phase
    since: float = 0.0  # since the last rehearsal
    cost: float = 0.0  # of that one
    watch: Stopwatch = field(init=False)

    def __post_init__(self) -> None:
        if self.worker.own_loop:
            raise InputError("Auto needs orchestra's own loop (orchestra train)")
        self.watch = exchange.Stopwatch(self.worker)
        self.ratios = self.ratios or [1.0] * len(self.strategy.candidates)

    @property
    def candidate(self) -> Strategy:
        """The candidate under way."""
        return self.strategy.candidates[self.current]

    def after_step(self) -> int | None:
        """If it is time, decide which candidate goes on; return its number if it is another one."""
        wall, own = self.watch.lap()
        self.walls.append(wall)
        self.own.append(own)
        self.steps += 1
        steps, several = len(self.walls), len(self.worker.workers) > 1
        least = self.strategy.every if self.exchanges else min(self.strategy.every, FIRST)
        if not several or steps < least or steps % _exchange_of(self.candidate).every:
            return None
        new = self._decide()
        self.watch.lap()  # what that took is nobody's step
        return None if new == self.current else new

    def change_to(self, new: int) -> None:
        """Go on with another candidate."""
        self.current, self.usual = new, 0.0

    def _decide(self) -> int:
        """Collective over the workers, after a step of all: return the candidate to go on with."""
        worker, strategy = self.worker, self.strategy
        # All decide by the same numbers of all workers: nobody has to announce the decision.
        table = exchange.gather_numbers(worker, [sum(self.walls), *self.own])
        steps = len(self.walls)
        self.walls, self.own = [], []
        seconds = max(row[0] for row in table) / steps
        self.since += seconds * steps
        slow, fast = max(self.usual, seconds), min(self.usual, seconds)
        changed = self.usual > 0 and slow > (1 + strategy.margin) * fast
        if not self.exchanges or self.cost <= (AFTER_CHANGE if changed else OFTEN) * self.since:
            self._rehearse()
        self.usual = seconds
        paces = self._paces([row[1:] for row in table])
        if not changed:  # else some of these steps may be from before the change
            own = paces[self.current]
            if steps >= strategy.every:  # a few steps can be slow by chance
                self.ratios[self.current] = seconds / own.predicted
            paces[self.current] = replace(own, ratio=seconds / own.predicted)
        new, reason = choose(paces, self.current, strategy.margin)
        worker.measures.decisions.append(
            {
                "step": self.steps,
                "sample": worker.step.consumed,
                "under": paces[self.current].name,
                "then": paces[new].name,
                "reason": reason,
                "measured_step_seconds": seconds,
                "candidates": [
                    {
                        "strategy": pace.name,
                        "exchange_seconds": pace.exchange,
                        "step_seconds": pace.seconds,
                        "to_target": pace.to_target / paces[self.current].to_target,
                    }
                    for pace in paces
                ],
            }
        )
        return new

    def _rehearse(self) -> None:
        """Collective: measure the exchange of each candidate; the slowest worker counts."""
        worker, strategy = self.worker, self.strategy
        kinds = [_exchange_of(each) for each in strategy.candidates]
        own: dict[str, float] = {}
        now, values = worker.transport.now, worker.parameters.clone()
        # Candidates with the same exchange, as LocalSGD and its all-reduce, share one.
        for name, kind in {kind.name: kind for kind in kinds}.items():
            # Together, or the first to come would measure how long it waits for the others.
            exchange.wait_for_workers(worker)
            began = now()
            kind.rehearse(worker, values)
            own[name] = now() - began
        table = exchange.gather_numbers(worker, [*own.values()])
        longest = dict(zip(own, map(max, zip(*table, strict=True)), strict=True))
        self.exchanges = [longest[kind.name] for kind in kinds]
        self.cost, self.since = sum(longest.values()), 0.0

    def _paces(self, own: Sequence[Sequence[float]]) -> list[PredictedPace]:
        """Predict the pace of each candidate, by the workers' `own` seconds of some steps."""
        strategy = self.strategy
        paces = []
        for number, each in enumerate(strategy.candidates):
            samples = strategy.samples[number] if strategy.samples else 1.0
            every = _exchange_of(each).every
            pace = PredictedPace.of(repr(each), samples, own, self.exchanges[number], every)
            paces.append(replace(pace, ratio=self.ratios[number]))
        return paces


def _exchange_of(candidate: Strategy) -> Rehearsal:
    """Return the exchange of a candidate, which `check` has found to have one."""
    found = candidate.traits().exchange
    assert found is not None
    return found


# What it decides by: plain numbers


@dataclass(frozen=True)
class PredictedPace:
    """How fast a candidate is, and how far the target is from it."""

    name: str  # in its notation
    samples: float  # to the target, in a unit that all candidates share
    exchange: float  # seconds of one, as it was rehearsed
    predicted: float  # seconds a step, by what workers compute and the exchange
    ratio: float = 1.0  # of the seconds measured while it was under way over those predicted

    @staticmethod
    def of(
        name: str, samples: float, own: Sequence[Sequence[float]], exchange: float, every: int
    ) -> PredictedPace:
        """Predict the pace of a candidate whose workers exchange after every `every` steps.

        `own` are each worker's seconds in each of some steps, without the exchange.
        """
        steps = len(own[0])
        rounds = [slice(first, first + every) for first in range(0, steps, every)]
        # Workers wait for each other once a round: the slowest over all steps of the round counts.
        slowest = sum(max(sum(worker[steps]) for worker in own) for steps in rounds)
        return PredictedPace(name, samples, exchange, slowest / steps + exchange / every)

    @property
    def seconds(self) -> float:
        """The predicted seconds of a step, corrected by what was measured."""
        return self.predicted * self.ratio

    @property
    def to_target(self) -> float:
        """The predicted time to the target, in a unit that all candidates share."""
        return self.samples * self.seconds


def choose(paces: Sequence[PredictedPace], current: int, margin: float) -> tuple[int, str]:
    """Return the candidate to go on with, and why: another one if it is sooner by the margin."""
    own, best = paces[current], min(range(len(paces)), key=lambda n: paces[n].to_target)
    if best == current:
        return current, "no other candidate is predicted to reach the target sooner"
    sooner = own.to_target / paces[best].to_target
    text = f"{paces[best].name} is predicted to reach the target {sooner:.2f} times as soon"
    if sooner < 1 + margin:
        return current, f"{text}, less than the margin of {1 + margin:g}"
    return best, text
