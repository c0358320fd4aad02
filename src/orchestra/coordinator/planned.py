"""What workers do that all count the same steps: each has its part of every one, by a plan."""

from __future__ import annotations

from typing import Protocol

from orchestra.coordinator.events import Finish, Instruction, RestAt, Take
from orchestra.coordinator.rest import Reason, Rest


class Plan(Protocol):
    """The samples of each step of all workers together."""

    @property
    def steps(self) -> int:
        """The number of steps."""

    def position(self, step: int) -> int:
        """Return the sample at which `step` begins: all before it are consumed."""


class PlannedWork:
    """The instructions of each worker of `plan`, from its number `step` on. Pure.

    They follow from what all workers know, so that no message is needed: all workers rest after
    every `rest_every` steps (None: never), and after the step that they stop at.
    """

    def __init__(self, plan: Plan, step: int, rest_every: int | None) -> None:
        self.plan, self.step = plan, step
        self._rest_every = rest_every
        self._due: Reason | None = None
        self._stopped = False

    def take(self) -> Instruction:
        """Return the next instruction; the one before is done."""
        at = self.plan.position(self.step)
        if self._due is not None:
            reason, self._due = self._due, None
            return RestAt(at, Rest(reason))
        if self._stopped or self.step >= self.plan.steps:
            return Finish(at)
        self.step += 1
        return Take(at, self.plan.position(self.step))

    def done(self, *, stop: bool) -> None:
        """Note that the step is over; with `stop` all workers have agreed that it is the last."""
        self._stopped = stop
        if stop:
            self._due = Reason.STOP
        elif self._rest_every is not None and self.step % self._rest_every == 0:
            self._due = Reason.CHECKPOINT
