"""Ranks as threads of this process, connected by real sockets: for tests of what ranks compute.

Threads share torch's global generator; what draws from it is tested on processes.
"""

from __future__ import annotations

import gc
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from orchestra.transports import executor
from orchestra.transports.handshake import address_of, listen
from orchestra.transports.sockets import SocketTransport, connect_mesh
from orchestra.worker.interception import InterceptedReporter
from orchestra.worker.runtime import Runtime, SilentReporter, Work
from orchestra.worker.worker import Worker

T = TypeVar("T")


@dataclass
class Notes(SilentReporter):
    """A reporter that remembers."""

    notices: list[str] = field(default_factory=list)
    stop: bool = False
    is_expendable: bool = False

    def expendable(self, yes: bool) -> None:
        self.is_expendable = yes

    def notice(self, text: str) -> None:
        self.notices.append(text)

    def stop_requested(self) -> bool:
        return self.stop


def ask_to_stop(worker: Worker) -> None:
    """The user asks this rank to stop."""
    reporter = worker.reporter
    if isinstance(reporter, InterceptedReporter):
        reporter = reporter.inner
    assert isinstance(reporter, Notes)
    reporter.stop = True


@dataclass
class FreeCompute:
    """Runs, and charges nothing."""

    seconds: float = 0.0
    main_seconds: float = 0.0

    def run(self, work: Work, function: Callable[[], T]) -> T:
        return function()

    def wait_before_using(self, slot: int, wait: Callable[[], object]) -> None:
        wait()

    def advance_to(self, slot: int) -> None:
        """Time passes by itself."""


def run_ranks(ranks: int, program: Callable[[Runtime], Any], timeout: float = 120.0) -> list[Any]:
    """What `program` returns on each rank; raises what the first failing rank raised.

    That one ends the others, as the watcher of a run does: a rank beside whose worker a server has
    given up waits for itself.
    """
    listeners = [listen() for _ in range(ranks)]
    addresses = [address_of(listener) for listener in listeners]
    token = secrets.token_bytes(16)
    results: list[Any] = [None] * ranks
    errors: list[BaseException] = []
    transports: list[SocketTransport] = []

    def run(rank: int) -> None:
        torch.set_num_threads(1)
        transport = connect_mesh(
            rank, addresses, listeners[rank], token,
            timeout=timeout, compiled=executor.is_there(),
        )  # fmt: skip
        transports.append(transport)
        try:
            runtime = Runtime(rank, ranks, transport, FreeCompute(), Notes(), seed=lambda _: None)
            results[rank] = program(runtime)
        except BaseException as error:
            errors.append(error)
            for each in list(transports):
                each.abort(RuntimeError(f"rank {rank} failed"))
        finally:
            transport.close()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(ranks)]
    collects = gc.isenabled()
    # torch holds a generator's lock while it makes a tensor of its state. Garbage collected there
    # may free another tensor, which lets a second thread run: if that one asks the same generator,
    # it waits for the lock and keeps the interpreter, for ever.
    gc.disable()
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout)
    finally:
        if collects:
            gc.enable()
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return results
