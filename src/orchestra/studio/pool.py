"""A pool of processes that outlives each of them.

Its like in `multiprocessing` never answers the job of a process that was killed, and hangs for good
if that one held the lock of its queue; `concurrent.futures` gives up all jobs and the pool.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, ParamSpec, TypeVar

from orchestra.engines.processes.system import die_with_parent
from orchestra.errors import RunFailed

KILLED = (
    "a process of the studio was killed, and another one has taken its place; move a control to "
    "ask again"
)
OVER = "the studio has ended"
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class StudioProcess:
    """A process, and the connection over which it takes calls and answers them."""

    process: BaseProcess
    connection: Connection

    def end(self) -> None:
        """End the process, whatever it is doing."""
        self.process.kill()
        self.process.join()
        self.connection.close()


class StudioPool(Executor):
    """`size` processes, each replaced if it ends; the call that it had fails with `RunFailed`.

    A thread for each process hands it one call after the other.
    """

    def __init__(self, size: int, begin: Callable[[], None]) -> None:
        self._begin = begin
        self._calls: queue.SimpleQueue[tuple[Future[Any], tuple[Any, ...]] | None]
        self._calls = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._processes: list[StudioProcess] = []
        self._is_over = False
        self._threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(size)]
        for thread in self._threads:
            thread.start()

    def submit(
        self, function: Callable[P, T], /, *arguments: P.args, **named: P.kwargs
    ) -> Future[T]:
        """Return what `function`, of a module, will return in one of the processes."""
        future: Future[T] = Future()
        self._calls.put((future, (function, arguments, named)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End all processes at once, with the calls under way."""
        with self._lock:
            self._is_over = True
            for held in self._processes:
                held.process.kill()
        with contextlib.suppress(queue.Empty):
            while (item := self._calls.get_nowait()) is not None:
                item[0].set_exception(RunFailed(OVER))
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads if wait else ():
            thread.join()

    def _serve(self) -> None:
        held = self._started()
        while held is not None and (item := self._calls.get()) is not None:
            future, call = item
            if not future.set_running_or_notify_cancel():
                continue
            if not held.process.is_alive():  # killed while it had nothing to do
                held = self._replaced(held)
            if held is None:
                future.set_exception(RunFailed(OVER))
                return
            try:
                held.connection.send(call)
                well, answer = held.connection.recv()
            except (EOFError, OSError):
                held = self._replaced(held)
                future.set_exception(RunFailed(OVER if held is None else KILLED))
                continue
            if well:
                future.set_result(answer)
            else:
                future.set_exception(answer)
        if held is not None:
            held.end()

    def _started(self) -> StudioProcess | None:
        """Start a process; None once the pool is over."""
        # Processes are spawned: each imports torch, and the server itself stays without it.
        context = get_context("spawn")
        with self._lock:
            if self._is_over:
                return None
            here, there = context.Pipe()
            process = context.Process(target=_answer, args=(there, self._begin), daemon=True)
            process.start()
            there.close()
            held = StudioProcess(process, here)
            self._processes.append(held)
            return held

    def _replaced(self, held: StudioProcess) -> StudioProcess | None:
        with self._lock:
            self._processes.remove(held)
        held.end()
        return self._started()


def _answer(connection: Connection, begin: Callable[[], None]) -> None:
    """Carry out calls until the pool is over; the program of each process."""
    # A terminal sends Ctrl-C to every process of its group; the server ends the pool in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
    begin()
    while True:
        function, arguments, named = connection.recv()
        try:
            answer = True, function(*arguments, **named)
        except Exception as error:
            answer = False, error
        connection.send(answer)
