"""The two simpler predictors that a simulation has to be better than."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, log2

from orchestra.bench.fidelity.cases import LOCAL_STEPS, MICROBATCHES, Case
from orchestra.cluster.calibration import Calibration, TaskCosts
from orchestra.errors import InputError


def constant(case: Case, calibration: Calibration) -> float:
    """The step of one worker, whatever the strategy and however many ranks there are."""
    threads = _threads(case, calibration)
    return _alone(_costs(case, calibration), case.task.subject.batch_sizes[0], threads)


def closed_formula(case: Case, calibration: Calibration) -> float:
    """Seconds a step by the usual sums: computation, plus a latency for each message and a time
    for each byte on the longest way, plus additions.

    alpha, beta and gamma come from the calibration, and processors are shared evenly by the ranks
    that compute at the same time.
    """
    costs = _costs(case, calibration)
    elements = sum(parameter.elements for parameter in costs.parameters)
    batch, way = case.task.subject.batch_sizes[0], calibration.messages.one_way
    workers = len(case.run.strategy.roles(case.ranks).workers)
    crowding, threads = max(1.0, workers / calibration.cores), _threads(case, calibration)
    micro_batch = batch * case.ranks / MICROBATCHES
    terms = _Terms(
        ranks=case.ranks,
        workers=workers,
        step=_alone(costs, batch, threads) * crowding,
        update=costs.seconds("update", elements, threads),
        stage=costs.seconds("gradient", micro_batch, threads) / case.ranks * crowding,
        alpha=way.points[0][1],
        message=way.at(4 * elements),
        adding=calibration.overhead(costs).add * 4 * elements,
    )
    return FORMULAS[case.label](terms)


@dataclass(frozen=True)
class _Terms:
    """Seconds of a worker's step, an update, a micro-batch on a stage; `alpha`: of no content,
    `message`: of one with all parameters, `adding`: of adding what arrived with one.
    """

    ranks: int
    workers: int
    step: float
    update: float
    stage: float
    alpha: float
    message: float
    adding: float

    @property
    def whole(self) -> float:
        """A message with all parameters, and adding them."""
        return self.message + self.adding

    @property
    def ring(self) -> float:
        """A ring all-reduce."""
        part = (self.ranks - 1) / self.ranks
        bytes_only = self.message - self.alpha
        return 2 * (self.ranks - 1) * self.alpha + part * (2 * bytes_only + self.adding)

    @property
    def uneven(self) -> float:
        """Folding the ranks beyond a power of two in, and out."""
        return 0.0 if 2 ** int(log2(self.ranks)) == self.ranks else 2 * self.message

    @property
    def served(self) -> float:
        """A push and a pull."""
        return 2 * self.message + self.update


def _halving_doubling(t: _Terms) -> float:
    part = (t.ranks - 1) / t.ranks
    rounds = 2 * int(log2(t.ranks))
    return rounds * t.alpha + part * (2 * (t.message - t.alpha) + t.adding) + t.uneven


def _asynchronous(t: _Terms) -> float:
    """A worker goes round, unless the server is the limit."""
    return t.ranks / t.workers * max(t.step + t.served, t.workers * t.served)


FORMULAS: dict[str, Callable[[_Terms], float]] = {
    "ring": lambda t: t.step + t.ring,
    "sharded": lambda t: t.step + t.ring,
    "halving_doubling": lambda t: t.step + _halving_doubling(t),
    "butterfly": lambda t: t.step + int(log2(t.ranks)) * t.whole + t.uneven,
    "tree": lambda t: t.step + ceil(log2(t.ranks)) * (2 * t.message + t.adding),
    "parallel": lambda t: t.step + (t.ranks - 1) * t.whole,
    "reduce_to_one": lambda t: t.step + (t.ranks - 1) * (2 * t.message + t.adding),
    "server": lambda t: t.ranks / t.workers * (t.step + t.workers * (t.served + t.adding)),
    "asynchronous": _asynchronous,
    "asynchronous beside": _asynchronous,
    "bounded": _asynchronous,
    "local SGD": lambda t: t.step + t.ring / LOCAL_STEPS,
    "gossip": lambda t: t.step + min(2, t.ranks - 1) * t.whole,
    "push-sum": lambda t: t.step + t.message + 3 * t.adding,
    "pairwise": lambda t: t.step,
    "pipeline": lambda t: (MICROBATCHES + t.ranks - 1) * t.stage + 2 * (t.ranks - 1) * t.alpha,
}
"""By label of the strategy."""


def _threads(case: Case, calibration: Calibration) -> int:
    """That each rank computes with."""
    return max(1, calibration.cores // case.ranks)


def _alone(costs: TaskCosts, batch: int, threads: int) -> float:
    elements = sum(parameter.elements for parameter in costs.parameters)
    gradient, rest = (costs.seconds(part, batch, threads) for part in ("gradient", "step"))
    return gradient + rest + costs.seconds("update", elements, threads)


def _costs(case: Case, calibration: Calibration) -> TaskCosts:
    key = case.task.subject.order(1.0).key
    found = calibration.task(*key)
    if found is None:
        raise InputError(
            f"--calibration: it does not hold {case.task.subject.task}; leave the option out"
        )
    return found
