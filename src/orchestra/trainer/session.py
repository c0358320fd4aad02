"""One rank's objects for a run: set up, train, agree, evaluate, report; checkpoints on the way."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from orchestra.coordinator.batches import BatchQueue
from orchestra.data import shares_of
from orchestra.data.feed import Samples, open_samples, open_shard
from orchestra.errors import GroupChanged, InputError, PeerLost, RunFailed
from orchestra.exchange import start_together
from orchestra.optimizers.settings import rate_factor
from orchestra.optimizers.state import (
    random_state,
    require_alike,
    restore,
    restore_random_state,
    undisturbed,
)
from orchestra.records.exports import Scalars, write_curve_events
from orchestra.records.files import steps_file, steps_files
from orchestra.records.report import LeaderReport, Membership, Point, RankReport, Regrouping
from orchestra.settings.base import REQUIRED, Mismatch, from_plain, setting
from orchestra.strategies.base import ModelPart, Roles, Strategy, roles_of
from orchestra.strategies.phases import Phases
from orchestra.strategies.switch import flattened_phases
from orchestra.strategies.traits import Partition
from orchestra.tasks.task import Task, evaluate, load_task
from orchestra.trainer import checkpoints, curve, setup
from orchestra.trainer.balancing import Balancer, BalanceState
from orchestra.trainer.checkpoint_files import LOST, Manifest
from orchestra.trainer.loop import NONFINITE, Loop, Position, queue_of
from orchestra.trainer.members import MemberFiles, handed_over
from orchestra.trainer.membership import refusal_to_resume
from orchestra.trainer.recorder import Order, Recorder, Recording, Repeating, Totals, keep_first
from orchestra.trainer.settings import Run, evenly_due
from orchestra.trainer.setup import in_files, kept_bytes, sizes_of
from orchestra.trainer.trace import Trace
from orchestra.worker.batches import Batch, to_device
from orchestra.worker.interception import intercepted
from orchestra.worker.layout import FlatModel, Share
from orchestra.worker.runtime import RankActivity, Runtime
from orchestra.worker.snapshots import Contribution, ModelRange, buffers_vector
from orchestra.worker.worker import Measures, Worker


@dataclass(frozen=True)
class Saved:
    """The state that a rank goes on from.

    It is the content of the rank's file in a checkpoint, or, on another number of ranks, what
    `Session._read_members` makes of the files of all members.
    """

    parameters: Tensor
    buffers: dict[str, Tensor]
    strategy: Any  # its state, as `capture` gives it
    random: dict[str, Any]
    position: Position
    totals: Totals
    measures: Measures
    snapshots: list[Contribution]
    rates: tuple[float, ...]
    shares: tuple[float, ...]
    rate_scale: float = setting(REQUIRED, "of the learning rates", low=0, high=1e9)
    balance: BalanceState | None = None
    handed: Any = None  # for another number of ranks; see `handed_over`
    moments: Any = None  # by parameter, where the checkpoint is of another number of ranks


@dataclass(frozen=True)
class Resumption:
    """What a rank has read of a checkpoint that it can go on from."""

    manifest: Manifest
    saved: Saved
    steps: Mapping[int, int]  # of each rank, by the number that the run's files know it by

    @property
    def is_of_others(self) -> bool:
        """True if the state was put together from the files of all members."""
        return self.saved.moments is not None


def role_of(rank: int, roles: Roles) -> str:
    """Return the role of `rank` in words."""
    named = {"worker": roles.workers, "server": roles.servers}
    return " and ".join(name for name, ranks in named.items() if rank in ranks) or "none"


class Session(Loop):
    """One rank's objects in one group of ranks; with `repeats`, of a run that is repeated."""

    samples: Samples

    def __init__(
        self,
        runtime: Runtime,
        run: Run,
        strategy: Strategy,
        folder: Path,
        repeats: Order | None = None,
    ) -> None:
        self.shapes_run: setup.ShapesRun | None = None
        if run.training.tensors == "shapes":
            self.shapes_run = runtime.share(lambda: setup.ShapesRun(run))
            run = self.shapes_run.run
        training = run.training
        windows = len(flattened_phases(strategy))
        # By the engine's clock: a replay has no timeline, so that these looks at the clock must not
        # be in the record of the order.
        self.trace = Trace(runtime.transport.now, training.trace_steps, windows)
        self.order = Order()
        # The engine's own: what is measured with it is neither traced nor recorded.
        self.engine = runtime
        self.run, self.training = run, training
        if repeats is not None:
            self.shares = tuple(repeats.shares)
        self.runtime = runtime = self._intercepted(repeats)
        self.strategy, self.folder = strategy, folder
        self.began = runtime.transport.now()
        self.setup: dict[str, float] = {}
        self.regroupings: list[Regrouping] = []
        self.speeds: tuple[float, ...] = ()
        self.roles = self._first_roles()
        self.held: ModelPart | Share | None = None  # of the model; None: all of it
        self._begin_anew()
        self._passed("task")
        try:
            self._join()
        except Exception:
            self.close()
            raise
        self._passed("group")
        self.scalars: Scalars | None = None
        if training.tensorboard:
            self.scalars = Scalars(folder, f"rank-{runtime.slot}", first=self.position.steps + 1)
        path = None if self.shapes_run else steps_file(folder, runtime.slot)
        self.recorder = Recorder(
            self.worker, path, self.totals, self.position.steps, self.scalars, kept=self.kept_steps
        )
        self.worker.observe = self.recorder.observe

    def _first_roles(self) -> Roles:
        return roles_of(self.strategy, self.training.ranks)

    def _join(self) -> None:
        """Join the others, from the newest checkpoint that fits if there is one. Collective."""
        leader, below = self.roles.leader, None
        while self.shapes_run is None:
            found = self.checkpoints.newest(leader, self._read_checkpoint, below)
            if found is None:
                break
            below = self.checkpoints.index
            self._adopt(found)
            try:
                self._resume(found.saved)
            except Mismatch as mismatch:  # on every rank
                if str(mismatch):
                    self.checkpoints.refuse(below, mismatch)
                self.checkpoints.require_own(below)
                self._begin_anew()
                continue
            except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
                raise InputError(
                    f"{self.folder}: checkpoint {below} does not fit this run ({error!r}); remove "
                    "its folder to go on from the checkpoint before it"
                ) from error
            if self.runtime.rank == self.roles.workers[0]:
                ranks, text = self.training.ranks, f", step {self.position.steps}"
                if found.is_of_others:
                    before = found.manifest.ranks
                    text = f" of {before} rank{'s' * (before > 1)}, on {ranks}{text}"
                self.runtime.reporter.notice(f"resumed from checkpoint {below}{text}")
            return
        self.phases = self._join_at_the_beginning()

    def _begin_anew(self) -> None:
        """Make what a run begins with, which nothing of an earlier attempt has touched."""
        self.worker = self._make_worker()
        self.worker.set_workers(self.roles.workers)
        # Before anything of it is sent, so that the rank is named whose own loss it is.
        self.worker.check_loss = lambda loss: self._check_loss(loss, self.position.steps + 1)
        self.position, self.totals = Position(), Totals()
        self.kept_steps: int | None = 0  # in this rank's file; None: it is not known
        self.begun_on = self.training.ranks
        first = Membership(self.training.ranks, len(self.roles.workers), 0)
        self.history: tuple[Membership, ...] = (first,)
        self._deal_out()
        folder = self.folder / "checkpoints"
        self.checkpoints = checkpoints.CollectiveCheckpoints(self.worker, folder)
        if self.run.balancing is not None:
            self.balancer = Balancer(self.run.balancing, self.worker)

    def _deal_out(self) -> None:
        """Let workers that go at their own pace take batches of the run's budget, and compute them
        in parts that are no larger than those on as many ranks as the run had at first."""
        self.worker.accumulation = self.training.micro_batches(self.begun_on)
        if self.training.work == "shared":
            self.worker.queue_of = self._queue_of

    def _queue_of(self, done: int, shares: tuple[float, ...]) -> BatchQueue:
        """Return the queue of what is left after `done` samples, for ranks with these shares."""
        given = self.training, self.budget, self.begun_on, self.position.owed
        return queue_of(*given, done, shares)

    def _intercepted(self, repeats: Order | None) -> Runtime:
        """Return the engine's runtime, whose interceptors record, repeat or trace this run."""
        runtime = self.engine
        if repeats is not None:
            runtime = intercepted(runtime, Repeating(runtime.rank, repeats))
        elif self.training.record_order:
            runtime = intercepted(runtime, Recording(self.order))
        if self.training.trace_steps:
            runtime = intercepted(runtime, self.trace)
        return runtime

    def begin(self) -> None:
        """Do what comes before the first step: the warm-up, and the start of the stopwatch."""
        self._warm_up()
        self._start_together()

    def _start_together(self) -> None:
        """Start the stopwatch, as close together with the others as can be. Collective."""
        worker, reporter = self.worker, self.runtime.reporter
        if not self.shares and self.run.measures_shares:
            self.speeds = self.engine.speeds
            if not self.speeds:
                self.speeds = setup.measured_speeds(self.engine, worker, self._first_samples)
            self.shares = shares_of(self.speeds)
            self.order.shares = list(self.shares)
        self._begin_phase()
        start_together(worker, self.roles.leader)
        reporter.activity(
            RankActivity.TRAINING
        )  # from now on the loss of a rank may be none of the others'
        worker.parameters_equal = False
        # A resumed run goes on at the seconds of its checkpoint.
        worker.snapshots.started = self.runtime.transport.now() - self.totals.elapsed
        self._passed("first_step")
        self.recorder.resume()
        self.trace.start()

    def _warm_up(self) -> None:
        """Compute once, so that no step has the costs of a first one."""
        worker = self.worker
        traits = self.strategy.traits(self.training.work)
        footprint = traits.memory(worker.rank, self.training.ranks)
        # A warm-up has a copy of the whole, with its gradients.
        warms_up = self.runtime.warms_up and not self.in_parts and not footprint.buckets_in_flight
        # Before the stopwatch: lazy imports and first allocations are no strategy's.
        if warms_up and worker.rank in self.roles.workers:
            setup.warm_up(worker, self._first_samples, footprint.optimizer)

    def train(self) -> None:
        """Train to the agreement on the final parameters."""
        self._train_to_end()
        self.trace.close()
        self.runtime.reporter.activity(RankActivity.LEAVING)
        self.phases.finish()
        if not self.phases.traits.lockstep:
            leader = self.phases.roles.leader
            curve.agree_on_buffers(self.worker, self.totals.samples, leader)
        self.recorder.pause()

    def flush_records(self) -> None:
        """Bring what was measured so far to disk, unless there is no room."""
        with contextlib.suppress(RunFailed):
            self.recorder.flush()

    def in_next_group(self, error: PeerLost | GroupChanged) -> Session:
        """Return the session that goes on in another group of ranks. Raises `error` where the run
        cannot."""
        raise error

    def _is_to_stop(self, *, complete: bool, saved: bool) -> bool:
        return True

    def finish(self) -> RankReport:
        """Evaluate on the leader, write the parameters, and report."""
        worker, roles = self.worker, self.phases.roles
        lockstep = self.phases.traits.lockstep
        tolerant = roles.replicas > 0 or not lockstep
        self._add_final_parts()
        report = self._report(roles)
        if self.scalars is not None:
            self.scalars.close()
        with curve.signs_of_life(worker, worker.module, self.position.steps):
            if worker.rank != roles.leader:
                curve.hand_in(worker, roles.leader, self._own_metrics)
                return report
            gathered = curve.Gathered(worker, tolerant=tolerant)
            if self.shapes_run is not None:
                points = curve.moments(self.shapes_run.parts, worker.layout.size)
                return replace(report, leader=LeaderReport(None, {}, None, points))
            nodes = gathered.evaluated(self.run.seed, self._own_metrics)
        worker.reporter.activity(RankActivity.EVALUATING)
        return replace(report, leader=self._evaluate(gathered, nodes))

    def _add_final_parts(self) -> None:
        """Add what each rank has of the final model to what it gives to the leader."""
        snapshots = self.worker.snapshots
        if self.shapes_run is not None:
            self.shapes_run.parts += snapshots.parts
            snapshots.parts = []
        elif self.in_parts:
            buffers = buffers_vector(self.worker.buffers)
            snapshots.parts += snapshots.conclude("parameters", self.worker.parameters)
            if buffers is not None:
                snapshots.parts += snapshots.conclude("buffers", buffers)

    def _evaluate(
        self, gathered: curve.Gathered, nodes: dict[int, curve.SnapshotMetrics]
    ) -> LeaderReport:
        """Evaluate snapshots and final parameters, and write the latter; on the leader."""
        worker, task, module = self.worker, self.task, self._whole(gathered)
        with curve.signs_of_life(worker, module, self.position.steps), curve.all_cores():
            # Snapshots have the indices before `final`, and the final model's parts have that.
            points: list[Point] = []
            final = len(worker.snapshots.due)
            if any(index < final for index in gathered.indices):
                model = FlatModel(module) if self.in_parts else worker
                points = curve.points_of(model, task, gathered, nodes, below=final)
            gathered.close()
            figures: dict[str, float] = {}
            dataset = task.test if self.run.judged_on == "test" else None
            dataset = task.validation if dataset is None else dataset
            if dataset is not None:
                figures = evaluate(task, module, dataset, curve.EVALUATION_BATCH)
        if self.training.tensorboard:
            with checkpoints.writing(self.folder):
                write_curve_events(self.folder, points)
        checkpoints.save_state(self.folder / "parameters.safetensors", module)
        final_loss = figures.pop("loss", self.totals.loss)
        return LeaderReport(final_loss, figures, checkpoints.parameters_hash(module), points)

    def _whole(self, gathered: curve.Gathered) -> nn.Module:
        """Return the final model, on the leader."""
        if not self.in_parts:
            return self.worker.module
        del self.phases  # the optimizer makes room
        with undisturbed():
            # No rank has the whole model: it is made again by the seed, and filled.
            self.runtime.seed(self.run.seed)
            module = self._build(self.worker.layout.device)
        for part in gathered.parts(len(self.worker.snapshots.due)):  # one at a time: they are large
            curve.put_together(module, part)
        return module

    def _own_metrics(self) -> curve.SnapshotMetrics:
        """Evaluate this rank's own replica at its snapshots."""
        self.worker.reporter.activity(RankActivity.EVALUATING)
        metrics = curve.own_metrics(self.worker, self.task, self.worker.snapshots.parts)
        self.worker.reporter.activity(RankActivity.LEAVING)
        return metrics

    def _report(self, roles: Roles) -> RankReport:
        worker, totals, measures = self.worker, self.totals, self.worker.measures
        shapes = self.shapes_run
        sizes = shapes.sizes if shapes else sizes_of(worker.module, worker.optimizer)
        first = worker.rank == self.roles.workers[0]  # the one to tell of the changes of batches
        seconds = vars(totals.spent).copy()
        bytes_sent = seconds.pop("bytes_sent")
        staleness = sorted(measures.staleness.items(), key=lambda item: int(item[0]))
        return RankReport(
            rank=self.runtime.slot,
            role="worker" if worker.rank in roles.workers else "server",
            steps=self.position.steps,
            samples=totals.samples,
            setup=self.setup,
            train_seconds=totals.elapsed,
            seconds=seconds,
            bytes_sent=bytes_sent,
            bytes_estimated=measures.native_bytes > 0,
            staleness=dict(staleness),
            dropped=measures.dropped,
            peak_buffer_bytes=measures.peak_buffer_bytes,
            switched_at_step=measures.switched_at_step,
            switched_at_sample=measures.switched_at_sample,
            decisions=measures.decisions,
            regroupings=self.regroupings,
            consumed=self.position.consumed,
            stopped=self.stopped,
            threads=self.runtime.threads or torch.get_num_threads(),
            timeline=self.trace.timeline(self.runtime.clock),
            memory=+kept_bytes(self.run, worker.rank, sizes, worker.layout),
            peak_memory_bytes=self.runtime.peak_memory(),
            shares=self.shares,
            batches=self.balancer.state.changes if self.balancer and first else [],
            node=self.runtime.node,
            counters=tuple(self.recorder.series.points),
            history=self.history,
            begun_on=self.begun_on if self.training.resized_batch == "kept" else None,
            speeds=self.speeds,
        )

    # Set-up

    def _make_worker(self) -> Worker:
        """Load the task and make its model, or take that which all ranks share."""
        runtime, run, training = self.runtime, self.run, self.training
        # The same initial parameters on all ranks; further down each rank gets a stream of its own,
        # for dropout and the like.
        runtime.seed(run.seed)
        self.samples = setup.Unread()
        if self.shapes_run is not None:
            self.epoch_samples, self.budget = setup.budget_of(self.shapes_run.task, training)
            return self.shapes_run.worker(runtime, self.budget)
        self.task: Task = self._load_task()
        self.epoch_samples, self.budget = setup.budget_of(self.task, training)
        module = self._build(setup.device_of(training, runtime))
        self._check_target(module)
        self.held = self._place(module)
        self.ranges: Sequence[ModelRange] = ()  # of a stage, in the whole model
        if isinstance(self.held, ModelPart):
            self.ranges = setup.stage_ranges(self.held, module)
        worker = setup.make_worker(runtime, run, self.task, module, self.held, self.budget)
        runtime.seed(run.seed * runtime.ranks + runtime.rank + 1)
        self.samples = open_samples(self.task.train, run.seed, self.task.collate)
        return worker

    def _load_task(self) -> Task:
        task: Task = self.runtime.share(lambda: load_task(self.run.task))
        return task

    def _build(self, device: torch.device) -> nn.Module:
        """Make the whole model; in files, where ranks have no room for it."""
        sharded = self.strategy.traits().partition is Partition.SHARDED
        with in_files(self.folder) if sharded else contextlib.nullcontext():
            return self.task.model().to(device)

    @property
    def in_parts(self) -> bool:
        """True if this rank has a part or shard of the model; the leader puts it together."""
        return self.held is not None

    def _check_target(self, module: nn.Module) -> None:
        """Refuse a run towards a metric that the task does not have: it would never arrive."""
        target, task = self.training.target, self.task
        if target is None or self.runtime.rank != self.roles.leader:
            return
        dataset = curve.evaluation_data(task)
        if dataset is None:
            raise InputError("target: the task has neither validation nor test data to measure it")
        curve.require_metric(target.metric, task, module, dataset)

    def _place(self, module: nn.Module) -> ModelPart | Share | None:
        """Return what this rank holds of `module`; None if it holds all of it."""

        def loss_of(model: nn.Module) -> Tensor:
            batch = to_device(self._first_samples(), next(module.parameters()).device)
            return self.task.loss(model, batch)

        with undisturbed():
            return self.strategy.place(module, loss_of, self.runtime.rank, self.runtime.ranks)

    def _first_samples(self) -> Batch:
        """Read a batch that training reads, too."""
        size = min(self.training.batch_size, self.epoch_samples)
        # Of a reader of its own, so that the run's keeps its place in a stream.
        return open_samples(self.task.train, self.run.seed, self.task.collate).read(0, size)

    def _samples(self, shares: tuple[float, ...]) -> Samples:
        sharding, rank = self.training.sharding, self.roles.part(self.runtime.rank)
        if sharding is None or not shares[rank]:
            return self.samples
        workers = [place for place, share in enumerate(shares) if share]
        weights, task = [shares[worker] for worker in workers], self.task
        index = workers.index(rank)
        return open_shard(task.train, self.run.seed, task.collate, sharding, weights, index)

    def _passed(self, part: str) -> None:
        """Note that the set-up has come to the end of `part`."""
        self.setup[part] = self.runtime.transport.now() - self.began - sum(self.setup.values())

    # Checkpoints

    def _join_at_the_beginning(self) -> Phases:
        return Phases(self.strategy, self.worker)

    def _read_checkpoint(self, index: int, manifest: Manifest) -> Resumption:
        """Return what this rank goes on from in checkpoint `index`; raise an exception if it does
        not fit the run. The strategy's state is not looked at. `_adopt` puts it into effect."""
        worker, budget = self.worker, manifest.budget
        if manifest.ranks == self.training.ranks and manifest.each_can_resume:
            saved = self.checkpoints.own(index)
        else:
            saved = self._read_members(index, manifest)
        found: Saved = from_plain(Saved, saved)
        require_alike(worker.parameters, found.parameters, "parameters")
        require_alike(dict(worker.buffers), found.buffers, "buffers")
        position, last = found.position, len(evenly_due(budget, manifest.snapshots))
        for name, value, most in (
            ("position: steps", position.steps, budget),
            ("position: consumed", position.consumed, budget),
            ("position: plan_start", position.plan_start, position.consumed),
            *(("snapshots: index", part.index, last) for part in found.snapshots),
        ):
            if not 0 <= value <= most:
                raise Mismatch(f"{name}: {value} is not from 0 to {most}")
        with undisturbed():
            restore_random_state(found.random)
        steps = manifest.steps_by_slot(self.folder / "checkpoints", index)
        return Resumption(manifest, found, steps)

    def _adopt(self, found: Resumption) -> None:
        """Go on with the budget, batch, history and records of the run in a checkpoint."""
        manifest, saved = found.manifest, found.saved
        self.budget, self.begun_on = manifest.budget, manifest.begun_on
        self.history = manifest.history
        self.worker.snapshots.due = tuple(evenly_due(self.budget, manifest.snapshots))
        self._deal_out()
        if found.is_of_others:
            workers = len(self._roles_in(manifest).workers)
            index = self.checkpoints.index
            self.history += (Membership(self.training.ranks, workers, manifest.consumed, index),)
            self._resize_batch()
            # A phase that begins may draw from the streams before `_resume` restores them.
            restore_random_state(saved.random)
        self._truncate_records(found.steps, saved.position.steps)

    def _roles_in(self, manifest: Manifest) -> Roles:
        """Return the roles in the phase of the checkpoint, on this number of ranks."""
        strategy = flattened_phases(self.strategy)[manifest.phase]
        return roles_of(strategy, self.training.ranks)

    def _truncate_records(self, known: Mapping[int, int], steps: int) -> None:
        """Note up to where the records of this rank are right, which goes on after `steps` steps.
        The first rank truncates the records of departed ranks there. `known` are the steps of each
        rank, by the numbers of the files."""
        runtime = self.runtime
        self.kept_steps = known.get(runtime.slot)
        if runtime.rank == 0:
            for slot, path in steps_files(self.folder).items():
                if slot not in (runtime.members or range(runtime.ranks)):
                    keep_first(path, known.get(slot, steps))

    def _read_members(self, index: int, manifest: Manifest) -> dict[str, Any]:
        """Return the state from which this rank goes on in a run of another number of ranks."""
        worker, runtime = self.worker, self.runtime
        if (why := refusal_to_resume(self.run, manifest)) is not None:
            raise InputError(why)
        members = MemberFiles(self.folder / "checkpoints", index, manifest)
        roles = self._roles_in(manifest)
        assigned = members.assigned(runtime.rank, runtime.ranks)
        parts = {rank: members.files[rank].unpacked("snapshots") for rank in assigned}
        self.checkpoints.read_snapshots(parts, index)
        named, elementwise = worker.named_parameters(), worker.optimizer.elementwise
        parameters, tree = torch.zeros_like(worker.parameters), members.first.tree
        members.fill(parameters, self._ranges())
        # A stream of its own, which has not been used before.
        text = f"{self.run.seed} {runtime.ranks} {runtime.rank} {manifest.consumed}"
        with undisturbed():
            runtime.seed(random.Random(text).getrandbits(62))
            streams = random_state()
        return {
            "parameters": parameters,
            "buffers": members.buffers(worker.buffers),
            "strategy": members.state(),
            "random": streams,
            **members.figures(runtime.rank, roles),
            "snapshots": [part for own in parts.values() for part in own],
            "rates": tree["rates"],
            "rate_scale": tree["rate_scale"] * self._resizing_rate(manifest.begun_on),
            "shares": [],
            "moments": members.moments(named, elementwise=elementwise),
        }

    def _resizing_rate(self, begun_on: int) -> float:
        """Return the factor of the learning rate for the samples of a step on this number of ranks,
        where they were those of `begun_on`."""
        training = self.training
        if training.resized_batch == "kept":
            return 1.0
        return rate_factor(training.optimizer, training.ranks / begun_on)

    def _resize_batch(self) -> None:
        """Let the samples of a step follow the number of ranks, if they are to."""
        if self.training.resized_batch == "scaled":
            self.begun_on = self.training.ranks
            self._deal_out()

    def _ranges(self) -> Sequence[ModelRange]:
        """Return where the parameters of this rank lie in those of the whole model."""
        if self.ranges:
            return self.ranges
        places = self.worker.snapshots.places
        return places["parameters"] if places else [ModelRange(0, self.worker.layout.size, 0)]

    def _resume(self, saved: Saved) -> None:
        """Collective: go on from this rank's state in a checkpoint."""
        worker = self.worker
        restore(worker.parameters, saved.parameters)
        self.position, self.totals, worker.measures = saved.position, saved.totals, saved.measures
        worker.snapshots.parts = self.checkpoints.without_lost(saved.snapshots)
        worker.snapshots.skip(saved.position.consumed)
        if self.balancer is not None and saved.balance is not None:
            self.balancer.state = saved.balance
        worker.step.consumed = saved.position.consumed
        moved = saved.moments is not None
        worker.inherited = saved.moments if moved else {}
        self.phases = checkpoints.resume(worker, self.strategy, vars(saved), common=moved)
        worker.inherited = {}
        self.order.first_step, self.shares = saved.position.steps, saved.shares

    def _write_checkpoint(self, *, whole: bool = True) -> bool:
        if self.shapes_run is not None:
            return False  # a run of shapes has nothing to write
        self._check_parameters()
        handed = handed_over(self.phases, in_parts=self.in_parts)
        # Last, as its tensors are those of the state: they are written once.
        state, roles = {**self.checkpoint_state(), "handed": handed}, self.phases.roles
        if self.worker.transport.lost():
            # Which replica has the slice of a server that is lost is not said in it.
            whole &= self.worker.survives_losses and not roles.replicas
        return self.checkpoints.take(state, self._manifest(), roles.leader, whole=whole)

    def _check_parameters(self) -> None:
        """Refuse to write parameters from which every resumed run would fail at once."""
        if self.training.stop_on_nonfinite and not self.worker.parameters.isfinite().all():
            raise RunFailed(
                f"parameters are NaN or infinite after step {self.position.steps}, so that no "
                f"checkpoint is written; {NONFINITE}"
            )

    def _manifest(self) -> Manifest:
        """Return the manifest of a checkpoint that is taken now, without its files."""
        roles, traits, runtime = self.phases.roles, self.phases.traits, self.runtime
        ranks, there = range(runtime.ranks), self.worker.everyone.ranks
        return Manifest(
            generation=0,
            members=tuple(role_of(rank, roles) if rank in there else LOST for rank in ranks),
            slots=runtime.members,
            layout={
                "parameters": traits.partition.name.lower(),
                "optimizer": traits.optimizer.name.lower(),
                "replicas": "equal" if traits.lockstep else "different",
            },
            consumed=self.position.consumed,
            budget=self.budget,
            global_batch=self._feed.plan.global_batch,
            snapshots=len(self.worker.snapshots.due),
            phase=self.phases.number,
            begun_on=self.begun_on,
            history=self.history,
        )

    def close(self) -> None:
        """Leave nothing unfinished behind in the folder of checkpoints."""
        if self.shapes_run is None:
            self.checkpoints.close(self.roles.leader)

    def checkpoint_state(self) -> dict[str, Any]:
        """Return the state from which a run resumes, without its settings."""
        worker = self.worker
        return checkpoints.rank_state(self.phases, worker.parameters) | {
            "position": self.position,
            "totals": self.totals,
            "measures": worker.measures,
            "snapshots": worker.snapshots.parts,
            "shares": self.shares,
            **({"balance": self.balancer.state} if self.balancer else {}),
        }
