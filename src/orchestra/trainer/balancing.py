"""Batches that follow the speeds of workers which step together, as a rule says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from orchestra.collectives import all_reduce
from orchestra.data.balancing import Balancing, Batches
from orchestra.data.plan import Plan, plan_of
from orchestra.exchange import agree_on_data
from orchestra.optimizers.state import capture, restore
from orchestra.transports.tags import Tag
from orchestra.worker.worker import Worker

FIRST = 2
"""Steps of a phase before its first decision: who is far slower than others shows at once."""
MOST_CHANGES = 200
"""That a run keeps; of more, every second one goes."""


@dataclass
class BalanceState:
    """What the workers know of each other; kept in checkpoints.

    Attributes:
        speeds: samples a second that are expected of each rank; 0: nothing is known.
        batches: of each rank in a step of the phase under way; 0 for one without data.
        changes: of each change of the batches the steps before it, and the batches from there on.
    """

    speeds: tuple[float, ...]
    batches: tuple[int, ...] = ()
    changes: list[list[int]] = field(default_factory=list)


class Balancer:
    """Carries out a `rule` on one rank. Equal measurements make equal batches on every rank."""

    def __init__(self, rule: Balancing, worker: Worker) -> None:
        self.state = BalanceState((0.0,) * worker.runtime.ranks)
        self._rule, self._worker = rule, worker
        self._samples, self._seconds_before = 0, 0.0

    def agree(self, first: int) -> None:
        """Collective over all ranks, between two phases: all know what the rank `first` does."""
        restore(self.state, agree_on_data(self._worker, capture(self.state), first))

    def begin(self, plan: Plan, steps: int) -> Plan:
        """The `plan` of a phase with batches by what is known of the speeds, after `steps`.

        Ranks of which nothing is known count as the mean of the others. Batches that fit, as those
        of a resumed run, stay.
        """
        self._samples, self._seconds_before = 0, self._worker.compute.seconds
        state, there = self.state, [rank for rank, share in enumerate(plan.shares) if share]
        fit = [rank for rank, batch in enumerate(state.batches) if batch] == there
        if not fit or sum(state.batches) != plan.global_batch:
            known = [state.speeds[rank] for rank in there if state.speeds[rank]]
            wanted = [plan.shares[rank] for rank in there]
            if known:
                mean = sum(known) / len(known)
                wanted = [state.speeds[rank] or mean for rank in there]
            self._set(there, self._rule.fitted(wanted, plan.global_batch), steps)
        return self._plan(plan)

    def after_step(self, plan: Plan, plan_step: int, steps: int) -> Plan:
        """Collective over the workers, after step `plan_step` of the plan: that of the next step.

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
        """Collective over the workers: samples a second of each since the last time, or 0."""
        worker, ranks = self._worker, self._worker.runtime.ranks
        seconds = worker.compute.seconds
        counts = torch.zeros(2, ranks, dtype=torch.float64)
        counts[0, worker.rank] = self._samples
        counts[1, worker.rank] = seconds - self._seconds_before
        self._samples, self._seconds_before = 0, seconds
        if len(worker.workers) > 1:
            all_reduce(worker.transport, counts.view(-1), "butterfly", worker.workers, Tag.AGREE)
        pairs = zip(*counts.tolist(), strict=True)
        speeds = [samples / spent if spent > 0 else 0.0 for samples, spent in pairs]
        return [speeds[rank] for rank in worker.workers.ranks]

    def _plan(self, plan: Plan) -> Plan:
        """Return the one that differs from `plan` by the batches alone; ranks here share it."""
        shares = tuple(map(float, self.state.batches))
        return plan_of(plan.start, plan.stop, plan.global_batch, shares)

    def _set(self, ranks: Sequence[int], batches: Batches, steps: int) -> None:
        state, of_rank = self.state, dict(zip(ranks, batches, strict=True))
        state.batches = tuple(of_rank.get(rank, 0) for rank in range(len(state.speeds)))
        state.changes.append([steps, *state.batches])
        if len(state.changes) > MOST_CHANGES:
            del state.changes[1:-1:2]
