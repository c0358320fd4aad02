"""Whole trainings for tests: ranks as threads, DistributedDataParallel, and a loop by hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from benchmarks.gloo import join_gloo
from safetensors.torch import load_file
from tests.support.tasks_for_tests import Partial
from tests.support.threads import run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from orchestra.data import DataPlan
from orchestra.data.feed import Feed, epoch_samples, open_samples
from orchestra.engines.processes import launch
from orchestra.engines.processes.training import train_run
from orchestra.optimizers.settings import Optimizer, ParameterGroup
from orchestra.optimizers.spec import OptimizerSpec, set_rates
from orchestra.records.record import RunRecord
from orchestra.records.report import RankReport
from orchestra.strategies.base import Strategy
from orchestra.tasks import load_task
from orchestra.trainer.session import Session
from orchestra.trainer.settings import Run, Training
from orchestra.worker.runtime import Runtime

State = dict[str, Tensor]
TASKS = "tests.support.tasks_for_tests:"


@dataclass(frozen=True)
class Trained:
    """What a training left: `final` as written by the leader, `replicas` as on each rank."""

    folder: Path
    final: State
    replicas: tuple[State, ...]
    reports: tuple[RankReport, ...]
    states: tuple[Any, ...]
    modules: tuple[Any, ...]

    def lines(self, rank: int) -> list[dict[str, Any]]:
        """The step records of `rank`."""
        return step_lines(self.folder, rank)


def step_lines(folder: Path, rank: int) -> list[dict[str, Any]]:
    text = (folder / f"steps-rank-{rank}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def settings(strategy: Strategy, ranks: int, task: str, *, seed: int = 0, **training: Any) -> Run:
    """A run of a task of `tasks_for_tests`; each worker has a batch of 8, whoever serves."""
    training = {"batch_size": 8, "equal": "worker_batch", "snapshots": 0, **training}
    if "steps" not in training:
        training.setdefault("epochs", 1)
    if isinstance(training.get("optimizer"), str):
        training["optimizer"] = Optimizer.parse(training["optimizer"], where="optimizer")
    named = task if ":" in task else TASKS + task
    return Run("test", named, strategy, seed, Training(ranks=ranks, **training))


def member_of(session: Session) -> Any:
    """Return its member; None where that has made room for the whole model."""
    phases = vars(session).get("phases")
    return phases and phases.member


def train_threads(
    strategy: Strategy, ranks: int, folder: Path, task: str, **training: Any
) -> Trained:
    """Train on threads of this process, with real sockets between them."""
    run = settings(strategy, ranks, task, **training)
    folder.mkdir(parents=True, exist_ok=True)

    def program(runtime: Runtime) -> tuple[State, RankReport, Any, nn.Module]:
        session = Session(runtime, run, strategy, folder)
        session.begin()
        session.train()
        replica = {k: v.detach().clone() for k, v in session.worker.module.state_dict().items()}
        return replica, session.finish(), member_of(session), session.worker.module

    results = run_ranks(len(strategy.roles(ranks).shares), program)
    final = load_file(folder / "parameters.safetensors")
    return Trained(folder, final, *zip(*results, strict=True))


def train_processes(run: Run, folder: Path) -> RunRecord:
    """Train on processes of their own."""
    folder.mkdir(parents=True, exist_ok=True)
    return train_run(run, folder, quiet=True)


@dataclass(frozen=True)
class Case:
    """A training of one epoch without orchestra's strategies, its batches dealt by a `DataPlan`."""

    task: str
    optimizer: str
    batch_size: int = 8
    clip_norm: float | None = None
    groups: tuple[ParameterGroup, ...] = ()
    reset_after: int | None = None  # steps after which the optimizer begins anew
    divide_after: int | None = None  # steps after which the learning rate is halved


def _trained(
    case: Case, rank: int, shares: Sequence[float], wrap: Callable[[nn.Module], nn.Module]
) -> State:
    task = load_task(TASKS + case.task)
    module = task.model()
    model = wrap(module)
    names = [name for name, _ in module.named_parameters()]
    chosen = replace(Optimizer.parse(case.optimizer, where="case"), groups=case.groups)
    spec = OptimizerSpec.from_settings(chosen, names)
    optimizer = spec.build(dict(module.named_parameters()))
    global_batch = case.batch_size * len(shares)
    plan = DataPlan(0, epoch_samples(task.train), global_batch, tuple(shares))
    feed = Feed(open_samples(task.train, 0, task.collate), plan, rank)
    for step in range(plan.steps):
        if step == case.reset_after:
            optimizer = spec.build(dict(module.named_parameters()))
        if step == case.divide_after:
            set_rates(optimizer, [rate / 2 for rate in spec.base_rates])
        optimizer.zero_grad()
        task.loss(model, feed.next(step)[0]).backward()
        if case.clip_norm is not None:
            nn.utils.clip_grad_norm_(module.parameters(), case.clip_norm)
        optimizer.step()
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def _ddp_rank(runtime: Runtime, argument: tuple[Sequence[Case], str]) -> list[State]:
    cases, store = argument
    join_gloo(runtime, store)
    shares = (1.0,) * runtime.ranks
    return [_trained(case, runtime.rank, shares, _wrapped) for case in cases]


def _wrapped(module: nn.Module) -> nn.Module:
    return DistributedDataParallel(module, find_unused_parameters=isinstance(module, Partial))


def distributed_data_parallel(ranks: int, cases: Sequence[Case], folder: Path) -> dict[Case, State]:
    """The state of torch's DistributedDataParallel on gloo, in real processes, on rank 0."""
    results = launch(_ddp_rank, (tuple(cases), str(folder / "store")), ranks).results
    return dict(zip(cases, results[0], strict=True))


def single_process(case: Case) -> State:
    """Plain PyTorch in this process, on as many threads as a rank has."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _trained(case, 0, (1.0,), lambda module: module)
    finally:
        torch.set_num_threads(threads)


def equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """The largest difference, relative to the largest number of the tensor."""
    assert one.keys() == other.keys()
    return max(
        float((one[k].double() - other[k].double()).abs().max() / other[k].double().abs().max())
        for k in one
    )
