"""The cases: tasks, and strategies, each with a closed formula."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil, log2
from pathlib import Path

from orchestra.calibration import Workload
from orchestra.cluster import Cluster
from orchestra.cluster.calibration import Calibration
from orchestra.cluster.file import read_cluster
from orchestra.errors import InputError
from orchestra.optimizers.settings import Optimizer
from orchestra.settings import parse
from orchestra.strategies.base import refusal_of
from orchestra.strategies.registry import STRATEGIES as KNOWN
from orchestra.trainer.settings import Run, Training


@dataclass(frozen=True)
class Terms:
    """The terms of closed formulas, in seconds."""

    ranks: int
    workers: int
    alone: float  # a worker's whole step, with no other process beside it
    step: float  # the same, while all ranks of the machine compute
    update: float  # of all parameters
    stage: float  # a micro-batch on one stage of a pipeline
    alpha: float  # a message without content
    message: float  # a message with all parameters
    adding: float  # adding the content of such a message

    @property
    def whole(self) -> float:
        """A message with all parameters, and adding them."""
        return self.message + self.adding

    @property
    def spread(self) -> float:
        """A reduce-scatter and an all-gather, without the latencies of their messages."""
        return (self.ranks - 1) / self.ranks * (2 * (self.message - self.alpha) + self.adding)

    @property
    def ring(self) -> float:
        return 2 * (self.ranks - 1) * self.alpha + self.spread

    @property
    def rounds(self) -> int:
        """The rounds of a schedule that doubles, on a power of two of the ranks."""
        return int(log2(self.ranks))

    @property
    def uneven(self) -> float:
        """The extra messages of the ranks beyond a power of two: a vector there, a result back."""
        return 0.0 if 2**self.rounds == self.ranks else 2 * self.message

    @property
    def served(self) -> float:
        return 2 * self.message + self.update

    @property
    def asynchronous(self) -> float:
        """A worker's round, or the server's share of it if that takes longer."""
        # A step of the budget is one of all ranks, and servers compute none of it
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
        # The server takes the gradients one after another
        lambda t: t.ranks / t.workers * (t.step + t.workers * (t.served + t.adding)),
    ),
    "asynchronous": (f"ParameterServer({ASYNCHRONOUS})", lambda t: t.asynchronous),
    "asynchronous beside": (
        f'ParameterServer({ASYNCHRONOUS}, placement="beside")',
        lambda t: t.asynchronous,
    ),
    "bounded": ('ParameterServer(consistency="bounded", staleness=1)', lambda t: t.asynchronous),
    "server in parts": (
        "ParameterServer()",
        lambda t: t.ranks / t.workers * max(t.step, t.workers * (t.served + t.adding)),
    ),
    "asynchronous in parts": (
        f"ParameterServer({ASYNCHRONOUS})",
        lambda t: t.ranks / t.workers * max(t.step, t.workers * t.served),
    ),
    "local SGD": (f"LocalSGD({LOCAL_STEPS})", lambda t: t.step + t.ring / LOCAL_STEPS),
    # The average arrives two steps later, while the ranks compute
    "late local SGD": (f"LocalSGD({LOCAL_STEPS}, overlap=2)", lambda t: t.step),
    "gossip": ("Gossip()", lambda t: max(t.step, min(2, t.ranks - 1) * t.whole)),
    "push-sum": ("StochasticGradientPush()", lambda t: t.step + t.message + 3 * t.adding),
    "late push-sum": ("StochasticGradientPush(overlap=1)", lambda t: t.step + 2 * t.adding),
    # Averages of pairs go on in the background
    "pairwise": ("PairwiseAveraging()", lambda t: t.step),
    "pipeline": (
        f"Pipeline(microbatches={MICROBATCHES})",
        lambda t: (MICROBATCHES + t.ranks - 1) * t.stage + 2 * (t.ranks - 1) * t.alpha,
    ),
}
"""Strategies of every family by label: the notation, and the formula of a step's seconds."""

ONE, COMPUTE, MESSAGES = "one worker", "compute only", "messages only"
CONTROLS: dict[str, tuple[str, Callable[[Terms], float]]] = {
    ONE: ("Single()", lambda t: t.alone),
    # A million steps without an average: more than any run here has
    COMPUTE: ("LocalSGD(1000000)", lambda t: t.step),
    MESSAGES: ('AllReduce("ring")', lambda t: t.step + t.ring),
}
"""Controls, which take turns with the strategies and are predicted like them. They show where an
error comes from: the step that the calibration measured, the same on all ranks at once, and an
all-reduce of as many parameters that takes next to no computation. They do not count as
strategies."""

EMULATED_STEPS, EMULATED_SECONDS = (24, 400), 4.0
"""Least and most steps of a run on an emulated cluster, where a step takes from milliseconds to
seconds: as many as are predicted to take these seconds. The first ones cost a rank some 0.1 s of
processor time for memory and caches, which a run of half a second would count as steps."""
BUCKET_MEGABYTES = {"server in parts": 0.1, "asynchronous in parts": 0.1}
"""Bucket sizes with which pushes and pulls overlap with computing; by default these models are one
bucket."""


@dataclass(frozen=True)
class Subtask:
    """A task, with the steps of its runs, and their numbers of ranks."""

    model: str  # that it trains, in words
    subject: Workload
    parameters: int  # approximately
    steps: int
    ranks: tuple[int, ...]

    @property
    def messages(self) -> Workload:
        """A task whose model has the same size and takes next to no computation."""
        return _workload(f"synthetic({self.parameters})", "SGD(lr=0.01)", 1)


def _workload(task: str, optimizer: str, batch: int) -> Workload:
    return Workload(task, Optimizer.parse(optimizer, where=task), batch_sizes=(batch,))


CNN = _workload("digits()", "SGD(lr=0.05)", 16)
LENET = _workload("digits28()", "Adam(lr=0.001)", 32)
MLP = _workload("regression(hidden=1024)", "SGD(lr=0.01, momentum=0.9)", 64)
TASKS = {
    "cnn": Subtask("CNN, 72k", CNN, 72_000, 80, (2, 3, 4)),
    "lenet": Subtask("LeNet-5, 62k, Adam", LENET, 62_000, 60, (4,)),
    "mlp": Subtask("MLP, 1.1M", MLP, 1_100_000, 60, (3,)),
}
"""The models that are trained: convolutions, another optimizer, and large messages."""


_NODES = """\
name: {name}
ranks: spread
all_nodes:
  cores: 1
  speed: 0.48
  loopback: {{bandwidth: 3 GB/s, latency: 15 us}}
"""
_LINK = "link: {bandwidth: 100 Mbit/s, latency: 250 us}"
CLUSTERS = {
    "equal": f"  {_LINK}\nnodes:\n  node: {{count: 4}}\n",
    "slow-node": f"  {_LINK}\nnodes:\n  fast: {{count: 3}}\n  slow: {{speed: 0.12}}\n",
    "slow-link": f"""\
  {_LINK}
nodes:
  near: {{count: 3}}
  far: {{link: {{bandwidth: 10 Mbit/s, latency: 250 us}}}}
""",
    "racks": f"""\
  {_LINK}
switches:
  top: {{}}
  rack-0: {{to: top, link: {{bandwidth: 40 Mbit/s, latency: 250 us}}}}
  rack-1: {{to: top, link: {{bandwidth: 40 Mbit/s, latency: 250 us}}}}
nodes:
  left: {{count: 2, switch: rack-0}}
  right: {{count: 2, switch: rack-1}}
""",
}
"""Clusters of four nodes with less than two cores together: equal ones; one four times slower; one
behind a link with a tenth of the bandwidth; two racks whose uplink is thinner than two of their
nodes could use."""


def write_clusters(folder: Path) -> dict[str, Path]:
    """Write a file for each cluster into `folder`, and return the paths by name."""
    paths = {name: folder / f"{name}.yaml" for name in CLUSTERS}
    for name, path in paths.items():
        path.write_text(_NODES.format(name=name) + CLUSTERS[name])
    return paths


@dataclass(frozen=True)
class Case:
    """A prediction to be tested, on processes of this machine or on an emulated `cluster`.

    A run has `steps`, or else those of the task, or the fewest for an emulated cluster.
    """

    label: str
    task: Subtask
    ranks: int
    cluster: Cluster | None = None
    file: Path | None = None
    steps: int | None = None

    def lengthened(self, step_seconds: float) -> Case:
        """Return the case with more steps if its run on an emulated cluster would be short."""
        if self.cluster is None:
            return self
        least, most = EMULATED_STEPS
        # A shorter run spends most of its time on the first use of memory and code.
        return replace(self, steps=min(max(least, round(EMULATED_SECONDS / step_seconds)), most))

    @property
    def block(self) -> tuple[str, int, str]:
        """The key of the cases that are compared with each other: task, ranks and cluster."""
        return self.task.model, self.ranks, self.cluster.name if self.cluster else ""

    @property
    def subject(self) -> Workload:
        return self.task.messages if self.label == MESSAGES else self.task.subject

    @property
    def processes(self) -> int:
        return 1 if self.label == ONE else self.ranks

    @property
    def formula(self) -> Callable[[Terms], float]:
        return (STRATEGIES | CONTROLS)[self.label][1]

    @property
    def run(self) -> Run:
        subject = self.subject
        emulated = {"engine": "emulation", "cluster": str(self.file)} if self.file else {}
        return Run(
            self.label,
            task=subject.task,
            strategy=parse((STRATEGIES | CONTROLS)[self.label][0], KNOWN, where=self.label),
            training=Training(
                ranks=self.processes,
                batch_size=subject.batch_sizes[0],
                # The calibrated batch, on any number of ranks
                equal="worker_batch",
                steps=self.steps or (EMULATED_STEPS[0] if self.file else self.task.steps),
                optimizer=subject.optimizer,
                # Nothing but steps: copies and the timeline would be timed with them
                snapshots=0,
                trace_steps=0,
                bucket_megabytes=BUCKET_MEGABYTES.get(self.label, Training.bucket_megabytes),
                **emulated,  # type: ignore[arg-type]
            ),
        )

    def simulated(self, machine: str, calibration: str) -> Run:
        """Return the same run in virtual time, on its cluster or else on a cluster that is this
        `machine`.
        """
        run, cluster = self.run, str(self.file or machine)
        training = replace(
            run.training, engine="simulation", cluster=cluster, calibration=calibration
        )
        return replace(run, training=training)


def cases(
    strategies: Iterable[str] = STRATEGIES,
    tasks: Iterable[Subtask] = tuple(TASKS.values()),
    ranks: Sequence[int] | None = None,
    clusters: Sequence[Path | None] = (None,),
) -> list[Case]:
    """Return the strategies with these labels, and the controls, on every task and number of
    ranks on which they can run. The numbers are `ranks`, or the task's own. They run on this
    machine, or on each of the emulated `clusters` with one rank on each node.

    Raises:
        InputError: nothing is left.
    """
    found = []
    for file, task in itertools.product(clusters, tasks):
        cluster = None if file is None else read_cluster(file)
        for count in ranks or (task.ranks if cluster is None else [len(cluster.nodes)]):
            # The controls run in every block. They tell whether an error comes from the machine,
            # from crowded cores or from messages.
            made = [Case(label, task, count, cluster, file) for label in (*strategies, *CONTROLS)]
            # Some strategies need two ranks, say, or an even number
            found += [one for one in made if refusal_of(one.run.strategy, one.processes) is None]
    if all(case.label in CONTROLS for case in found):
        raise InputError("--strategies: none of them runs on that many ranks")
    return found


def predicted(case: Case, calibration: Calibration) -> tuple[float, float]:
    """Return the seconds of a step by a closed formula, and those of one worker alone.

    The formula is the usual sum: computation, plus a latency for each message and a time for each
    byte on the longest way, plus additions. alpha, beta and gamma come from the calibration, and
    processors are shared evenly by the ranks that compute at the same time. On a cluster the
    slowest node computes, and messages cross the way with the least bandwidth, and the longest.
    """
    subject, cluster = case.subject, case.cluster
    costs = calibration.task(*subject.key)
    if costs is None:
        raise InputError(f"--calibration: it does not hold {subject.task}; leave the option out")
    ranks = case.processes
    batch, threads = subject.batch_sizes[0], max(1, calibration.cores // ranks)
    speed = crowding = 1.0
    if cluster is not None:
        speeds = [node.speed_beside(costs.flops) for node in cluster.nodes_of(ranks)]
        # All wait for the slowest node; a worker alone is placed on the fastest
        threads, speed = 1, min(speeds) if ranks > 1 else max(speeds)
    elements = sum(parameter.elements for parameter in costs.parameters)
    update = costs.seconds("update", elements, threads) / speed
    gradient, rest = (costs.seconds(part, batch, threads) for part in ("gradient", "step"))
    alone = (gradient + rest) / speed + update
    workers = len(case.run.strategy.roles(ranks).workers)
    if cluster is None:
        # Of the machine's processes only workers compute; emulated nodes have quotas instead
        crowding = max(1.0, workers / calibration.cores)
    stage = costs.seconds("gradient", batch * ranks / MICROBATCHES, threads) / ranks / speed
    overhead = calibration.overhead(costs)
    alpha, beta = _way(case, overhead.wire)
    near = calibration.near if cluster is None else None
    one_way = (near or calibration.messages).one_way
    terms = Terms(
        ranks=ranks,
        workers=workers,
        alone=alone,
        step=alone * crowding,
        update=update,
        stage=stage * crowding,
        # The smallest message measured: next to no content
        alpha=one_way.points[0][1] + alpha,
        message=one_way.at(4 * elements) + alpha + beta * 4 * elements,
        adding=overhead.add * 4 * elements / speed,
    )
    return case.formula(terms), alone


def _way(case: Case, wire: float) -> tuple[float, float]:
    """Return the latency and the seconds per byte of the worst route between two ranks of a
    cluster; zeros on one machine.
    """
    if case.cluster is None or case.processes == 1:
        return 0.0, 0.0
    nodes = case.cluster.nodes_of(case.processes)
    ways = [case.cluster.path(a, b) for a, b in itertools.permutations(nodes, 2)]
    narrowest = min(channel.bandwidth for way in ways for channel in way.channels)
    return max(way.latency for way in ways), wire / narrowest
