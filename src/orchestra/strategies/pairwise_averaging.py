"""Asynchronous decentralized parallel SGD: everyone averages with one other worker at a time."""

from __future__ import annotations

import random
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING

from orchestra import exchange, optimizers
from orchestra.errors import InputError
from orchestra.settings import MOST_SEED, setting
from orchestra.strategies.base import Footprint, Roles, Strategy, roles_of
from orchestra.topologies import Complete, Graph, Topology, connect

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from orchestra.exchange import PairwiseAverage, SharedWork
    from orchestra.worker.worker import Worker


@dataclass
class PairwiseState:
    """A worker's own optimizer, its part in averages, the steps done, and whom it may ask in each
    step of the topology's period."""

    optimizer: Optimizer
    pair: PairwiseAverage = field(metadata=optimizers.TRANSIENT)
    work: SharedWork | None = field(default=None, metadata=optimizers.TRANSIENT)
    step: int = 0
    partners: dict[int, tuple[int, ...]] = field(
        default_factory=dict, metadata=optimizers.TRANSIENT
    )


@dataclass(frozen=True, repr=False)
class PairwiseAveraging(Strategy[PairwiseState]):
    """Average parameters with one random worker at a time.

    AD-PSGD (Lian et al., ICML 2018), Algorithm 1. On worker i, at its own pace:

        g_i at x_i;  meanwhile x_i, x_j <- (x_i + x_j) / 2 with a random j;  x_i <- x_i - gamma g_i

    so the gradient is of an x_i that was averaged since. Even workers ask, odd ones answer: as
    no one who answers ever waits, there is no deadlock. The optimizer stays with the worker; it
    acts on the averaged x_i. Staleness counts the averages between a gradient's read and its
    write. The final parameters are the exact mean.
    """

    use = "for workers of unlike speed, without a server"
    variants = (("PairwiseAveraging()", use),)

    topology: Topology = setting(
        Complete(), "whom a worker may average with; links between two even or two odd are not used"
    )
    _: KW_ONLY
    seed: int = setting(0, "of the choice of partners", low=0, high=MOST_SEED)

    @property
    def synchronous(self) -> bool:
        """Nobody waits for more than one partner."""
        return False

    @property
    def self_paced(self) -> bool:
        """A partner averages in the background, at any step of its own."""
        return True

    def work(self, state: PairwiseState) -> SharedWork | None:
        """From the first worker."""
        return state.work

    def currently_lockstep(self, state: PairwiseState) -> bool:
        """Where work is dealt out, all count the steps alike."""
        return state.work is None

    def roles(self, ranks: int) -> Roles:
        """All ranks are workers; the links between even and odd ones have to connect them."""
        period = self.topology.period(ranks)
        graphs = [self.topology.graph(ranks, step) for step in range(period)]
        if not connect(
            [tuple(_partners(graph, rank) for rank in range(ranks)) for graph in graphs]
        ):
            raise InputError(
                f"{self!r}: the links between even and odd ranks do not connect {ranks} ranks"
            )
        return Roles((1.0,) * ranks)

    def footprint(self, rank: int, ranks: int) -> Footprint:
        """And what is averaged meanwhile: x, and that of the other worker."""
        return replace(super().footprint(rank, ranks), copies=2.0)

    def start(self, worker: Worker) -> PairwiseState:
        """Everyone begins with the parameters of the first rank."""
        exchange.agree_on_parameters(worker)
        worker.reporter.expendable(False)
        work = exchange.share_work(worker, roles_of(self, worker.budget_ranks).shares)
        return PairwiseState(worker.local_optimizer(), exchange.PairwiseAverage(worker), work)

    def before_forward(self, worker: Worker, state: PairwiseState) -> None:
        """From here the parameters are averaged, while the gradient of the old ones is taken."""
        state.pair.give(self._partner(worker, state) if state.pair.active else None)

    def _partner(self, worker: Worker, state: PairwiseState) -> int | None:
        own, ranks = worker.workers.index(worker.rank), len(worker.workers)
        phase = state.step % self.topology.period(ranks)
        if phase not in state.partners:
            state.partners[phase] = _partners(self.topology.graph(ranks, phase), own)
        choices = state.partners[phase]
        return random.Random(f"{self.seed}-{own}-{state.step}").choice(choices) if choices else None

    def reduce(self, worker: Worker, state: PairwiseState) -> None:
        """The gradient stays here."""
        exchange.keep_gradient(worker)

    def update(self, worker: Worker, state: PairwiseState) -> None:
        """The optimizer's step on the averaged parameters."""
        worker.clip()
        worker.step.staleness = (state.pair.take(),)
        worker.measures.staleness.extend(worker.step.staleness)
        worker.update_locally(state.optimizer)
        worker.snapshots.offer(worker.step.consumed, worker.parameters)
        state.step += 1

    def quiesce(self, worker: Worker, state: PairwiseState, step: int) -> bool:
        """Nobody averages."""
        state.pair.settle()
        return True

    def agree(self, worker: Worker, state: PairwiseState) -> None:
        """The exact mean of the replicas, and of their buffers."""
        state.pair.settle()
        exchange.exact_mean(worker)
        exchange.exact_mean_of_buffers(worker)

    def stop(self, worker: Worker, state: PairwiseState) -> None:
        """The exact mean of the replicas."""
        state.pair.settle()
        state.pair.close()
        if state.work is not None:
            state.work.close()
        worker.snapshots.offer(worker.step.consumed, worker.parameters)
        worker.snapshots.renew(worker.step.consumed, worker.parameters)
        exchange.exact_mean(worker)

    def optimizer_of(self, state: PairwiseState) -> Optimizer:
        """This worker's own."""
        return state.optimizer


def _partners(graph: Graph, rank: int) -> tuple[int, ...]:
    """Those at the other ends of the links of `rank`, either way, of even and odd ranks."""
    near = set(graph[rank])
    return tuple(
        other
        for other in range((rank + 1) % 2, len(graph), 2)
        if other in near or rank in graph[other]
    )
