"""Which samples are behind a gradient, in a loop of the user's own."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from orchestra.errors import InputError
from orchestra.worker.batches import tensors_of


class Count(NamedTuple):
    """Samples of this worker and of all workers."""

    samples: int = 0
    total: int = 0

    def plus(self, other: Count) -> Count:
        """The sum of both."""
        return Count(self.samples + other.samples, self.total + other.total)


@dataclass
class _Taken:
    count: Count
    held: Callable[[], object]  # None once nobody holds the batch


class SampleCounts:
    """Assigns the batches that a worker takes to the backward passes that it makes.

    Usually a backward pass follows each batch. A loop may take batches ahead of the backward pass
    of an earlier one, which it still holds then; it may pass batches over, which it has let go of;
    and it may make several backward passes on one batch, each of which has the batch's counts.

    Where batches are `copied` to another device, those that were let go of say nothing.

    Attributes:
        ahead: batches that the loop has taken, and not begun, when it calls `backward`.
    """

    def __init__(self, *, copied: bool) -> None:
        self._copied = copied
        self._exchanged: Count | None = None  # of the last exchange
        self._stepped: Count | None = None  # of the last step
        self._in_exchange: Count | None = None  # since then; a batch may count 0
        self._in_step: Count | None = None
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """From here batches are those of another epoch."""
        self.ahead: int | None = None
        self._taken: deque[_Taken] = deque()
        self._fresh = self._ended = self._done = False
        self._forwards = self._entered = 0  # in this epoch, and since the last batch was taken

    def end_epoch(self) -> None:
        """There are no more batches."""
        self._ended = True

    def take(self, samples: int, total: int, batch: Any) -> None:
        """A batch is handed out."""
        first = next(tensors_of(batch), None)
        held: Callable[[], object] = (lambda: None) if first is None else weakref.ref(first)
        self._taken.append(_Taken(Count(samples, total), held))
        self._fresh, self._entered = True, 0

    def forward(self) -> None:
        """A forward pass of the whole model begins."""
        self._forwards += 1
        self._entered += 1

    def backward(self) -> None:
        """A backward pass begins.

        Raises:
            InputError: no batch can be behind it.
        """
        none_before = self._exchanged is None and self._in_exchange is None
        if not self._taken and (none_before or (self._ended and self._done)):
            raise InputError(
                "backward(): no batch was taken for it from the batches that distribute returned: "
                "iterate them, anew in each epoch; where several models are trained on the same "
                "batches, pass the first call's batches to the others"
            )
        if not self._taken or not (self._fresh or (self._ended and self._done)):
            return
        if self.ahead is None:
            self.ahead = self._taken_ahead()
        while len(self._taken) > self.ahead + 1:
            self._taken.popleft()
        count = self._taken.popleft().count
        self._fresh = self._done = False
        self._in_exchange = count.plus(self._in_exchange or Count())
        self._in_step = count.plus(self._in_step or Count())

    def _taken_ahead(self) -> int:
        *earlier, _ = self._taken
        held = sum(taken.held() is not None for taken in earlier)
        if earlier and self._forwards and not self._entered:
            return max(held, 1)  # what is going backward went forward before the last was taken
        if len(earlier) == 1 and not held and self._copied:
            raise InputError(
                "backward(): two batches were taken before, and it cannot be told which of them "
                "this one is of: take a batch after the step of the one before (num_workers "
                "loads ahead)"
            )
        return held

    def exchange(self) -> tuple[Count, int]:
        """What is behind the gradient that is exchanged; and how many samples were not before."""
        new = self._in_exchange
        self._exchanged = new or self._exchanged or Count()
        self._in_exchange = None
        return self._exchanged, new.total if new else 0

    def step(self) -> Count:
        """What is behind the update that is made."""
        self._stepped = self._in_step or self._stepped or Count()
        self._in_step = None
        self._done = True
        return self._stepped
