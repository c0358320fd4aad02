"""The default of `Transport.collective`: schedules over messages, in this flow or behind it.

A flow that begins collectives has two queues. Those of the foreground are executed by the flow
itself, when it waits for one of them; those of the background by one more flow, which is made for
the first of them.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from orchestra.schedules import Schedule
from orchestra.transports.executor import execute
from orchestra.transports.protocol import Group, Task, Traffic, Transport

Execute = Callable[[Transport], int]
"""Executes one collective over the transport of a flow; the bytes of buffer used."""


class HandOver(Protocol):
    """How two flows of a rank tell each other of what has changed; the engine's."""

    def wait_until(self, so: Callable[[], bool], traffic: Traffic) -> None:
        """Block until `so`, which counts as waiting in `traffic`."""
        ...

    def tell(self, change: Callable[[], None], traffic: Traffic) -> None:
        """Make `change`, and let whoever waits look again."""
        ...


class ThreadHandOver:
    """Between two threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()

    def wait_until(self, so: Callable[[], bool], traffic: Traffic) -> None:
        started = time.perf_counter()
        with self._changed:
            self._changed.wait_for(so)
        traffic.seconds_waiting += time.perf_counter() - started

    def tell(self, change: Callable[[], None], traffic: Traffic) -> None:
        with self._changed:
            change()
            self._changed.notify_all()


class Begun:
    """A collective that was begun, and that `queue` executes."""

    def __init__(self, queue: Foreground | Background, execute: Execute) -> None:
        self.execute = execute
        self.finished = False
        self.buffer_bytes = 0
        self.error: BaseException | None = None
        self._queue = queue

    def wait(self) -> int:
        """Block until it is done: the bytes of buffer used. Raises what it raised."""
        if not self.finished:
            self._queue.finish(self)
        if self.error is not None:
            raise self.error
        return self.buffer_bytes

    def done(self) -> bool:
        """Whether `wait` would return (or raise) at once."""
        return self.finished

    @property
    def flow(self) -> Task[None] | None:
        """The background flow that executes it."""
        return self._queue.flow

    def end(self, buffer_bytes: int = 0, error: BaseException | None = None) -> None:
        """It is done, or has failed."""
        self.buffer_bytes, self.error, self.finished = buffer_bytes, error, True


class Foreground:
    """Collectives that make progress only while `over`, the flow that began them, waits."""

    flow = None

    def __init__(self, over: Transport) -> None:
        self._over = over
        self._waiting: deque[Begun] = deque()

    def begin(self, execute: Execute) -> Begun:
        """One more, behind the others."""
        begun = Begun(self, execute)
        self._waiting.append(begun)
        return begun

    def finish(self, last: Begun) -> None:
        """Execute all up to `last`."""
        while not last.finished:
            begun = self._waiting.popleft()
            try:
                begun.end(begun.execute(self._over))
            except BaseException as error:
                begun.end(error=error)
                raise


class Background:
    """Collectives that a flow behind `over` executes, one after the other."""

    def __init__(self, over: Transport, hand_over: HandOver) -> None:
        self._over = over
        self._hand_over = hand_over
        self._waiting: deque[Begun] = deque()
        self._ended = False
        self._error: BaseException | None = None
        self.flow: Task[None] | None = None

    def begin(self, execute: Execute) -> Begun:
        """One more, behind the others; the first of them makes the flow."""
        if self.flow is None:
            self._ended = False
            self.flow = self._over.spawn(self.sum_in_background)
        begun = Begun(self, execute)
        self._hand_over.tell(lambda: self._waiting.append(begun), self._over.traffic)
        return begun

    def finish(self, begun: Begun) -> None:
        """Wait until the flow has executed it, or has failed before."""
        self._hand_over.wait_until(
            lambda: begun.finished or self._error is not None, self._over.traffic
        )
        if not begun.finished:
            begun.end(error=self._error)

    def end(self) -> None:
        """Let the flow end once all is done; whatever failed has been raised by `wait`."""
        if self.flow is not None:
            self._hand_over.tell(self._end, self._over.traffic)
            self.flow.wait()
            self.flow = None

    def _end(self) -> None:
        self._ended = True

    def _is_told(self) -> bool:
        return bool(self._waiting) or self._ended

    def sum_in_background(self, transport: Transport) -> None:
        """The flow, on its `transport`."""
        traffic = transport.traffic
        while self._error is None:
            self._hand_over.wait_until(self._is_told, traffic)
            if not self._waiting:
                return
            begun = self._waiting[0]
            before = traffic.seconds_communicating
            try:
                end = functools.partial(begun.end, begun.execute(transport))
            except BaseException as error:
                self._error = error
                end = functools.partial(begun.end, error=error)
            self._over.traffic.seconds_in_background += traffic.seconds_communicating - before
            self._waiting.popleft()
            self._hand_over.tell(end, traffic)


class CollectiveVerb:
    """`Transport.collective` for a transport of messages.

    Queues belong to whatever the messages are sent over, since an interceptor's background flow is
    intercepted, too.
    """

    _foreground: dict[Transport, Foreground] | None = None
    _background: dict[Transport, Background] | None = None

    def collective(
        self,
        schedule: Schedule,
        vector: Tensor,
        group: Group,
        tag: int,
        edges: Sequence[int] | None = None,
        *,
        background: bool = False,
        via: Transport | None = None,
        visible: bool = False,
    ) -> Task[int]:
        """Begin this rank's part in `schedule`; see `Transport.collective`."""
        over: Transport = via or self  # type: ignore[assignment]
        call = functools.partial(self._execute, schedule, vector, group, tag, edges, visible)
        if self._foreground is None or self._background is None:
            self._foreground, self._background = {}, {}
        if not background:
            if over not in self._foreground:
                self._foreground[over] = Foreground(over)
            return self._foreground[over].begin(call)
        if over not in self._background:
            self._background[over] = Background(over, self._new_hand_over())
        return self._background[over].begin(call)

    def end_background(self, via: Transport | None = None) -> None:
        """End the background flow, if there is one; see `Transport.end_background`."""
        over: Transport = via or self  # type: ignore[assignment]
        if self._background and over in self._background:
            self._background[over].end()

    def _execute(
        self,
        schedule: Schedule,
        vector: Tensor,
        group: Group,
        tag: int,
        edges: Sequence[int] | None,
        visible: bool,
        flow: Transport,
    ) -> int:
        return execute(flow, schedule, vector, group, tag, edges)

    def _new_hand_over(self) -> HandOver:
        return ThreadHandOver()
