"""The candidates of a plan: strategies on some of the fastest nodes, with batch and rate."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from orchestra.cluster import Cluster, Node
from orchestra.cluster.file import cluster_text
from orchestra.engines.simulation.costs import Costs
from orchestra.engines.simulation.training import costs_of
from orchestra.errors import InputError
from orchestra.experiments.experiment import ONE_PROCESS, Experiment
from orchestra.optimizers.settings import rate_factor
from orchestra.records.files import write_atomically
from orchestra.strategies.all_reduce import AllReduce
from orchestra.strategies.base import Strategy, refusal_of
from orchestra.strategies.local_sgd import LocalSGD
from orchestra.strategies.parameter_server import ParameterServer
from orchestra.strategies.registry import strategy_of
from orchestra.strategies.single import Single
from orchestra.trainer.settings import MEASURED, Run, Training

if TYPE_CHECKING:
    from orchestra.engines.simulation.memory import Memory

T = TypeVar("T")

BATCHES = (0.5, 1.0, 2.0, 4.0)
"""The global batches to try, relative to the experiment's."""
RATES = (0.5, 2.0)
"""The factors of the learning rate to try besides 1, with the experiment's batch."""
KEPT = (0.25, 0.5)
"""Batches for which one process is also tried with the experiment's own learning rate: its updates
are then those that a worker makes from its own samples."""
MOST_COUNTS = 8
"""Up to this number of nodes every count is tried; with more nodes, the powers of two and all."""
SPEED_STEPS, RANK_STEPS, FEWEST_STEPS = 20, 4000, 8
"""The steps of a run that measures a speed; those of all ranks together; the fewest."""

EVERYWHERE: Mapping[str, str] = {
    "ring": 'AllReduce("ring")',
    "local SGD, H=16": "LocalSGD(16)",
    "asynchronous beside": 'ParameterServer(consistency="asynchronous", placement="beside")',
    "ring, BF16": "AllReduce(compression=BF16())",
    "server beside": 'ParameterServer(placement="beside")',
    "gossip": "Gossip()",
    "halving-doubling": 'AllReduce("halving_doubling")',
    "ring, PowerSGD": "AllReduce(compression=PowerSGD(4))",
    "local SGD, H=4": "LocalSGD(4)",
    "asynchronous, divided": (
        'ParameterServer(consistency="asynchronous", placement="beside", learning_rate="divided")'
    ),
    "local SGD, H=64": "LocalSGD(64)",
    "push-sum": "StochasticGradientPush()",
    "ring, top 1 %": "AllReduce(compression=TopK(0.01))",
    "asynchronous": 'ParameterServer(consistency="asynchronous")',
    "ring, then asynchronous": (
        'Switch(AllReduce("ring"), ParameterServer(consistency="asynchronous", '
        'placement="beside"), when=AfterFraction(0.25), learning_rate="divided")'
    ),
    "DiLoCo, H=32": "LocalSGD(32, outer=Nesterov())",
    "bounded beside": 'ParameterServer(consistency="bounded", staleness=2, placement="beside")',
    "all to all": 'AllReduce("parallel")',
    "server": "ParameterServer()",
    "tree": 'AllReduce("tree")',
    "ring, sharded": 'AllReduce("ring", shard="parameters")',
}
"""The strategies on all nodes with the experiment's batch, the most informative ones first."""
ON_FEWER = ("ring", "halving-doubling")
"""The strategies that are also tried on fewer nodes."""
WITH_BATCHES = ("ring", "halving-doubling", "server beside")
"""The strategies that are also tried with other batches."""


@dataclass(frozen=True)
class Candidate:
    """A strategy with its settings on some nodes."""

    name: str  # tells it from the others, in words
    run: Run  # in virtual time, on the plan's cluster
    nodes: tuple[str, ...]  # the names of those that it uses
    label: str = ""  # of the strategy, without its nodes and batch
    batch: float = 1.0  # samples in a step of all workers; as a multiple of the experiment's
    rate: float = 1.0  # of the learning rate, as a multiple of the rule's

    @property
    def own(self) -> bool:
        """True if its strategy is one of the experiment's, and none of `EVERYWHERE`."""
        return self.label not in (*EVERYWHERE, ONE_PROCESS)

    @cached_property
    def exact(self) -> bool:
        """True if it learns what one process with the same batch does, but for rounding."""
        strategy = self.run.strategy
        # Compression rounds, and `backup` drops gradients; asynchronous pushes are stale.
        if isinstance(strategy, AllReduce | ParameterServer):
            together = isinstance(strategy, AllReduce) or strategy.consistency == "synchronous"
            return together and strategy.compression is None and not strategy.backup
        return isinstance(strategy, Single)

    @cached_property
    def learns_as(self) -> str:
        """Candidates with the same one learn the same from as many samples."""
        if self.exact:
            return f"one process, batch x {self.batch:g}, rate x {self.rate:g}"
        return self.name

    @cached_property
    def update_samples(self) -> float:
        """The least samples that any of its updates is made of."""
        workers = self.run.strategy.roles(self.run.training.ranks).workers
        # All gradients of a step make one update; asynchronous and local ones are of one worker
        one = self.exact or isinstance(self.run.strategy, AllReduce)
        return self.samples / (1 if one else max(1, len(workers)))

    @cached_property
    def samples(self) -> int:
        """The samples of one step of all of its workers."""
        training = self.run.training
        return training.global_batch(self.run.strategy.roles(training.ranks).shares)


class NodeSpeeds:
    """Which nodes are the fastest for an experiment, by the rule and costs of the simulation.

    They hold for every cluster, so that those of a map share one object.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Memory, Costs] | None] = {}  # by the global batch

    def alone(self, run: Run, cluster: Cluster) -> Node:
        """Return the node on which the simulation puts `run`, which is one process."""
        known = self._of(run) if len(cluster.nodes) > 1 else None
        return cluster.nodes[0] if known is None else known[0].best_node(cluster, known[1])

    def fastest_first(self, run: Run, cluster: Cluster) -> list[Node]:
        """Return all nodes, the fastest for steps of one process, `run`, first."""
        known = self._of(run) if len(cluster.nodes) > 1 else None
        return list(cluster.nodes) if known is None else known[0].fastest_first(cluster, known[1])

    def _of(self, run: Run) -> tuple[Memory, Costs] | None:
        """Return what decides for `run`; None if its loss fails, as the simulations will tell."""
        from orchestra.engines.simulation.memory import Memory

        batch = run.training.batch_size * run.training.ranks
        if batch not in self._known:
            self._known[batch] = counted(run, lambda brief: (Memory(brief), costs_of(brief)))
        return self._known[batch]


def counted(run: Run, count: Callable[[Run], T]) -> T | None:
    """Return what `count` finds of `run` from shapes, or where the task does not allow that, with
    values; None if its loss fails."""
    for values in (False, True):
        with contextlib.suppress(Exception):
            return count(short(run, values=values))
    return None


@dataclass(frozen=True)
class Space:
    """The candidates for an experiment on a cluster. They use its fastest nodes first."""

    experiment: Experiment
    cluster: Cluster  # the whole one
    folder: Path  # where clusters of some of its nodes are written
    refused: list[str] = field(default_factory=list)  # of the experiment's strategies, and why
    speeds: NodeSpeeds = field(default_factory=NodeSpeeds)

    @cached_property
    def fastest(self) -> list[Node]:
        """The nodes, the fastest first; of equal ones the first in the file."""
        return self.speeds.fastest_first(self._single(1.0), self.cluster)

    @property
    def mixed(self) -> bool:
        """True if nodes are unlike in what they compute."""
        kinds = {(node.speed, node.flops, node.slots, node.devices) for node in self.cluster.nodes}
        return len(kinds) > 1

    @property
    def several(self) -> bool:
        """True if candidates differ in their nodes; else in the ranks of a single one."""
        return len(self.cluster.nodes) > 1

    @property
    def counts(self) -> list[int]:
        """The numbers of nodes, or of ranks on a single one, that are tried; all last."""
        most = len(self.cluster.nodes) if self.several else self.cluster.nodes[0].slots
        if most <= MOST_COUNTS:
            return list(range(2, most + 1))
        powers = [2**power for power in range(1, most.bit_length()) if 2**power < most]
        return [*powers, most]

    def candidates(self) -> list[Candidate]:
        """Return all candidates: the experiment's own strategies, and those of this file.

        A strategy that cannot run on so many ranks is left out; one without room in memory is found
        in the simulation.
        """
        # One process comes first: its learning curve stands for all candidates that learn as it
        # does.
        found = [self._alone(batch) for batch in BATCHES]
        found += [self._alone(batch, kept=True) for batch in KEPT]
        if not (counts := self.counts):
            return found
        own = {
            f"{label} of the file" if label in (*EVERYWHERE, ONE_PROCESS) else label: each
            for label, each in self.experiment.strategies.items()
            if not isinstance(each, Single)
        }
        strategies = {**{label: strategy_of(text) for label, text in EVERYWHERE.items()}, **own}
        # The experiment's own strategy may be one of this file's, under another label.
        first = {repr(each): label for label, each in reversed(strategies.items())}
        for label, each in strategies.items():
            if first[repr(each)] != label:
                continue
            for count in counts if label in ON_FEWER else counts[-1:]:
                for batch in BATCHES if label in WITH_BATCHES and count == counts[-1] else (1.0,):
                    found += self._together(label, each, count, batch)
        # With alike nodes parts by speed would be equal ones
        for count in counts if self.mixed else ():
            found += self._together("ring", strategies["ring"], count, 1.0, MEASURED)
        return by_interest(found)

    def on_other_counts(self, candidate: Candidate) -> list[Candidate]:
        """Return the strategy of `candidate`, with its batch, on each number of nodes."""
        each, shares = candidate.run.strategy, candidate.run.training.shares
        return [
            other
            for count in self.counts
            for other in self._together(candidate.label, each, count, candidate.batch, shares)
        ]

    def _alone(self, batch: float, *, kept: bool = False) -> Candidate:
        """Return one process on the fastest node; `kept`: with the experiment's own rate."""
        run, rate = self._single(batch), 1.0
        node = self.speeds.alone(run, self.cluster).name
        if kept:
            # The experiment's own rate again, in place of the scaled one
            optimizer = self.experiment.training.optimizer
            run = replace(run, training=run.training.with_setting("optimizer", optimizer))
            rate = 1 / rate_factor(optimizer, batch)
        name = run.name + ", rate kept" * kept
        return Candidate(name, replace(run, name=name), (node,), ONE_PROCESS, batch, rate)

    def _single(self, batch: float) -> Run:
        """Return the run of one process; on several nodes the simulation takes the fastest."""
        names = (self.cluster.nodes[0].name,)
        cluster = self._written("all", "spread") if self.several else self._only(names)
        name = ONE_PROCESS + _batch_text(batch)
        return self._run(name, Single(), self._training(1, batch, cluster))

    def _together(
        self, label: str, each: Strategy, count: int, batch: float, shares: Any = None
    ) -> list[Candidate]:
        """Return the strategy on the `count` fastest nodes, or ranks of one; none if it refuses."""
        nodes = self.fastest[:count] if self.several else self.fastest * count
        # A rank on each device; a node without devices is one rank with all its cores
        devices = [max(node.devices, 1) if self.several else 1 for node in nodes]
        names = [n.name for n, ranks in zip(nodes, devices, strict=True) for _ in range(ranks)]
        on = f" on {count} {'nodes' if self.several else 'ranks'}"
        name = label + ", shares by speed" * (shares == MEASURED) + on + _batch_text(batch)
        try:
            if (reason := refusal_of(each, len(names))) is None:
                training = self._training(len(names), batch, self._only(tuple(names)), shares)
                run = self._run(name, each, training)
                return [Candidate(name, run, tuple(dict.fromkeys(names)), label, batch)]
        # A setting that so many ranks cannot have: no candidate, and no end of the plan
        except InputError as error:
            reason = str(error)
        if label not in EVERYWHERE:
            self.refused.append(f"{name} is left out: {reason}")
        return []

    def _run(self, name: str, each: Strategy, training: Training) -> Run:
        return Run(name, self.experiment.task, each, self.experiment.seeds[0], training)

    def _only(self, names: tuple[str, ...]) -> str:
        """Return the file of the cluster with a rank on each of these nodes."""
        return self._written(str(len(dict.fromkeys(names)) if self.several else len(names)), names)

    def _written(self, name: str, placement: Literal["spread"] | tuple[str, ...]) -> str:
        """Return the path of the cluster's file with this placement, written if it is new."""
        path = self.folder / f"{name}.yaml"
        # Candidates with the same nodes share a file
        if not path.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(path, cluster_text(replace(self.cluster, placement=placement)))
        return str(path.absolute())

    def _training(self, ranks: int, batch: float, cluster: str, shares: Any = None) -> Training:
        """Return the experiment's training in virtual time: `batch` times its samples in a step,
        divided among `ranks`, as many in all, and the learning rate that goes with the batch.
        """
        given = self.experiment.training
        whole = given.ranks * given.batch_size
        of_rank = max(1, round(whole * batch / ranks))
        steps = given.steps and max(1, round(given.steps * whole / (ranks * of_rank)))
        training = replace(
            given, ranks=ranks, batch_size=of_rank, equal="global_batch", steps=steps,
            shares=shares,
            # The batch is varied instead
            accumulation=1,
            engine="simulation", tensors="real", cluster=cluster,
            # Candidates are stopped and resumed by the search itself
            checkpoint_every=None, trace_steps=0, record_order=False, tensorboard=False,
        )  # fmt: skip
        return _at_rate(training, rate_factor(given.optimizer, ranks * of_rank / whole))


def by_interest(found: Sequence[Candidate]) -> list[Candidate]:
    """Return `found` in the order of interest: one process, each strategy once on all nodes, then
    other batches and numbers of nodes.
    """
    seen: Counter[str] = Counter()
    places = {}
    # Each strategy has one candidate early, because the time may end before all speeds are known.
    for candidate in sorted(found, key=lambda each: (each.batch != 1, -each.run.training.ranks)):
        seen[candidate.label] += 1
        places[candidate.name] = (candidate.label != ONE_PROCESS, seen[candidate.label])
    return sorted(found, key=lambda each: places[each.name])


def with_rates(candidate: Candidate) -> list[Candidate]:
    """Return `candidate` with other learning rates."""
    found = []
    for rate in RATES:
        run = replace(candidate.run, training=_at_rate(candidate.run.training, rate))
        name = f"{candidate.name}, rate x {rate:g}"
        found.append(replace(candidate, name=name, run=run, rate=rate))
    return found


def short(run: Run, steps: int = 0, *, values: bool = False) -> Run:
    """Return a run of the same kind with few steps, or `steps`.

    It is without values where the run's settings allow that, unless `values`.
    """
    training = run.training
    steps = steps or max(FEWEST_STEPS, min(SPEED_STEPS, RANK_STEPS // training.ranks))
    if isinstance(run.strategy, LocalSGD) and run.strategy.every is not None:
        # Two rounds: fewer steps would have no average in them, or half of one.
        steps = 2 * run.strategy.every
    # No target and no snapshots: only the time of its steps is of interest
    training = replace(training, epochs=None, steps=steps, target=None, snapshots=0)
    if not values:
        # Refused: a pipeline, or a switch that goes by losses
        with contextlib.suppress(InputError):
            return replace(run, training=replace(training, tensors="shapes", clip_norm=None))
    return replace(run, training=training)


def _at_rate(training: Training, factor: float) -> Training:
    optimizer = training.optimizer
    rate = optimizer.arguments.get("lr")
    if factor == 1 or not isinstance(rate, int | float):
        return training
    # Four digits: rates are part of names, and more are noise of the multiplication.
    optimizer = optimizer.with_setting("lr", float(f"{rate * factor:.4g}"))
    groups = tuple(
        replace(group, arguments={**group.arguments, "lr": float(f"{own * factor:.4g}")})
        if isinstance(own := group.arguments.get("lr"), int | float)
        else group
        for group in optimizer.groups
    )
    return training.with_setting("optimizer", replace(optimizer, groups=groups))


def _batch_text(batch: float) -> str:
    return "" if batch == 1 else f", batch x {batch:g}"
