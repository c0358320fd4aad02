"""One rank: join the run, connect with the others, run the program, deliver its result."""

from __future__ import annotations

import json
import os
import pickle
import socket
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from orchestra.engines.events import describe
from orchestra.engines.processes.control import Control, RankSpec, Signs
from orchestra.engines.processes.system import keep_freed_memory, kernel, machine
from orchestra.engines.random_streams import seed
from orchestra.errors import RunEnded
from orchestra.transports.mesh import Listener, connect_mesh
from orchestra.transports.native import Native
from orchestra.worker.interception import Flow, Interceptor, Operation, intercepted
from orchestra.worker.runtime import PassingReporter, Runtime, Work
from orchestra.worker.threads import chosen_threads, usable_cores

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

T = TypeVar("T")

Program = Callable[[Runtime, Any], Any]


@dataclass
class TimedCompute:
    """Computation takes the time that it takes."""

    seconds: float = 0.0
    calls: int = 0

    def run(self, work: Work, function: Callable[[], T]) -> T:
        started = time.perf_counter()
        try:
            return function()
        finally:
            self.seconds += time.perf_counter() - started
            self.calls += 1

    def reached(self, slot: int) -> None:
        """The clock knows."""


class Watched(Interceptor):
    """Knows what the main flow of `rank` is blocked on, for the watcher."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.others = tuple(other for other in range(ranks) if other != rank)
        self._completed = 0  # operations, of all flows
        self._main = Flow()

    def wait(self, flow: Flow, operation: Operation, proceed: Callable[[], T]) -> T:
        if flow.name == self._main.name:
            self._main = flow
        before, flow.waiting = flow.waiting, operation
        try:
            return proceed()
        finally:
            flow.waiting = before
            self._completed += 1

    def signs(self) -> Signs:
        """What the main flow waits for, and how much has moved."""
        waiting = self._main.waiting
        while waiting is not None and waiting.flow is not None:
            waiting = waiting.flow.waiting
        if waiting is None:
            return Signs(self._completed)
        peers = self.others if waiting.peer is None else (waiting.peer,)
        what = f"to {waiting.kind}" if waiting.kind in ("send", "receive") else "in a collective"
        return Signs(self._completed, peers, f"{what}, tag {waiting.tag}")


class MemoryKeeper(PassingReporter):
    """Keeps freed memory once training begins; what set-up frees, such as a whole model of which
    this rank trains a stage, goes back to the system."""

    def phase(self, name: str) -> None:
        super().phase(name)
        if name == "training":
            keep_freed_memory()


def run_rank(
    spec: RankSpec,
    load: Callable[[], tuple[Program, Any]],
    make_store: Callable[[], Store],
    on_orphaned: Callable[[str], None] | None = None,
    on_cause: Callable[[str], None] | None = None,
) -> Any:
    """Be the rank that `spec` describes until its program has ended; what the program returned.

    Args:
        load: gives the program and its argument; its errors count as the program's.
        make_store: where the ranks of a process group of torch.distributed find each other.
        on_orphaned: called with the reason, from another thread, before this process leaves
            because the watcher is gone.
        on_cause: called with the first cause, from another thread, when the run ends by it.

    Raises:
        RunFailed: with the first cause, wherever it lies.
    """
    with ExitStack() as resources:
        listener = resources.enter_context(Listener(spec.host))
        control = Control(spec, on_orphaned, on_cause)
        control.hello(
            pid=os.getpid(),
            host=socket.gethostname(),
            machine=machine(),
            kernel=kernel(),
            cores=usable_cores(),
            address=listener.address,
        )
        try:
            result = _run(spec, control, listener, load, make_store, resources)
            delivery = _pickled(result) if spec.local else _as_json(result)
        except BaseException as error:
            cause = control.fail(describe(error))
            raise RunEnded(cause) from error
        control.finish(delivery)
        return result


def _run(
    spec: RankSpec,
    control: Control,
    listener: Listener,
    load: Callable[[], tuple[Program, Any]],
    make_store: Callable[[], Store],
    resources: ExitStack,
) -> Any:
    program, argument = load()
    addresses, share = control.roster()
    torch.set_num_threads(spec.threads or chosen_threads(os.environ) or share)
    transport = connect_mesh(
        spec.rank,
        addresses,
        listener,
        spec.token.encode(),
        tls=spec.tls,
        timeout=spec.limits.joining,
        on_flow_start=_one_thread,
        on_wait=lambda ranks: control.waiting(ranks, "to connect"),
    )
    resources.callback(transport.close)
    watched = Watched(spec.rank, spec.ranks)
    compute = TimedCompute()
    native = Native(
        make_store,
        spec.rank,
        spec.ranks,
        host=spec.host,
        device=spec.local_rank,
        timeout=4 * spec.limits.patience,  # the watcher judges first
    )
    resources.callback(native.close)

    def probe() -> Signs:
        signs = watched.signs()
        if native.waiting:
            signs = Signs(signs.progress, watched.others, "in a native collective")
        moved = transport.acknowledged_bytes() if sys.platform == "linux" else 0
        progress = (signs.progress, native.calls, compute.calls, moved)
        return Signs(progress, signs.waits_for, signs.what)

    control.attach(probe, transport.abort, transport.disconnect)
    runtime = Runtime(
        spec.rank,
        spec.ranks,
        transport,
        compute,
        MemoryKeeper(control),
        seed,
        local_rank=spec.local_rank,
        native=lambda: native,
        clock=machine(),
    )
    result = program(intercepted(runtime, watched), argument)
    control.phase("leaving")
    transport.close(timeout=spec.limits.patience)
    return result


def _one_thread() -> None:
    """Intra-op thread counts are each thread's own; a background flow leaves the cores to the main
    flow."""
    torch.set_num_threads(1)


def _as_json(result: Any) -> bytes:
    """For the watcher of another process tree, which unpickles nothing."""
    try:
        return json.dumps(result).encode()
    except (TypeError, ValueError) as error:
        raise TypeError(f"the result of the program cannot be written as JSON: {error}") from None


def _pickled(result: Any) -> bytes:
    try:
        return pickle.dumps(result)
    except Exception as error:
        raise TypeError(f"the result of the program cannot be pickled: {error}") from None
