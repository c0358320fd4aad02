"""The timeline of one rank: when its flows compute, send, receive and wait, in windows of its run.

Messages are numbered from the start, so that both ends give one message the same number whenever
their windows open. Everything else happens only while a window is open, and after the last one
has closed nothing is looked at any more.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from orchestra.cluster.units import BYTES
from orchestra.records.report import Instant, MessageKey, Timeline, TimelineSlice
from orchestra.transports.tags import tag_name
from orchestra.worker.interception import HookedCall, HookedFlow, Interceptor
from orchestra.worker.runtime import Work

T = TypeVar("T")

SHOWN = 16
"""The most ranks of a collective whose messages are recorded if the engine can do without them."""

_size_text = functools.lru_cache(maxsize=1024)(BYTES.rounded)

STEPS = 0
"""The index of the row of steps in a timeline; that of the main flow follows."""


class Trace(Interceptor):
    """Keeps the timeline of one rank, for all of its flows.

    A window lasts for `limit` steps, or on a rank that serves for as many messages from any
    source as its workers send in `limit` steps. Without a limit above 0 none ever opens. There are
    `windows` of them at most; `now` is the clock.
    """

    def __init__(self, now: Callable[[], float], limit: int, windows: int = 1) -> None:
        self.limit = limit
        self.is_open = False
        self._now = now
        self._windows = windows
        self._sent: dict[tuple[int, int], Iterator[int]] = defaultdict(itertools.count)
        self._received: dict[tuple[int, int], Iterator[int]] = defaultdict(itertools.count)
        self._labels = ["steps", "main"]
        self._rows: dict[HookedFlow, int] = {}
        self._slices: list[TimelineSlice] = []
        self._instants: list[Instant] = []
        self._serving = False
        self._left = self._step = 0
        self._began = self._step_began = 0.0

    # What the loop says

    def start(self) -> None:
        """Note that the stopwatch starts."""
        self._began = self._now()

    def open_for_steps(self, first: int) -> None:
        """Write down the steps from `first` on."""
        self._step, self._step_began = first, self._now()
        self._open(self.limit, serving=False)

    def open_for_requests(self, workers: int) -> None:
        """Open a window on a rank that serves `workers` workers."""
        self._open(self.limit * workers + 1, serving=True)  # to the end of the last answer

    def close(self) -> None:
        """End the trace: the steps are over."""
        self.is_open = False
        self.detach()

    @contextmanager
    def aside(self, name: str) -> Iterator[None]:
        """Show what happens inside as one piece that belongs to no step."""
        start, was_open = self._now(), self.is_open
        self.is_open = False
        yield
        if was_open:
            self._step_began = self._now()
            self._slices.append(TimelineSlice(STEPS, "step", name, start, self._step_began, {}))
            self.is_open = True

    def step_ended(self, number: int) -> None:
        """Note that step `number` of this rank is finished, and the next one begins."""
        if not self.is_open:
            return
        now = self._now()
        args = {"step": number}
        self._slices.append(
            TimelineSlice(STEPS, "step", f"step {number}", self._step_began, now, args)
        )
        self._step, self._step_began = number + 1, now
        self._count_down()

    def happened(self, name: str) -> None:
        """Note an event that concerns the whole run."""
        self._instants.append(Instant(name, self._now(), whole_run=True))

    def timeline(self, clock: str) -> Timeline | None:
        """Return the timeline; None where no window could open."""
        if not self.limit:
            return None
        return Timeline(clock, self._began, tuple(self._labels), self._slices, self._instants)

    def _open(self, left: int, *, serving: bool) -> None:
        self._serving, self._left = serving, left
        self._windows -= 1
        self.is_open = self.limit > 0

    def _count_down(self) -> None:
        self._left -= 1
        if self._left == 0:
            self.is_open = False
            self._instants.append(Instant("end of the steps that were traced", self._now()))
            if not self._windows:
                self.detach()

    # What the flows do

    def begin(self, flow: HookedFlow, operation: HookedCall, proceed: Callable[[], T]) -> T:
        if operation.kind == "flow":
            assert operation.flow is not None
            self._rows[operation.flow] = len(self._labels)
            self._labels.append(operation.flow.label)
        elif operation.kind == "send":
            return self._begin_send(flow, operation, proceed)
        elif operation.kind == "collective":
            # Of a collective that an engine computes as a whole there would be no messages to show.
            operation.message_by_message |= self.is_open and operation.ranks <= SHOWN
        elif operation.kind == "receive" and operation.peer is not None:
            number = next(self._received[operation.peer, operation.tag])
            if self.is_open:
                operation.marks[self] = number
        elif operation.kind == "receive" and self._serving and self.is_open:
            self._count_down()
        return proceed()

    def wait(self, flow: HookedFlow, operation: HookedCall, proceed: Callable[[], T]) -> T:
        from_any = operation.kind == "receive" and operation.peer is None
        if not self.is_open:
            result = proceed()
            if from_any:
                self._number(operation)
            return result
        if operation.kind in ("flow", "collective", "native"):
            return self._wait_for_other(flow, operation, proceed)
        if from_any or self in operation.marks:
            return self._wait_for_message(flow, operation, proceed)
        return proceed()

    def compute(self, flow: HookedFlow, work: Work, proceed: Callable[[], T]) -> T:
        # "step" stands for what surrounds a gradient, which has no place of its own in the row.
        if not self.is_open or work.kind == "step":
            return proceed()
        start = self._now()
        result = proceed()
        name = f"{work.kind} ({work.amount} samples)" if work.kind == "gradient" else work.kind
        self._add(flow, "compute", name, start, self._now(), {"amount": work.amount})
        return result

    def executed(
        self,
        flow: HookedFlow,
        operation: HookedCall,
        start: float,
        moving: float,
        sent: int,
    ) -> None:
        if not self.is_open:
            return
        about: dict[str, Any] = {"tag": tag_name(operation.tag)}
        self._add(flow, "wait", "wait for the others", start, moving, dict(about))
        name = f"all-reduce ({operation.label}), {_size_text(operation.size)}"
        about |= {"payload_bytes": operation.size, "bytes_sent": sent}
        self._add(flow, "native", name, moving, self._now(), about)

    def _begin_send(self, flow: HookedFlow, operation: HookedCall, proceed: Callable[[], T]) -> T:
        to, tag = operation.peer, operation.tag
        assert to is not None
        number = next(self._sent[to, tag])
        if not self.is_open:
            return proceed()
        operation.marks[self] = number
        traffic = flow.transport.traffic
        bytes_before, start = traffic.bytes_sent, self._now()
        handle = proceed()
        name = f"send {_size_text(operation.size)} to {_name(flow, to)}"
        about = {
            "payload_bytes": operation.size,
            "bytes_sent": traffic.bytes_sent - bytes_before,
            "tag": tag_name(tag),
            "peer": to,
        }
        message = MessageKey(flow.transport.rank, to, tag, number)
        self._add(flow, "send", name, start, self._now(), about, message)
        return handle

    def _wait_for_other(
        self, flow: HookedFlow, operation: HookedCall, proceed: Callable[[], T]
    ) -> T:
        """Wait for a flow of this rank, for what it executes, or for torch.distributed."""
        traffic = flow.transport.traffic
        before, start = traffic.seconds_waiting, self._now()
        result = proceed()
        end = self._now()
        if operation.kind == "native":
            name = f"all-reduce (native), {_size_text(operation.size)}"
            self._add(flow, "native", name, start, end, {"payload_bytes": operation.size})
        elif operation.kind == "flow":
            assert operation.flow is not None
            self._add(flow, "wait", f"wait for: {operation.flow.label}", start, end, {})
        elif operation.flow is not None:  # else its messages are seen
            end = start + traffic.seconds_waiting - before
            if end > start:
                self._add(flow, "wait", "wait for another flow", start, end, {})
        return result

    def _wait_for_message(
        self, flow: HookedFlow, operation: HookedCall, proceed: Callable[[], T]
    ) -> T:
        """Wait for a message: first until something moves, then for the rest of it.

        The transport counts how long it had nothing to move, but not when. Here that time is placed
        before the rest. For a receive from any source, the sender, and so the message's number, is
        known at the end.
        """
        traffic, peer, tag = flow.transport.traffic, operation.peer, tag_name(operation.tag)
        waited, moved, start = traffic.seconds_waiting, traffic.seconds_communicating, self._now()
        result = proceed()
        end = self._now()
        moving = min(start + traffic.seconds_waiting - waited, end)
        if moving > start:
            name = f"wait for {_name(flow, peer)}"
            self._add(flow, "wait", name, start, moving, {"tag": tag, "peer": peer})
        if operation.kind == "receive":
            source, size = operation.source, result.nbytes  # type: ignore[attr-defined]
            name = f"receive {_size_text(size)} from {_name(flow, source)}"
            about = {"payload_bytes": size, "tag": tag, "peer": source}
            message = MessageKey(
                source, flow.transport.rank, operation.tag, self._number(operation)
            )
            self._add(flow, "receive", name, moving, end, about, message)
        elif traffic.seconds_communicating > moved:  # else it had been complete
            name = f"send the rest to {_name(flow, peer)}"
            self._add(flow, "send", name, moving, end, {"tag": tag, "peer": peer})
        return result

    def _number(self, operation: HookedCall) -> int:
        if self not in operation.marks:
            operation.marks[self] = next(self._received[operation.source, operation.tag])
        return operation.marks[self]

    def _add(
        self,
        flow: HookedFlow,
        category: str,
        name: str,
        start: float,
        end: float,
        about: dict[str, Any],
        message: MessageKey | None = None,
    ) -> None:
        if not self._serving:
            about["step"] = self._step
        row = self._rows.get(flow, STEPS + 1)
        self._slices.append(TimelineSlice(row, category, name, start, end, about, message))


def _name(flow: HookedFlow, rank: int | None) -> str:
    """Return `rank` as seen from `flow`."""
    if rank is None:
        return "any rank"
    return "another flow" if rank == flow.transport.rank else f"rank {rank}"
