"""What one rank writes down of its flows, in windows of its run."""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from orchestra.records.timeline import Instant, Message, Slice, Timeline

STEPS, MAIN = 0, 1
FLOWS = ("steps", "main")


class Tracer:
    """Keeps the timeline of one rank, for all of its flows.

    A window lasts for `limit` steps, or on a rank that serves for as many messages from any
    source as its workers send in so many steps. Without a limit above 0 none ever opens.
    """

    def __init__(self, now: Callable[[], float], limit: int) -> None:
        self.now = now
        self.limit = limit
        self.is_open = False
        self.sent: dict[tuple[int, int], Iterator[int]] = defaultdict(itertools.count)
        self.received: dict[tuple[int, int], Iterator[int]] = defaultdict(itertools.count)
        self._flows = list(FLOWS)
        self._flow_of_thread = threading.local()
        self._slices: list[Slice] = []
        self._instants: list[Instant] = []
        self._began = 0.0
        self._serving = False
        self._left = 0
        self._step = 0
        self._step_began = 0.0

    def begin(self) -> None:
        """The stopwatch starts."""
        self._began = self.now()

    def open_for_steps(self, first: int) -> None:
        """Write down the steps from `first` on."""
        self._step, self._step_began = first, self.now()
        self._open(self.limit, serving=False)

    def open_for_requests(self, workers: int) -> None:
        """Write down what this rank does for so many workers."""
        self._open(self.limit * workers + 1, serving=True)  # to the end of the last answer

    def close(self) -> None:
        """The steps are over."""
        self.is_open = False

    @contextmanager
    def aside(self, name: str) -> Iterator[None]:
        """What happens inside is none of a step's; the timeline shows it as one piece."""
        start, was_open = self.now(), self.is_open
        self.is_open = False
        yield
        if was_open:
            self._step_began = self.now()
            self._slices.append(Slice(STEPS, "step", name, start, self._step_began, {}))
            self.is_open = True

    def _open(self, left: int, *, serving: bool) -> None:
        self._serving, self._left = serving, left
        self.is_open = left > 0

    def step_ended(self, number: int) -> None:
        """Step `number` of this rank is finished; the next one begins."""
        if not self.is_open:
            return
        now = self.now()
        args = {"step": number}
        self._slices.append(Slice(STEPS, "step", f"step {number}", self._step_began, now, args))
        self._step, self._step_began = number + 1, now
        self._count_down()

    def awaits_request(self) -> None:
        """A receive from any source begins."""
        if self._serving and self.is_open:
            self._count_down()

    def _count_down(self) -> None:
        self._left -= 1
        if self._left == 0:
            self.is_open = False
            self._instants.append(Instant("end of the steps that were traced", self.now()))

    def happened(self, name: str) -> None:
        """Something that concerns the whole run."""
        self._instants.append(Instant(name, self.now(), whole_run=True))

    def add(
        self,
        flow: int,
        category: str,
        name: str,
        start: float,
        end: float,
        args: dict[str, Any],
        message: Message | None = None,
    ) -> None:
        """Write down what `flow` did; `args` is given away."""
        if not self._serving:
            args["step"] = self._step
        self._slices.append(Slice(flow, category, name, start, end, args, message))

    def new_flow(self, name: str) -> int:
        """The index of a background flow that begins."""
        self._flows.append(name)
        return len(self._flows) - 1

    def enter(self, flow: int) -> None:
        """This thread is that of `flow`."""
        self._flow_of_thread.index = flow

    @property
    def flow(self) -> int:
        """The flow of this thread."""
        index: int = getattr(self._flow_of_thread, "index", MAIN)
        return index

    def timeline(self, clock: str) -> Timeline | None:
        """All that was written down; None if nothing was to be."""
        if not self.limit:
            return None
        flows = tuple(self._flows)
        return Timeline(clock, self._began, flows, self._slices, self._instants)
