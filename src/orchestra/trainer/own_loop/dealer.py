"""The user's loader, dealt out to the workers: which batches come to this one, in which order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from orchestra.coordinator.batches import QueuedWork
from orchestra.coordinator.events import Finish, RestAt, Take
from orchestra.coordinator.rest import Reason
from orchestra.data import loaders
from orchestra.errors import Stopped
from orchestra.optimizers.state import random_state, restore_random_state, undisturbed
from orchestra.strategies.base import Roles
from orchestra.strategies.traits import Dealing
from orchestra.trainer.own_loop.rank import OwnRank
from orchestra.worker.worker import QueueOf, Worker


class Dealer:
    """Deals `loader` out to those that have roles in the phase under way, epoch by epoch.

    `seed` is that of the order. `queued`: workers that do not wait for each other may take batches
    from a queue, where the loader allows it. `leads`: false where another loop's batches are
    iterated, which see to the order. `elastic`: what is left of an epoch may be dealt out anew.

    Attributes:
        item: what was taken from the queue, if no step was made with it yet.
    """

    def __init__(
        self,
        loader: loaders.Loader,
        seed: int,
        *,
        queued: bool,
        leads: bool,
        elastic: bool = False,
    ) -> None:
        self.loader, self.seed = loader, seed
        self.item: Take | None = None
        self._queued = loaders.QueuedLoader.of(loader, seed) if queued and leads else None
        self._leads, self._elastic = leads, elastic
        self.is_rest = False  # the epoch under way was dealt out anew
        self._roles: Roles  # of those that it is dealt out to
        self._sharded: loaders.ShardedLoader | None = None
        self._order: dict[str, Any] = {}
        self._dealt: loaders.DealtLoader  # the same as `_sharded`, where it is elastic

    @property
    def queue_of(self) -> QueueOf | None:
        """What makes a queue of the loader; None if each worker gets a part of its own."""
        return None if self._queued is None else self._queued.queue

    def uses_queue(self, rank: OwnRank) -> bool:
        """Return whether workers take the batches of some phase from a queue."""
        return self._queued is not None and rank.strategy.traits().dealing is Dealing.QUEUE

    @property
    def workers(self) -> tuple[int, ...]:
        """The ranks among which the epoch under way, or the next one, is dealt out."""
        return self._roles.workers

    def deal_out(self, rank: OwnRank, epoch: int) -> None:
        """Deal epochs out from number `epoch` on to those who have roles now, among them `rank`."""
        self._roles = rank.roles
        self._sharded = None
        workers, own = self._roles.workers, rank.worker.rank
        if own in workers:
            place = len(workers), workers.index(own), self.seed, rank.alike
            if self._elastic:
                self._sharded = self._dealt = loaders.DealtLoader(self._standard, *place)
            else:
                self._sharded = loaders.shard_loader(self.loader, *place)
            self._sharded.epoch = epoch

    @property
    def _standard(self) -> DataLoader[Any]:
        assert loaders.is_standard(self.loader)
        return self.loader

    def deal_out_rest(
        self, rank: OwnRank, epoch: int, done: int
    ) -> tuple[Iterator[loaders.WorkerBatch], int]:
        """Deal out what is left of `epoch` behind its first `done` samples to those who have roles
        now; return this worker's part, and how many samples there are."""
        self.deal_out(rank, epoch)
        part = self._dealt.begin_rest(done)
        self.is_rest = done > 0
        return part, self.position(len(self)) - done

    def position(self, batches: int) -> int:
        """Return the samples of the epoch before its batch of that number, where it is elastic."""
        return self._dealt.position(batches)

    def follow(self, rank: OwnRank, epoch: int) -> None:
        """Deal the epochs from number `epoch` on out anew, if roles have changed."""
        if rank.roles != self._roles:
            self.deal_out(rank, epoch)

    def __len__(self) -> int:
        if self._sharded is None:  # on a server: that of a worker
            return len(loaders.shard_loader(self.loader, len(self.workers), 0, self.seed))
        return len(self._sharded)

    @property
    def length(self) -> int | None:
        """The batches of an epoch; None if the loader does not know."""
        try:
            return len(self)
        except TypeError:
            return None

    # An epoch

    @property
    def has_part(self) -> bool:
        """True if this rank has a part of the epoch."""
        return self._sharded is not None

    @property
    def knows_totals(self) -> bool:
        """True if each batch comes with the samples of all workers."""
        assert self._sharded is not None
        return self._sharded.knows_totals

    def compare(self) -> None:
        """Collective over the workers, before an epoch: refuse data that differ."""
        assert self._sharded is not None
        self._sharded.compare()

    def begin(self, first: int) -> Iterator[loaders.WorkerBatch]:
        """Return this worker's part of the epoch, from its batch number `first` on."""
        assert self._sharded is not None
        self.is_rest = False
        if not first:
            self._order = self._draws()
            return self._sharded.begin(0)
        # The sampler draws what it drew when the epoch began, so that the rest is the same.
        with undisturbed():
            restore_random_state(self._order["random"])
            return self._sharded.begin(first)

    def take(self, source: QueuedWork, worker: Worker) -> Iterator[loaders.WorkerBatch]:
        """Give the batches of the queue, until all pause at the end of the epoch.

        Raises `Stopped` where all stop before.
        """
        assert self._queued is not None
        self._queued.check_length()
        while True:
            if self.item is not None:
                # The loop made no step with the batch before: the queue has to be told.
                source.skip(worker.parameters)
            item, self.item = source.take(), None
            if isinstance(item, RestAt | Finish):
                worker.step.consumed = item.at
                if isinstance(item, RestAt) and item.rest.reason is Reason.STOP:
                    raise Stopped
                return
            assert isinstance(item, Take)
            self.item = item
            yield self._queued.load(item)

    # Going on in the midst of an epoch

    def order_number(self, *, begun: bool) -> int:
        """Return the number from which the order of the epoch that has `begun` follows, or of the
        next one."""
        return 0 if self._sharded is None else self._sharded.epoch - begun

    def order_state(self, *, begun: bool) -> dict[str, Any]:
        """Return the states of the generators at the beginning of the epoch that has `begun`, or
        now.

        The order of the epoch follows from them: what was drawn since is drawn again.
        """
        return self._order if begun and self._leads else self._draws()

    def go_on(self, rank: OwnRank, number: int, order: dict[str, Any]) -> None:
        """Let the next epoch have the order that `order_number` and `order_state` gave."""
        self.deal_out(rank, number)
        self._order = order
        for generator, state in zip(self.generators(), order["generators"], strict=True):
            generator.set_state(state)

    def _draws(self) -> dict[str, Any]:
        own = [generator.get_state() for generator in self.generators()]
        return {"random": random_state(), "generators": own}

    def generators(self) -> list[torch.Generator]:
        """Return the loader's own, unless another loop's batches see to them."""
        return loaders.generators_of(self.loader) if self._leads else []
