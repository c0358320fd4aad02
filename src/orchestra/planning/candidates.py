"""The candidates of a plan: strategies on so many of the fastest nodes, with batch and rate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from orchestra.cluster import Cluster, Node
from orchestra.cluster.file import cluster_text
from orchestra.engines.simulation.cost_source import FLOPS
from orchestra.errors import InputError
from orchestra.experiments.experiment import ONE_PROCESS, Experiment
from orchestra.optimizers.settings import Optimizer
from orchestra.records.record import write_atomically
from orchestra.settings import parse
from orchestra.strategies.all_reduce import AllReduce
from orchestra.strategies.base import Strategy
from orchestra.strategies.parameter_server import ParameterServer
from orchestra.strategies.registry import STRATEGIES
from orchestra.strategies.single import Single
from orchestra.trainer.settings import MEASURED, Run, Training

ADAPTIVE = ("Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adagrad")
"""Optimizers whose rate goes by the square root of the batch; that of others is in proportion."""

BATCHES = (0.5, 1.0, 2.0, 4.0)
"""Of a step of all workers, where the experiment's is 1."""
RATES = (0.5, 2.0)
"""Times the learning rate, beside 1: tried with the experiment's batch."""
KEPT = (0.25, 0.5)
"""Batches that one process has with the experiment's own learning rate, too: its updates are then
those that a worker beside others makes of its own samples."""
MOST_COUNTS = 8
"""Up to so many nodes every number of them is tried, of more the powers of two and all."""

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
"""The strategies on all nodes, with the experiment's batch; those first that show most."""
ON_FEWER = ("ring", "halving-doubling")
"""Those that are tried on fewer nodes, too."""
WITH_BATCHES = ("ring", "halving-doubling", "server beside")
"""Those that are tried with other batches, too."""


@dataclass(frozen=True)
class Candidate:
    """A strategy with its settings on some nodes.

    Attributes:
        name: tells it from the others, in words.
        run: in virtual time, on the plan's cluster.
        nodes: the names of those that it uses.
        label: of the strategy, without its nodes and batch.
        batch: samples in a step of all workers; as a multiple of the experiment's.
        rate: of the learning rate, as a multiple of the rule's.
    """

    name: str
    run: Run
    nodes: tuple[str, ...]
    label: str = ""
    batch: float = 1.0
    rate: float = 1.0

    @property
    def exact(self) -> bool:
        """Whether it learns what one process with the same batch does, but for rounding."""
        strategy = self.run.strategy
        if isinstance(strategy, AllReduce | ParameterServer):
            together = isinstance(strategy, AllReduce) or strategy.consistency == "synchronous"
            return together and strategy.compression is None and not strategy.backup
        return isinstance(strategy, Single)

    @property
    def learns_as(self) -> str:
        """Candidates with the same one learn the same from as many samples."""
        if self.exact:
            return f"one process, batch x {self.batch:g}, rate x {self.rate:g}"
        return self.name

    @property
    def update_samples(self) -> float:
        """The least samples that any of its updates is made of."""
        if self.exact or isinstance(self.run.strategy, AllReduce):
            return float(samples(self))
        workers = self.run.strategy.roles(self.run.training.ranks).workers
        return samples(self) / max(1, len(workers))


def samples(candidate: Candidate) -> int:
    """In a step of all of its workers."""
    training = candidate.run.training
    return training.global_batch(candidate.run.strategy.roles(training.ranks).shares)


@dataclass(frozen=True)
class Places:
    """Which nodes the candidates use: the fastest ones first.

    Attributes:
        cluster: the whole one.
        folder: where clusters of some of its nodes are written.
    """

    cluster: Cluster
    folder: Path

    @property
    def fastest(self) -> list[Node]:
        """The nodes, the fastest first; of equal ones the first in the file."""
        return sorted(
            self.cluster.nodes,
            key=lambda node: -node.speed_beside(FLOPS) * node.slots,
        )

    @property
    def mixed(self) -> bool:
        """Whether nodes are unlike in what they compute."""
        kinds = {(node.speed, node.flops, node.slots, node.devices) for node in self.cluster.nodes}
        return len(kinds) > 1

    @property
    def counts(self) -> list[int]:
        """The numbers of nodes, or of ranks on a single one, that are tried; all last."""
        most = len(self.cluster.nodes) if len(self.cluster.nodes) > 1 else self.fastest[0].slots
        if most <= MOST_COUNTS:
            return list(range(2, most + 1))
        powers = [2**power for power in range(1, most.bit_length()) if 2**power < most]
        return [*powers, most]

    def on(self, count: int) -> tuple[tuple[str, ...], str]:
        """The node of each rank on the `count` fastest nodes (ranks of a single node), and the file
        of a cluster with only these."""
        if len(self.cluster.nodes) == 1:
            names = [self.cluster.nodes[0].name] * count
        else:
            chosen = self.fastest[:count]
            names = [node.name for node in chosen for _ in range(max(node.devices, 1))]
        return tuple(names), self.written(str(count), tuple(names))

    def written(self, name: str, placement: Literal["spread"] | tuple[str, ...]) -> str:
        """The path of a file of the cluster with this placement, which is written if it is new."""
        path = self.folder / f"{name}.yaml"
        if not path.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(path, cluster_text(replace(self.cluster, placement=placement)))
        return str(path.absolute())


def candidates(experiment: Experiment, places: Places) -> list[Candidate]:
    """All that is tried for `experiment`: its own strategies, and those of this file.

    A strategy that cannot run on so many ranks is left out; one without room in memory is found in
    the simulation.
    """
    found = list(_alone(experiment, places))
    counts = places.counts
    if not counts:
        return found
    own = {
        f"{label} of the file" if label in (*EVERYWHERE, ONE_PROCESS) else label: each
        for label, each in experiment.strategies.items()
        if not isinstance(each, Single)
    }
    strategies = {**{name: strategy(text) for name, text in EVERYWHERE.items()}, **own}
    known = set()
    for name, each in strategies.items():
        if repr(each) in known:
            continue
        known.add(repr(each))
        for count in counts if name in ON_FEWER else counts[-1:]:
            for batch in BATCHES if name in WITH_BATCHES and count == counts[-1] else (1.0,):
                found.extend(_one(experiment, places, name, each, count, batch))
    for count in counts if places.mixed else ():
        ring = strategies["ring"]
        found.extend(_one(experiment, places, "ring", ring, count, 1.0, shares=MEASURED))
    return by_interest(found)


def by_interest(found: Sequence[Candidate]) -> list[Candidate]:
    """`found` so that whoever comes first shows most: one process, each strategy once on all nodes,
    then other batches and numbers of nodes."""
    seen: dict[str, int] = {}
    places = {}
    for candidate in sorted(found, key=lambda each: (each.batch != 1, -each.run.training.ranks)):
        seen[candidate.label] = seen.get(candidate.label, 0) + 1
        places[candidate.name] = (candidate.label != ONE_PROCESS, seen[candidate.label])
    return sorted(found, key=lambda each: places[each.name])


def on_other_counts(
    candidate: Candidate, experiment: Experiment, places: Places
) -> list[Candidate]:
    """The strategy of `candidate`, with its batch, on each number of nodes."""
    if candidate.label == ONE_PROCESS:
        return []
    label, each, batch = candidate.label, candidate.run.strategy, candidate.batch
    shares = candidate.run.training.shares
    return [
        other
        for count in places.counts
        for other in _one(experiment, places, label, each, count, batch, shares)
    ]


def strategy(text: str) -> Strategy[Any]:
    """The strategy of this notation."""
    built = parse(text, STRATEGIES, where="candidate")
    assert isinstance(built, Strategy)
    return built


def with_rates(candidate: Candidate) -> list[Candidate]:
    """`candidate` with other learning rates."""
    return [
        replace(
            candidate,
            name=f"{candidate.name}, rate x {rate:g}",
            run=replace(candidate.run, training=_at_rate(candidate.run.training, rate)),
            rate=rate,
        )
        for rate in RATES
    ]


def scaled_rate(optimizer: Optimizer, batch: float) -> float:
    """By what the learning rate is multiplied for `batch` times the samples in a step.

    In proportion for SGD (Goyal et al., 2017), by the square root for Adam and its kin (Malladi et
    al., NeurIPS 2022).
    """
    return float(batch**0.5) if optimizer.name in ADAPTIVE else batch


def _at_rate(training: Training, factor: float) -> Training:
    optimizer = training.optimizer
    rate = optimizer.arguments.get("lr")
    if factor == 1 or not isinstance(rate, int | float):
        return training
    optimizer = optimizer.with_setting("lr", float(f"{rate * factor:.4g}"))
    groups = tuple(
        replace(group, arguments={**group.arguments, "lr": float(f"{own * factor:.4g}")})
        if isinstance(own := group.arguments.get("lr"), int | float)
        else group
        for group in optimizer.groups
    )
    return training.with_setting("optimizer", replace(optimizer, groups=groups))


def _alone(experiment: Experiment, places: Places) -> Iterator[Candidate]:
    """One process on the fastest node, with each batch."""
    node, optimizer = places.fastest[0].name, experiment.training.optimizer
    several = len(places.cluster.nodes) > 1  # `Single` chooses the node where it is fastest
    path = places.written("all", "spread") if several else places.on(1)[1]
    tried = [(batch, False) for batch in BATCHES] + [(batch, True) for batch in KEPT]
    for batch, kept in tried:
        training, rate = _training(experiment, 1, batch, path), 1.0
        if kept:
            training = training.with_setting("optimizer", optimizer)
            rate = 1 / scaled_rate(optimizer, batch)
        name = ONE_PROCESS + _batch_text(batch) + ", rate kept" * kept
        run = Run(name, experiment.task, Single(), experiment.seeds[0], training)
        yield Candidate(name, run, (node,), ONE_PROCESS, batch, rate)


def _one(
    experiment: Experiment,
    places: Places,
    label: str,
    each: Strategy[Any],
    count: int,
    batch: float,
    shares: Any = None,
) -> Iterator[Candidate]:
    names, path = places.on(count)
    try:
        if each.refusal(len(names)) is not None:
            return
        several = len(places.cluster.nodes) > 1
        on = f" on {count} {'nodes' if several else 'ranks'}"
        name = label + ", shares by speed" * (shares == MEASURED) + on + _batch_text(batch)
        training = _training(experiment, len(names), batch, path, shares)
        run = Run(name, experiment.task, each, experiment.seeds[0], training)
    except InputError:
        return
    yield Candidate(name, run, tuple(dict.fromkeys(names)), label, batch)


def _batch_text(batch: float) -> str:
    return "" if batch == 1 else f", batch x {batch:g}"


def _training(
    experiment: Experiment, ranks: int, batch: float, cluster: str, shares: Any = None
) -> Training:
    """The experiment's training in virtual time, with `batch` times its samples in a step, divided
    among `ranks`, as many samples in all, and the learning rate that goes with the batch."""
    given = experiment.training
    whole = given.ranks * given.batch_size
    of_rank = max(1, round(whole * batch / ranks))
    steps = given.steps and max(1, round(given.steps * whole / (ranks * of_rank)))
    training = replace(
        given,
        ranks=ranks,
        batch_size=of_rank,
        steps=steps,
        shares=shares,
        accumulation=1,
        engine="simulation",
        tensors="real",
        cluster=cluster,
        checkpoint_every=None,
        trace_steps=0,
        record_order=False,
        tensorboard=False,
    )
    return _at_rate(training, scaled_rate(given.optimizer, ranks * of_rank / whole))
