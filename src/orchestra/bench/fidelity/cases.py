"""What is predicted and then run: strategies, numbers of ranks, tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from orchestra.bench.calibrate import Workload
from orchestra.errors import InputError, nearest
from orchestra.optimizers.settings import Optimizer
from orchestra.settings import parse
from orchestra.strategies.registry import STRATEGIES as KNOWN
from orchestra.trainer.settings import Run, Training

ASYNCHRONOUS = 'consistency="asynchronous"'
LOCAL_STEPS, MICROBATCHES = 4, 4
STRATEGIES = {
    "ring": 'AllReduce("ring")',
    "halving_doubling": 'AllReduce("halving_doubling")',
    "butterfly": 'AllReduce("butterfly")',
    "tree": 'AllReduce("tree")',
    "parallel": 'AllReduce("parallel")',
    "reduce_to_one": 'AllReduce("reduce_to_one")',
    "sharded": 'AllReduce(shard="optimizer")',
    "server": "ParameterServer()",
    "asynchronous": f"ParameterServer({ASYNCHRONOUS})",
    "asynchronous beside": f'ParameterServer({ASYNCHRONOUS}, placement="beside")',
    "bounded": 'ParameterServer(consistency="bounded", staleness=1)',
    "local SGD": f"LocalSGD({LOCAL_STEPS})",
    "gossip": "Gossip()",
    "push-sum": "StochasticGradientPush()",
    "pairwise": "PairwiseAveraging()",
    "pipeline": f"Pipeline(microbatches={MICROBATCHES})",
}
"""By label, strategies of every family."""


@dataclass(frozen=True)
class Subtask:
    """A task with the length of its runs and the numbers of ranks that it is run on; `model` is
    what it trains, in words."""

    name: str
    model: str
    subject: Workload
    steps: int
    ranks: tuple[int, ...]


def _subtask(
    name: str, model: str, task: str, optimizer: str, batch: int, steps: int, *ranks: int
) -> Subtask:
    subject = Workload(task, Optimizer.parse(optimizer, where=name), batch_sizes=(batch,))
    return Subtask(name, model, subject, steps, ranks)


TASKS = (
    _subtask("cnn", "CNN, 72k", "digits()", "SGD(lr=0.05)", 16, 80, 2, 3, 4),
    _subtask("lenet", "LeNet-5, 62k, Adam", "digits28()", "Adam(lr=0.001)", 32, 60, 4),
    _subtask(
        "mlp", "MLP, 1.1M", "regression(hidden=1024)", "SGD(lr=0.01, momentum=0.9)", 64, 60, 3
    ),
)
"""The models that are trained: convolutions, another optimizer, and large messages."""


def tasks_named(names: Sequence[str] | None) -> tuple[Subtask, ...]:
    """The tasks of these names; all without any.

    Raises:
        InputError: an unknown name.
    """
    by_name = {task.name: task for task in TASKS}
    for name in names or ():
        if name not in by_name:
            raise InputError(f"--tasks: unknown {name!r}; {nearest(name, by_name)}")
    return tuple(by_name[name] for name in names) if names else TASKS


@dataclass(frozen=True)
class Case:
    """One prediction to be tested."""

    label: str
    task: Subtask
    ranks: int

    @property
    def run(self) -> Run:
        """On processes."""
        subject = self.task.subject
        return Run(
            self.label,
            task=subject.task,
            strategy=parse(STRATEGIES[self.label], KNOWN, where=self.label),
            training=Training(
                ranks=self.ranks,
                batch_size=subject.batch_sizes[0],
                equal="worker_batch",
                steps=self.task.steps,
                optimizer=subject.optimizer,
                snapshots=0,
                trace_steps=0,
            ),
        )

    def simulated(self, cluster: str, calibration: str) -> Run:
        """The same in virtual time."""
        run = self.run
        training = replace(
            run.training, engine="simulation", cluster=cluster, calibration=calibration
        )
        return replace(run, training=training)


def cases(
    strategies: Sequence[str] | None = None,
    tasks: Sequence[Subtask] = TASKS,
    ranks: Sequence[int] | None = None,
) -> list[Case]:
    """The strategies with these labels (None: all) on every task, on every number of ranks that
    they can run on: `ranks`, or the task's own.

    Raises:
        InputError: an unknown label, or nothing is left.
    """
    for label in strategies or ():
        if label not in STRATEGIES:
            raise InputError(f"--strategies: unknown {label!r}; {nearest(label, STRATEGIES)}")
    possible = (
        Case(label, task, count)
        for task in tasks
        for count in ranks or task.ranks
        for label in strategies or STRATEGIES
    )
    found = [case for case in possible if case_refusal(case) is None]
    if not found:
        raise InputError("--strategies: none of them runs on that many ranks")
    return found


def case_refusal(case: Case) -> str | None:
    """Why the strategy cannot run on so many ranks; None if it can."""
    try:
        case.run.strategy.roles(case.ranks)
    except InputError as error:
        return str(error)
    return None
