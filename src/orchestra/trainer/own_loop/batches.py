"""What a loop of the user's own iterates in place of its loader."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Mapping
from typing import Any

from torch import Tensor

from orchestra.data.loaders import Loader
from orchestra.errors import InputError
from orchestra.trainer.own_loop.dealer import Dealer
from orchestra.trainer.own_loop.epochs import Epochs
from orchestra.trainer.own_loop.group import OwnGroup, Stateful
from orchestra.trainer.own_loop.passes import BackwardPasses
from orchestra.trainer.own_loop.rank import OwnRank
from orchestra.trainer.own_loop.saving import Saver
from orchestra.transports.tags import Tag
from orchestra.worker.runtime import RankActivity
from orchestra.worker.worker import Worker


class Batches:
    """The user's loader, dealt out to the workers; iterate it as before, once an epoch.

    When an iteration ends, every worker's model holds the agreed parameters. A rank that has become
    a server gets nothing more: its iterations serve until the workers' epoch is over, and the one
    after the workers have left ends its script, with status 0. Where workers take batches from a
    queue they get unlike numbers of them.
    """

    def __init__(
        self,
        rank: OwnRank,
        dealer: Dealer,
        epochs: Epochs,
        passes: BackwardPasses,
        saver: Saver,
        group: OwnGroup | None = None,
    ) -> None:
        self.iteration, self._group = epochs, group
        self._rank, self._dealer = rank, dealer
        self._passes, self._saver = passes, saver

    # Iterating

    def __len__(self) -> int:
        return len(self._dealer)

    def __iter__(self) -> Generator[Any, None, None]:
        return self.iteration.iterate(None)

    def groups(self, size: int) -> Generator[Any, None, None]:
        """Iterate an epoch, `size` batches at a time; the gradient of a group is exchanged once.

        For loops that take the batches of a step before its first `backward()`. They call
        `backward()` once for each batch, and `step()` once for each group. Only the last
        `backward()` of a group exchanges, whatever `accumulation` says; the last group of an epoch
        may be smaller. InputError if batches lie in a queue, from which workers take one at a time.
        """
        if self.iteration.uses_queue:
            raise InputError("batches.groups() needs as many on every worker: set work='equal'")
        return self.iteration.iterate(size)

    def epochs(self, number: int) -> Iterator[int]:
        """Yield the numbers, from 0, of those of `number` epochs that are left; in each of them
        iterate the batches once.

        On a rank that joins a run under way, or after `load_state_dict`, these are not all. Raises
        InputError where an epoch was not ended.
        """
        if self._group is not None:
            self._group.begin()
        while (epoch := self.epoch) < number:
            yield epoch
            if self.epoch == epoch:
                raise InputError(
                    f"batches.epochs(): epoch {epoch} was not ended: iterate the batches, or after "
                    "a break call batches.end_epoch()"
                )

    def register(self, **objects: Stateful) -> None:
        """Let the states of `objects` go with that of the training to ranks that join, by name: a
        scheduler of learning rates, a GradScaler, an average of weights, or anything else with
        `state_dict()` and `load_state_dict()`. Call it before the loop, on every worker.

        Where a step is void, since ranks were lost, what it has changed in them is taken back.
        """
        if self._group is not None:
            self._group.register(**objects)

    @property
    def loader(self) -> Loader:
        """The user's loader."""
        return self._dealer.loader

    @property
    def length(self) -> int | None:
        """The batches of an epoch; None if the loader does not know."""
        return self._dealer.length

    @property
    def epoch(self) -> int:
        """How many epochs have ended."""
        return self.iteration.epoch

    @property
    def taken(self) -> int:
        """The batches of the epoch under way that this worker has had."""
        return self.iteration.taken

    @property
    def ended(self) -> bool:
        """True if all workers have left this loop."""
        return self.iteration.ended

    # Gradients

    @property
    def averages_gradients(self) -> bool:
        """True if the workers step together now, on the average of their gradients."""
        return self.iteration.averages_gradients

    @property
    def share(self) -> float:
        """This worker's of the samples behind the gradient of the batch, or group, that was handed
        out last; 1 where its gradient is not averaged."""
        return self.iteration.share

    def weight(self, count: int) -> int:
        """Let the gradient of the batch, or group, that was taken last weigh `count`; return the
        sum over the workers.

        Every worker calls it before `backward()`, where the loss is a mean over something else than
        samples, such as the tokens that are not masked: `count` is their number. A gradient that is
        not averaged has no other to be weighed against, so the sum is `count` there. In averages of
        models the count takes the place of the samples. InputError outside of that place.
        """
        if isinstance(count, bool) or int(count) != count or count < 0:
            raise InputError(f"batches.weight(): expected a whole number from 0, got {count!r}")
        return self.iteration.weigh(int(count))

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Let `backward()` exchange nothing inside; the next one outside exchanges for all of them.

        As `no_sync` of DistributedDataParallel, for loops that know which one is the last.
        """
        self._passes.paused = True
        try:
            yield
        finally:
            self._passes.paused = False

    def report(self, loss: float) -> None:
        """Tell this step's loss, before `loss.backward()`: for rules that watch it."""
        self._rank.loss = float(loss)

    # The ends of epochs

    def agree(self) -> None:
        """Let every worker's model hold the agreed parameters in mid-epoch; training can go on.

        Every worker calls it, after equally many steps; for instance after `break`, before saving.
        Where an epoch has ended it changes nothing. InputError if workers take unlike numbers of
        batches.
        """
        if self._group is not None:
            self._group.together(self.iteration.agree)
        else:
            self.iteration.agree()

    def end_epoch(self) -> None:
        """End the epoch after `break`, as if there were no more batches.

        Every worker's model then holds the agreed parameters, and the next iteration begins another
        epoch. Every worker calls it, after equally many steps. Where an epoch has ended it changes
        nothing. InputError if workers take unlike numbers of batches.
        """
        self.iteration.end_epoch()

    # Saving and resuming

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the training; every worker calls it, between two steps.

        It holds parameters, buffers and moments as each rank has them, slices on servers included,
        the epoch and the place in it, and random generators: plain data and tensors, for
        torch.save. Save the state of the first worker, which alone is complete. InputError if it
        cannot be taken at this place; the message says where it can.
        """
        return self._saver.save()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`; every worker calls it with the first worker's `state_dict()`.

        Call it after `distribute` and before the loop over these batches, whose first iteration
        goes on where the epoch was left. InputError if `state` is of other settings, or training
        has come too far to go back.
        """
        self._saver.load(state)

    def start_at(self, batch: int) -> None:
        """Begin the next epoch at its batch number `batch`, from 0."""
        self._saver.start_at(batch)

    # This rank

    @property
    def worker(self) -> Worker:
        """This rank's model and connections."""
        return self._rank.worker

    @property
    def workers(self) -> tuple[int, ...]:
        """The ranks that have data now; the others serve."""
        return self._rank.workers

    def is_worker(self) -> bool:
        """Return whether this rank has data in the phase under way."""
        return self._rank.is_worker()

    def sum_over_workers(self, numbers: Tensor, tag: Tag = Tag.COUNT) -> Tensor:
        """Collective over the workers: return sums of their `numbers`, in float64 on the CPU."""
        if self._group is None:
            return self._rank.sum_over_workers(numbers, tag)
        return self._group.together(lambda: self._rank.sum_over_workers(numbers, tag))

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Let this rank take any time inside; the others wait when they need it.

        For work that takes longer than `patience` without a forward pass of the model. Under
        `AllReduce("native")` the collectives of the others give up after four times `patience`.
        """
        reporter = self._rank.worker.reporter
        reporter.activity(RankActivity.PAUSED)
        try:
            yield
        finally:
            reporter.activity(RankActivity.TRAINING)

    @property
    def ends_process(self) -> bool:
        """True if the process of a rank that serves ends once the workers' scripts are over."""
        return self.iteration.ends_process

    @ends_process.setter
    def ends_process(self, ends: bool) -> None:
        self.iteration.ends_process = ends

    def serve_to_the_end(self) -> None:
        """Serve until the workers have left this loop. Called on a rank without data.

        Raises SystemExit where their scripts are over, if it `ends_process`.
        """
        self.iteration.serve_to_the_end()
