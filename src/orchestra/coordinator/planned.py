"""What a worker does next where all count the same steps: its part of each one, by a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    """The instructions of each worker of `plan`, from its number `step` on.

    They follow from what all workers know, so that no message is needed: all workers rest after
    every `rest_every` steps (None: never), and where a policy says so. After each step `policies`
    are asked, in their order, for a rest of all workers: the first one that there is counts. They
    may also replace the plan of the steps to come.
    """

    def __init__(
        self,
        plan: Plan,
        step: int,
        rest_every: int | None,
        policies: Sequence[Callable[[], Rest | None]] = (),
    ) -> None:
        self.plan, self.step = plan, step
        self._rest_every = rest_every
        self._policies = policies
        self._due: Rest | None = None

    def take(self) -> Instruction:
        """Return the next instruction; the one before is done."""
        at = self.plan.position(self.step)
        if self._due is not None:
            rest, self._due = self._due, None
            return RestAt(at, rest)
        if self.step >= self.plan.steps:
            return Finish(at)
        self.step += 1
        return Take(at, self.plan.position(self.step))

    def done(self) -> None:
        """Ask the policies; the step is over."""
        rests = (policy() for policy in self._policies)
        self._due = next((rest for rest in rests if rest is not None), None)
        is_point = self._rest_every is not None and self.step % self._rest_every == 0
        if self._due is None and is_point:
            self._due = Rest(Reason.CHECKPOINT)
