"""The pace of workers of an asynchronous server while one of them is suspended.

Four workers and a dedicated server are processes of their own. One worker is stopped by SIGSTOP
and continued by SIGCONT, again and again; each rank keeps the times of its steps, and afterwards
they are counted in the windows between the signals. All read the same clock of the machine.

A suspended worker also leaves its processor to the others. In one load a step therefore waits,
without using a processor, as if each worker had one of its own: there nothing is gained, and
whatever the suspended worker costs the others is seen. In the other a step computes, and on a
machine with fewer cores than ranks the others may become faster.
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.options import (
    PrintedTable,
    bench_parser,
    print_remarks,
    read_options,
    write_figures,
)
from benchmarks.server import RATE, make_worker, mean_output
from orchestra.calibration.timing import Progress, run_ranks
from orchestra.cli.main import guarded
from orchestra.cli.terminal import progress_line
from orchestra.coordinator.rest import Reason, Rest
from orchestra.strategies.parameter_server import ParameterServer
from orchestra.worker.runtime import Runtime
from orchestra.worker.worker import Step

WORKERS = 4
VICTIM = 1
REQUIRED = 0.9
STEP_SECONDS = 0.04
WARM_UP_STEPS = 10
POLL_SECONDS = 0.02
PAIRS = 5
WINDOW_SECONDS = 4.0  # longer than it takes the watcher to notice
END = "end"


class Window(NamedTuple):
    """A stretch of time, in seconds of the common clock."""

    begin: float
    end: float


Pair = tuple[Window, Window]
"""The victim runs, then it is suspended."""
DESCRIPTION = """\
Four workers and a dedicated server. Count the steps a second of three workers while the fourth
runs, and while it is stopped by SIGSTOP.
"""


@dataclass(frozen=True)
class Assignment:
    """How each worker is to step; `folder` is where ranks and conductor leave notes."""

    strategy: ParameterServer
    load: str
    folder: Path


class RankSteps(NamedTuple):
    """When a rank's steps ended, and how many processors it kept busy on average."""

    times: list[float]
    busy: float


@dataclass(frozen=True)
class SuspendRow:
    """Median steps a second of each other worker before and during, and the pace kept.

    `ratios` has one entry a pair, `ratio` is their median; `busy_cores` is what all ranks
    together took of the machine's `cores`.
    """

    load: str
    before_per_second: float
    suspended_per_second: float
    ratios: tuple[float, ...]
    ratio: float
    required: float
    busy_cores: float
    cores: int


def wait(seconds: float) -> None:
    """A step on a processor that nobody else uses."""
    time.sleep(seconds)


def compute(seconds: float) -> None:
    """A step that takes `seconds` of a processor, however long it has to wait for one."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


LOADS: dict[str, Callable[[float], None]] = {"waits": wait, "computes": compute}


def bench_suspend(
    pairs: int = PAIRS,
    window: float = WINDOW_SECONDS,
    loads: Sequence[str] = tuple(LOADS),
    strategy: ParameterServer | None = None,
    on_progress: Progress | None = None,
) -> list[SuspendRow]:
    """Measure each load in `pairs` pairs of windows of `window` seconds.

    Raises KeyboardInterrupt where the user stopped it.
    """
    strategy = strategy or ParameterServer(consistency="asynchronous")
    rows = []
    for load in loads:
        with tempfile.TemporaryDirectory(prefix="orchestra-bench-") as name:
            assignment = Assignment(strategy, load, Path(name))
            conductor = Conductor(Path(name), pairs, window, on_progress, f"a step {load}")
            ranks, measured = conductor.conduct(assignment)
        rows.append(row_of(load, ranks, measured))
    return rows


class Conductor:
    """Launches the ranks, and meanwhile suspends the victim, from a thread."""

    def __init__(
        self, folder: Path, pairs: int, window: float, on_progress: Progress | None, what: str
    ) -> None:
        self._folder = folder
        self._pairs = pairs
        self._window = window
        self._tell = on_progress or (lambda *_: None)
        self._what = what
        self._over = threading.Event()

    def conduct(self, assignment: Assignment) -> tuple[list[RankSteps | None], list[Pair]]:
        """What each rank did, and the pairs of windows; raises as `launch` does."""
        with ThreadPoolExecutor(1) as pool:
            measuring = pool.submit(self._measure)
            try:
                results = run_ranks(step_on, assignment, WORKERS + 1, steps=1)
            finally:
                self._over.set()
            return list(results), measuring.result()

    def _measure(self) -> list[Pair]:
        try:
            victim = self._arrived()
            pairs: list[Pair] = []
            while len(pairs) < self._pairs and not self._over.is_set():
                pairs.append(self._pair(victim))
                self._tell(self._what, len(pairs) / self._pairs)
            return pairs
        finally:
            (self._folder / END).touch()

    def _arrived(self) -> int:
        """The victim's process id, once all workers are warm."""
        notes = [self._folder / str(rank) for rank in range(WORKERS)]
        while not all(note.exists() for note in notes) and not self._over.is_set():
            self._over.wait(POLL_SECONDS)
        return 0 if self._over.is_set() else int(notes[VICTIM].read_text())

    def _pair(self, victim: int) -> Pair:
        begin = time.perf_counter()
        self._over.wait(self._window)
        os.kill(victim, signal.SIGSTOP)
        middle = time.perf_counter()
        try:
            self._over.wait(self._window)
            return Window(begin, middle), Window(middle, time.perf_counter())
        finally:
            os.kill(victim, signal.SIGCONT)


def row_of(load: str, ranks: Sequence[RankSteps | None], pairs: Sequence[Pair]) -> SuspendRow:
    """The figures of one load. Steps are counted in each window, for each other worker."""
    others = [steps.times for rank, steps in enumerate(ranks[:WORKERS]) if steps and rank != VICTIM]
    before = [_pace(others, running) for running, _ in pairs]
    during = [_pace(others, suspended) for _, suspended in pairs]
    ratios = tuple(b / a for a, b in zip(before, during, strict=True))
    return SuspendRow(
        load,
        statistics.median(before),
        statistics.median(during),
        ratios,
        statistics.median(ratios),
        REQUIRED,
        sum(steps.busy for steps in ranks if steps),
        os.cpu_count() or 1,
    )


def _pace(workers: Sequence[Sequence[float]], window: Window) -> float:
    """The median over the workers of their steps a second."""
    seconds = window.end - window.begin
    counts = [bisect_left(t, window.end) - bisect_left(t, window.begin) for t in workers]
    return statistics.median(counts) / seconds


def step_on(runtime: Runtime, assignment: Assignment) -> RankSteps:
    """On each rank: step, or serve, until the conductor has seen enough."""
    strategy, load = assignment.strategy, LOADS[assignment.load]

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        load(STEP_SECONDS)
        return mean_output(model, batch)

    worker = make_worker(runtime, loss)
    member = strategy.join(worker)
    started, used = time.perf_counter(), time.process_time()
    times: list[float] = []
    batch = torch.ones(1, 1_000)
    stop = runtime.reporter.stop_requested
    is_worker = worker.rank in strategy.roles(runtime.ranks).workers
    while is_worker and not (assignment.folder / END).exists() and not stop():
        worker.begin_step(Step(1, WORKERS, rates=(RATE,)))
        member.gradient(batch)
        member.update()
        times.append(time.perf_counter())
        runtime.reporter.progress(step=len(times), samples=len(times))
        if len(times) == WARM_UP_STEPS:
            _arrive(assignment.folder, worker.rank)
    member.rest(Rest(Reason.END))
    busy = (time.process_time() - used) / (time.perf_counter() - started)
    return RankSteps(times, busy)


def _arrive(folder: Path, rank: int) -> None:
    """Leave this process's id in a file that appears with its content."""
    draft = folder / f"{rank}.draft"
    draft.write_text(str(os.getpid()))
    draft.rename(folder / str(rank))


def table_of(rows: Sequence[SuspendRow]) -> PrintedTable:
    """Return the table with a line for each load."""
    lines = [
        (
            row.load,
            f"{row.before_per_second:.1f}",
            f"{row.suspended_per_second:.1f}",
            f"{row.ratio:.0%}",
            f"{min(row.ratios):.0%} to {max(row.ratios):.0%}",
            f"{row.busy_cores:.1f} of {row.cores}",
        )
        for row in rows
    ]
    headings = ("a step", "before", "suspended", "pace kept", "of the pairs", "busy cores")
    required = f"required: {rows[0].required:.0%} of the pace, median of the pairs"
    title = f"steps a second of the others while one of four is suspended; {required}"
    return PrintedTable(title, headings, lines)


def main(arguments: list[str]) -> int:
    """Measure both loads, and print the paces."""
    options = read_options(
        bench_parser("python -m benchmarks.suspend", DESCRIPTION, rounds=5), arguments
    )
    with progress_line() as tell:
        rows = bench_suspend(options.rounds, on_progress=tell)
    table = table_of(rows)
    table.show()
    print_remarks(
        "Where a step computes and the cores are busy, the suspended worker leaves its share to "
        "the others."
    )
    write_figures(options.json, "suspend", rows, [table], options.command)
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main))
