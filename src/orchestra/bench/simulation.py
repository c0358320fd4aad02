"""A simulated training with real gradients beside the plain steps that it consists of."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from orchestra.bench.turns import Blocks, Progress, check_stopped, median_ratio, order, teller
from orchestra.cluster import load_cluster
from orchestra.data.feed import open_samples
from orchestra.engines.processes.launch import launch
from orchestra.engines.simulation.assumed import OVERHEAD, assumed_costs
from orchestra.engines.simulation.simulate import simulate
from orchestra.optimizers.settings import Optimizer
from orchestra.strategies.all_reduce import AllReduce
from orchestra.tasks.load import load_task
from orchestra.trainer.program import train
from orchestra.trainer.settings import Run, Training
from orchestra.worker.reporters import SilentReporter
from orchestra.worker.runtime import Reporter, Runtime

SIMULATED, PLAIN = "simulated", "plain steps"
TASK = "digits28()"
RATE = 0.01


@dataclass(frozen=True)
class Contest:
    """A block is `steps` steps of each of `workers` workers."""

    workers: int
    rounds: int
    steps: int = 8
    batch_size: int = 64


@dataclass(frozen=True)
class SimulationRow:
    """Seconds for a gradient with its update, medians over the rounds.

    `ratios` are those of the blocks of each round, simulated over plain; `ratio` their median.
    """

    workers: int
    simulated_seconds: float
    plain_seconds: float
    ratio: float
    ratios: list[float]


def bench_simulation(
    workers: Sequence[int] = (64,), rounds: int = 7, on_progress: Progress | None = None
) -> list[SimulationRow]:
    """Measure each number of workers (2 or more), in `rounds` rounds.

    Raises KeyboardInterrupt where the user stopped it.
    """
    return [measured(Contest(count, rounds), on_progress) for count in workers]


def measured(contest: Contest, on_progress: Progress | None = None) -> SimulationRow:
    """The figures of one contest, from a process of its own."""
    tell = teller(on_progress, f"{contest.workers} workers", 2 * (contest.rounds + 1))
    outcome = launch(measure, contest, 1, on_event=tell)
    check_stopped(outcome)
    blocks: Blocks = outcome.results[0]
    gradients = contest.workers * contest.steps
    pairs = zip(blocks[SIMULATED], blocks[PLAIN], strict=True)
    return SimulationRow(
        contest.workers,
        statistics.median(blocks[SIMULATED]) / gradients,
        statistics.median(blocks[PLAIN]) / gradients,
        median_ratio(blocks[SIMULATED], blocks[PLAIN]),
        [simulated / plain for simulated, plain in pairs],
    )


def measure(runtime: Runtime, contest: Contest) -> Blocks:
    """The seconds of each one's blocks; the first round warms up."""
    torch.set_num_threads(1)  # as the ranks of a simulation have
    runtime.reporter.phase("training")  # so that memory is kept as it is there
    contestants: dict[str, Callable[[], float]] = {
        SIMULATED: lambda: _simulated(runtime, contest),
        PLAIN: lambda: _plain(contest),
    }
    blocks: Blocks = {name: [] for name in contestants}
    done = 0
    for number in range(contest.rounds + 1):
        for name in order(list(contestants), number):
            if runtime.reporter.stop_requested():
                return blocks
            seconds = contestants[name]()
            if number:
                blocks[name].append(seconds)
            done += 1
            runtime.reporter.progress(step=done, samples=0)
    return blocks


class _Stopwatch(SilentReporter):
    """The reporter of the process of a simulation: reads the clock when all have done a step."""

    def __init__(self, outer: Reporter, workers: int) -> None:
        self.seconds: list[float] = []
        self._outer = outer
        self._workers = workers
        self._done = 0

    def progress(
        self,
        *,
        step: int,
        samples: int,
        loss: float | None = None,
        fraction: float | None = None,
    ) -> None:
        self._done += 1
        if self._done % self._workers == 0:
            self.seconds.append(time.perf_counter())

    def notice(self, text: str) -> None:
        self._outer.notice(text)

    def stop_requested(self) -> bool:
        return self._outer.stop_requested()


def _simulated(runtime: Runtime, contest: Contest) -> float:
    """Between two ends of a step of all workers: set-up, first and last step are left out."""
    training = Training(
        ranks=contest.workers,
        batch_size=contest.batch_size,
        steps=contest.steps + 2,
        optimizer=Optimizer("SGD", {"lr": RATE}),
        engine="simulation",
        cluster=f"lan_1gbit(nodes={contest.workers})",
        snapshots=0,
        trace_steps=0,
    )
    run = Run("simulated", TASK, AllReduce("ring"), training=training)
    cluster = load_cluster(training.cluster, where="cluster", folder=Path())
    watch = _Stopwatch(runtime.reporter, contest.workers)
    with tempfile.TemporaryDirectory(prefix="orchestra-bench-") as folder:
        outcome = simulate(
            lambda rank: train(rank, (run, Path(folder))),
            cluster,
            contest.workers,
            assumed_costs(run, 1),
            OVERHEAD,
            watch,
        )
    assert outcome.failure is None, outcome.failure
    if len(watch.seconds) < contest.steps + 2:
        return 0.0  # the user stopped it
    return watch.seconds[contest.steps] - watch.seconds[0]


def _plain(contest: Contest) -> float:
    """One model in a loop by hand, through as many batches; reads the loss, as every step does."""
    task = load_task(TASK)
    torch.manual_seed(0)
    model: torch.nn.Module = task.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    samples = open_samples(task.train, 0, task.collate)
    size = contest.batch_size
    samples.read(0, size)
    started = time.perf_counter()
    for number in range(contest.workers * contest.steps):
        batch = samples.read(number * size, (number + 1) * size)
        optimizer.zero_grad()
        loss = task.loss(model, batch)
        loss.backward()
        loss.item()
        optimizer.step()
    return time.perf_counter() - started
