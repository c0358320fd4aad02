"""The epochs of a loop of the user's own: workers have parts of a loader, other ranks serve."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from orchestra import exchange
from orchestra.collectives import all_reduce
from orchestra.data.own_loop import Loader, Part, ShardedLoader, generators_of, shard_loader
from orchestra.data.random_state import random_state, restore_random_state, undisturbed
from orchestra.errors import InputError
from orchestra.strategies.base import Roles
from orchestra.trainer.own_state import Word
from orchestra.transports.tags import Tag

if TYPE_CHECKING:
    from orchestra.trainer.own_loop import OwnLoop

MID_EPOCH = -(1 << 20)
"""In place of the step of a pause: the workers' epoch goes on after it. Phases end above that."""
SAVING = MID_EPOCH - 1
"""The same, where the state of all ranks is collected."""

ENDED = (
    "this loop ended when another model was distributed; models that are trained by turns are all "
    "distributed before the first step"
)


class Epochs:
    """How far a rank has come in the epochs of its loop, and what it does where they begin and end.

    Attributes:
        epoch: how many have ended.
        taken: batches of the epoch under way that this worker has had.
        ended: all workers have left.
        begun: an epoch was begun, or served.
        left: an iteration was left before its epoch's end, and nobody has agreed since.
    """

    def __init__(self, loop: OwnLoop, loader: Loader, seed: int, *, follows: bool) -> None:
        self.loader = loader
        self.seed = seed
        self.epoch = self.taken = 0
        self.ended = self.begun = self.left = False
        self._goes_on = self._in_epoch = False
        self._loop = loop
        self._follows = follows  # another loop, whose batches see to the order
        self._resumed_at = self._backwards = 0
        self._order: dict[str, Any] = {}
        self._roles = self._current_roles()
        self._sharded = self._shard()

    def _is_over(self) -> bool:
        """Return whether there is nothing to do any more, where that is no mistake."""
        if not self.ended:
            return False
        if self.is_worker():
            raise InputError(f"batches: {ENDED}")
        if not self._goes_on:
            raise SystemExit(0)
        return True

    def _begin_epoch(self) -> None:
        self.begun = self._in_epoch = True
        self.left = False
        self._loop.worker.reporter.phase("training")
        self.taken, self._resumed_at = self._resumed_at, 0
        self._loop.begin_epoch(self._backwards)
        self._backwards = 0
        if (roles := self._current_roles()) != self._roles:  # deal the coming epochs out anew
            self._roles = roles
            self._sharded = self._shard()

    def _begin_order(self, sharded: ShardedLoader) -> Iterator[Part]:
        if not self.taken:
            self._order = self._draws()
            return sharded.begin(0)
        with undisturbed():
            restore_random_state(self._order["random"])
            return sharded.begin(self.taken)

    def _end_epoch(self) -> None:
        loop = self._loop
        loop.counts.end_epoch()
        word = None
        if self.is_worker():
            loop.strategy.quiesce(loop.worker, loop.state, self.epoch)
        else:
            word = self._serve()
        self._take_part_in_agreement()
        if word is not None:
            self.end(word)
        self._in_epoch = False
        self.taken = 0
        self.epoch += 1

    def _take_part_in_agreement(self) -> None:
        loop = self._loop
        loop.strategy.agree(loop.worker, loop.state)
        if not self.ended:  # replicas that differ have averaged them; others take the first one's
            exchange.broadcast_buffers(loop.worker, loop.worker.everyone)
        self.left = False

    # Where the order stands

    @property
    def dealt_out_anew(self) -> bool:
        """Whether there are other workers than when the epoch began."""
        return self.taken > 0 and self.workers != self._roles.workers

    @property
    def order(self) -> int:
        """The number from which the order of the epoch under way, or of the next one, follows."""
        begun = self.taken > 0 and not self._resumed_at
        return 0 if self._sharded is None else self._sharded.epoch - begun

    def order_state(self) -> dict[str, Any]:
        """The generators that the order of the epoch under way, or of the next one, follows from.

        At its beginning, that is: what was drawn since is drawn again.
        """
        return self._order if self.taken and not self._follows else self._draws()

    def _draws(self) -> dict[str, Any]:
        own = [generator.get_state() for generator in self.generators()]
        return {"random": random_state(), "generators": own}

    def generators(self) -> list[torch.Generator]:
        """The loader's own, unless another loop's batches see to them."""
        return generators_of(self.loader) if not self._follows else []

    def go_on_from(self, position: Mapping[str, Any], order: dict[str, Any]) -> None:
        """The next iteration begins at `position`, as `state_dict` gave it."""
        self._roles = self._current_roles()
        self._sharded = self._shard()
        self.epoch = position["epoch"]
        self.taken = self._resumed_at = position["taken"]
        self._backwards = position["backwards"]
        if self._sharded is not None:
            self._sharded.epoch = position["order"]
        self.begun = self._in_epoch = self.left = False
        self._order = order
        for generator, state in zip(self.generators(), order["generators"], strict=True):
            generator.set_state(state)

    # Ranks that serve

    def serve_to_the_end(self) -> None:
        """On a rank without data: serve until the workers have left this loop.

        Raises SystemExit where their scripts are over.
        """
        while not self.is_worker() and not self.ended:
            self._end_epoch()
        if self.ended and not self._goes_on:
            raise SystemExit(0)

    def _serve(self, *, until_saved: bool = False) -> Word | None:
        """Serve to the end of the workers' epoch; return what follows, if the loop ends there."""
        loop = self._loop
        loop.worker.reporter.phase("serving")
        loop.optimizer._opt_called = True  # type: ignore[attr-defined]  # for torch's schedulers
        last = None
        while not self.is_worker():
            paused = loop.strategy.serve(loop.worker, loop.state)
            if paused is None:
                word = loop.kept.hear()
                if word not in (Word.RESTART, Word.RESUME):
                    self.ended, last = True, word
                    break
                loop.kept.follow(word)
            elif paused.step == SAVING:
                loop.kept.collect()
                if until_saved:
                    break
            elif paused.step == MID_EPOCH:
                self._take_part_in_agreement()
            elif paused.step >= 0:
                break
        loop.worker.reporter.phase("training")
        return last

    def end(self, word: Word) -> None:
        """The loop is over; `word` tells whether the script goes on with another one."""
        self.begun = self.ended = True
        self._goes_on = word is not Word.OVER
        if word is Word.HANDS_OVER:
            self._loop.kept.hand_over()

    # Workers

    def _current_roles(self) -> Roles:
        return self._loop.strategy.current_roles(self._loop.worker, self._loop.state)

    @property
    def workers(self) -> tuple[int, ...]:
        """The ranks that have data now; the others serve."""
        return self._current_roles().workers

    def is_worker(self) -> bool:
        """Whether this rank has data in the phase under way."""
        return self._loop.worker.rank in self.workers

    def _shard(self) -> ShardedLoader | None:
        """Return the part of this rank, where it has data."""
        workers, rank = self._roles.workers, self._loop.worker.rank
        if rank not in workers:
            return None
        index = workers.index(rank)
        sharded = shard_loader(self.loader, len(workers), index, self.seed, self.alike)
        sharded.epoch = self.epoch
        return sharded

    def sum_over_workers(self, numbers: Tensor) -> Tensor:
        """Collective over the workers: the sums, in float64 on the CPU, of their `numbers`."""
        worker = self._loop.worker
        sums = numbers.detach().to("cpu", torch.float64, copy=True)
        all_reduce(worker.transport, sums, "ring", worker.workers, Tag.COUNT)
        return sums

    def alike(self, number: int) -> bool:
        """Collective over the workers: whether `number`, of 32 bits, is the same on all of them."""
        worker = self._loop.worker
        numbers = torch.zeros(len(worker.workers), dtype=torch.float64)
        numbers[worker.workers.index(worker.rank)] = number
        return bool((self.sum_over_workers(numbers) == number).all())
