"""A recorded run once more, in virtual time: the same answers, hence the same parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from orchestra.engines.processes.display import Display
from orchestra.engines.processes.launch import launch
from orchestra.errors import InputError, RunFailed
from orchestra.strategies.base import roles_of
from orchestra.strategies.single import Single
from orchestra.trainer.settings import Run

if TYPE_CHECKING:
    from orchestra.worker.runtime import Runtime


@dataclass(frozen=True)
class Replayed:
    """How a replay ended.

    Attributes:
        parameters_sha256: of the final parameters; None where it was stopped before.
        steps: of each rank that has data, how many it has done.
        folder: where the states of all ranks are, where it was stopped.
    """

    parameters_sha256: str | None
    steps: dict[int, int]
    folder: Path


@dataclass(frozen=True)
class Assignment:
    """What to replay: `run`, recorded in `source`; what it writes goes into `folder`. `threads` are
    those that each rank computed with; None: those of a simulation."""

    run: Run
    source: Path
    folder: Path
    ranks: int
    until: int | None
    threads: Sequence[int] | None


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
    if run.strategy.native:
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
    """What the process of the replay runs; here, so that a launcher can name it."""
    from orchestra.cluster import load_cluster
    from orchestra.engines.simulation.costs import OVERHEAD
    from orchestra.engines.simulation.halting import ALIKE, Halt, Halting
    from orchestra.engines.simulation.simulate import simulate
    from orchestra.trainer.order import read_order
    from orchestra.trainer.program import Session
    from orchestra.worker.interception import intercepted

    training = replace(
        assignment.run.training, trace_steps=0, record_order=False, tensorboard=False
    )
    run = replace(assignment.run, training=training)
    halt = Halt(
        assignment.until, roles_of(run.strategy, run.training.ranks).workers, assignment.folder
    )

    def rank_program(inner: Runtime) -> Any:
        inner.reporter.phase("set-up")
        order = read_order(assignment.source, inner.rank)
        halting = intercepted(inner, Halting(inner.rank, halt))
        session = Session(halting, run, run.strategy, assignment.folder, repeats=order)
        halt.sessions[inner.rank] = session
        session.train()
        return session.finish()

    cluster = load_cluster(f"lan_10gbit(nodes={assignment.ranks})", where="replay", folder=Path())
    outcome = simulate(
        rank_program, cluster, assignment.ranks, ALIKE, OVERHEAD, runtime.reporter,
        arithmetic=assignment.threads,
    )  # fmt: skip
    if outcome.bad_input is not None:
        return InputError(outcome.bad_input)
    if halt.reached:
        return Replayed(None, halt.conclude(), assignment.folder)
    if outcome.failure is not None:
        return RunFailed(outcome.failure)
    leader = next(report.leader for report in outcome.results if report.leader is not None)
    return Replayed(leader.parameters_sha256, halt.steps(), assignment.folder)
