"""`Transport.collective`: collectives in this flow, behind it, or by torch.distributed.

A flow that begins collectives has two queues. Those of the foreground are executed by the flow
itself, when it waits for one of them; those of the background by one more flow, which is made for
the first of them.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable

from torch import Tensor

from orchestra.errors import InputError
from orchestra.transports.executor import execute
from orchestra.transports.protocol import CollectiveCall, HandOver, Task, Traffic, Transport


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
    """A collective that was begun; `finish` blocks until it was executed.

    Attributes:
        flow: the background flow that executes it.
    """

    def __init__(
        self,
        call: CollectiveCall,
        finish: Callable[[Begun], None],
        flow: Task[None] | None = None,
    ) -> None:
        self.flow = flow
        self.finished = False
        self.error: BaseException | None = None
        self._call = call
        self._finish = finish
        self._buffer_bytes = 0

    def wait(self) -> int:
        """Block until it is done: the bytes of buffer used. Raises what it raised."""
        if not self.finished:
            self._finish(self)
        if self.error is not None:
            raise self.error
        return self._buffer_bytes

    def done(self) -> bool:
        """Whether `wait` would return (or raise) at once."""
        return self.finished

    def execute(self, transport: Transport) -> None:
        """Carry it out, or note what it raised; it counts as finished once that is said."""
        try:
            self._buffer_bytes = transport.execute(self._call)
        except BaseException as error:
            self.error = error


class Background:
    """Collectives that a flow behind `owner` executes, one after the other."""

    def __init__(self, owner: Transport) -> None:
        self._owner = owner
        self._hand_over = owner.new_hand_over()
        self._waiting: deque[Begun] = deque()
        self._ended = False
        self._error: BaseException | None = None
        self._flow: Task[None] | None = None

    def begin(self, call: CollectiveCall) -> Begun:
        """One more, behind the others; the first of them makes the flow."""
        if self._flow is None:
            self._ended = False
            self._flow = self._owner.spawn(self.sum_in_background)
        begun = Begun(call, self._finish, self._flow)
        self._hand_over.tell(lambda: self._waiting.append(begun), self._owner.traffic)
        return begun

    def end(self) -> None:
        """Let the flow end once all is done; whatever failed has been raised by `wait`."""
        if self._flow is not None:
            self._hand_over.tell(lambda: setattr(self, "_ended", True), self._owner.traffic)
            self._flow.wait()
            self._flow = None

    def _finish(self, begun: Begun) -> None:
        """Wait until the flow has executed it, or has failed before."""
        self._hand_over.wait_until(
            lambda: begun.finished or self._error is not None, self._owner.traffic
        )
        if not begun.finished:
            begun.error = self._error

    def sum_in_background(self, transport: Transport) -> None:
        """The flow, on its `transport`."""
        traffic = transport.traffic
        while self._error is None:
            self._hand_over.wait_until(lambda: bool(self._waiting) or self._ended, traffic)
            if not self._waiting:
                return
            begun = self._waiting[0]
            before = traffic.seconds_communicating
            begun.execute(transport)
            self._error = begun.error
            self._owner.traffic.seconds_in_background += traffic.seconds_communicating - before
            self._waiting.popleft()
            self._hand_over.tell(functools.partial(setattr, begun, "finished", True), traffic)


class CollectiveVerb:
    """`Transport.collective` for every transport.

    An interceptor's transport has queues of its own, so that the flow behind them is intercepted.
    """

    _foreground: deque[Begun] | None = None
    _background: Background | None = None

    def collective(self, call: CollectiveCall) -> Task[int]:
        """Begin this rank's part in a collective; see `Transport.collective`."""
        this: Transport = self  # type: ignore[assignment]
        if call.schedule is None:
            return this.native_all_reduce(call.vector)
        if call.background:
            self._background = self._background or Background(this)
            return self._background.begin(call)
        self._foreground = deque() if self._foreground is None else self._foreground
        begun = Begun(call, self._execute_up_to)
        self._foreground.append(begun)
        return begun

    def _execute_up_to(self, last: Begun) -> None:
        assert self._foreground is not None
        while not last.finished:
            begun = self._foreground.popleft()
            begun.execute(self)  # type: ignore[arg-type]
            begun.finished = True
            if begun.error is not None:
                raise begun.error

    def end_background(self) -> None:
        """End the background flow, if there is one."""
        if self._background is not None:
            self._background.end()

    def execute(self, call: CollectiveCall, over: Transport | None = None) -> int:
        """Carry out `call` now, message by message; see `Transport.execute`."""
        return execute(over or self, call)  # type: ignore[arg-type]

    def native_all_reduce(self, vector: Tensor) -> Task[int]:
        """Refuse: only some transports have a backend."""
        raise InputError("this engine has no native collectives: name a schedule instead")

    def new_hand_over(self) -> HandOver:
        """Make what two threads wait on."""
        return ThreadHandOver()
