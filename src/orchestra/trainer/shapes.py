"""The program of a rank in a run of shapes: the same loop and strategy, and only time to tell.

Nothing is read, evaluated, written or put into checkpoints; of snapshots it is known when they are
taken. All ranks share one model, so that nothing is agreed on before the first step, either.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from orchestra.errors import InputError
from orchestra.exchange import start_together
from orchestra.optimizers.spec import OptimizerSpec
from orchestra.records.report import ChiefReport, RankReport
from orchestra.strategies.base import Strategy, roles_of
from orchestra.tasks.task import Task, load_task
from orchestra.trainer.curve import moments
from orchestra.trainer.evaluation import agree_on_buffers
from orchestra.trainer.gathering import hand_in
from orchestra.trainer.loop import Loop, Position, queue_of
from orchestra.trainer.program import budget_of
from orchestra.trainer.recorder import Recorder, Spent, Totals
from orchestra.trainer.reports import rank_report
from orchestra.trainer.settings import Run, Training
from orchestra.trainer.speeds import shares_of
from orchestra.trainer.trace import Trace
from orchestra.worker.runtime import Runtime
from orchestra.worker.shape_worker import ShapeWorker, SharedShapes
from orchestra.worker.snapshots import Part, Snapshots
from orchestra.worker.worker import Worker


@dataclass(frozen=True)
class Common:
    """What all ranks of a run of shapes share; `parts` are their parts of snapshots."""

    training: Training
    shapes: SharedShapes
    optimizer: OptimizerSpec
    epoch_samples: int
    budget: int
    parts: list[Part] = field(default_factory=list)


def common(run: Run) -> Common:
    """The model of the task on the meta device; its data tell only how many they are.

    Raises:
        InputError: the model cannot be made there.
    """
    task = load_task(run.task)
    module = meta_model(task)
    names = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    spec = OptimizerSpec.from_settings(run.training.optimizer, names)
    epoch_samples, budget = budget_of(task, run.training)
    ranks = len(roles_of(run.strategy, run.training.ranks).shares)
    training = replace(run.training, sharding=None)  # which samples they are changes nothing
    return Common(training, SharedShapes(module, spec, ranks), spec, epoch_samples, budget)


def meta_model(task: Task) -> torch.nn.Module:
    """The model of `task`, without values."""
    try:
        with torch.device("meta"):
            module = task.model()
        return module.to("meta")
    except (NotImplementedError, RuntimeError) as error:
        raise InputError(
            f"tensors: shapes: the model cannot be made without values ({error}); set tensors to "
            "real"
        ) from error


def train_shapes(runtime: Runtime, run: Run, shared: Common) -> RankReport:
    """Take this rank's part in the time that a run takes."""
    session = ShapeSession(runtime, run, shared)
    session.train()
    return session.report()


class ShapeSession:
    """One rank's objects, for the length of a run."""

    def __init__(self, runtime: Runtime, run: Run, shared: Common) -> None:
        training = shared.training
        assert isinstance(run.strategy, Strategy)
        self.runtime, self.strategy = runtime, run.strategy
        self.roles = roles_of(run.strategy, training.ranks)
        self.worker = ShapeWorker(
            runtime,
            shared.shapes,
            shared.optimizer,
            accumulation=training.accumulation,
            budget_ranks=training.ranks,
            bucket_bytes=int(training.bucket_megabytes * 1e6),
            overlap=training.overlap,
            snapshots=Snapshots(
                training.snapshots_due(shared.budget, shared.shapes.layout.bytes),
                runtime.transport.now,
            ),
        )
        self._parts = shared.parts
        self.worker.set_workers(self.roles.workers)
        if training.work == "shared":
            self.worker.queue_of = functools.partial(queue_of, training, shared.budget)
        self.position, self.totals = Position(), Totals()
        self.stopped = False
        runtime.reporter.phase("set-up")
        began = runtime.transport.now()
        self.state = run.strategy.start(self.worker)
        self.setup = {"task": 0.0, "group": runtime.transport.now() - began}
        self._recorder = Sums(self.worker, self.totals)
        self._trace = Trace(runtime.transport.now, 0)
        self._shares = shares_of(runtime.speeds) if run.measures_shares else ()
        self._loop: Callable[[], Loop] = lambda: Loop(
            self.worker,
            self.strategy,
            self.state,
            training,
            lambda shares: Places(),
            epoch_samples=shared.epoch_samples,
            budget=shared.budget,
            position=self.position,
            recorder=self._recorder,
            trace=self._trace,
            checkpoint=_nothing,
            measured=self._shares or None,
        )

    def train(self) -> None:
        """From the first step to the agreement on the final parameters."""
        runtime, worker, strategy = self.runtime, self.worker, self.strategy
        loop = self._loop()
        runtime.reporter.phase("training")
        began = runtime.transport.now()
        start_together(worker, self.roles.chief)
        self.setup["first_step"] = runtime.transport.now() - began
        worker.agrees = False
        worker.snapshots.start_clock(runtime.transport.now())
        self._recorder.resume()
        loop.run()
        self.stopped = loop.stopped
        runtime.reporter.phase("leaving")
        strategy.stop(worker, self.state)
        loop.close()
        if not strategy.currently_synchronous(self.state):
            chief = strategy.current_roles(worker, self.state).chief
            agree_on_buffers(worker, self.totals.samples, chief)
        self._recorder.pause()
        tolerant = not strategy.currently_synchronous(self.state)
        chief = strategy.current_roles(worker, self.state).chief
        self._parts += worker.snapshots.parts
        worker.snapshots.parts = []
        hand_in(worker, chief, tolerant=tolerant)  # others may still be at work meanwhile

    def report(self) -> RankReport:
        """What this rank has to say."""
        roles = self.strategy.current_roles(self.worker, self.state)
        report = rank_report(
            self.worker,
            roles,
            self.totals,
            steps=self.position.steps,
            setup=self.setup,
            stopped=self.stopped,
            threads=self.runtime.threads or 1,
        )
        chief = self._chief_report() if self.worker.rank == roles.chief else None
        return replace(report, chief=chief, shares=self._shares)

    def _chief_report(self) -> ChiefReport:
        """When the snapshots were taken, and nothing else; all have handed in their parts."""
        points = moments(self._parts, self.worker.layout.size)
        return ChiefReport(None, {}, None, points)


class Places:
    """Samples that nobody looks at."""

    def read(self, start: int, stop: int) -> range:
        """Their places."""
        return range(start, stop)


class Sums(Recorder):
    """Sums over the run, and nothing of single steps."""

    def __init__(self, worker: Worker, totals: Totals) -> None:
        self.totals = totals
        self._worker = worker
        self._started_at = 0.0
        self._spent_before = Spent()

    def step(self, number: int) -> None:
        """Count its samples."""
        self.totals.samples += self._worker.step.samples

    def flush(self) -> None:
        """There is nothing to be written."""


def _nothing() -> Any:
    return None
