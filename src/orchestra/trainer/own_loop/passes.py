"""The backward passes of a loop of the user's own, and the batches behind each."""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from orchestra.errors import InputError
from orchestra.worker.batches import leaves_of


class Count(NamedTuple):
    """The weights of a gradient: samples, unless the loop has set others."""

    weight: int = 0  # of this worker
    total: int = 0  # of all workers
    samples: int = 0  # that all workers have read

    def plus(self, other: Count | None) -> Count:
        """Return the sum of both."""
        return self if other is None else Count(*map(sum, zip(self, other, strict=True)))


class BackwardPasses:
    """Counts the backward passes that a worker makes, and the batches behind each.

    Usually a backward pass follows each batch. But a loop may take further batches before the
    backward pass of an earlier batch, which it still holds. It may skip batches, which it no longer
    holds. And it may make several backward passes on one batch; each has the batch's counts.
    `accumulation`: backward passes of a step; the last one exchanges. `copied`: batches go to
    another device; then it is no sign of a skipped batch that the loop no longer holds it.
    """

    def __init__(self, accumulation: int, *, copied: bool) -> None:
        self.accumulation = accumulation
        self.paused = False  # no pass exchanges, for now
        self.under_way = False  # a pass has begun, and not ended
        self.complete = False  # a pass has ended since the last step
        self._copied = copied
        self._exchanged: Count | None = None  # of the last exchange
        self._stepped: Count | None = None  # of the last step
        self._in_exchange: Count | None = None  # since then; a batch may count 0
        self._in_step: Count | None = None
        self.begin_epoch(0)

    def begin_epoch(self, done: int) -> None:
        """Count batches and passes from here, where `done` passes of the epoch are over."""
        # Batches that the loop has taken, and not begun, when it calls `backward`.
        self.ahead: int | None = None
        self.done = done  # passes in this epoch, or group of batches
        self.entered = False  # the strategy knows that this step has begun
        self.open = False  # a forward pass may be that of a step
        self._every = self.accumulation
        self._grouped = False  # all batches of a step were taken before its first backward
        # Of each batch its weights, if they are known, and what it is, unless nobody holds it.
        self._taken: deque[tuple[Count | None, Callable[[], object]]] = deque()
        self._fresh = self._ended = self._stepped_since = False
        self._forwards = self._forwards_on_last = 0  # in this epoch, on the batch taken last
        self._batches = 0  # taken in this epoch
        self._run: set[int] = set()  # the numbers of those that went forward

    def begin_group(self, size: int) -> None:
        """`size` batches are behind the next step, each with a backward pass of its own."""
        self._every, self._grouped, self.done = size, True, 0

    def end_epoch(self) -> None:
        """There are no more batches."""
        self._ended = True

    def rest(self) -> None:
        """Called when workers have come together, and the model shows what they agreed on.

        A step that had begun begins anew.
        """
        self.entered, self.open = False, bool(self._taken) and not self._ended

    def exchanges(self, at_end: Callable[[], bool]) -> bool:
        """Return whether the pass under way is the last of its step, and so exchanges. `at_end`:
        returns whether all batches of the epoch are taken."""
        last = (self.done + 1) % self._every == 0 or (at_end() and not self._grouped)
        return last and not self.paused

    def take(self, count: Count | None, batch: Any) -> None:
        """Called when a batch is handed out; without a `count`, `weigh` has to give one."""
        held: Callable[[], object] = lambda: None  # noqa: E731
        # A weak reference tells later whether the loop has let go of the batch.
        for leaf in leaves_of(batch):
            with contextlib.suppress(TypeError):
                held = weakref.ref(leaf)
                break
        self._taken.append((count, held))
        self._fresh = self.open = True
        self._forwards_on_last = 0
        self._batches += 1

    def weigh(self, weight: int, total: int) -> None:
        """Let the gradient of the batch that was taken last count `weight` of `total`."""
        if not self._fresh:
            raise InputError(
                "batches.weight(): call it after a batch was taken and before its backward()"
            )
        count, held = self._taken[-1]
        self._taken[-1] = Count(weight, total, count.samples if count else total), held

    def forward(self) -> None:
        """Called when a forward pass of the whole model begins."""
        self._forwards += 1
        self._forwards_on_last += 1
        if self._every > 1:
            self._run.add(self._batches)

    def backward(self) -> None:
        """Called when a backward pass begins. Raises InputError: no batch can be behind it."""
        none_before = self._exchanged is None and self._in_exchange is None
        over = self._ended and self._stepped_since
        if not self._taken and (none_before or over):
            raise InputError(
                "backward(): no batch was taken for it from the batches that distribute returned: "
                "iterate them, anew in each epoch; where several models are trained on the same "
                "batches, pass the first call's batches to the others"
            )
        if not self._taken or not (self._fresh or over):
            return
        if self.ahead is None:
            self.ahead = self._taken_ahead()
        # Batches that the loop passed over have no gradient.
        while len(self._taken) > self.ahead + 1:
            if not self.count_unreached():
                self._taken.popleft()
        self._count_first()
        self._fresh = self._stepped_since = False

    def count_unreached(self) -> bool:
        """Count the first batch, of several of a step, if it went forward: its gradient was 0."""
        if self._batches + 1 - len(self._taken) not in self._run:
            return False
        self._count_first()
        self.done += 1
        return True

    def _count_first(self) -> None:
        count, _ = self._taken.popleft()
        if count is None:
            raise InputError(
                "backward(): the tensors of this batch do not tell how many samples it has: their "
                "first dimensions are unlike, or smaller than what the sampler chose; call "
                "batches.weight(samples) before, on all workers, or, where Lightning or a Trainer "
                "calls backward(), drop samples from the data set, not in collate_fn"
            )
        self._in_exchange = count.plus(self._in_exchange)
        self._in_step = count.plus(self._in_step)

    def end(self) -> None:
        """Called when a backward pass ends."""
        self.under_way, self.complete = False, True
        self.done += 1

    def reaches_nothing(self) -> bool:
        """Return whether a batch was taken and no gradient came of it before `step()`."""
        return self._fresh and not self.complete

    def _taken_ahead(self) -> int:
        *earlier, _ = self._taken
        held = sum(held() is not None for _, held in earlier)
        if earlier and self._forwards and not self._forwards_on_last:
            return max(held, 1)  # what is going backward went forward before the last was taken
        if len(earlier) == 1 and not held and self._copied:
            raise InputError(
                "backward(): two batches were taken before, and it cannot be told which of them "
                "this one is of: take a batch after the step of the one before (num_workers "
                "loads ahead)"
            )
        return held

    def exchange(self) -> tuple[Count, int]:
        """Return the weights of the gradient that is exchanged now, and how many samples are new.

        A gradient that is exchanged again, after a further pass on the same batch, has no new ones.
        """
        new = self._in_exchange
        self._exchanged = new or self._exchanged or Count()
        self._in_exchange = None
        return self._exchanged, new.samples if new else 0

    def step(self) -> Count:
        """Return the weights of the gradient of the update that is made now."""
        self._stepped = self._in_step or self._stepped or Count()
        self._in_step = None
        self._stepped_since = True
        self.complete = self.entered = False
        return self._stepped
