"""A replay that stops after a step, and keeps what each rank held there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from orchestra.errors import RunFailed
from orchestra.optimizers.state import capture
from orchestra.trainer import checkpoints
from orchestra.trainer.program import Session
from orchestra.worker.interception import Interceptor
from orchestra.worker.runtime import Work

STATES = 0
"""The number under which the states of the ranks are written, as a checkpoint's."""


class _Alike:
    """Costs of a replay, in which time does not matter: all work takes the same."""

    flops = 1e9

    def seconds(self, work: Work, threads: int = 1) -> float:
        return 1e-3

    def ready(self, slot: int) -> float:
        return 0.5

    def needed(self, slot: int) -> float:
        return 0.25


ALIKE = _Alike()


class Halt:
    """Keeps the state of each of `workers` after its step `until`, and stops after the last one.

    Until then those that are ahead go on, since others may need what they send. Who serves is
    kept as it stands when all stop.
    """

    def __init__(self, until: int | None, workers: tuple[int, ...], folder: Path) -> None:
        self.sessions: dict[int, Session] = {}
        self._until = until
        self._missing = set(workers)
        self._folder = folder
        self._digests: dict[str, str] = {}

    @property
    def reached(self) -> bool:
        """Whether every worker was there."""
        return self._until is not None and not self._missing

    def passed(self, rank: int, step: int) -> None:
        """In the flow of `rank`: it has done `step` steps."""
        if step == self._until and rank in self._missing:
            self._keep(rank)
            self._missing.discard(rank)
            if self.reached:
                raise RunFailed("the replay was to stop here")

    def conclude(self) -> dict[int, int]:
        """Keep the states of the ranks that serve, too; the steps of the workers."""
        for rank in self.sessions:
            if checkpoints.rank_file(rank) not in self._digests:
                self._keep(rank)
        checkpoints.commit(self._folder, STATES, self._digests)
        assert self._until is not None
        return {rank: min(steps, self._until) for rank, steps in self.steps().items()}

    def steps(self) -> dict[int, int]:
        """Of each rank that has computed gradients, how many."""
        done = {rank: session.position.steps for rank, session in sorted(self.sessions.items())}
        return {rank: steps for rank, steps in done.items() if steps}

    def _keep(self, rank: int) -> None:
        """What the rank holds, as a checkpoint would keep it, and its gradient."""
        session = self.sessions[rank]
        state = session.checkpoint_state() | {"gradients": session.worker.gradients.vector}
        name = checkpoints.rank_file(rank)
        self._digests[name] = checkpoints.write_rank(self._folder, STATES, rank, capture(state))


@dataclass(eq=False)
class Halting(Interceptor):
    """Tells `halt` how far its rank is."""

    rank: int
    halt: Halt

    def progress(self, step: int) -> None:
        self.halt.passed(self.rank, step)
