"""Small programs for ranks, and a launch in the background that a test can disturb."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.waiting import wait_until
from torch import Tensor

from orchestra.collectives import Group
from orchestra.engines.live import print_notice
from orchestra.engines.processes import Outcome, launch
from orchestra.engines.processes.system import RankPlace
from orchestra.transports import compiled
from orchestra.transports.protocol import CollectiveCall, Pending, Transport
from orchestra.worker.runtime import RankActivity, Runtime, chosen_threads, cpu_quota

TAG = 7
WHERE_COMPILED = pytest.mark.skipif(not compiled.is_there(), reason="nothing was compiled")
COMPILED = pytest.mark.parametrize("compiled", ["0", pytest.param("1", marks=WHERE_COMPILED)])
"""ORCHESTRA_COMPILED of the ranks."""


class StopsAtTheDoor(RankPlace):
    """Stops the process of its rank after the fork, before the rank introduces itself."""

    def enter(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)


def say_rank(runtime: Runtime, argument: Any) -> Any:
    return runtime.rank, runtime.ranks, argument


def quota_of(_: Runtime, __: None) -> float | None:
    return cpu_quota()


def thread_count(_: Runtime, __: None) -> int:
    return torch.get_num_threads()


def thread_counts_of_flows(runtime: Runtime, _: None) -> tuple[int, int, int]:
    """Of the main flow, of another one, and of the main flow again."""
    before = torch.get_num_threads()
    inside = runtime.transport.spawn(lambda _: torch.get_num_threads()).wait()
    return before, inside, torch.get_num_threads()


def asked_threads(_: Runtime, __: None) -> int | None:
    return chosen_threads(os.environ)


def read_variable(_: Runtime, name: str) -> str | None:
    return os.environ.get(name)


def draw(runtime: Runtime, seed: int) -> tuple[float, float]:
    import random

    runtime.seed(seed)
    return float(torch.rand(())), random.random()


def pass_round(runtime: Runtime, _: None) -> float:
    """The sum of all ranks, passed round a ring."""
    total = torch.zeros(1)
    moving = torch.full((1,), float(runtime.rank))
    for _step in range(runtime.ranks):
        total += moving
        sent = runtime.transport.send(moving, (runtime.rank + 1) % runtime.ranks, TAG)
        moving = runtime.transport.receive((runtime.rank - 1) % runtime.ranks, TAG).wait()
        sent.wait()
    return float(total)


def all_reduce_natively(runtime: Runtime, vector: Tensor) -> Pending[int]:
    everyone = Group(tuple(range(runtime.ranks)))
    return runtime.transport.collective(CollectiveCall(None, vector, everyone, TAG))


def collect_natively(runtime: Runtime, _: None) -> list[list[float]]:
    vectors = [torch.full((3,), float(runtime.rank)), torch.ones(2)]
    begun = [all_reduce_natively(runtime, vector) for vector in vectors]
    for each in begun:
        each.wait()
        assert each.done()
    return [vector.tolist() for vector in vectors]


def arrive(runtime: Runtime, folder: Path) -> None:
    """Leave this rank's process id, in a file that appears with its content."""
    draft = folder / f"{runtime.rank}.draft"
    draft.write_text(str(os.getpid()))
    draft.rename(folder / str(runtime.rank))


def wait_for_last(runtime: Runtime, folder: Path) -> None:
    """All but the last rank wait for a message that the last never sends."""
    arrive(runtime, folder)
    runtime.reporter.activity(RankActivity.TRAINING)
    if runtime.rank == runtime.ranks - 1:
        wait_until((folder / "never").exists, "a file that no test makes")
    runtime.transport.receive(runtime.ranks - 1, TAG).wait()


def wait_natively_for_last(runtime: Runtime, folder: Path) -> None:
    arrive(runtime, folder)
    all_reduce_natively(runtime, torch.ones(1)).wait()
    if runtime.rank == runtime.ranks - 1:
        signal.pause()
    all_reduce_natively(runtime, torch.ones(1)).wait()


def send_half(runtime: Runtime, folder: Path) -> None:
    """Rank 1 sends more than fits into the buffers; rank 0 takes none of it."""
    if runtime.rank == 1:
        handle = runtime.transport.send(torch.ones(50_000_000), 0, TAG)
        arrive(runtime, folder)
        handle.wait()
    arrive(runtime, folder)
    wait_until((folder / "1").exists, "rank 1 sends")
    wait_until((folder / "killed").exists, "the test kills rank 1")
    runtime.transport.receive(1, TAG).wait()


def end_own_child(_: Runtime, __: None) -> int | None:
    """The exit status of a process that was asked to end."""
    child = multiprocessing.get_context("fork").Process(target=signal.pause)
    child.start()
    child.terminate()
    child.join(60)
    return child.exitcode


def fail_in_one(runtime: Runtime, failing: int) -> None:
    if runtime.rank == failing:
        raise ValueError("bad sample 17")
    runtime.transport.receive(failing, TAG).wait()


def fail_after_native(runtime: Runtime, failing: int) -> None:
    all_reduce_natively(runtime, torch.ones(1)).wait()
    if runtime.rank == failing:
        raise ValueError("bad sample 17")
    all_reduce_natively(runtime, torch.ones(1)).wait()


def leave_without_result(runtime: Runtime, status: int) -> None:
    if runtime.rank == 1:
        os._exit(status)
    runtime.transport.receive(1, TAG).wait()


def unpicklable(runtime: Runtime, _: None) -> Any:
    return (lambda: None) if runtime.rank == 1 else None


def wait_in_a_circle(runtime: Runtime, behind: bool) -> None:
    """In the main flow, or in one behind it for which the main flow waits."""

    def wait(transport: Transport) -> None:
        transport.receive((runtime.rank + 1) % runtime.ranks, TAG).wait()

    if behind:
        runtime.transport.in_background(wait).wait()
    else:
        wait(runtime.transport)


def loop_for_ever(runtime: Runtime, _: None) -> None:
    """Rank 1 computes without end; the others wait for it."""
    runtime.reporter.progress(step=1, samples=1)
    while runtime.rank == 1:
        pass
    runtime.transport.receive(1, TAG).wait()


def hold_interpreter(seconds: float) -> None:
    import ctypes

    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def notices_loss(runtime: Runtime, folder: Path) -> str:
    """Rank 0 waits for anybody, and is told of the rank that it will not hear of."""
    from orchestra.errors import PeerLost

    runtime.reporter.activity(RankActivity.TRAINING)
    if runtime.rank == 1:
        runtime.reporter.expendable(True)
        arrive(runtime, folder)
        signal.pause()
    try:
        runtime.transport.receive(None, TAG).wait()
    except PeerLost as error:
        return f"went on without {error.rank}"
    return "heard something"


def loses_connection_to_rank_that_ends(runtime: Runtime, folder: Path) -> str:
    """Rank 0 loses its connection to rank 1, which then ends. Rank 2 reads nothing before rank 0
    knows of that end, and then reads what rank 1 has sent."""
    from orchestra.errors import PeerLost

    runtime.reporter.activity(RankActivity.TRAINING)
    is_cut, is_known = folder / "cut", folder / "known"
    if runtime.rank == 1:
        runtime.transport.send(torch.tensor(7), 2, TAG).wait()
        wait_until(is_cut.exists, "rank 0 loses its connection")
        return "ended"
    if runtime.rank == 2:
        wait_until(is_known.exists, "rank 0 learns that rank 1 has ended")
        return f"received {int(runtime.transport.receive(1, TAG).wait())}"
    arriving = runtime.transport.receive(1, TAG)  # a fault cuts the connection
    arriving.done()  # reads the end of the connection, before rank 1 says farewell
    is_cut.touch()
    try:
        arriving.wait()
    except PeerLost as error:
        is_known.touch()
        return str(error)
    return "heard something"


def until_asked_to_stop(runtime: Runtime, folder: Path) -> str:
    arrive(runtime, folder)
    while not runtime.reporter.stop_requested():
        time.sleep(0.01)
    return "stopped in order"


def deaf(runtime: Runtime, folder: Path) -> None:
    """Never looks whether a stop was asked for; the ways in which a rank can be stuck."""
    arrive(runtime, folder)
    if runtime.rank == 0:
        hold_interpreter(1000.0)
    elif runtime.rank == 1:
        time.sleep(1000)
    else:
        signal.pause()


def blocked(runtime: Runtime, folder: Path) -> None:
    """No message ends this."""
    arrive(runtime, folder)
    while True:
        signal.pause()


class Breaks:
    """An argument that cannot be unpickled."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _refuse, ("no such dataset",)


def _refuse(text: str) -> Any:
    raise ImportError(text)


class Running:
    """A launch in a thread."""

    def __init__(self, program: Any, argument: Any, ranks: int, **options: Any) -> None:
        self._outcome: Outcome | None = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run, args=(program, argument, ranks), kwargs=options
        )
        self._thread.start()

    def _run(self, program: Any, argument: Any, ranks: int, **options: Any) -> None:
        try:
            self._outcome = launch(program, argument, ranks, **options)
        except BaseException as error:
            self.error = error

    def outcome(self) -> Outcome:
        self._thread.join()
        if self.error is not None:
            raise self.error
        assert self._outcome is not None
        return self._outcome


def pids(folder: Path, ranks: int) -> list[int]:
    """Wait until all ranks have arrived; their process ids."""
    wait_until(lambda: all((folder / str(r)).exists() for r in range(ranks)), "all ranks arrive")
    return [int((folder / str(rank)).read_text()) for rank in range(ranks)]


if __name__ == "__main__":
    # A launcher of its own: the name of a program, the folder, the number of ranks.
    name, place, count = sys.argv[1:]
    import tests.support.rank_programs as programs

    from orchestra.errors import RunFailed

    try:
        print(launch(getattr(programs, name), Path(place), int(count), on_event=print_notice))
    except RunFailed as failed:
        print(f"failed: {failed}")
        sys.exit(1)


def faults_of_freed_memory(runtime: Runtime, rounds: int) -> int:
    """Pages that the system gives for what is taken and freed `rounds` times, after five times."""
    import resource

    def take() -> None:
        parts = [torch.ones(1 << 20) for _ in range(4)]  # 4 MiB each
        while parts:
            parts.pop()

    runtime.reporter.activity(RankActivity.TRAINING)
    for _ in range(5):
        take()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(rounds):
        take()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def places_of_memory(runtime: Runtime, file: Path) -> int:
    """How many the C library has after several threads have taken some."""
    import ctypes

    threads = [threading.Thread(target=torch.ones, args=(1 << 16,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    library = ctypes.CDLL(None)
    library.fopen.restype = ctypes.c_void_p
    stream = ctypes.c_void_p(library.fopen(str(file).encode(), b"w"))
    library.malloc_info(0, stream)
    library.fclose(stream)
    return file.read_text().count("<heap nr=")
