"""A recorded run once more, in virtual time: the same answers, hence the same parameters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from orchestra.engines.processes.display import Display
from orchestra.engines.processes.launch import launch
from orchestra.engines.run_record import roles_of
from orchestra.errors import InputError, RunFailed
from orchestra.strategies.single import Single
from orchestra.trainer.settings import Run

if TYPE_CHECKING:
    from orchestra.trainer.program import Session
    from orchestra.worker.runtime import Reporter, Runtime, Work

STATES = 0
"""The number under which the states of the ranks are written."""


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
class Errand:
    """What to replay: `run`, recorded in `source`; what it writes goes into `folder`."""

    run: Run
    source: Path
    folder: Path
    ranks: int
    until: int | None


def replay_run(
    run: Run, source: Path, folder: Path, *, until: int | None = None, quiet: bool = False
) -> Replayed:
    """Repeat `run` as the orders in `source` say, to its end or to step `until` of its workers.

    Raises:
        InputError: the run was not recorded, or not as a whole.
        RunFailed: it failed, now as perhaps then.
    """
    if "native" in repr(run.strategy):
        raise InputError(
            "the collectives of torch.distributed add in an order of their own, so that a run with "
            "native cannot be replayed exactly; record one with a schedule, such as ring"
        )
    ranks = len(roles_of(run).shares)
    errand = Errand(run, source.absolute(), folder.absolute(), ranks, until)
    with Display(run, Single().roles(1), quiet=quiet) as display:
        launched = launch(program, errand, 1, patience=3600.0, on_event=display.on_event)
    if launched.stopped:
        raise KeyboardInterrupt
    (result,) = launched.results
    if isinstance(result, Exception):
        raise result
    return cast("Replayed", result)


def program(runtime: Runtime, errand: Errand) -> Replayed | Exception:
    """What the process of the replay runs; here, so that a launcher can name it."""
    from orchestra.cluster import load_cluster
    from orchestra.engines.simulation.assumed import OVERHEAD
    from orchestra.engines.simulation.simulate import simulate
    from orchestra.trainer.order import read_order
    from orchestra.trainer.program import Session

    training = replace(errand.run.training, trace_steps=0, record_order=False, tensorboard=False)
    run = replace(errand.run, training=training)
    halt = Halt(errand.until, roles_of(run).workers, errand.folder)

    def rank_program(inner: Runtime) -> Any:
        inner.reporter.phase("set-up")
        order = read_order(errand.source, inner.rank)
        halting = replace(inner, reporter=_Halting(inner.rank, inner.reporter, halt))
        session = Session(halting, run, run.strategy, errand.folder, repeats=order)
        halt.sessions[inner.rank] = session
        session.train()
        return session.finish()

    cluster = load_cluster(f"lan_10gbit(nodes={errand.ranks})", where="replay", folder=Path())
    outcome = simulate(rank_program, cluster, errand.ranks, _Alike(), OVERHEAD, runtime.reporter)
    if outcome.bad_input is not None:
        return InputError(outcome.bad_input)
    if halt.reached:
        return Replayed(None, halt.conclude(), errand.folder)
    if outcome.failure is not None:
        return RunFailed(outcome.failure)
    chief = next(report.chief for report in outcome.results if report.chief is not None)
    return Replayed(chief.parameters_sha256, halt.steps(), errand.folder)


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
        from orchestra.trainer import checkpoints

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
        from orchestra.optimizers.state import capture
        from orchestra.trainer import checkpoints

        session = self.sessions[rank]
        state = session.held() | {"gradients": session.worker.gradients.vector}
        name = checkpoints.rank_file(rank)
        self._digests[name] = checkpoints.write_rank(self._folder, STATES, rank, capture(state))


class _Alike:
    """Costs of a replay, in which time does not matter: all work takes the same."""

    flops = 1e9

    def seconds(self, work: Work) -> float:
        return 1e-3

    def ready(self, slot: int) -> float:
        return 0.5


@dataclass
class _Halting:
    """A reporter that tells `halt` how far its rank is."""

    rank: int
    inner: Reporter
    halt: Halt

    def progress(
        self,
        *,
        step: int,
        samples: int,
        loss: float | None = None,
        fraction: float | None = None,
    ) -> None:
        self.inner.progress(step=step, samples=samples, loss=loss, fraction=fraction)
        self.halt.passed(self.rank, step)

    def phase(self, name: str) -> None:
        self.inner.phase(name)

    def waiting(self, for_ranks: tuple[int, ...], what: str) -> None:
        self.inner.waiting(for_ranks, what)

    def expendable(self, yes: bool) -> None:
        self.inner.expendable(yes)

    def notice(self, text: str) -> None:
        self.inner.notice(text)

    def stop_requested(self) -> bool:
        return self.inner.stop_requested()
