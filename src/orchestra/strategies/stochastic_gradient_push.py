"""Stochastic gradient push: gossip over one-way links, which never wait for an answer."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from orchestra import exchange, topologies
from orchestra.errors import InputError
from orchestra.settings import MAX_SEED, MAX_STEPS, setting
from orchestra.settings.base import COMMON
from orchestra.strategies.base import Replicas, Roles, torch
from orchestra.strategies.member import ReplicaMember
from orchestra.strategies.traits import AfterLoss, Dealing, Footprint, Traits, WorkMode
from orchestra.topologies import Exponential, Topology, sources_of
from orchestra.transports.tags import Tag

if TYPE_CHECKING:
    from torch import Tensor

    from orchestra.coordinator.rest import Rest
    from orchestra.exchange import Kept
    from orchestra.transports.protocol import Pending
    from orchestra.worker.worker import Worker

SENDING, RECEIVING = 0, 1
"""Lanes of background flows: neither waits for the other."""

AWAITED = 4
"""Messages of any rank that a background flow receives before the worker asks for them."""


@dataclass(frozen=True, repr=False)
class StochasticGradientPush(Replicas):
    """Push shares of the parameters along one-way links.

    SGP (Assran et al., ICML 2019), Algorithm 1; with `overlap`, OSGP.

    Worker i has a numerator x_i, a weight w_i, which begins at 1, and parameters z_i = x_i / w_i:

        g_i at z_i;  x_i <- x_i - gamma g_i;  x_i, w_i <- sum_j p_ij (x_j, w_j);  z_i = x_i / w_i

    p_ji is what i sends to j; each worker's shares sum to 1, itself included, so that the sums
    of all x and of all w stay as they are. The optimizer acts on x and stays with the worker.

    With `overlap` tau a worker goes on while messages are made, sent and taken in by background
    flows, adds them when they are there, and waits for those that are tau steps old. When it sends
    is `exchanges`:

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
    2021). It sends once and then only after it has heard of somebody, and at most tau of its
    messages are under way. With exchanges="one_at_a_time" it mixes before the gradient, and
    otherwise after it. In the mean, sum x / sum w, all gradients count alike.

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
        0, "tau: steps a worker may be ahead of the messages sent to it", low=0, high=MAX_STEPS
    )
    exchanges: Literal["every_tau_steps", "one_at_a_time", "every_step"] = setting(
        "every_tau_steps", "with overlap: in which steps a worker sends"
    )
    weights: Literal["uniform", "random"] = setting(
        "uniform", "random: each worker divides its mass by chance, anew in each step"
    )
    seed: int = setting(0, "of random weights", low=0, high=MAX_SEED)

    def check(self) -> None:
        if self.exchanges != "every_tau_steps" and not self.overlap:
            raise InputError(
                f"StochasticGradientPush: exchanges={self.exchanges!r} needs messages that may be "
                "late: set overlap to 1 or more"
            )

    def traits(self, work: WorkMode = "shared") -> Traits:
        """With `overlap` messages are added when they are there, and need not be of a certain
        step."""
        if self.overlap:
            return self._free_traits(work)
        return replace(super().traits(work), after_loss=AfterLoss.KEPT)

    def roles(self, ranks: int) -> Roles:
        if not topologies.connected(self.topology.graphs(ranks)):
            raise InputError(f"{self!r}: the topology does not connect {ranks} ranks")
        return super().roles(ranks)

    def _memory(self, rank: int, ranks: int) -> Footprint:
        """Add x, and messages on their way, out and in, of as many steps as they may be late."""
        graphs = self.topology.graphs(ranks)
        moving = max(len(graph[rank]) + len(sources_of(graph)[rank]) for graph in graphs)
        copies = 1.0 + moving * (1 + self.overlap) + (self.overlap > 0)  # the mass before its parts
        return replace(super()._memory(rank, ranks), copies=copies)

    def member(self, worker: Worker) -> PushMember:
        mixes_first = self.exchanges == "one_at_a_time"
        rule: type[PushMember] = SynchronousPush
        if self.traits(worker.work).dealing is Dealing.QUEUE:
            rule = MixFirstAsynchronousPush if mixes_first else AsynchronousPush
        elif self.overlap:
            rule = OneAtATimePush if mixes_first else OverlappedPush
        mass = torch.cat([worker.parameters, worker.parameters.new_ones(1)])
        return rule(self, worker, worker.local_optimizer(), mass)

    def shares(self, targets: tuple[int, ...], rank: int, number: int) -> Mapping[int, float]:
        """Return the shares that `rank` sends to targets in exchange `number`, and keeps; sum 1."""
        if self.weights == "uniform":
            return topologies.uniform_shares(targets, rank, number)
        return topologies.random_shares(targets, rank, number, seed=self.seed)


@dataclass(eq=False)
class PushMember(ReplicaMember[StochasticGradientPush]):
    """A worker with a mass: x and behind it w, in one flat vector, [layout.size + 1].

    An exchange sends a share of the mass along every link and keeps the rest, so that the sums of
    x and of w over all ranks, messages included, never change. z = x / w tends to the mean.
    """

    mass: Tensor
    step: int = field(default=0, metadata=COMMON)

    @property
    def x(self) -> Tensor:
        return self.mass[:-1]

    @property
    def w(self) -> float:
        """The weight; 1 at the beginning. NaN where tensors have shapes only."""
        return math.nan if self.mass.is_meta else float(self.mass[-1])

    def z(self) -> Tensor:
        return self.x / self.mass[-1]

    def update(self) -> None:
        """Take a local step on x and a step of push-sum; show z."""
        self.descend()
        self.mix()
        self.offer()

    def descend(self) -> None:
        """x_i <- x_i - gamma g_i, by the worker's optimizer."""
        worker = self.worker
        worker.clip()
        worker.parameters.copy_(self.x)
        worker.update_locally(self.optimizer)
        self.x.copy_(worker.parameters)

    @abstractmethod
    def mix(self) -> None:
        """x_i, w_i <- sum_j p_ij (x_j, w_j), as far as messages have arrived."""

    @abstractmethod
    def drain(self) -> None:
        """Add all mass that was sent until this step. Collective over the workers."""

    def show(self) -> None:
        """Set the parameters, at which the next gradient is computed, to z."""
        self.worker.parameters.copy_(self.z())

    def offer(self) -> None:
        """Show z, for the next gradient and for a snapshot."""
        worker = self.worker
        self.show()
        worker.snapshots.offer(worker.step.consumed, worker.parameters, weight=self.w)

    def links(self, number: int) -> tuple[list[int], dict[int, float], float]:
        """Return the ranks that send to this one in exchange `number`, the share that it sends to
        each of its targets, and the share that it keeps.
        """
        ranks, own = self.worker.workers.ranks, self.worker.workers.index(self.worker.rank)
        graph = self.strategy.topology.graph(len(ranks), number)
        shares = self.strategy.shares(graph[own], own, number)
        sources = [ranks[peer] for peer in sources_of(graph)[own]]
        return sources, {ranks[peer]: shares[peer] for peer in graph[own]}, shares[own]

    def add(self, arrived: Tensor) -> None:
        self.charged(partial(self.mass.add_, arrived.to(self.mass.device)))

    def charged(self, function: Callable[[], Tensor]) -> Tensor:
        """Run `function`, and charge it as work on the whole mass."""
        return exchange.charge(self.worker, "mix", self.mass.numel(), function)

    def open(self, *, fresh: bool) -> None:
        """Begin with x, w = the parameters, 1, if all have equal ones."""
        super().open(fresh=fresh)
        if fresh:
            self.x.copy_(self.worker.parameters)
            self.mass[-1] = 1.0

    def settle(self, rest: Rest) -> None:
        self.drain()
        self.show()

    def rest(self, rest: Rest) -> Kept:
        if rest.reason.ends:
            self.close_queue()  # first, so that all have taken their last batch when they drain
        kept = super().rest(rest)
        if rest.reason.ends:
            z = self.x.double() / self.w  # in float32 its mean would not be the final one
            self.worker.snapshots.renew(self.worker.step.consumed, z, weight=self.w)
        return kept

    def kept(self) -> Kept:
        """Return x and w: the model is the sum of x over the sum of w."""
        return replace(super().kept(), learnt=[exchange.Learnt(0, self.x, self.w, summed=True)])


@dataclass(eq=False)
class SynchronousPush(PushMember):
    """SGP, Algorithm 1: the messages of a step are added in that step."""

    def mix(self) -> None:
        transport = self.worker.transport
        sources, shares, kept = self.links(self.step)
        arriving = [transport.receive(source, Tag.MIX) for source in sources]
        leaving = [
            transport.send(self.charged(partial(torch.mul, self.mass, share)), peer, Tag.MIX)
            for peer, share in shares.items()
        ]
        self.charged(lambda: self.mass.mul_(kept))
        for arrived in arriving:
            self.add(arrived.wait())
        for sent in leaving:
            sent.wait()
        self.step += 1

    def drain(self) -> None:
        """Return at once: nothing is in flight after a step."""


@dataclass(eq=False)
class BackgroundPush(PushMember):
    """A worker whose messages are made, sent and received by background flows.

    `leaving` are the messages that it sends, each with the step in which it began to.
    """

    exchanges: int = field(default=0, metadata=COMMON)  # begun so far
    leaving: list[tuple[int, Pending[Tensor]]] = field(init=False, default_factory=list)

    def send_shares(self, shares: Mapping[int, float], kept: float) -> None:
        """Begin to send the shares of an exchange, and keep the rest."""
        for peer, share in shares.items():
            self.send(partial(self.charged, partial(torch.mul, self.mass, share)), peer)
        # A new tensor: the flow that sends shares of the old one still reads it.
        self.mass = self.charged(lambda: self.mass * kept)
        self.exchanges += 1

    def send(self, make: Callable[[], Tensor], to: int) -> None:
        """Begin to send what `make` returns."""
        sending = self.worker.transport.in_background(
            lambda flow: flow.send(make(), to, Tag.MIX).wait(), SENDING
        )
        self.leaving.append((self.step, sending))

    def receive(self, source: int | None) -> Pending[Tensor]:
        """Begin to receive the next message of `source`, or of any rank."""
        return self.worker.transport.in_background(
            lambda flow: flow.receive(source, Tag.MIX).wait(), RECEIVING
        )

    def wait_for_sends(self, due: int) -> None:
        """Wait until the messages sent in the steps up to `due` have left."""
        for step, sending in self.leaving:
            if step <= due:
                sending.wait()
        self.leaving = [(step, sending) for step, sending in self.leaving if step > due]

    def rest(self, rest: Rest) -> Kept:
        """Also end the flows."""
        kept = super().rest(rest)
        self.worker.transport.end_background()
        return kept


@dataclass(eq=False)
class OverlappedPush(BackgroundPush):
    """OSGP, Algorithm 2: a worker adds what has arrived, and waits for messages of tau steps ago.

    `arriving` are the expected messages: the step in which each was sent, its source and itself.
    """

    arriving: list[tuple[int, int, Pending[Tensor]]] = field(init=False, default_factory=list)

    def mix(self) -> None:
        """Send in the steps that the period divides; add what is here, wait for what is due."""
        settings = self.strategy
        period = settings.overlap if settings.exchanges == "every_tau_steps" else 1
        if self.step % period == 0:
            self.begin_exchange()
        self.add_arrived(due=self.step - settings.overlap)
        self.step += 1

    def drain(self) -> None:
        self.add_arrived(due=self.step)

    def begin_exchange(self) -> None:
        sources, shares, kept = self.links(self.exchanges)
        self.expect(sources)
        self.send_shares(shares, kept)

    def expect(self, sources: list[int]) -> None:
        """Begin to receive a message of each of `sources`."""
        self.arriving += [(self.step, source, self.receive(source)) for source in sources]

    def add_arrived(self, due: int) -> None:
        """Add what has arrived, and wait for the messages of the steps up to `due`."""
        late = []
        for step, source, message in self.arriving:
            if step > due and not message.done():
                late.append((step, source, message))
            else:
                self.take(source, message.wait())
        self.arriving = late
        self.wait_for_sends(due)

    def take(self, source: int, arrived: Tensor) -> None:
        """Add a message of `source`."""
        self.add(arrived)


class MixFirst(PushMember):
    """A worker that mixes before the gradient of a step, as the authors' code does."""

    def begin(self) -> None:
        self.mix()
        self.show()

    def update(self) -> None:
        self.descend()
        self.offer()


@dataclass(eq=False)
class OneAtATimePush(MixFirst, OverlappedPush):
    """The authors' code: an exchange begins once all messages of the last one have been added.

    `closed` are the ranks that drain, and how many exchanges each has begun.
    """

    closed: dict[int, int] = field(init=False, default_factory=dict)

    def mix(self) -> None:
        self.add_arrived(due=self.step - self.strategy.overlap)
        if not self.arriving:
            self.begin_exchange()
        self.step += 1

    def drain(self) -> None:
        """Tell the others how many exchanges this rank began, as the last of its messages.

        A rank that is in an earlier step, and has begun more exchanges, would wait for ever for
        its part of them: the number of exchanges in a number of steps is each rank's own.
        """
        begun = torch.tensor([self.exchanges])
        others = [rank for rank in self.worker.workers.ranks if rank != self.worker.rank]
        for peer in others:
            self.send(lambda: begun, peer)
        self.add_arrived(due=self.step)
        for peer in others:
            while peer not in self.closed:
                self.expect([peer])
                self.add_arrived(due=self.step)
        self.exchanges = max(self.exchanges, *self.closed.values(), 0)
        self.closed.clear()

    def expect(self, sources: list[int]) -> None:
        super().expect([source for source in sources if source not in self.closed])

    def take(self, source: int, arrived: Tensor) -> None:
        if arrived.dtype == torch.int64:  # no mass: the last message of a rank that drains
            self.closed[source] = int(arrived)
        else:
            self.add(arrived)


@dataclass(eq=False)
class AsynchronousPush(BackgroundPush):
    """Asynchronous gradient push: a worker adds what has arrived, and waits for nobody.

    A worker that has sent keeps the rest of its mass until it has heard of somebody: its w would
    become arbitrarily small otherwise, and its steps in z arbitrarily long.
    """

    sent: Tensor = field(init=False)  # to each since the last drain
    received: int = field(init=False, default=0)
    heard: bool = field(init=False, default=True)  # since it sent
    # The next messages, of whatever rank
    arriving: deque[Pending[Tensor]] = field(init=False, default_factory=deque)

    def __post_init__(self) -> None:
        self.sent = torch.zeros(len(self.worker.workers), dtype=torch.float64)

    def mix(self) -> None:
        """Add what is here; send, if this worker has heard of somebody."""
        while self.next_message().done():
            self.take_next()
        if self.heard:
            _, shares, kept = self.links(self.exchanges)
            self.send_shares(shares, kept)
            for peer in shares:
                self.sent[self.worker.workers.index(peer)] += 1
            self.heard = False
        self.wait_for_sends(due=self.step - self.strategy.overlap)
        self.step += 1

    def drain(self) -> None:
        """Add all mass that was sent. No worker may send before all have done so."""
        sent, own = self.sent.clone(), self.worker.workers.index(self.worker.rank)
        exchange.ring_sum(self.worker, sent, Tag.COUNT)
        while self.received < int(sent[own]):
            self.take_next()
        self.sent.zero_()
        self.received = 0
        self.wait_for_sends(due=self.step)

    def next_message(self) -> Pending[Tensor]:
        while len(self.arriving) < AWAITED:
            self.arriving.append(self.receive(None))
        return self.arriving[0]

    def take_next(self) -> None:
        """Wait for the next message, and add it."""
        arrived = self.next_message().wait()
        self.arriving.popleft()
        self.received += 1
        self.heard = True
        self.add(arrived)

    def settle(self, rest: Rest) -> None:
        """Also cancel the posted receives, by messages to this rank itself."""
        super().settle(rest)
        transport = self.worker.transport
        for message in self.arriving:
            transport.send(torch.zeros(0), transport.rank, Tag.MIX).wait()
            message.wait()
        self.arriving.clear()


class MixFirstAsynchronousPush(MixFirst, AsynchronousPush):
    """Asynchronous gradient push in the order of the authors' code."""
