"""The batches of a phase, as a value, and what a worker knows of them without a message."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, Protocol

from orchestra.coordinator.events import Done, Finish, Instruction, RestAt, Take
from orchestra.coordinator.rest import Reason, Rest

if TYPE_CHECKING:
    from torch import Tensor

Sizes = tuple[tuple[int, int], ...]
Batch = tuple[int, int]
"""The samples [start, stop) of the global order."""


class Observer(NamedTuple):
    """Ends the phase by `transition` when `observe(reports, seconds)` returns True; see `Rounds`.

    `fired`: it has done so already, and the phase ends as soon as possible.
    """

    transition: int
    observe: Callable[[Sequence[Done], tuple[float, ...]], bool]
    fired: bool = False


@dataclass(frozen=True)
class BatchQueue:
    """The samples [start, stop) of the global order, for workers that take the next batch when
    they are free: dynamic self-scheduling. A `Coordinator` hands out each sample once.

    The first instruction of each worker, and the first after a rest, follow from the position alone
    and need no message.
    """

    start: int
    budget: int | None  # samples of the run; None where that is not known
    sizes: Sizes  # the samples in a batch of each worker, as (rank, samples)
    rest_every: int | None = None
    """All workers rest when the samples before each multiple of this are handed out; None: never.
    No batch crosses such a point."""
    reason: Reason = Reason.CHECKPOINT  # of these rests
    end: int | None = None  # of the phase, where it ends before the budget
    transition: int = 0  # the number of the one that ends it there; outer ones have higher numbers
    observers: tuple[Observer, ...] = ()
    owed: tuple[Batch, ...] = ()
    """Batches before `start` that nobody has done, in their order: they are handed out first."""

    @property
    def round(self) -> int:
        """The samples that all workers take in a step."""
        return sum(size for _, size in self.sizes)

    @property
    def stop(self) -> int | None:
        """The sample before which the phase ends, at the latest."""
        return self.budget if self.end is None else self.end

    def ending(self, stop: int, transition: int) -> BatchQueue:
        """Return the queue of a phase that `transition` ends at `stop`, at the latest."""
        assert self.stop is not None
        # At the same sample the outer phase ends, and with it those inside.
        if (stop, -transition) < (self.stop, -self.transition):
            return replace(self, end=stop, transition=transition)
        return self

    def watched(self, observer: Observer) -> BatchQueue:
        """Return the queue with one more observer."""
        return replace(self, observers=(*self.observers, observer))

    def rest_after(self, position: int) -> int | None:
        """Return the first sample after `position` at which all workers rest."""
        every = self.rest_every
        return None if every is None else (position // every + 1) * every

    def at_end(self, transition: int, at: int) -> Instruction:
        """Return what all workers do once the samples before `at`, the end, are handed out."""
        return Finish(at) if at == self.budget else RestAt(at, Rest(Reason.PHASE, transition))

    def first(self, position: int) -> Mapping[int, Instruction]:
        """Return an instruction for each worker, in rank order, if all before `position` is done,
        except for what is `owed`.

        Nobody may change the result.
        """
        return _first(replace(self, observers=()), position)

    @property
    def begun(self) -> BatchQueue:
        """The queue after the first instructions of all workers: nothing is owed at a rest."""
        return replace(self, owed=()) if self.owed else self


@lru_cache(maxsize=16)  # all workers of a simulation ask for the same
def _first(queue: BatchQueue, position: int) -> Mapping[int, Instruction]:
    limit = queue.rest_after(position)
    instructions: dict[int, Instruction] = {}
    owed = iter(queue.owed)
    for rank, size in queue.sizes:
        if (batch := next(owed, None)) is not None:
            instructions[rank] = Take(*batch)
            continue
        end = earliest(position + size, queue.stop, limit)
        if end > position:
            instructions[rank] = Take(position, end)
        elif end == queue.stop:
            instructions[rank] = queue.at_end(queue.transition, position)
        else:
            instructions[rank] = RestAt(position, Rest(queue.reason))
        position = end
    return instructions


def earliest(*ends: int | None) -> int:
    """Return the smallest of the ends that are known."""
    return min(end for end in ends if end is not None)


class WorkSource(Protocol):
    """Tells one rank what it does next, one thing after the other."""

    def take(self) -> Instruction:
        """Return the next instruction; the one before is done."""


class QueuedWork(WorkSource, Protocol):
    """One worker's end of a queue of batches."""

    def skip(self, values: Tensor) -> None:
        """Note that nobody computes the last batch; renew the flat parameters `values`.

        For loops of the user's own, which may take a batch and make no step with it.
        """


class HeldWork(NamedTuple):
    """What a worker knows of a queue: the samples before `dealt` are handed out, at least.

    The worker holds the batch [start, stop), which may be empty. At a rest that is its first batch
    after the rest, which may lie behind `dealt`. `pushed`: the worker has pushed the gradient of
    the batch, and no server has answered yet.
    """

    dealt: int
    start: int = 0
    stop: int = 0
    pushed: bool = False


def rebuilt(held: Sequence[HeldWork], applied: int) -> tuple[int, tuple[Batch, ...]]:
    """Return the `start` of a queue whose coordinator is lost, and the batches `owed` before it.

    The workers of the queue have `held` these batches, and the model has `applied` samples. If that
    is more than the samples that nobody holds, servers have applied batches without an answer:
    pushed ones. Such batches are not owed; the earliest count first.
    """
    dealt = max(each.dealt for each in held)
    batches = sorted(
        (each for each in held if each.start < each.stop <= dealt), key=lambda each: each.start
    )
    unanswered = applied - (dealt - sum(each.stop - each.start for each in batches))
    owed: list[Batch] = []
    for each in batches:
        samples = each.stop - each.start
        if each.pushed and samples <= unanswered:
            unanswered -= samples
        else:
            owed.append((each.start, each.stop))
    return dealt, tuple(owed)


class WorkInHand:
    """The next instruction of a worker, which the coordinator gave, or which follows by itself."""

    def __init__(self, queue: BatchQueue, rank: int) -> None:
        self._rank = rank
        self._queue = queue.begun
        self._dealt = queue.start
        self._first: Mapping[int, Instruction] = {}  # after a rest that is not over
        first = queue.first(queue.start)
        self._note(*first.values())
        self.next = first[rank]

    def take(self) -> Instruction:
        """Return the instruction; after a rest, the next call returns the first one behind it."""
        instruction = self.next
        self._note(*self._first.values())
        self._first = {}
        if isinstance(instruction, RestAt):
            self._first = self._queue.first(instruction.at)
            self.next = self._first[self._rank]
        return instruction

    def give(self, instruction: Instruction) -> None:
        """The batch before is done, and `instruction` comes next."""
        self._note(instruction)
        self.next = instruction

    def _note(self, *instructions: Instruction) -> None:
        """Note that the coordinator has given `instructions`, to whichever worker."""
        stops = [each.stop for each in instructions if isinstance(each, Take)]
        self._dealt = max([self._dealt, *stops])

    def held(self, *, pushed: bool) -> HeldWork:
        """Return what this worker holds; see `HeldWork`."""
        if isinstance(self.next, Take):
            return HeldWork(self._dealt, *self.next, pushed)
        return HeldWork(self._dealt)
