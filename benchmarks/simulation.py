"""A simulated training with real gradients beside the plain steps that it consists of."""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.options import (
    PrintedTable,
    bench_parser,
    print_remarks,
    rank_counts,
    read_options,
    write_figures,
)
from benchmarks.ratios import Ratio
from orchestra.calibration.timing import Progress, run_ranks
from orchestra.cli.main import guarded
from orchestra.cli.terminal import progress_line
from orchestra.cluster import load_cluster
from orchestra.data.feed import open_samples
from orchestra.engines.simulation.costs import OVERHEAD, assumed_costs
from orchestra.engines.simulation.simulate import Simulation
from orchestra.optimizers.settings import Optimizer
from orchestra.records.report import Counters
from orchestra.strategies.all_reduce import AllReduce
from orchestra.tasks.task import load_task
from orchestra.trainer.program import train
from orchestra.trainer.settings import Run, Training
from orchestra.worker.runtime import RankActivity, Reporter, Runtime, SilentReporter

SIMULATED, PLAIN = "simulated", "plain steps"
ROUNDS = 40
WARM_UP = 2
TASK = "digits28()"
RATE = 0.01
Seconds = dict[str, list[float]]
DESCRIPTION = """\
Time a simulated training of LeNet-5 under AllReduce("ring"), every worker with gradients of its
own, and after each of its steps as many plain steps of one model in a loop, in the same process.
"""


@dataclass(frozen=True)
class SimulationContest:
    """In a round each of `workers` workers does a step."""

    workers: int
    rounds: int
    batch_size: int = 64


@dataclass(frozen=True)
class SimulationRow:
    """Seconds for a gradient with its update, medians over the rounds; `ratio` is simulated over
    plain, in pairs.
    """

    workers: int
    simulated_seconds: float
    plain_seconds: float
    ratio: Ratio


def bench_simulation(
    workers: Sequence[int] = (64,), rounds: int = ROUNDS, on_progress: Progress | None = None
) -> list[SimulationRow]:
    """Measure each number of workers (2 or more), in `rounds` rounds.

    Raises KeyboardInterrupt where the user stopped it.
    """
    return [measured(SimulationContest(count, rounds), on_progress) for count in workers]


def measured(contest: SimulationContest, on_progress: Progress | None = None) -> SimulationRow:
    """The figures of one contest, from a process of its own."""
    blocks: Seconds = run_ranks(
        measure, contest, 1,
        steps=contest.rounds, what=f"{contest.workers} workers", on_progress=on_progress,
    )[0]  # fmt: skip
    return SimulationRow(
        contest.workers,
        statistics.median(blocks[SIMULATED]) / contest.workers,
        statistics.median(blocks[PLAIN]) / contest.workers,
        Ratio.of(blocks[SIMULATED], blocks[PLAIN]),
    )


def measure(runtime: Runtime, contest: SimulationContest) -> Seconds:
    """The seconds of each one's blocks."""
    torch.set_num_threads(1)  # as the ranks of a simulation have
    runtime.reporter.activity(RankActivity.TRAINING)  # so that memory is kept as it is there
    referee = _Referee(runtime.reporter, contest)
    _simulate(contest, referee)
    return referee.blocks


class _PlainSteps:
    """One model in a loop by hand; reads the loss, as every step does."""

    def __init__(self, batch_size: int) -> None:
        self._task = load_task(TASK)
        torch.manual_seed(0)
        self._model: torch.nn.Module = self._task.model()
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=RATE)
        self._samples = open_samples(self._task.train, 0, self._task.collate)
        self._batch_size = batch_size
        self._consumed = 0

    def run(self, steps: int) -> None:
        """So many more steps, through the same data as the workers of a simulation."""
        for _ in range(steps):
            start, self._consumed = self._consumed, self._consumed + self._batch_size
            batch = self._samples.read(start, self._consumed)
            self._optimizer.zero_grad()
            loss = self._task.loss(self._model, batch)
            loss.backward()
            loss.item()
            self._optimizer.step()


class _Referee(SilentReporter):
    """The reporter of the process of a simulation, whose clock it stops after each step of all
    workers, for as many plain steps. The first two steps warm up, and after the last one no
    gradients follow."""

    def __init__(self, outer: Reporter, contest: SimulationContest) -> None:
        self.blocks: Seconds = {SIMULATED: [], PLAIN: []}
        self._outer = outer
        self._contest = contest
        self._plain = _PlainSteps(contest.batch_size)
        self._done = 0
        self._went_on_at = 0.0

    def progress(
        self,
        *,
        step: int,
        samples: int,
        loss: float | None = None,
        fraction: float | None = None,
        counters: Counters | None = None,
    ) -> None:
        stopped_at = time.perf_counter()
        self._done += 1
        steps, others = divmod(self._done, self._contest.workers)
        if others or steps < WARM_UP or steps > WARM_UP + self._contest.rounds:
            return
        began = time.perf_counter()
        self._plain.run(self._contest.workers)
        ended = time.perf_counter()
        if steps > WARM_UP:
            self.blocks[SIMULATED].append(stopped_at - self._went_on_at)
            self.blocks[PLAIN].append(ended - began)
            self._outer.progress(step=steps - WARM_UP, samples=0)
        self._went_on_at = time.perf_counter()

    def notice(self, text: str) -> None:
        self._outer.notice(text)

    def stop_requested(self) -> bool:
        return self._outer.stop_requested()


def _simulate(contest: SimulationContest, referee: _Referee) -> None:
    training = Training(
        ranks=contest.workers,
        batch_size=contest.batch_size,
        steps=WARM_UP + contest.rounds + 1,
        optimizer=Optimizer("SGD", {"lr": RATE}),
        engine="simulation",
        cluster=f"lan_1gbit(nodes={contest.workers})",
        snapshots=0,
        trace_steps=0,
    )
    run = Run("simulated", TASK, AllReduce("ring"), training=training)
    cluster = load_cluster(training.cluster, where="cluster", folder=Path())
    with tempfile.TemporaryDirectory(prefix="orchestra-bench-") as folder:
        outcome = Simulation(
            cluster,
            contest.workers,
            assumed_costs(run),
            OVERHEAD,
            referee,
        ).run(lambda rank: train(rank, (run, Path(folder))))
    assert outcome.failure is None, outcome.failure


def table_of(rows: Iterable[SimulationRow]) -> PrintedTable:
    """Return the table with a line for each number of workers."""
    lines = [
        (
            str(row.workers),
            f"{row.simulated_seconds * 1e3:.2f}",
            f"{row.plain_seconds * 1e3:.2f}",
            str(row.ratio),
        )
        for row in rows
    ]
    headings = ("workers", "simulated", "plain", "ratio")
    title = "ms for a worker's step, LeNet-5, batches of 64, AllReduce('ring')"
    return PrintedTable(title, headings, lines)


def main(arguments: list[str]) -> int:
    """Measure, and print the times."""
    parser = bench_parser("python -m benchmarks.simulation", DESCRIPTION, rounds=ROUNDS)
    parser.add_argument(
        "--ranks", default="64", metavar="N,...", help="numbers of workers (default: 64)"
    )
    options = read_options(parser, arguments)
    ranks = rank_counts(options.ranks)
    with progress_line() as tell:
        rows = bench_simulation(ranks, options.rounds, tell)
    table = table_of(rows)
    table.show()
    print_remarks(
        "Ratios near 1: the simulation costs little beside the gradients; in brackets the 95 % "
        "interval."
    )
    write_figures(options.json, "simulation", rows, [table], options.command)
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main))
