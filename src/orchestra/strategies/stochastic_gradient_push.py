"""Stochastic gradient push: gossip over one-way links, which never wait for an answer."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from orchestra import exchange
from orchestra.errors import InputError
from orchestra.settings import setting
from orchestra.strategies.base import Footprint, Roles, Strategy
from orchestra.topologies import (
    Exponential,
    Topology,
    connected,
    random_shares,
    sources_of,
    uniform_shares,
)

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from orchestra.exchange import PushSum
    from orchestra.worker.worker import Worker


@dataclass
class PushState:
    """A worker's own optimizer, and its mass."""

    optimizer: Optimizer
    push: PushSum


@dataclass(frozen=True, repr=False)
class StochasticGradientPush(Strategy[PushState]):
    """Push shares of the parameters along one-way links.

    SGP (Assran et al., ICML 2019), Algorithm 1; with `overlap`, OSGP.

    Worker i has a numerator x_i, a weight w_i, which begins at 1, and parameters z_i = x_i / w_i:

        g_i at z_i;  x_i <- x_i - gamma g_i;  x_i, w_i <- sum_j p_ij (x_j, w_j);  z_i = x_i / w_i

    p_ji is what i sends to j; each worker's shares sum to 1, itself included, so that the sums
    of all x and of all w stay as they are. The optimizer acts on x and stays with the worker.

    The weights: P^k 1 tends to n times the stationary distribution of P, so w_i tends to 1 where
    every rank sends and hears alike, and to a number of its own elsewhere. What is n is the sum
    of all w, and the w of each rank in the variant whose x and w are not averages but sums
    (n p_ij in place of p_ij in the limit); z is the same in both.

    More peers first and fewer later: Switch(StochasticGradientPush(Exponential(peers=2)),
    StochasticGradientPush(), when=AfterFraction(0.3), moments="averaged").
    """

    use = "for links one way, and peers that may be late"
    variants = (
        ("StochasticGradientPush()", "for many workers of about equal speed"),
        ("StochasticGradientPush(overlap=1)", "for slow links: messages may be a step late"),
    )

    topology: Topology = setting(Exponential(peers=1), "who sends to whom")
    _: KW_ONLY
    overlap: int = setting(
        0, "tau: steps that a worker may be ahead of the messages sent to it", low=0
    )
    weights: Literal["uniform", "random"] = setting(
        "uniform", "random: each worker divides its mass by chance, anew in each step"
    )
    seed: int = setting(0, "of random weights", low=0)

    @property
    def synchronous(self) -> bool:
        """Workers wait for few others, and share no loss."""
        return False

    @property
    def depends_on_speed(self) -> bool:
        """With `overlap` messages are added when they are there."""
        return self.overlap > 0

    def currently_lockstep(self, state: PushState) -> bool:
        """In every step others wait for this worker's mass."""
        return True

    def roles(self, ranks: int) -> Roles:
        """All ranks are workers; the graph has to connect them."""
        if not connected(self.topology, ranks):
            raise InputError(f"{self!r}: the topology does not connect {ranks} ranks")
        return Roles((1.0,) * ranks)

    def footprint(self, rank: int, ranks: int) -> Footprint:
        """And x, and what is on its way, out and in, of a step and of those that it may be late."""
        graphs = [self.topology.graph(ranks, s) for s in range(self.topology.period(ranks))]
        moving = max(len(graph[rank]) + len(sources_of(graph)[rank]) for graph in graphs)
        copies = 1.0 + moving * (1 + self.overlap)
        return replace(super().footprint(rank, ranks), copies=copies)

    def start(self, worker: Worker) -> PushState:
        """Everyone begins with the parameters of the first rank, and weight 1."""
        exchange.agree_on_parameters(worker)
        worker.reporter.expendable(False)
        shares = partial(random_shares, seed=self.seed)
        push = exchange.PushSum(
            worker,
            self.topology,
            shares if self.weights == "random" else uniform_shares,
            self.overlap,
        )
        return PushState(worker.local_optimizer(), push)

    def reduce(self, worker: Worker, state: PushState) -> None:
        """The gradient stays here."""
        exchange.keep_gradient(worker)

    def update(self, worker: Worker, state: PushState) -> None:
        """The optimizer's step on x, a step of push-sum, and z."""
        worker.clip()
        worker.parameters.copy_(state.push.x)
        worker.update_locally(state.optimizer)
        state.push.x.copy_(worker.parameters)
        state.push.mix()
        worker.parameters.copy_(state.push.z())
        worker.snapshots.offer(worker.step.consumed, worker.parameters, weight=state.push.w)

    def quiesce(self, worker: Worker, state: PushState, step: int) -> bool:
        """All mass sent until this step has arrived."""
        state.push.drain()
        worker.parameters.copy_(state.push.z())
        return True

    def agree(self, worker: Worker, state: PushState) -> None:
        """The exact mean of the replicas, and of their buffers."""
        self.stop(worker, state)
        exchange.exact_mean_of_buffers(worker)

    def stop(self, worker: Worker, state: PushState) -> None:
        """The exact mean: sum of x / sum of w."""
        state.push.drain()
        z = state.push.x.double() / state.push.w  # in float32 its mean would not be the final one
        worker.snapshots.renew(worker.step.consumed, z, weight=state.push.w)
        state.push.agree()
        worker.parameters.copy_(state.push.x)

    def optimizer_of(self, state: PushState) -> Optimizer:
        """This worker's own."""
        return state.optimizer
