"""What a flow runs on: a thread of its own, or a greenlet. Exactly one of all contexts runs.

PyTorch's grad mode, default device and dispatch modes live in the thread, so that flows which
compute have one each. Where tensors have no values none of that matters, and greenlets change
places in a hundredth of the time.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Self

from greenlet import getcurrent, greenlet

Life = Callable[[], Any]
"""What a context does from its first turn on; gives the one whose turn it is after its end."""

LOOK_UP = 1.0
"""Seconds after which the launching thread looks whether a signal has come."""


class ThreadContext:
    """Waits for a lock, its baton; then goes on where the one before it stopped."""

    def __init__(self, affinity: Affinity, life: Life | None = None, name: str = "") -> None:
        self._affinity = affinity
        self._baton = threading.Lock()
        self._baton.acquire()
        self._life = life
        self._thread = threading.current_thread()
        # Handlers of signals run in the main thread. A signal that came just before it waited, or
        # that the kernel gave to another thread, does not wake it from a lock.
        self._timeout = LOOK_UP if life is None else -1.0
        if life is not None:
            self._thread = threading.Thread(target=self._live, name=name, daemon=True)
            self._thread.start()

    @classmethod
    def present(cls) -> Self:
        """Make the context that runs at present, which makes all others."""
        return cls(Affinity())

    def another(self, life: Life, name: str) -> ThreadContext:
        """Make a further one, which waits for its first turn."""
        return ThreadContext(self._affinity, life, name)

    def pass_to(self, other: Any) -> None:
        """Let it be the turn of `other`, until it is this one's, which runs now, again."""
        other._take_over()
        self.await_turn()

    def await_turn(self) -> None:
        """Wait until it is the turn of this one, also after a signal has ended its `pass_to`."""
        while not self._baton.acquire(timeout=self._timeout):
            pass  # a signal that came just before it waited has its effect here
        self._affinity.release()

    def join(self) -> None:
        """Wait until nothing of it is left; its life is over."""
        self._thread.join()

    def _live(self) -> None:
        assert self._life is not None
        self.await_turn()
        self._life()._take_over()

    def _take_over(self) -> None:
        """From the one that runs: it is the turn of this one."""
        assert self._thread.native_id is not None
        # Before the baton: the kernel chooses a core at the moment in which it wakes the thread.
        self._affinity.bring_here(self._thread.native_id)
        self._baton.release()


class GreenletContext:
    """All are greenlets of the thread of the first."""

    def __init__(self, own: Any, first: GreenletContext | None = None) -> None:
        self._greenlet, self._first = own, first or self

    @classmethod
    def present(cls) -> Self:
        return cls(getcurrent())

    def another(self, life: Life, name: str) -> GreenletContext:
        maker = getcurrent()

        def live() -> None:
            maker.switch()  # one that began in another's turn would lie deeper on the stack
            own.parent = life()._greenlet  # goes on when this one ends

        own = greenlet(live, self._first._greenlet)
        # To its first line and back, so that it lies on the stack of its maker alone.
        own.switch()
        return GreenletContext(own, self._first)

    def pass_to(self, other: Any) -> None:
        other._greenlet.switch()

    def await_turn(self) -> None:
        """Do nothing: an exception in a greenlet goes on in its parent, so that it is its turn."""

    def join(self) -> None:
        assert self._greenlet.dead


Context = ThreadContext | GreenletContext
"""Runs when it is its turn. It exists from the start, and waits for that."""


class Affinity:
    """Keeps threads that run one at a time on the same core of a machine, which may change.

    A thread that wakes another one is still running. So the system would put the woken thread on an
    idle core, whose caches hold none of its data. This class makes it wake on the core of the
    running thread; from then on the system may move it. All are bound to the cores that the present
    thread may use.
    """

    def __init__(self) -> None:
        # Gives the number of its caller's core, where there is one.
        read = getattr(ctypes.CDLL(None), "sched_getcpu", None) if sys.platform == "linux" else None
        self._read = read if read is not None and read() >= 0 else None
        self._cores = set() if self._read is None else os.sched_getaffinity(0)

    def bring_here(self, thread: int) -> None:
        """Let `thread` (its native id), which waits, wake on the core of the present one."""
        if self._read is not None:
            self._restrict(thread, {self._read()})

    def release(self) -> None:
        """Let the present thread run on any of them again."""
        self._restrict(0, self._cores)

    def _restrict(self, thread: int, cores: set[int]) -> None:
        # On a single core there is nothing to choose, and two system calls a turn are saved.
        if len(self._cores) > 1:
            with suppress(OSError):  # a sandbox may forbid it, and all goes on, only slower
                os.sched_setaffinity(thread, cores)
