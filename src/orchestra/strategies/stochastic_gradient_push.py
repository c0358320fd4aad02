"""Stochastic gradient push: gossip over one-way links, which never wait for an answer."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from orchestra import exchange, optimizers, topologies
from orchestra.errors import InputError
from orchestra.settings import MAX_SEED, MAX_STEPS, setting
from orchestra.strategies.base import Roles, torch
from orchestra.strategies.stateful import ReplicaState, StatefulReplicas
from orchestra.strategies.traits import Footprint, Traits, WorkMode
from orchestra.topologies import Exponential, Topology, sources_of
from orchestra.transports.tags import Tag

if TYPE_CHECKING:
    from torch import Tensor

    from orchestra.exchange import Learnt
    from orchestra.transports.protocol import Task, Transport
    from orchestra.worker.worker import Worker

SENDING, RECEIVING = 0, 1
"""Lanes of background flows: neither waits for the other."""

AWAITED = 4
"""Messages of any rank that a background flow takes in before they are asked for."""


@dataclass
class PushState(ReplicaState):
    """`push` holds this worker's mass, x and w."""

    push: PushSum


@dataclass(frozen=True, repr=False)
class StochasticGradientPush(StatefulReplicas[PushState]):
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
        return self._free_traits(work) if self.overlap else super().traits(work)

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

    def allocate(self, worker: Worker, work: exchange.SharedWork | None) -> PushState:
        push = PushSum(worker, self) if work is None else SelfPacedPushSum(worker, self)
        return PushState(worker.local_optimizer(), push, work=work)

    def shares(self, targets: tuple[int, ...], rank: int, number: int) -> Mapping[int, float]:
        """Return the shares that `rank` sends to targets in exchange `number`, and keeps; sum 1."""
        if self.weights == "uniform":
            return topologies.uniform_shares(targets, rank, number)
        return topologies.random_shares(targets, rank, number, seed=self.seed)

    def before_forward(self, worker: Worker, state: PushState) -> None:
        """Follow the authors' code: add what has arrived, begin an exchange, then show z."""
        if self.exchanges == "one_at_a_time":
            state.push.mix()
            worker.parameters.copy_(state.push.z())

    def update(self, worker: Worker, state: PushState) -> None:
        """Step the optimizer on x, take a step of push-sum, and show z."""
        worker.clip()
        worker.parameters.copy_(state.push.x)
        worker.update_locally(state.optimizer)
        state.push.x.copy_(worker.parameters)
        if self.exchanges != "one_at_a_time":
            state.push.mix()
        worker.parameters.copy_(state.push.z())
        worker.snapshots.offer(worker.step.consumed, worker.parameters, weight=state.push.w)

    def settle(self, worker: Worker, state: PushState) -> None:
        """Take in all mass that was sent until this step."""
        state.push.drain()
        worker.parameters.copy_(state.push.z())

    def stop(self, worker: Worker, state: PushState) -> None:
        if state.work is not None:
            state.work.close()
        state.push.drain()
        z = state.push.x.double() / state.push.w  # in float32 its mean would not be the final one
        worker.snapshots.renew(worker.step.consumed, z, weight=state.push.w)

    def learnt(self, worker: Worker, state: PushState) -> Iterable[Learnt]:
        """Return x and w: the model is the sum of x over the sum of w."""
        return [state.push.learnt()]

    def rebase(self, worker: Worker, state: PushState) -> None:
        state.push.rebase()


@dataclass
class PushSum:
    """This rank's `mass`: x and behind it w, in one flat vector, [layout.size + 1].

    An exchange sends a share of the mass along every link and keeps the rest, so that the sums of
    x and of w over all ranks, messages included, never change. z = x / w tends to the mean.
    Messages of a step may be added up to `push.overlap` steps later; `push.exchanges` tells in
    which steps an exchange begins. The graph of an exchange is that of its number.
    """

    worker: Worker = field(metadata=optimizers.TRANSIENT)
    push: StochasticGradientPush = field(metadata=optimizers.TRANSIENT)
    mass: Tensor = field(init=False)
    step: int = 0
    exchanges: int = 0

    def __post_init__(self) -> None:
        worker, push = self.worker, self.push
        self.mass = torch.cat([worker.parameters, worker.parameters.new_ones(1)])
        self._period = max(push.overlap, 1) if push.exchanges == "every_tau_steps" else 1
        self._one_at_a_time = push.exchanges == "one_at_a_time" and push.overlap > 0
        self._leaving: list[tuple[int, Task[Tensor]]] = []  # since which step, and what
        self._arriving: list[tuple[int, int, Task[Tensor]]] = []  # and from whom
        self._closed: dict[int, int] = {}  # ranks that drain, and the exchanges that they began

    @property
    def x(self) -> Tensor:
        return self.mass[:-1]

    @property
    def w(self) -> float:
        """The weight; 1 at the beginning. NaN where tensors have shapes only."""
        return math.nan if self.mass.is_meta else float(self.mass[-1])

    def z(self) -> Tensor:
        return self.x / self.mass[-1]

    def mix(self) -> None:
        """Send, if an exchange begins, and add what is here; wait for what is due."""
        due = self.step - self.push.overlap
        if self._one_at_a_time:
            self._finish(due)
            if not self._arriving:
                self._send()
        else:
            if self.step % self._period == 0:
                self._send()
            self._finish(due)
        self.step += 1

    def _send(self) -> tuple[int, ...]:
        """Begin the next exchange; return the workers that are sent to."""
        ranks, mass = self.worker.workers.ranks, self.mass
        own = self.worker.workers.index(self.worker.rank)
        graph = self.push.topology.graph(len(ranks), self.exchanges)
        shares = self.push.shares(graph[own], own, self.exchanges)
        self._expect([ranks[peer] for peer in sources_of(graph)[own]])
        for peer in graph[own]:
            make = partial(self._charged, partial(torch.mul, mass, shares[peer]))
            self._begin_send(make, ranks[peer])
        if self.push.overlap:  # the flow that sends shares of it reads it still
            self.mass = self._charged(lambda: mass * shares[own])
        else:
            self._charged(lambda: mass.mul_(shares[own]))
        self.exchanges += 1
        return graph[own]

    def _begin(self, message: Callable[[Transport], Task[Tensor]], lane: int) -> Task[Tensor]:
        """Begin to send or receive a message; with overlap in the background."""
        transport = self.worker.transport
        if not self.push.overlap:
            return message(transport)
        return transport.in_background(lambda flow: message(flow).wait(), lane)

    def _begin_send(self, make: Callable[[], Tensor], to: int) -> None:
        sending = self._begin(lambda transport: transport.send(make(), to, Tag.MIX), SENDING)
        self._leaving.append((self.step, sending))

    def _begin_receive(self, source: int | None) -> Task[Tensor]:
        """Begin to receive the next message of `source`, or of any rank."""
        return self._begin(lambda transport: transport.receive(source, Tag.MIX), RECEIVING)

    def _expect(self, sources: Sequence[int]) -> None:
        """Begin to receive what the ranks `sources` send in this exchange."""
        for source in sources:
            if source not in self._closed:
                self._arriving.append((self.step, source, self._begin_receive(source)))

    def drain(self) -> None:
        """Collective, after a step of all: take in all that is on its way."""
        if self._one_at_a_time:
            self._drain_one_at_a_time()
        else:
            self._finish(self.step)

    def _drain_one_at_a_time(self) -> None:
        """Tell the others how many exchanges this rank began, as the last of its messages.

        A rank that is in an earlier step, and has begun more exchanges, would wait for ever for
        its part of them: the number of exchanges in a number of steps is each rank's own.
        """
        begun = torch.tensor([self.exchanges])
        others = [rank for rank in self.worker.workers.ranks if rank != self.worker.rank]
        for peer in others:
            self._begin_send(lambda: begun, peer)
        self._finish(self.step)
        for peer in others:
            while peer not in self._closed:
                self._expect([peer])
                self._finish(self.step)
        self.exchanges = max(self.exchanges, *self._closed.values(), 0)
        self._closed.clear()

    def _finish(self, due: int) -> None:
        """Add what has arrived, and wait for the messages of the steps up to `due`."""
        late = []
        for step, source, task in self._arriving:
            if step > due and not task.done():
                late.append((step, source, task))
                continue
            arrived = task.wait()
            if arrived.dtype == torch.int64:  # no mass: the last message of a rank that drains
                self._closed[source] = int(arrived)
            else:
                self._charged(partial(self.mass.add_, arrived.to(self.mass.device)))
        self._arriving = late
        for step, sending in self._leaving:
            if step <= due:
                sending.wait()
        self._leaving = [(step, sending) for step, sending in self._leaving if step > due]

    def learnt(self) -> Learnt:
        """With nothing on its way: return x and w."""
        return exchange.Learnt(0, self.x.double(), self.w)

    def rebase(self) -> None:
        """After `learnt`: set x to the worker's parameters, and w to 1; end the background."""
        self.x.copy_(self.worker.parameters)
        self.mass[-1] = 1.0
        self.worker.transport.end_background()

    def _charged(self, function: Callable[[], Tensor]) -> Tensor:
        return exchange.charge(self.worker, "mix", self.mass.numel(), function)


class SelfPacedPushSum(PushSum):
    """Push-sum among workers that take as many steps as they can.

    A worker adds whatever has arrived, and waits for nobody. One that has sent keeps the rest of
    its mass until it has heard of somebody: its w would become arbitrarily small otherwise, and its
    steps in z arbitrarily long.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        ranks = len(self.worker.workers)
        self._sent = torch.zeros(ranks, dtype=torch.float64)  # since the last drain
        self._received = 0
        self._heard = True  # of somebody, since it last sent
        self._arrivals: deque[Task[Tensor]] = deque()  # of whatever comes next

    def mix(self) -> None:
        """Add what is here; send."""
        while self._next_arrival().done():
            self._add_next()
        if self._heard:  # else w would shrink with each send, and steps in z grow
            for peer in self._send():
                self._sent[peer] += 1
            self._heard = False
        self._finish(self.step - self.push.overlap)
        self.step += 1

    def drain(self) -> None:
        """Collective: take in all that is on its way. Nobody may send before all have done so."""
        sent, own = self._sent.clone(), self.worker.workers.index(self.worker.rank)
        exchange.ring_sum(self.worker, sent, Tag.COUNT)
        while self._received < int(sent[own]):
            self._add_next()
        self._sent.zero_()
        self._received = 0
        self._finish(self.step)

    def learnt(self) -> Learnt:
        """Cancel the posted receives, by messages to this rank itself; then return x and w."""
        transport = self.worker.transport
        for arrival in self._arrivals:
            transport.send(torch.zeros(0), transport.rank, Tag.MIX).wait()
            arrival.wait()
        self._arrivals.clear()
        return super().learnt()

    def _expect(self, sources: Sequence[int]) -> None:
        """Do nothing: messages of any rank are awaited."""

    def _next_arrival(self) -> Task[Tensor]:
        while len(self._arrivals) < AWAITED:
            self._arrivals.append(self._begin_receive(None))
        return self._arrivals[0]

    def _add_next(self) -> None:
        arrived = self._next_arrival().wait().to(self.mass.device)
        self._arrivals.popleft()
        self._received += 1
        self._heard = True
        self._charged(lambda: self.mass.add_(arrived))
