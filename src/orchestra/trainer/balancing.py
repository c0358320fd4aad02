"""Batches that follow the speeds of workers which step together: the rules, and who applies them.

A rule is pure: from how fast every worker has been it makes new batches of the same sum. Gradients
are weighted by the batches behind them everywhere, so that their mean stays the global batch's.
A rule is a setting, so that this file loads without torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from math import fsum, inf
from typing import TYPE_CHECKING, Literal

from orchestra import exchange, optimizers
from orchestra.data import DataPlan, apportion, plan_of
from orchestra.errors import InputError
from orchestra.settings import MAX_STEPS, Registry, Settings, setting

if TYPE_CHECKING:
    from orchestra.worker.worker import Worker

Batches = tuple[int, ...]
Speeds = tuple[float, ...]
"""The samples per second of each worker."""


@dataclass(frozen=True, repr=False)
class Balancing(Settings, ABC):
    """A rule that moves samples from slow workers to fast ones at the barrier between two steps."""

    _: KW_ONLY
    every: int = setting(
        5, "steps between two decisions; the first comes after two", low=1, high=MAX_STEPS
    )
    dead_band: float = setting(
        0.05, "no batch changes unless one is to change by more than this part", low=0, high=1e6
    )
    low: int = setting(1, "samples that a worker has at least in a step", low=1, high=2**24)
    high: int | None = setting(None, "samples that it has at most; none: any", low=1, high=2**24)
    start: Literal["equal", "measured"] = setting(
        "equal", "the first batches; measured: by a short profile before the first step"
    )

    def check(self) -> None:
        if self.high is not None and self.high < self.low:
            raise InputError(
                f"{type(self).__name__}: high={self.high} is below low={self.low}: raise it, or "
                "lower low"
            )

    @abstractmethod
    def predicted(self, before: Speeds, measured: Speeds) -> Speeds:
        """Return the speeds to expect, from those expected `before` and those just `measured`."""

    @abstractmethod
    def wanted(self, batches: Batches, speeds: Speeds) -> Sequence[float]:
        """Return numbers in proportion to the next batches, before bounds and sum are applied.

        `batches` are the samples of each worker in a step so far, `speeds` the predicted ones.
        """

    def decide(self, batches: Batches, speeds: Speeds) -> Batches:
        """Return the next batches at the predicted `speeds`: of the same sum, within the bounds."""
        new = self.fitted(self.wanted(batches, speeds), sum(batches))
        pairs = zip(batches, new, strict=True)
        if all(abs(after - before) <= self.dead_band * before for before, after in pairs):
            return batches
        return new

    def fitted(self, wanted: Sequence[float], total: int) -> Batches:
        """Return integers within the bounds that sum to `total`, in proportion to `wanted` as far
        as possible. Raises InputError: the bounds leave no such numbers."""
        workers, high = len(wanted), inf if self.high is None else self.high
        if not self.low * workers <= total <= high * workers:
            raise InputError(
                f"shares: {workers} workers cannot share the {total} samples of a step within the "
                f"bounds of {self!r}: lower low, raise high, or change batch_size"
            )
        fixed: dict[int, int] = {}
        while True:  # Bitran and Hax (1981): each round fixes those whose bound is sure to hold
            free = [worker for worker in range(workers) if worker not in fixed]
            left = total - sum(fixed.values())
            scale = left / fsum(wanted[worker] for worker in free) if free else 0.0
            parts = {worker: scale * wanted[worker] for worker in free}
            lacking = {worker: self.low - part for worker, part in parts.items() if part < self.low}
            beyond = {worker: part - high for worker, part in parts.items() if part > high}
            if not lacking and not beyond:
                break
            # The side with the larger sum of violations is at its bounds in the solution, too.
            if fsum(lacking.values()) >= fsum(beyond.values()):
                fixed |= dict.fromkeys(lacking, self.low)
            else:
                assert self.high is not None
                fixed |= dict.fromkeys(beyond, self.high)
        # Parts are rounded up or down, so they stay within the bounds, which are integers.
        counts = apportion(left, tuple(wanted[worker] for worker in free)) if free else ()
        chosen = fixed | dict(zip(free, counts, strict=True))
        return tuple(chosen[worker] for worker in range(workers))


@dataclass(frozen=True, repr=False)
class LBBSP(Balancing):
    """Batches in proportion to the speeds expected of the workers.

    LB-BSP (Chen et al., SoCC 2020), as on its CPU clusters: at a barrier batches are resized so
    that all workers are expected to compute equally long, b_i = B v_i / sum_j v_j. The paper
    predicts the speeds v by a recurrent network (NARX) that also sees the use of processor and
    memory. Here 1/v, seconds for a sample, is an exponential moving average of what was measured.
    Bounds, dead band, and the steps between decisions are of this implementation.
    """

    _: KW_ONLY
    newest: float = setting(0.5, "weight of the last measurement in the average", above=0, high=1)

    def predicted(self, before: Speeds, measured: Speeds) -> Speeds:
        """1/v <- (1 - newest) 1/v + newest 1/measured; what is measured first is taken as it is."""
        # Times are averaged: an average of speeds follows a slow-down later.
        pairs = zip(before, measured, strict=True)
        old, new = 1 - self.newest, self.newest
        return tuple(v * now / (old * now + new * v) if v else now for v, now in pairs)

    def wanted(self, batches: Batches, speeds: Speeds) -> Sequence[float]:
        return speeds


@dataclass(frozen=True, repr=False)
class Proportional(Balancing):
    """Batches by proportional control of the workers' iteration times.

    Dynamic batching (Tyagi and Sharma, ACSOS 2020): the error of worker k is tau_k - mean tau, its
    iteration time less the mean of all, and X_k = b_k / tau_k its throughput:

        b_k <- b_k - gain X_k (tau_k - mean tau)

    Batches are then scaled to the same sum. With gain=1 that is b_k in proportion to X_k; less
    damps what chance does to the times.
    """

    _: KW_ONLY
    gain: float = setting(1.0, "part of the error that one decision corrects", above=0, high=1)

    def predicted(self, before: Speeds, measured: Speeds) -> Speeds:
        return measured

    def wanted(self, batches: Batches, speeds: Speeds) -> Sequence[float]:
        times = [batch / speed for batch, speed in zip(batches, speeds, strict=True)]
        mean = fsum(times) / len(times)
        return [
            batch - self.gain * speed * (time - mean)
            for batch, speed, time in zip(batches, speeds, times, strict=True)
        ]


BALANCINGS = Registry(
    "rule of balancing",
    {rule.__name__: f"{__name__}:{rule.__name__}" for rule in (LBBSP, Proportional)},
    group="orchestra.balancings",
)


# Carrying out a rule

FIRST = 2
"""The steps of a phase before its first decision. Few, as a far slower worker shows at once."""
MOST_CHANGES = 200
"""The number of changes that a run keeps; beyond it every second one is dropped."""


@dataclass
class BalanceState:
    """The workers' knowledge of each other's speeds; kept in checkpoints."""

    speeds: tuple[float, ...]  # samples a second expected of each rank; 0: nothing is known
    batches: tuple[int, ...] = ()  # of each rank in a step of this phase; 0 for one without data
    changes: list[list[int]] = field(default_factory=list)
    """Of each change of the batches the steps before it, and the batches from there on."""


class Balancer:
    """Carries out a `rule` on one rank. Equal measurements make equal batches on every rank."""

    def __init__(self, rule: Balancing, worker: Worker) -> None:
        self.state = BalanceState((0.0,) * worker.runtime.ranks)
        self._rule, self._worker = rule, worker
        self._samples, self._seconds_before = 0, 0.0

    def agree(self, first: int) -> None:
        """Collective over all ranks, between two phases: give all of them the state of `first`."""
        data = exchange.agree_on_data(self._worker, optimizers.capture(self.state), first)
        optimizers.restore(self.state, data)

    def begin(self, plan: DataPlan, steps: int) -> DataPlan:
        """Return the `plan` of a phase, with batches by the speeds known after `steps` steps.

        A rank whose speed is not known counts as the mean of the others. Batches that fit the
        plan, such as those of a resumed run, stay.
        """
        self._samples, self._seconds_before = 0, self._worker.compute.seconds
        state, there = self.state, [rank for rank, share in enumerate(plan.shares) if share]
        # Workers of the phase before, or of the run before a resumption, whose batches can stay.
        fit = [rank for rank, batch in enumerate(state.batches) if batch] == there
        if not fit or sum(state.batches) != plan.global_batch:
            known = [state.speeds[rank] for rank in there if state.speeds[rank]]
            wanted = [plan.shares[rank] for rank in there]
            if known:
                mean = sum(known) / len(known)
                wanted = [state.speeds[rank] or mean for rank in there]
            self._set(there, self._rule.fitted(wanted, plan.global_batch), steps)
        return self._plan(plan)

    def after_step(self, plan: DataPlan, plan_step: int, steps: int) -> DataPlan:
        """Collective over the workers, after step `plan_step`: return the plan of the next step.

        `steps` are those of the run so far.
        """
        self._samples += self._worker.step.samples
        due = plan_step % self._rule.every == 0 or plan_step == FIRST
        if not due or plan_step >= plan.steps:
            return plan
        there, state = self._worker.workers.ranks, self.state
        measured = dict(zip(there, self._measured(), strict=True))
        if not all(measured.values()):  # somebody was late all the time, under backup
            return plan
        before = tuple(state.speeds[rank] for rank in there)
        expected = self._rule.predicted(before, tuple(measured.values()))
        speeds = dict(zip(there, expected, strict=True))
        state.speeds = tuple(speeds.get(rank, old) for rank, old in enumerate(state.speeds))
        batches = tuple(state.batches[rank] for rank in there)
        new = self._rule.decide(batches, expected)
        if new == batches:
            return plan
        self._set(there, new, steps)
        return self._plan(plan)

    def _measured(self) -> list[float]:
        """Collective over the workers: return the samples a second of each since the last call.

        0 for a worker that has computed nothing since.
        """
        seconds = self._worker.compute.seconds
        own = self._samples, seconds - self._seconds_before
        self._samples, self._seconds_before = 0, seconds
        # Equal on all ranks, bit for bit, so that they decide alike.
        table = exchange.gather_numbers(self._worker, own)
        return [samples / spent if spent > 0 else 0.0 for samples, spent in table]

    def _plan(self, plan: DataPlan) -> DataPlan:
        """Return the one that differs from `plan` by the batches alone; ranks here share it."""
        shares = tuple(map(float, self.state.batches))
        return plan_of(plan.start, plan.stop, plan.global_batch, shares)

    def _set(self, ranks: Sequence[int], batches: Batches, steps: int) -> None:
        state, of_rank = self.state, dict(zip(ranks, batches, strict=True))
        state.batches = tuple(of_rank.get(rank, 0) for rank in range(len(state.speeds)))
        state.changes.append([steps, *state.batches])
        if len(state.changes) > MOST_CHANGES:
            # The first and the last change stay.
            del state.changes[1:-1:2]
