"""The epochs of a loop of the user's own: batches are handed out, and workers rest and agree."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import islice
from typing import Any

import torch

from orchestra.coordinator.rest import Reason
from orchestra.data import loaders
from orchestra.errors import InputError, Stopped
from orchestra.strategies.traits import Pace
from orchestra.trainer.own_loop.dealer import Dealer
from orchestra.trainer.own_loop.group import OwnGroup
from orchestra.trainer.own_loop.passes import BackwardPasses, Count
from orchestra.trainer.own_loop.rank import OwnRank
from orchestra.trainer.own_loop.strategy_state import StrategyState
from orchestra.trainer.own_loop.weights import SampleWeights
from orchestra.worker.runtime import RankActivity

ENDED = (
    "this loop ended when another model was distributed; models that are trained by turns are all "
    "distributed before the first step"
)


class Epochs:
    """The epochs of one model, and where it stands in the one under way.

    Models that are trained by turns are iterated together: the batches of the first one, which
    `leads`, are handed out to all of them.

    Attributes:
        lead: the first of those that are iterated together; itself, if this model is alone.
        epoch: how many have ended.
        taken: batches of the epoch under way that this worker has had.
        begun: an epoch was begun, or served.
        left: an iteration, before its epoch's end, and nobody has agreed since.
        steps_begin_with_batches: in place of a forward pass of the model.
        ends_process: of a rank that serves, once the workers' scripts are over.
    """

    def __init__(
        self,
        rank: OwnRank,
        state: StrategyState,
        dealer: Dealer,
        passes: BackwardPasses,
        lead: Epochs | None,
    ) -> None:
        self.group: OwnGroup | None = None  # where ranks may be lost, or join
        self._rank, self._state = rank, state
        self._dealer, self._passes = dealer, passes
        self._weights: SampleWeights = SampleWeights(rank) if lead is None else lead._weights
        self.epoch = self.taken = 0
        self.begun = self.left = False
        self.steps_begin_with_batches = False
        self.ends_process = True
        self._goes_on = self._in_epoch = False
        self._resumed_at = self._passes_before = 0  # batches and passes of the next epoch
        self.lead = lead or self
        self._together = [self]  # on the lead: all that are iterated
        if lead is not None:
            if lead.uses_queue:
                raise InputError(
                    "models that are trained by turns need as many batches on every worker: set "
                    "work='equal' in the first distribute"
                )
            lead._together.append(self)
        dealer.deal_out(rank, self.epoch)

    @property
    def uses_queue(self) -> bool:
        """True if workers take the batches of some phase from a queue."""
        return self._dealer.uses_queue(self._rank)

    @property
    def ended(self) -> bool:
        """True if all workers have left this loop."""
        return self._rank.ended

    @property
    def turns(self) -> int:
        """The sum of the digests of all turns in which batches were dealt out."""
        return self._weights.turns

    @turns.setter
    def turns(self, turns: int) -> None:
        self._weights.turns = turns

    @property
    def averages_gradients(self) -> bool:
        """True if the workers step together now, on the average of their gradients."""
        return any(each._rank.synchronous for each in self.lead._together)

    @property
    def share(self) -> float:
        """This worker's share of the samples behind the gradient of what was handed out last."""
        return self._weights.share

    # Iterating

    def iterate(self, group: int | None) -> Generator[Any, None, None]:
        """Iterate an epoch, `group` batches at a time as a list; with None one by one."""
        return self.lead._iterate(group)

    def _iterate(self, group: int | None) -> Generator[Any, None, None]:
        if self.is_over():
            return
        if self.group is not None:
            self.group.begin()
        for each in self._together:
            each._take_over()
        left = self.left
        for each in self._together:
            each._begin()
        try:
            if self._dealer.has_part:
                # All workers are here, unless one left the epoch, or its process, by itself.
                anew = self.group is not None and self.group.is_dealt_anew
                if not (left or anew or self._rank.worker.transport.lost()):
                    self._guarded(self._dealer.compare)
                yield from self._hand_out_all(group)
        # The script left the loop over the batches, by `break` or an exception.
        except GeneratorExit:
            for each in self._together:
                each.left = True
            raise
        for each in self._together:
            each._end()

    def _guarded(self, call: Callable[[], object]) -> bool:
        """Make `call`, which waits for other ranks; return whether it has come to its end."""
        if self.group is not None:
            return self.group.guarded(call)
        call()
        return True

    def _hand_out_all(self, group: int | None) -> Iterator[Any]:
        rank = self._rank
        if rank.source() is None:
            yield from self._hand_out_parts(group)
        # A step with one of these may have ended a phase of `Switch`: this rank serves now, or
        # workers take batches from a queue.
        if rank.is_worker() and (source := rank.source()) is not None:
            for part in self._dealer.take(source, rank.worker):
                self._count([part])
                yield part.batch

    def _hand_out_parts(self, group: int | None) -> Iterator[Any]:
        """Give this worker's parts, as long as the roles stay."""
        rank, dealer = self._rank, self._dealer
        parts: Iterator[loaders.WorkerBatch] | None = None
        while rank.is_worker() and rank.source() is None:
            anew = None if self.group is None else self.group.next_part()
            if anew is not None:
                parts, self.taken = anew, 0
            elif parts is None:
                parts = dealer.begin(self.taken)
            if not (some := self._next(parts, group)):
                if not dealer.knows_totals and self.averages_gradients:
                    self._weights.end()
                return
            self._count(some)
            if group is not None:
                for each in self._together:
                    each._passes.begin_group(len(some))
            batches = [part.batch for part in some]
            yield batches[0] if group is None else batches

    def _next(
        self, parts: Iterator[loaders.WorkerBatch], group: int | None
    ) -> list[loaders.WorkerBatch]:
        """Return the batches of the next step. Raises `Stopped` if all stop before it."""
        some = list(islice(parts, group or 1))
        if some and any(each._rank.stopping for each in self._together):
            raise Stopped
        return some

    def _count(self, parts: Sequence[loaders.WorkerBatch]) -> None:
        """Note which samples are behind the next gradient, here and on all workers."""
        count = self._weights.take(parts, averaged=self.averages_gradients)
        batches = [part.batch for part in parts]
        for each in self._together:
            each._hand_out(count, batches)

    def _hand_out(self, count: Count | None, batches: list[Any]) -> None:
        self.taken += len(batches)
        self._passes.take(count, batches)
        if self.steps_begin_with_batches and torch.is_grad_enabled():
            self.begin_step()

    def weigh(self, count: int) -> int:
        """Let the gradient of what was handed out last weigh `count`; return the sum over the
        workers. Collective over the workers where gradients are averaged.
        """
        lead = self.lead
        if lead._dealer.item is not None:  # of a queue, which counts samples
            return count
        found = count

        def weigh() -> None:
            nonlocal found
            own, found = self._weights.weigh(count, averaged=self.averages_gradients)
            for each in lead._together:
                each._passes.weigh(own, found)

        self._guarded(weigh)
        return found

    def _take_over(self) -> bool:
        return self._state.take_over(mid_epoch=self.taken > 0)

    def begin_step(self) -> None:
        """Collective over the workers: begin a step, unless it has begun. Parameters may change."""
        if self._take_over() or not self._passes.entered:
            self._passes.entered = True
            if self.group is not None:
                self.group.step_begins()
            self._rank.phases.member.begin()

    # They begin, and end

    def is_over(self) -> bool:
        """Return whether this loop has ended, on a rank that serves; refuse to go on elsewhere."""
        if not self.ended:
            return False
        if self._rank.is_worker():
            raise InputError(f"batches: {ENDED}")
        if not self._goes_on and self.ends_process:
            # A rank that a `Switch` made a server ends its script here, once all workers have left.
            raise SystemExit(0)
        return True

    def _begin(self) -> None:
        self.begun = self._in_epoch = True
        self.left = False
        self._rank.worker.reporter.activity(RankActivity.TRAINING)
        self.taken, self._resumed_at = self._resumed_at, 0
        self._passes.begin_epoch(self._passes_before)
        self._passes_before = 0
        self._dealer.follow(self._rank, self.epoch)
        if self.group is not None:
            self.group.epoch_begins()

    def _end(self, *, by_script: bool = False) -> None:
        """End the epoch; `by_script`, whatever batches there are still."""
        epoch = self.epoch
        self._passes.end_epoch()
        if not self._rank.is_worker():
            self.serve()
            if not self.ended:
                self._agree()
        elif self.group is not None and by_script:
            self.group.together(self._agree_at_end)
        elif self.group is None or not self.group.has_agreed(epoch):
            self._guarded(self._agree_at_end)
        self._in_epoch = self.left = False
        self.taken = 0
        self.epoch = epoch + 1
        if self.group is not None:
            self.group.epoch_ends(epoch)

    def _agree_at_end(self) -> None:
        self._rest(Reason.EPOCH)
        if not self.ended:
            self._agree()

    def _rest(self, reason: Reason) -> None:
        """Wait until nothing is in flight anywhere; servers learn the `reason`."""
        self._state.rest(reason)
        self._passes.rest()

    def _agree(self) -> None:
        rank = self._rank
        # Once nothing is in flight: a worker that waits here answers nobody who averages with it.
        if rank.is_worker() and rank.source() is None and not rank.worker.transport.lost():
            if not rank.alike(self._weights.turns & 0xFFFFFFFF):
                raise InputError(loaders.UNLIKE)
            pace = rank.phases.traits.pace
            if pace is not Pace.FREE and not rank.alike(rank.ledger.digest(rank.worker.phase)):
                raise rank.ledger.refusal(rank.steps)
        self._state.agree()
        self.left = False

    def agree(self) -> None:
        """Let every worker's model hold the agreed parameters in mid-epoch; training can go on."""
        for each in self._in_mid_epoch("agree"):
            each._rest(Reason.AGREEMENT)
            each._agree()

    def end_epoch(self) -> None:
        """End the epoch after `break`, as if there were no more batches."""
        for each in self._in_mid_epoch("end_epoch"):
            each._end(by_script=True)

    def _in_mid_epoch(self, method: str) -> Iterator[Epochs]:
        """Give those that are iterated together, where this worker is within an epoch."""
        for each in self.lead._together:
            if each._in_epoch and not each.ended and each._rank.is_worker():
                if method == "agree":
                    each._take_over()
                if each._rank.source() is not None:
                    raise InputError(
                        f"batches.{method}() in mid-epoch needs equally many batches on every "
                        "worker: set work='equal' in distribute, or go on to the end of the epoch"
                    )
                yield each

    # Ranks that serve

    def serve_to_the_end(self) -> None:
        """Serve until the workers have left this loop. Called on a rank without data.

        Raises SystemExit where their scripts are over, if it `ends_process`.
        """
        while not self._rank.is_worker() and not self.ended:
            self._end()
        self.is_over()

    def serve(self, *, until_saved: bool = False) -> None:
        """Serve to the end of the workers' epoch, or of this loop."""
        rank = self._rank
        rank.worker.reporter.activity(RankActivity.SERVING)
        rank.optimizer._opt_called = True  # type: ignore[attr-defined]  # for torch's schedulers
        while not rank.is_worker() and not self.ended:
            reason = self._state.serve()
            if reason in (Reason.END, Reason.NEXT_LOOP):
                self._note_end(reason)
            elif reason is Reason.SAVE:
                self._collect()
                if until_saved:
                    break
            elif reason is Reason.AGREEMENT:
                self._agree()
            elif reason is Reason.EPOCH:
                break
        rank.worker.reporter.activity(RankActivity.TRAINING)

    def end_loop(self, *, goes_on: bool) -> None:
        """End this loop, and leave in order; the script may go on with another one."""
        if not self.ended:
            reason = Reason.NEXT_LOOP if goes_on else Reason.END
            self._state.end(reason)
            self._note_end(reason)

    def _note_end(self, reason: Reason) -> None:
        self.begun = self._rank.ended = True
        self.left = False
        self._goes_on = reason is Reason.NEXT_LOOP

    # Saving and resuming

    @property
    def under_way(self) -> bool:
        """True while an iteration is, which was not left."""
        return self._in_epoch and not self.left

    def save(self) -> dict[str, Any]:
        """Collective, on a worker: return the states of all ranks on the first worker, by rank."""
        self._take_over()
        self._rest(Reason.SAVE)
        return self._collect()

    def _collect(self) -> dict[str, Any]:
        """Collective over all ranks, at rest: as `save`."""
        return self._state.collect(self.order_state())

    def order_state(self) -> dict[str, Any]:
        """Return what the order of the epoch under way, or of the next one, follows from."""
        return self._dealer.order_state(begun=self.taken > 0)

    def position(self) -> dict[str, int]:
        """Return where the next iteration would go on after the last step."""
        return {
            "epoch": self.epoch,
            # Batches that were taken ahead have had no step: they are read again.
            "taken": self.taken - (self._passes.ahead or 0),
            "order": self._dealer.order_number(begun=self.taken > 0 and not self._resumed_at),
            "backwards": self._passes.done if self.taken else 0,
        }

    def go_on(self, position: dict[str, Any], order: dict[str, Any]) -> None:
        """Let the next iteration begin at `position`, with the order that follows from `order`."""
        self.epoch = position["epoch"]
        self.taken = self._resumed_at = position["taken"]
        self._passes_before = position["backwards"]
        self.begun = self._in_epoch = self.left = False
        self._dealer.go_on(self._rank, position["order"], order)
