"""Updates of parameters in shared memory, without locks (Hogwild)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from orchestra import exchange
from orchestra.errors import InputError
from orchestra.strategies.base import Replicas, torch
from orchestra.strategies.member import ReplicaMember
from orchestra.strategies.traits import Footprint, Traits, WorkMode
from orchestra.transports.tags import Tag

if TYPE_CHECKING:
    from orchestra.coordinator.rest import Rest
    from orchestra.exchange import Kept
    from orchestra.transports.protocol import SharedTensor
    from orchestra.worker.worker import Worker


@dataclass(frozen=True, repr=False)
class Hogwild(Replicas):
    """All workers update the same parameters in shared memory, and nobody waits.

    Hogwild! (Niu, Recht, Re and Wright, NIPS 2011). Each worker, at its own pace:

        g at the shared x;  x <- x - gamma g

    Nothing is locked: a worker may read x while others write to it, and of two writes of one
    element at the same time one may be lost. Nothing is sent, either. The paper's analysis is for
    sparse gradients, which seldom meet in an element; dense ones meet in all of them.

    For the ranks of one host, on CPUs, and optimizers without state: what momentum or Adam keep
    would follow the updates of one worker, not those of the parameters. Staleness counts the
    updates of other workers between a gradient's read and its write. Buffers stay with each worker.
    """

    use = "for workers of one host, of unlike speed, without a server"
    variants = (("Hogwild()", use),)

    def traits(self, work: WorkMode = "shared") -> Traits:
        return self._free_traits(work)

    def _memory(self, rank: int, ranks: int) -> Footprint:
        """Count the parameters with the first rank alone: they are there once."""
        return replace(super()._memory(rank, ranks), parameters=0.0 if rank else 1.0)

    def member(self, worker: Worker) -> HogwildMember:
        if worker.own_loop:
            raise InputError(
                "Hogwild: a loop of your own may hold parameters that are not shared: train with "
                "`orchestra train` or orchestra.train"
            )
        if not worker.optimizer.stateless:
            raise InputError(
                "Hogwild: the state of an optimizer would follow the updates of one worker, and "
                "all write to the same parameters: set optimizer to SGD, without momentum"
            )
        member = HogwildMember(self, worker, worker.local_optimizer())
        share, workers = worker.transport.share, worker.workers
        member.shared = share(worker.parameters, workers, Tag.SHARED)
        counts = torch.zeros(len(workers), dtype=torch.int64, device=worker.parameters.device)
        member.updates = share(counts, workers, Tag.SHARED)
        worker.move_parameters(member.shared.values)
        return member


@dataclass(eq=False)
class HogwildMember(ReplicaMember[Hogwild]):
    """A worker that updates the `shared` parameters of all workers.

    `updates` counts the updates of each worker; `seen` is their sum when this worker began its
    gradient.
    """

    seen: int = 0
    shared: SharedTensor = field(init=False)
    updates: SharedTensor = field(init=False)

    def begin(self) -> None:
        """Note the updates so far: from here on the parameters are read."""
        self.shared.catch_up()
        self.seen = self._count()

    def update(self) -> None:
        """Take the optimizer's step on the shared parameters."""
        worker = self.worker
        worker.clip()
        self.shared.catch_up()
        worker.step.staleness = (self._count() - self.seen,)
        worker.measures.count_staleness(worker.step.staleness)
        self.updates.values[worker.workers.index(worker.rank)] += 1
        worker.update_locally(self.optimizer)
        worker.offer_equal_parameters()

    def _count(self) -> int:
        return 0 if self.updates.values.is_meta else int(self.updates.values.sum())

    def settle(self, rest: Rest) -> None:
        """Wait until all workers have made their updates."""
        exchange.wait_for_workers(self.worker)

    def kept(self) -> Kept:
        """Return nothing learnt: all have the same parameters already."""
        return replace(super().kept(), learnt=())

    def rest(self, rest: Rest) -> Kept:
        """Wait for all updates; at the end, let each worker take a copy of the parameters."""
        kept, worker = super().rest(rest), self.worker
        if rest.reason.ends:
            if worker.rank == worker.workers.ranks[0]:
                worker.snapshots.renew(worker.step.consumed, worker.parameters)
            worker.move_parameters(worker.parameters.clone())
            exchange.wait_for_workers(worker)  # nobody writes before all have copied
        return kept
