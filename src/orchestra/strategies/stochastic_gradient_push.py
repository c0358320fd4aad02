"""Stochastic gradient push: gossip over one-way links, which never wait for an answer."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from orchestra import exchange
from orchestra.errors import InputError
from orchestra.settings import MOST_SEED, MOST_STEPS, setting
from orchestra.strategies.base import Footprint, Replicas, ReplicaState, Roles
from orchestra.topologies import (
    Exponential,
    Topology,
    connected,
    random_shares,
    sources_of,
    uniform_shares,
)

if TYPE_CHECKING:
    from orchestra.exchange import PushSum, SharedWork
    from orchestra.exchange.push_sum import Shares
    from orchestra.worker.worker import Worker


@dataclass
class PushState(ReplicaState):
    """`push` is this worker's mass, x and w."""

    push: PushSum


@dataclass(frozen=True, repr=False)
class StochasticGradientPush(Replicas[PushState]):
    """Push shares of the parameters along one-way links.

    SGP (Assran et al., ICML 2019), Algorithm 1; with `overlap`, OSGP.

    Worker i has a numerator x_i, a weight w_i, which begins at 1, and parameters z_i = x_i / w_i:

        g_i at z_i;  x_i <- x_i - gamma g_i;  x_i, w_i <- sum_j p_ij (x_j, w_j);  z_i = x_i / w_i

    p_ji is what i sends to j; each worker's shares sum to 1, itself included, so that the sums
    of all x and of all w stay as they are. The optimizer acts on x and stays with the worker.

    With `overlap` tau a worker goes on while messages travel, adds them when they are there, and
    waits for those that are tau steps old. When it sends is `exchanges`:

    every_tau_steps   tau-OSGP (Section 3 and Algorithm 2 of the paper): in steps that tau divides,
                      after the local step and before it adds what has come
    one_at_a_time     the authors' code (gossip_module/distributed.py of
                      facebookresearch/stochastic_gradient_push, where synch_freq is tau - 1): at
                      the beginning of a step, before its gradient, and only once the messages of
                      the last exchange have been added
    every_step        the delays of the paper's analysis: up to tau exchanges at once

    For tau = 1 the first and the last are the same. Graphs and random weights are those of the
    number of the exchange, as the authors' code rotates peers.

    The weights: P^k 1 tends to n times the stationary distribution of P, so w_i tends to 1 where
    every rank sends and hears alike, and to a number of its own elsewhere. What is n is the sum
    of all w, and the w of each rank in the variant whose x and w are not averages but sums
    (n p_ij in place of p_ij in the limit); z is the same in both.

    With `overlap`, where workers take batches from a queue, each goes at its own pace, adds what
    has arrived, and waits for nobody: asynchronous gradient push (Assran and Rabbat, IEEE TAC
    2021). Whatever `exchanges` says, it sends once and then only after it has heard of somebody,
    and at most tau of its messages are under way. In the mean, sum x / sum w, all gradients count
    alike.

    With `overlap` two runs differ in their bits: a message is added in the step in which it has
    come, as in the paper and in the authors' code. To add it only in the step in which it is due
    would make every message as late as tau allows; and where batches come from a queue, workers do
    unlike numbers of steps, so that no step is known in which it is due. `record_order` writes down
    what came when, and `orchestra replay` repeats that run to the bit.

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
        0, "tau: steps a worker may be ahead of the messages sent to it", low=0, high=MOST_STEPS
    )
    exchanges: Literal["every_tau_steps", "one_at_a_time", "every_step"] = setting(
        "every_tau_steps", "with overlap: in which steps a worker sends"
    )
    weights: Literal["uniform", "random"] = setting(
        "uniform", "random: each worker divides its mass by chance, anew in each step"
    )
    seed: int = setting(0, "of random weights", low=0, high=MOST_SEED)

    def check(self) -> None:
        """Without overlap every step has its exchange."""
        if self.exchanges != "every_tau_steps" and not self.overlap:
            raise InputError(
                f"StochasticGradientPush: exchanges={self.exchanges!r} needs messages that may be "
                "late: set overlap to 1 or more"
            )

    @property
    def depends_on_speed(self) -> bool:
        """With `overlap` messages are added when they are there."""
        return self.overlap > 0

    @property
    def self_paced(self) -> bool:
        """With `overlap`: messages need not be of a certain step."""
        return self.overlap > 0

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

    def allocate(self, worker: Worker, work: SharedWork | None) -> PushState:
        shares: Shares = partial(random_shares, seed=self.seed)
        if self.weights == "uniform":
            shares = uniform_shares
        if work is None:
            push = exchange.PushSum(worker, self.topology, shares, self.overlap, self.exchanges)
        else:
            push = exchange.SelfPacedPushSum(worker, self.topology, shares, self.overlap)
        return PushState(worker.local_optimizer(), push, work=work)

    def before_forward(self, worker: Worker, state: PushState) -> None:
        """As in the authors' code: what has come is added and an exchange begins, then z."""
        if self.exchanges == "one_at_a_time":
            state.push.mix()
            worker.parameters.copy_(state.push.z())

    def update(self, worker: Worker, state: PushState) -> None:
        """The optimizer's step on x, a step of push-sum, and z."""
        worker.clip()
        worker.parameters.copy_(state.push.x)
        worker.update_locally(state.optimizer)
        state.push.x.copy_(worker.parameters)
        if self.exchanges != "one_at_a_time":
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
        self._come_together(worker, state)
        exchange.exact_mean_of_buffers(worker)

    def stop(self, worker: Worker, state: PushState) -> None:
        """The exact mean: sum of x / sum of w."""
        if state.work is not None:
            state.work.close()
        self._come_together(worker, state)

    def _come_together(self, worker: Worker, state: PushState) -> None:
        state.push.drain()
        z = state.push.x.double() / state.push.w  # in float32 its mean would not be the final one
        worker.snapshots.offer(worker.step.consumed, z, weight=state.push.w)
        worker.snapshots.renew(worker.step.consumed, z, weight=state.push.w)
        state.push.agree()
        worker.parameters.copy_(state.push.x)
