"""Averages with one partner at a time, each worker at its own pace (AD-PSGD)."""

from __future__ import annotations

import enum
import random
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING

from orchestra import exchange
from orchestra.errors import InputError
from orchestra.settings import MAX_SEED, setting
from orchestra.settings.base import COMMON
from orchestra.strategies.base import Replicas, Roles, torch
from orchestra.strategies.member import ReplicaMember
from orchestra.strategies.traits import Footprint, Traits, WorkMode
from orchestra.topologies import Complete, Graph, Topology, connected
from orchestra.transports.tags import Tag

if TYPE_CHECKING:
    from torch import Tensor

    from orchestra.coordinator.rest import Rest
    from orchestra.exchange import Kept
    from orchestra.transports.protocol import Handle, Pending, Transport
    from orchestra.worker.worker import Worker


@dataclass(frozen=True, repr=False)
class PairwiseAveraging(Replicas):
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
    seed: int = setting(0, "of the choice of partners", low=0, high=MAX_SEED)

    def traits(self, work: WorkMode = "shared") -> Traits:
        """A partner averages in the background, at any step of its own."""
        return replace(self._free_traits(work), answers_beside=True)

    def roles(self, ranks: int) -> Roles:
        """All ranks are workers; the links between even and odd ones have to connect them."""
        graphs = self.topology.graphs(ranks)
        if not connected([tuple(_partners(graph, r) for r in range(ranks)) for graph in graphs]):
            raise InputError(
                f"{self!r}: the links between even and odd ranks do not connect {ranks} ranks"
            )
        return super().roles(ranks)

    def _memory(self, rank: int, ranks: int) -> Footprint:
        """Add what is averaged meanwhile: x, and that of the other worker."""
        return replace(super()._memory(rank, ranks), copies=2.0)

    def member(self, worker: Worker) -> PairwiseMember:
        return PairwiseMember(self, worker, worker.local_optimizer())


@dataclass(eq=False)
class PairwiseMember(ReplicaMember[PairwiseAveraging]):
    """A worker whose parameters are averaged with another one's while it computes gradients."""

    step: int = field(default=0, metadata=COMMON)  # steps done
    pair: PairwiseAverage = field(init=False)
    # The choices of a partner, for each step of the topology's period
    partners: list[tuple[int, ...]] = field(init=False)

    def __post_init__(self) -> None:
        workers = self.worker.workers
        own, graphs = workers.index(self.worker.rank), self.strategy.topology.graphs(len(workers))
        self.partners = [_partners(graph, own) for graph in graphs]
        self.pair = PairwiseAverage(self.worker)

    def open(self, *, fresh: bool) -> None:
        """Begin to answer other workers."""
        super().open(fresh=fresh)
        self.pair.open()

    def begin(self) -> None:
        """Let the parameters be averaged while the gradient of the old ones is taken."""
        self.pair.give(self._partner() if self.pair.active else None)

    def _partner(self) -> int | None:
        own, seed = self.worker.workers.index(self.worker.rank), self.strategy.seed
        choices = self.partners[self.step % len(self.partners)]
        return random.Random(f"{seed}-{own}-{self.step}").choice(choices) if choices else None

    def update(self) -> None:
        """Take the optimizer's step on the averaged parameters."""
        worker = self.worker
        worker.clip()
        worker.step.staleness = (self.pair.take(),)
        worker.measures.count_staleness(worker.step.staleness)
        worker.update_locally(self.optimizer)
        worker.snapshots.offer(worker.step.consumed, worker.parameters)
        self.step += 1

    def settle(self, rest: Rest) -> None:
        self.pair.settle()
        if rest.reason.ends:
            self.pair.close()

    def rest(self, rest: Rest) -> Kept:
        kept = super().rest(rest)
        if rest.reason.ends:
            self.worker.snapshots.renew(self.worker.step.consumed, self.worker.parameters)
        return kept


def _partners(graph: Graph, rank: int) -> tuple[int, ...]:
    """Return the ranks of the other parity that are linked with `rank` in either direction."""
    near, others = set(graph[rank]), range((rank + 1) % 2, len(graph), 2)
    return tuple(other for other in others if other in near or rank in graph[other])


NOBODY = -1


class _Command(enum.IntEnum):
    """What a message tells a flow to do."""

    GIVE = 0  # from the main flow: x is yours, average it with that worker first
    TAKE = 1  # from the main flow: let me have x
    ASK = 2  # from another flow: average with my x, which I have sent before
    END = 3  # from the main flow


class PairwiseAverage:
    """This worker's x, which belongs in turn to the main flow and to a background flow.

    While the flow has it, the flow of an active worker (an even one) asks that of a passive
    worker (an odd one) to replace both their x by the mean, and that of a passive one answers.
    Active flows wait for passive ones, passive flows for main flows that compute, and those
    for nobody: there is no deadlock.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.active = worker.workers.index(worker.rank) % 2 == 0  # it asks; the others answer
        self._x = torch.empty_like(worker.parameters)
        self._other = torch.empty_like(worker.parameters)
        self._held = True  # by the main flow
        self._replies: dict[int, Handle] = {}
        self._flow: Pending[None] | None = None

    def open(self) -> None:
        """Begin the flow, unless it goes on."""
        if self._flow is None and len(self._worker.workers) > 1:
            self._flow = self._worker.transport.spawn(self._run)

    def give(self, partner: int | None = None) -> None:
        """Let the flow have the parameters, and average them with the worker number `partner`."""
        if self._flow is None or not self._held:
            return
        self._held = False
        self._copy(self._worker.parameters, self._x)
        rank = NOBODY if partner is None else self._worker.workers.ranks[partner]
        self._tell(Tag.HAND_OVER, _Command.GIVE, rank)

    def take(self) -> int:
        """Take the parameters back; return how many averages were made of them meanwhile."""
        if self._flow is None or self._held:
            return 0
        self._tell(Tag.PAIR, _Command.TAKE)
        averages = int(self._worker.transport.receive(self._worker.rank, Tag.TAKEN).wait())
        if averages < 0:
            self._flow.wait()  # raises what the flow raised
        self._held = True
        self._copy(self._x, self._worker.parameters)
        return averages

    def _copy(self, values: Tensor, into: Tensor) -> None:
        exchange.charge(self._worker, "encode", values.numel(), lambda: into.copy_(values))

    def settle(self) -> None:
        """Collective over the workers: have the parameters, when nobody averages any more."""
        if self._flow is None:
            return
        if self.active:
            self.take()
        else:
            self.give()  # goes on answering those who are not yet here
        # Active workers come without x, and ask no more; passive ones answer until all are here.
        exchange.wait_for_workers(self._worker)
        self.take()

    def close(self) -> None:
        """After `settle`: end the flow."""
        if self._flow is not None:
            self._tell(Tag.HAND_OVER, _Command.END)
            self._flow.wait()
            self._flow = None

    def _tell(self, tag: int, *numbers: int) -> None:
        self._worker.transport.send(torch.tensor(numbers), self._worker.rank, tag).wait()

    def _run(self, transport: Transport) -> None:
        """The background flow: average while the main flow computes."""
        try:
            while True:
                given = transport.receive(transport.rank, Tag.HAND_OVER).wait().tolist()
                if given[0] == _Command.END:
                    return
                averages = self._serve(transport, given[1])
                transport.send(torch.tensor([averages]), transport.rank, Tag.TAKEN).wait()
        except BaseException:
            transport.send(torch.tensor([-1]), transport.rank, Tag.TAKEN)
            raise

    def _serve(self, transport: Transport, partner: int) -> int:
        """Average until the main flow takes x; return how many averages were made."""
        averages = 0
        if partner != NOBODY:
            self._ask(transport, partner)
            averages += 1
        while True:
            # From any rank: the order in which requests come is all that depends on chance.
            request = transport.receive(None, Tag.PAIR)
            if request.wait()[0] == _Command.TAKE:
                return averages
            self._answer(transport, request.source)
            averages += 1

    def _ask(self, transport: Transport, partner: int) -> None:
        arriving = transport.receive(partner, Tag.PAIR_MEAN, self._other)
        # The request comes last: who reads it has all of x.
        sending = transport.send(self._x, partner, Tag.PAIR_VALUES)
        transport.send(torch.tensor([_Command.ASK]), partner, Tag.PAIR).wait()
        sending.wait()
        arriving.wait()
        self._average()

    def _answer(self, transport: Transport, asker: int) -> None:
        transport.receive(asker, Tag.PAIR_VALUES, self._other).wait()
        # One copy for each asker at most: it has to have taken the last one.
        if asker in self._replies:
            self._replies.pop(asker).wait()
        # From a copy, so that nobody waits for a slow asker.
        self._replies[asker] = transport.send(self._x.clone(), asker, Tag.PAIR_MEAN)
        self._average()

    def _average(self) -> None:
        """Average x with the other one's. Both sides do this, and get the same bits."""
        x, other = self._x, self._other
        exchange.charge(self._worker, "mix", x.numel(), lambda: x.add_(other).mul_(0.5))
