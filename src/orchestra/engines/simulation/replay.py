"""A recorded run once more, in virtual time: the same answers, hence the same parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from orchestra.cluster import load_cluster
from orchestra.engines.live import Display
from orchestra.engines.processes.launch import launch
from orchestra.engines.simulation.costs import OVERHEAD
from orchestra.engines.simulation.simulate import Simulation
from orchestra.errors import InputError, RunFailed
from orchestra.optimizers.state import capture
from orchestra.records.report import Membership
from orchestra.strategies.base import roles_of
from orchestra.strategies.single import Single
from orchestra.trainer import checkpoint_files, checkpoints
from orchestra.trainer.checkpoint_files import Manifest
from orchestra.trainer.checkpoints import RunAttempt
from orchestra.trainer.recorder import read_order
from orchestra.trainer.session import Session
from orchestra.trainer.settings import Run
from orchestra.worker.interception import Interceptor, intercepted
from orchestra.worker.runtime import RankActivity, Runtime, Work

STATES = 0
"""The number under which the states of the ranks are written, as a checkpoint's."""


@dataclass(frozen=True)
class Replayed:
    """How a replay ended."""

    parameters_sha256: str | None  # of the final parameters; None where it was stopped before
    steps: dict[int, int]  # of each rank that has data, how many it has done
    folder: Path  # where the states of all ranks are, where it was stopped


@dataclass(frozen=True)
class Assignment:
    """What to replay."""

    run: Run
    source: Path  # where it was recorded
    folder: Path  # for what is written
    ranks: int
    until: int | None
    threads: Sequence[int] | None  # that each rank computed with; None: those of a simulation


def replay_run(
    run: Run,
    source: Path,
    folder: Path,
    *,
    until: int | None = None,
    threads: Sequence[int] | None = None,
    quiet: bool = False,
) -> Replayed:
    """Repeat `run` as the orders in `source` say, to its end or to step `until` of its workers.

    `threads` are those that each rank computed with: bits are equal where their numbers are.

    Raises:
        InputError: the run was not recorded, or not as a whole.
        RunFailed: it failed, now as perhaps then.
    """
    if run.strategy.traits().native:
        raise InputError(
            "the collectives of torch.distributed add in an order of their own, so that a run with "
            "native cannot be replayed exactly; record one with a schedule, such as ring"
        )
    ranks = len(roles_of(run.strategy, run.training.ranks).shares)
    assignment = Assignment(run, source.absolute(), folder.absolute(), ranks, until, threads)
    with Display(run, Single().roles(1), quiet=quiet) as display:
        launched = launch(program, assignment, 1, patience=3600.0, on_event=display.on_event)
    if launched.stopped:
        raise KeyboardInterrupt
    (result,) = launched.results
    if isinstance(result, Exception):
        raise result
    return cast("Replayed", result)


def program(runtime: Runtime, assignment: Assignment) -> Replayed | Exception:
    """Run the replay; the program of its process, here so that a launcher can name it."""
    run = assignment.run
    training = replace(run.training, trace_steps=0, record_order=False, tensorboard=False)
    run = replace(run, training=training)
    workers = roles_of(run.strategy, run.training.ranks).workers
    halt = Halt(assignment.until, workers, assignment.folder)

    def rank_program(inner: Runtime) -> Any:
        inner.reporter.activity(RankActivity.SET_UP)
        order = read_order(assignment.source, inner.rank)
        halting = intercepted(inner, Halting(inner.rank, halt))
        session = Session(halting, run, run.strategy, assignment.folder, repeats=order)
        halt.sessions[inner.rank] = session
        try:
            session.begin()
            session.train()
            return session.finish()
        finally:
            session.close()

    cluster = load_cluster(f"lan_10gbit(nodes={assignment.ranks})", where="replay", folder=Path())
    outcome = Simulation(
        cluster, assignment.ranks, _Alike(), OVERHEAD, runtime.reporter,
        arithmetic=assignment.threads,
    ).run(rank_program)  # fmt: skip
    if outcome.bad_input is not None:
        return InputError(outcome.bad_input)
    if halt.reached:
        return Replayed(None, halt.conclude(), assignment.folder)
    if outcome.failure is not None:
        return RunFailed(outcome.failure)
    leader = next(report.leader for report in outcome.results if report.leader is not None)
    return Replayed(leader.parameters_sha256, halt.steps(), assignment.folder)


# What stops it after a step


class _Alike:
    """Costs of a replay, in which time does not matter: all work takes the same."""

    flops = 1e9

    def seconds(self, work: Work, threads: int = 1) -> float:
        return 1e-3

    def ready(self, slot: int) -> float:
        return 0.5

    def needed(self, slot: int) -> float:
        return 0.25


class Halt:
    """Keeps the state of each of `workers` after its step `until`, and stops after the last one.

    Until then those that are ahead go on, since others may need what they send. Who serves is
    kept as it stands when all stop.
    """

    def __init__(self, until: int | None, workers: tuple[int, ...], folder: Path) -> None:
        self.sessions: dict[int, Session] = {}
        self._until, self._folder = until, folder
        self._attempt: RunAttempt | None = None
        self._missing = set(workers)
        self._digests: dict[str, str] = {}

    @property
    def reached(self) -> bool:
        """True if every worker has come to step `until`."""
        return self._until is not None and not self._missing

    def passed(self, rank: int, step: int) -> None:
        """Called in the flow of `rank` when it has done `step` steps."""
        if step == self._until and rank in self._missing:
            self._keep(rank)
            self._missing.discard(rank)
            if self.reached:
                raise RunFailed("the replay was to stop here")

    def conclude(self) -> dict[int, int]:
        """Keep the states of the ranks that serve, too; return the steps of the workers."""
        for rank in self.sessions:
            if checkpoint_files.rank_file(rank) not in self._digests:
                self._keep(rank)
        members = ("",) * len(self.sessions)
        history = (Membership(len(members), len(self.steps()), 0),)
        manifest = Manifest(0, members, history=history, files=self._digests)
        assert self._attempt is not None
        checkpoints.commit(self._attempt, STATES, manifest)
        self._attempt.end()
        assert self._until is not None
        return {rank: min(steps, self._until) for rank, steps in self.steps().items()}

    def steps(self) -> dict[int, int]:
        """Return how many gradients each rank has computed, without those that have none."""
        done = {rank: session.position.steps for rank, session in sorted(self.sessions.items())}
        return {rank: steps for rank, steps in done.items() if steps}

    def _keep(self, rank: int) -> None:
        """Write what the rank holds, as a checkpoint would keep it, and its gradient."""
        session = self.sessions[rank]
        state = session.checkpoint_state() | {"gradients": session.worker.gradients.current()}
        name = checkpoint_files.rank_file(rank)
        if self._attempt is None:
            self._attempt = RunAttempt.begin(self._folder)
        self._digests[name] = checkpoints.write_rank(self._attempt, STATES, rank, capture(state))


@dataclass(eq=False)
class Halting(Interceptor):
    """Tells `halt` how far its rank is."""

    rank: int
    halt: Halt

    def progress(self, step: int) -> None:
        self.halt.passed(self.rank, step)
