"""What `orchestra bench fidelity` predicts: strategies, each with a closed formula, and tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil, log2

from orchestra.bench.calibrate import Workload
from orchestra.cluster.calibration import Calibration
from orchestra.errors import InputError
from orchestra.optimizers.settings import Optimizer
from orchestra.settings import parse
from orchestra.strategies.registry import STRATEGIES as KNOWN
from orchestra.trainer.settings import Run, Training


@dataclass(frozen=True)
class Terms:
    """What a closed formula is made of, in seconds.

    Attributes:
        step: a worker's whole step.
        update: an update of all parameters.
        stage: a micro-batch on one stage of a pipeline.
        alpha: a message without content.
        message: a message with all parameters.
        adding: adding what arrived with one.
    """

    ranks: int
    workers: int
    step: float
    update: float
    stage: float
    alpha: float
    message: float
    adding: float

    @property
    def whole(self) -> float:
        """A message with all parameters, and adding them."""
        return self.message + self.adding

    @property
    def spread(self) -> float:
        """A reduce-scatter and an all-gather, but for the latencies of their messages."""
        return (self.ranks - 1) / self.ranks * (2 * (self.message - self.alpha) + self.adding)

    @property
    def ring(self) -> float:
        """A ring all-reduce."""
        return 2 * (self.ranks - 1) * self.alpha + self.spread

    @property
    def rounds(self) -> int:
        """The rounds of a schedule that doubles, on a power of two of the ranks."""
        return int(log2(self.ranks))

    @property
    def uneven(self) -> float:
        """Folding the ranks beyond a power of two in, and out."""
        return 0.0 if 2**self.rounds == self.ranks else 2 * self.message

    @property
    def served(self) -> float:
        """A push and a pull."""
        return 2 * self.message + self.update

    @property
    def asynchronous(self) -> float:
        """A worker's round, unless the server is the limit."""
        return self.ranks / self.workers * max(self.step + self.served, self.workers * self.served)


ASYNCHRONOUS = 'consistency="asynchronous"'
LOCAL_STEPS, MICROBATCHES = 4, 4
STRATEGIES: dict[str, tuple[str, Callable[[Terms], float]]] = {
    "ring": ('AllReduce("ring")', lambda t: t.step + t.ring),
    "halving_doubling": (
        'AllReduce("halving_doubling")',
        lambda t: t.step + 2 * t.rounds * t.alpha + t.spread + t.uneven,
    ),
    "butterfly": ('AllReduce("butterfly")', lambda t: t.step + t.rounds * t.whole + t.uneven),
    "tree": (
        'AllReduce("tree")',
        lambda t: t.step + ceil(log2(t.ranks)) * (2 * t.message + t.adding),
    ),
    "parallel": ('AllReduce("parallel")', lambda t: t.step + (t.ranks - 1) * t.whole),
    "reduce_to_one": (
        'AllReduce("reduce_to_one")',
        lambda t: t.step + (t.ranks - 1) * (2 * t.message + t.adding),
    ),
    "sharded": ('AllReduce(shard="optimizer")', lambda t: t.step + t.ring),
    "server": (
        "ParameterServer()",
        lambda t: t.ranks / t.workers * (t.step + t.workers * (t.served + t.adding)),
    ),
    "asynchronous": (f"ParameterServer({ASYNCHRONOUS})", lambda t: t.asynchronous),
    "asynchronous beside": (
        f'ParameterServer({ASYNCHRONOUS}, placement="beside")',
        lambda t: t.asynchronous,
    ),
    "bounded": (
        'ParameterServer(consistency="bounded", staleness=1)',
        lambda t: t.asynchronous,
    ),
    "server in parts": (
        "ParameterServer()",
        lambda t: t.ranks / t.workers * max(t.step, t.workers * (t.served + t.adding)),
    ),
    "asynchronous in parts": (
        f"ParameterServer({ASYNCHRONOUS})",
        lambda t: t.ranks / t.workers * max(t.step, t.workers * t.served),
    ),
    "local SGD": (f"LocalSGD({LOCAL_STEPS})", lambda t: t.step + t.ring / LOCAL_STEPS),
    "late local SGD": (f"LocalSGD({LOCAL_STEPS}, overlap=2)", lambda t: t.step),
    "gossip": ("Gossip()", lambda t: max(t.step, min(2, t.ranks - 1) * t.whole)),
    "push-sum": ("StochasticGradientPush()", lambda t: t.step + t.message + 3 * t.adding),
    "late push-sum": ("StochasticGradientPush(overlap=1)", lambda t: t.step + 2 * t.adding),
    "pairwise": ("PairwiseAveraging()", lambda t: t.step),
    "pipeline": (
        f"Pipeline(microbatches={MICROBATCHES})",
        lambda t: (MICROBATCHES + t.ranks - 1) * t.stage + 2 * (t.ranks - 1) * t.alpha,
    ),
}
"""By label, strategies of every family: the notation, and the seconds of a step by formula."""

BUCKET_MEGABYTES = {"server in parts": 0.1, "asynchronous in parts": 0.1}
"""Where pushes and pulls overlap with computing; elsewhere these models are one bucket."""


@dataclass(frozen=True)
class Subtask:
    """A task, the `model` that it trains in words, the steps of its runs, and numbers of ranks."""

    model: str
    subject: Workload
    steps: int
    ranks: tuple[int, ...]


def _workload(task: str, optimizer: str, batch: int) -> Workload:
    return Workload(task, Optimizer.parse(optimizer, where=task), batch_sizes=(batch,))


LARGE = "regression(hidden=1024)"
TASKS = {
    "cnn": Subtask("CNN, 72k", _workload("digits()", "SGD(lr=0.05)", 16), 80, (2, 3, 4)),
    "lenet": Subtask("LeNet-5, 62k, Adam", _workload("digits28()", "Adam(lr=0.001)", 32), 60, (4,)),
    "mlp": Subtask("MLP, 1.1M", _workload(LARGE, "SGD(lr=0.01, momentum=0.9)", 64), 60, (3,)),
}
"""The models that are trained: convolutions, another optimizer, and large messages."""


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
            strategy=parse(STRATEGIES[self.label][0], KNOWN, where=self.label),
            training=Training(
                ranks=self.ranks,
                batch_size=subject.batch_sizes[0],
                equal="worker_batch",
                steps=self.task.steps,
                optimizer=subject.optimizer,
                snapshots=0,
                trace_steps=0,
                bucket_megabytes=BUCKET_MEGABYTES.get(self.label, Training.bucket_megabytes),
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
    strategies: Iterable[str] = STRATEGIES,
    tasks: Iterable[Subtask] = tuple(TASKS.values()),
    ranks: Sequence[int] | None = None,
) -> list[Case]:
    """The strategies with these labels on every task, on every number of ranks that they can run
    on: `ranks`, or the task's own.

    Raises:
        InputError: nothing is left.
    """
    found = [
        case
        for task in tasks
        for count in ranks or task.ranks
        for label in strategies
        if (case := Case(label, task, count)).run.strategy.refusal(count) is None
    ]
    if not found:
        raise InputError("--strategies: none of them runs on that many ranks")
    return found


def predicted(case: Case, calibration: Calibration) -> tuple[float, float]:
    """Seconds a step by a closed formula, and by the step of one worker with nobody beside it.

    The formula is the usual sum: computation, plus a latency for each message and a time for each
    byte on the longest way, plus additions. alpha, beta and gamma come from the calibration, and
    processors are shared evenly by the ranks that compute at the same time.
    """
    subject = case.task.subject
    costs = calibration.task(*subject.key)
    if costs is None:
        raise InputError(f"--calibration: it does not hold {subject.task}; leave the option out")
    batch, threads = subject.batch_sizes[0], max(1, calibration.cores // case.ranks)
    elements = sum(parameter.elements for parameter in costs.parameters)
    update = costs.seconds("update", elements, threads)
    gradient, rest = (costs.seconds(part, batch, threads) for part in ("gradient", "step"))
    alone = gradient + rest + update
    workers = len(case.run.strategy.roles(case.ranks).workers)
    crowding = max(1.0, workers / calibration.cores)
    stage = costs.seconds("gradient", batch * case.ranks / MICROBATCHES, threads) / case.ranks
    way = calibration.messages.one_way
    terms = Terms(
        ranks=case.ranks,
        workers=workers,
        step=alone * crowding,
        update=update,
        stage=stage * crowding,
        alpha=way.points[0][1],
        message=way.at(4 * elements),
        adding=calibration.overhead(costs).add * 4 * elements,
    )
    return STRATEGIES[case.label][1](terms), alone
