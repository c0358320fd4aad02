"""What the flows of a rank execute for each other, and how they tell each other of it."""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestra.transports.protocol import Pending, Traffic, Transport


class HandOver:
    """How two flows of a rank, here threads, tell each other of what has changed."""

    def __init__(self) -> None:
        self._changed = threading.Condition()

    def look(self) -> None:
        """In virtual time: return once all that other flows have told before now can be seen."""

    def wait_until(self, condition: Callable[[], bool], traffic: Traffic) -> None:
        """Block until `condition` is true; the seconds count as waiting in `traffic`."""
        started = time.perf_counter()
        with self._changed:
            self._changed.wait_for(condition)
        traffic.seconds_waiting += time.perf_counter() - started

    def tell(self, change: Callable[[], None], traffic: Traffic) -> None:
        """Make `change`, and let waiting flows check their conditions again."""
        with self._changed:
            change()
            self._changed.notify_all()

    def pass_on(self, change: Callable[[], None], traffic: Traffic) -> None:
        """`tell`, where mostly nobody waits: in virtual time it takes none then."""
        self.tell(change, traffic)


class Turns:
    """Flows of a rank take turns at what they share, in the order of their numbers.

    `Transport.take_turn` begins a turn. Numbers can be recorded, so that a replay has the same
    order.
    """

    def __init__(self, hand_over: HandOver) -> None:
        self._hand_over = hand_over
        self._numbers = itertools.count()
        self._present = 0  # the number whose turn it is, or will be next

    def take_number(self) -> int:
        """Take the next number; the turn comes after those of all lower ones."""
        self._hand_over.look()
        return next(self._numbers)

    def wait(self, number: int, traffic: Traffic) -> None:
        """Block until it is the turn of `number`."""
        self._hand_over.wait_until(lambda: self._present == number, traffic)

    def end(self, traffic: Traffic, change: Callable[[], None] = lambda: None) -> None:
        """End the turn under way; `change` is made before anybody looks again."""

        def end() -> None:
            change()
            self._present += 1

        self._hand_over.pass_on(end, traffic)


@dataclass(eq=False)
class Begun:
    """A `function` of a transport that was begun; `finish` blocks until it was executed.

    Attributes:
        flow: the background flow that executes it.
        look: is called before it is said whether it is done.
        result: what the function returned.
    """

    function: Callable[[Transport], Any]
    finish: Callable[[Begun], None]
    flow: Pending[None] | None = None
    look: Callable[[], object] = lambda: None
    finished: bool = False
    error: BaseException | None = None
    result: Any = None

    def wait(self) -> Any:
        """Block until it is done, and return what it returned or raise what it raised."""
        if not self.finished:
            self.finish(self)
        if self.error is not None:
            raise self.error
        return self.result

    def done(self) -> bool:
        self.look()
        return self.finished

    def execute(self, transport: Transport) -> None:
        """Carry it out, or note what it raised; it counts as finished once that is said."""
        try:
            self.result = self.function(transport)
        except BaseException as error:
            self.error = error


class Background:
    """What a flow behind `owner` executes, one function after the other."""

    def __init__(self, owner: Transport) -> None:
        self._owner = owner
        self._hand_over = owner.new_hand_over()
        self._waiting: deque[Begun] = deque()
        self._ended = False
        self._error: BaseException | None = None
        self._flow: Pending[None] | None = None

    def begin(self, function: Callable[[Transport], Any]) -> Begun:
        """Queue `function` behind the others; the first one starts the flow."""
        if self._flow is None:
            self._ended = False
            self._flow = self._owner.spawn(self._background)
        begun = Begun(function, self._finish, self._flow, self._hand_over.look)
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
            # One before it has failed, so that the flow has stopped and it will never be executed.
            begun.error = self._error

    def _background(self, transport: Transport) -> None:
        """The flow, which is called in a timeline as this function is."""
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
