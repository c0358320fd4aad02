"""The program of every rank: set up, train, agree, evaluate, report. Ignorant of the engine."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from orchestra.data.feed import Samples, epoch_samples, open_samples, open_shard
from orchestra.errors import InputError, RunFailed, nearest
from orchestra.exchange import start_together
from orchestra.optimizers.spec import OptimizerSpec
from orchestra.optimizers.state import restore
from orchestra.records.report import ChiefReport, Point, RankReport
from orchestra.records.tensorboard import Scalars, write_curve_events
from orchestra.strategies.base import ModelPart, Strategy
from orchestra.strategies.switch import phases
from orchestra.tasks.task import Task, evaluate, load_task
from orchestra.trainer.collective_checkpoints import CollectiveCheckpoints
from orchestra.trainer.curve import (
    EVALUATION_BATCH,
    curve,
    judged_ranks,
    judging_data,
    own_figures,
)
from orchestra.trainer.evaluation import (
    agree_on_buffers,
    all_cores,
    buffers_vector,
    signs_of_life,
)
from orchestra.trainer.gathering import Figures, Gathered, answer, hand_in
from orchestra.trainer.loop import Loop, Position, queue_of
from orchestra.trainer.order import Order, Recording, Repeating, write_order
from orchestra.trainer.parts import places_of, put_together, release
from orchestra.trainer.random_state import random_state, restore_random_state, undisturbed
from orchestra.trainer.recorder import Recorder, Totals
from orchestra.trainer.reports import rank_report
from orchestra.trainer.settings import Run, Training
from orchestra.trainer.speeds import measured_speeds, shares_of
from orchestra.trainer.trace import Trace
from orchestra.trainer.warm_up import warm_up
from orchestra.trainer.writing import save_state, writing
from orchestra.worker.batches import Batch, to_device
from orchestra.worker.interception import intercepted
from orchestra.worker.layout import FlatModel, Layout
from orchestra.worker.runtime import Runtime
from orchestra.worker.snapshots import Part, Snapshots
from orchestra.worker.worker import Measures, Worker


def train(runtime: Runtime, assignment: tuple[Run, Path]) -> RankReport:
    """Take this rank's part in a run; its records go into the run's folder."""
    run, folder = assignment
    assert isinstance(run.strategy, Strategy)
    runtime.reporter.phase("set-up")
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    session = Session(runtime, run, run.strategy, folder)
    try:
        session.train()
        return session.finish()
    except Exception:
        with contextlib.suppress(RunFailed):
            session.recorder.flush()  # what was measured until then is kept
        raise
    finally:
        session.keep_order()


class Session:
    """One rank's objects, for the length of a run; with `repeats`, of one that is repeated."""

    def __init__(
        self,
        runtime: Runtime,
        run: Run,
        strategy: Strategy[Any],
        folder: Path,
        repeats: Order | None = None,
    ) -> None:
        training = run.training
        windows = len(list(phases(strategy)))
        self.trace = Trace(runtime.transport.now, training.trace_steps, windows)
        self.order = Order()
        self.shares: tuple[float, ...] = ()
        self.engine = runtime  # as it was given: what is measured with it is not traced
        if repeats is not None:
            self.shares = tuple(repeats.shares)
            runtime = intercepted(runtime, Repeating(runtime.rank, repeats))
        elif training.record_order:
            runtime = intercepted(runtime, Recording(self.order))
        if training.trace_steps:
            runtime = intercepted(runtime, self.trace)
        self.runtime, self.run, self.strategy, self.folder = runtime, run, strategy, folder
        self.began = runtime.transport.now()
        self.setup: dict[str, float] = {}
        self.stopped = False
        self.roles = strategy.roles(training.ranks)
        runtime.seed(run.seed)
        self.task: Task = runtime.share(lambda: load_task(run.task))
        self.epoch_samples, self.budget = budget_of(self.task, training)
        module = self.task.model().to(_device(training, runtime))
        self._check_target(module)
        self.part = self._part_of(module)
        self.worker = _make_worker(runtime, run, self.task, module, self.part, self.budget)
        self.worker.set_workers(self.roles.workers)
        if training.work == "shared":
            self.worker.queue_of = functools.partial(queue_of, training, self.budget)
        runtime.seed(run.seed * runtime.ranks + runtime.rank + 1)
        self.samples = open_samples(self.task.train, run.seed, self.task.collate)
        self.position = Position()
        self.totals = Totals()
        self.checkpoints = CollectiveCheckpoints(self.worker, folder / "checkpoints")
        self._passed("task")
        self.state = self._start()
        self._passed("group")
        steps = self.position.steps
        self.scalars: Scalars | None = None
        if training.tensorboard:
            self.scalars = Scalars(folder, f"rank-{runtime.rank}", first=steps + 1)
        self.recorder = Recorder(self.worker, folder, self.totals, steps, self.scalars)

    def train(self) -> None:
        """From the warm-up to the agreement on the final parameters."""
        self._warm_up()
        self._measure()
        loop = Loop(
            self.worker,
            self.strategy,
            self.state,
            self.run.training,
            self._samples,
            epoch_samples=self.epoch_samples,
            budget=self.budget,
            position=self.position,
            recorder=self.recorder,
            trace=self.trace,
            checkpoint=self._take_checkpoint,
            measured=self.shares or None,
        )
        self.runtime.reporter.phase("training")
        start_together(self.worker, self.roles.chief)
        self.worker.snapshots.start_clock(self.runtime.transport.now() - self.totals.elapsed)
        self._passed("first_step")
        self.recorder.resume()
        self.trace.start()
        loop.run()
        self.trace.close()
        self.stopped = loop.stopped
        self.runtime.reporter.phase("leaving")
        self.strategy.stop(self.worker, self.state)
        loop.close()
        if not self.strategy.currently_synchronous(self.state):
            chief = self.strategy.current_roles(self.worker, self.state).chief
            agree_on_buffers(self.worker, self.totals.samples, chief)
        self.recorder.pause()

    def finish(self) -> RankReport:
        """Evaluate on the chief, write the parameters, and report."""
        worker, roles = self.worker, self.strategy.current_roles(self.worker, self.state)
        chief = roles.chief
        tolerant = roles.replicas > 0 or not self.strategy.currently_synchronous(self.state)
        self._conclude()
        held = hand_in(worker, chief, tolerant=tolerant)
        report = self._report()
        if self.scalars is not None:
            self.scalars.close()
        with signs_of_life(worker, worker.module, self.position.steps):
            if worker.rank != chief:
                answer(worker, chief, self._judge)
                return report
            gathered = Gathered(worker, held, tolerant=tolerant)
            nodes = gathered.judged(judged_ranks(gathered, self.run.seed), self._judge)
        worker.reporter.phase("evaluating")
        module = self._whole(gathered)
        with signs_of_life(worker, module, self.position.steps), all_cores():
            points: list[Point] = []
            final = len(worker.snapshots.due)
            if any(index < final for index in gathered.indices):
                model = worker if self.part is None else FlatModel(module)
                points = curve(model, self.task, gathered, nodes, below=final)
            gathered.close()
            dataset, figures = self._final_dataset(), dict[str, float]()
            if dataset is not None:
                figures = evaluate(self.task, module, dataset, EVALUATION_BATCH)
        if self.run.training.tensorboard:
            with writing(self.folder):
                write_curve_events(self.folder, points)
        chief_report = ChiefReport(
            final_loss=figures.pop("loss", self.totals.loss),
            metrics=figures,
            parameters_sha256=self._write_parameters(module),
            curve=points,
        )
        return replace(report, chief=chief_report)

    def _judge(self) -> Figures:
        """What this rank's own replica was worth at its snapshots."""
        self.worker.reporter.phase("evaluating")
        figures = own_figures(self.worker, self.task, self.worker.snapshots.parts)
        self.worker.reporter.phase("leaving")
        return figures

    def keep_order(self) -> None:
        """Write down what this rank could not foresee, if that was recorded."""
        if self.run.training.record_order:
            write_order(self.folder, self.runtime.rank, self.order)

    def _samples(self, shares: tuple[float, ...]) -> Samples:
        """What this rank reads where the ranks have these shares: all samples, or its shard."""
        sharding, rank = self.run.training.sharding, self.roles.part(self.runtime.rank)
        if sharding is None or not shares[rank]:
            return self.samples
        workers = [place for place, share in enumerate(shares) if share]
        return open_shard(
            self.task.train,
            self.run.seed,
            self.task.collate,
            sharding,
            [shares[worker] for worker in workers],
            workers.index(rank),
        )

    def _final_dataset(self) -> Dataset[Any] | None:
        """What the final parameters are judged on; one split where the task lacks the other."""
        test, validation = self.task.test, self.task.validation
        if self.run.judged_on == "validation":
            return validation
        return test if test is not None else validation

    def _passed(self, part: str) -> None:
        """The set-up has come to the end of `part`."""
        passed = self.runtime.transport.now() - self.began
        self.setup[part] = passed - sum(self.setup.values())

    def _report(self) -> RankReport:
        report = rank_report(
            self.worker,
            self.strategy.current_roles(self.worker, self.state),
            self.totals,
            steps=self.position.steps,
            setup=self.setup,
            stopped=self.stopped,
            threads=self.runtime.threads or torch.get_num_threads(),
        )
        timeline = self.trace.timeline(self.runtime.clock)
        return replace(report, timeline=timeline, shares=self.shares)

    def _write_parameters(self, module: nn.Module) -> str:
        """All parameters and buffers to `parameters.safetensors`; the hash of the parameters."""
        save_state(self.folder / "parameters.safetensors", module)
        return parameters_hash(module)

    def _check_target(self, module: nn.Module) -> None:
        """A run towards a metric that the task does not have would never arrive."""
        target, task = self.run.training.target, self.task
        if target is None or self.runtime.rank != self.roles.chief:
            return
        dataset = judging_data(task)
        if dataset is None:
            raise InputError("target: the task has neither validation nor test data to measure it")
        with undisturbed():
            known = evaluate(task, module, dataset, EVALUATION_BATCH)
        if target.metric not in known:
            hint = nearest(target.metric, known)
            raise InputError(f"target: the task has no metric {target.metric!r}; {hint}")

    def _warm_up(self) -> None:
        warms_up = self.runtime.warms_up and self.part is None
        if warms_up and self.worker.rank in self.roles.workers:
            warm_up(self.worker, self._first_samples)

    def _measure(self) -> None:
        """The weights of the ranks' parts, where they are to be measured and are not known yet."""
        if self.shares or not self.run.measures_shares:
            return
        speeds = self.engine.speeds
        if not speeds:
            speeds = measured_speeds(self.engine, self.worker, self._first_samples)
        self.shares = shares_of(speeds)
        self.order.shares = list(self.shares)

    def _first_samples(self) -> Batch:
        """A batch that training reads, too."""
        size = min(self.run.training.batch_size, self.epoch_samples)
        fresh = open_samples(self.task.train, self.run.seed, self.task.collate)
        return fresh.read(0, size)

    # Where each rank has a part of the model

    def _part_of(self, module: nn.Module) -> ModelPart | None:
        strategy, runtime = self.strategy, self.runtime
        if not strategy.divides_model:
            return None
        with undisturbed():
            device = next(module.parameters()).device
            batch = to_device(self._first_samples(), device)
            return strategy.part_of(
                module, lambda model: self.task.loss(model, batch), runtime.rank, runtime.ranks
            )

    def _conclude(self) -> None:
        """Each rank adds what it has of the final model to what it gives to the chief."""
        if self.part is not None:
            snapshots, buffers = self.worker.snapshots, buffers_vector(self.worker.buffers)
            snapshots.parts += snapshots.conclude("parameters", self.worker.parameters)
            if buffers is not None:
                snapshots.parts += snapshots.conclude("buffers", buffers)

    def _whole(self, gathered: Gathered) -> nn.Module:
        """The final model, on the chief."""
        if self.part is None:
            return self.worker.module
        self.state = None  # the optimizer makes room
        with undisturbed():
            self.runtime.seed(self.run.seed)
            module = self.task.model().to(self.worker.layout.device)
        for part in gathered.parts(len(self.worker.snapshots.due)):  # one at a time: they are large
            put_together(module, [part])
        return module

    # Checkpoints

    def _start(self) -> Any:
        saved = self.checkpoints.newest(self.roles.chief)
        if saved is None:
            return self.strategy.start(self.worker)
        restore(self.worker.parameters, saved["parameters"])
        for name, buffer in self.worker.buffers:
            restore(buffer, saved["buffers"][name])
        restore(self.position, saved["position"])
        self.order.first_step = self.position.steps
        restore(self.totals, saved["totals"])
        self.worker.measures = restore(Measures(), saved["measures"])
        self.worker.snapshots.parts = [Part(**part) for part in saved["snapshots"]]
        self.worker.snapshots.skip(self.position.consumed)
        self.shares = tuple(saved.get("shares", ()))
        self.worker.step.consumed = self.position.consumed
        self.worker.step.rates = tuple(saved.get("rates", ()))
        state = self.strategy.resume(self.worker, saved["strategy"])
        self.worker.rate_scale = saved["rate_scale"]
        restore_random_state(saved["random"])
        if self.runtime.rank == self.roles.workers[0]:
            step = self.position.steps
            self.runtime.reporter.notice(
                f"resumed from checkpoint {self.checkpoints.index}, step {step}"
            )
        return state

    def _take_checkpoint(self) -> None:
        """At a quiet point, all ranks together."""
        chief = self.strategy.current_roles(self.worker, self.state).chief
        self.checkpoints.take(self.held(), chief)

    def held(self) -> dict[str, Any]:
        """All that a run resumes from, but its settings."""
        worker = self.worker
        return {
            "parameters": worker.parameters,
            "buffers": dict(worker.buffers),
            "position": self.position,
            "totals": self.totals,
            "measures": worker.measures,
            "snapshots": worker.snapshots.parts,
            "strategy": self.state,
            "rate_scale": worker.rate_scale,
            "rates": worker.step.rates,
            "shares": self.shares,
            "random": random_state(),
        }


def parameters_hash(module: nn.Module) -> str:
    """SHA-256 over the names and values of the parameters, in the order of their names."""
    sha = hashlib.sha256()
    for name, parameter in sorted(module.named_parameters()):
        sha.update(name.encode())
        sha.update(parameter.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def budget_of(task: Task, training: Training) -> tuple[int, int]:
    """Samples of an epoch, and of the whole run."""
    if training.steps is not None:
        budget = training.steps * training.ranks * training.batch_size
        try:
            return epoch_samples(task.train), budget
        except InputError:
            return budget, budget
    assert training.epochs is not None
    samples = epoch_samples(task.train)
    return samples, samples * training.epochs


def _make_worker(
    runtime: Runtime, run: Run, task: Task, module: nn.Module, part: ModelPart | None, budget: int
) -> Worker:
    training = run.training
    names = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    if not names:
        raise InputError(f"task: {run.task}: its model has no parameters that are to be trained")
    places = None
    due = training.snapshots_due(budget, Layout.of_module(module).bytes)
    if part is not None:
        places = places_of(part, module)
        release(module, part.module)
    return Worker(
        runtime,
        module if part is None else part.module,
        OptimizerSpec.from_settings(training.optimizer, names),
        loss=task.loss,
        accumulation=training.accumulation,
        precision=training.precision,
        clip_norm=training.clip_norm,
        budget_ranks=training.ranks,
        bucket_bytes=int(training.bucket_megabytes * 1e6),
        overlap=training.overlap,
        snapshots=Snapshots(due, runtime.transport.now, places),
    )


def _device(training: Training, runtime: Runtime) -> torch.device:
    available = torch.cuda.is_available()
    if training.device == "cuda" and not available:
        raise InputError("device: cuda was asked for, but torch sees no GPU here; use cpu or auto")
    if training.device == "cpu" or not available:
        return torch.device("cpu")
    device = torch.device("cuda", runtime.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)  # random states and libraries refer to the current one
    return device
