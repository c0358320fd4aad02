"""How long a simulation of shapes takes: many workers, a large model, all kinds of strategies.

Durations are exact, without jitter.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.options import (
    PrintedTable,
    bench_parser,
    listed,
    print_remarks,
    read_options,
    write_figures,
)
from orchestra.calibration.timing import Progress, run_ranks
from orchestra.cli.main import guarded
from orchestra.cli.terminal import progress_line
from orchestra.cluster import load_cluster
from orchestra.engines.processes.system import peak_memory
from orchestra.engines.simulation.costs import OVERHEAD, assumed_costs
from orchestra.engines.simulation.simulate import Simulation
from orchestra.errors import InputError, RunFailed
from orchestra.optimizers.settings import Optimizer
from orchestra.settings import parse
from orchestra.strategies.base import Strategy
from orchestra.strategies.registry import STRATEGIES
from orchestra.trainer.program import train
from orchestra.trainer.settings import Run, Training
from orchestra.worker.runtime import PassingReporter, Runtime

AIM_SECONDS = 60.0
ASYNCHRONOUS = 'consistency="asynchronous"'
SCALED = {
    "ring": 'AllReduce("ring")',
    "halving-doubling": 'AllReduce("halving_doubling")',
    "server": "ParameterServer()",
    "server without overlap": "ParameterServer()",
    "local SGD": "LocalSGD(8)",
    "one-peer gossip": "Gossip(Exponential(peers=1))",
    "push-sum": "StochasticGradientPush()",
    "butterfly": 'AllReduce("butterfly")',
    "tree": 'AllReduce("tree")',
    "hierarchical": 'AllReduce("hierarchical", ranks_per_node=8)',
    "native": 'AllReduce("native")',
    "sharded optimizer": 'AllReduce(shard="optimizer")',
    "first 1000": "AllReduce(backup=24)",
    "reduce to one": 'AllReduce("reduce_to_one")',
    "ring-gather": 'AllReduce("ring_gather")',
    "parallel": 'AllReduce("parallel")',
    "16 servers": "ParameterServer(servers=16)",
    "16 servers without overlap": "ParameterServer(servers=16)",
    "server beside": 'ParameterServer(placement="beside")',
    "asynchronous": f"ParameterServer({ASYNCHRONOUS})",
    "bounded staleness": 'ParameterServer(consistency="bounded", staleness=1)',
    "first 1000 pushes": "ParameterServer(backup=24)",
    "ring gossip": "Gossip()",
    "overlapped push-sum": "StochasticGradientPush(overlap=1)",
    "pairwise averaging": "PairwiseAveraging()",
    "streaming DiLoCo": "LocalSGD(16, outer=Nesterov(0.7, 0.9), fragments=4, overlap=2)",
    "strategy-switch": (
        f"Switch(AllReduce(), ParameterServer({ASYNCHRONOUS}), when=AfterFraction(0.5), "
        'moments="reset")'
    ),
    "post-local SGD": "Switch(AllReduce(), LocalSGD(8), when=AfterFraction(0.5))",
}
"""By label."""

SETTINGS: dict[str, dict[str, Any]] = {
    "server without overlap": {"overlap": False},
    "16 servers without overlap": {"overlap": False},
}
"""Further settings of a row."""

AIMS = {"ring": 25.0}
"""Seconds, where it is not `AIM_SECONDS`."""
DESCRIPTION = """\
Simulate time alone (tensors: shapes): 1,024 workers, 100 steps, 100 million parameters, under
strategies of every family, each in a process of its own, of which the memory is told, too.
"""


@dataclass(frozen=True)
class Scale:
    """How large a simulation is; every worker has a node of its own, and batches of 32."""

    workers: int = 1024
    steps: int = 100
    parameters: int = 100_000_000


@dataclass(frozen=True)
class ScaleRow:
    """One simulation, in a process of its own.

    `seconds` it took from the settings to the reports, of which it had a processor for
    `processor_seconds`: less, where other programs ran. `peak_megabytes` of memory the process held
    at most, torch included. `virtual_seconds` is what the simulated training took. Where it was
    ended at the limit, `steps` is how far it had come, and the seconds are None.
    """

    label: str
    strategy: str
    workers: int
    steps: int
    parameters: int
    aim_seconds: float
    seconds: float | None
    processor_seconds: float | None
    virtual_seconds: float | None
    peak_megabytes: float | None


def bench_scale(
    labels: Sequence[str],
    scale: Scale,
    limit_seconds: float,
    on_progress: Progress | None = None,
) -> Iterator[ScaleRow]:
    """Simulate each of `labels`, one after the other; what takes longer than the limit is ended.

    Raises KeyboardInterrupt where the user stopped it.
    """
    for label in labels:
        yield _measured(label, scale, limit_seconds, on_progress)


@dataclass(frozen=True)
class Assignment:
    """What one process simulates."""

    label: str
    scale: Scale
    limit_seconds: float


@dataclass(frozen=True)
class Measured:
    """What came of it; `steps` of the first worker."""

    seconds: float
    processor_seconds: float
    steps: int
    virtual_seconds: float
    peak_megabytes: float


def _measured(
    label: str, scale: Scale, limit_seconds: float, on_progress: Progress | None
) -> ScaleRow:
    assignment = Assignment(label, scale, limit_seconds)
    what = f"{label}, {scale.workers} workers"
    result: Measured | None = None
    try:
        (result,) = run_ranks(
            measure, assignment, 1,
            steps=scale.steps, what=what, on_progress=on_progress, patience=limit_seconds,
        )  # fmt: skip
    except RunFailed as failed:
        if "hangs" not in str(failed):  # not a step within three times the limit
            raise
    steps = 0 if result is None else result.steps
    complete = result if steps >= scale.steps else None
    return ScaleRow(
        label,
        SCALED[label],
        scale.workers,
        steps,
        scale.parameters,
        AIMS.get(label, AIM_SECONDS),
        None if complete is None else complete.seconds,
        None if complete is None else complete.processor_seconds,
        None if complete is None else complete.virtual_seconds,
        None if result is None else result.peak_megabytes,
    )


def measure(runtime: Runtime, assignment: Assignment) -> Measured:
    """The program of the process: from the settings to the reports."""
    began, computed = time.perf_counter(), time.process_time()
    scale = assignment.scale
    run = _run(assignment.label, scale)
    ranks = run.training.ranks
    reporter = _Limited(runtime.reporter, began + assignment.limit_seconds)
    outcome = Simulation(
        load_cluster(run.training.cluster, where="cluster", folder=Path()),
        ranks,
        assumed_costs(run),
        OVERHEAD,
        reporter,
        values=False,
    ).run(lambda rank: train(rank, (run, Path())))
    assert (outcome.failure, outcome.bad_input) == (None, None), outcome
    seconds = time.perf_counter() - began
    reports = [report for report in outcome.results if report is not None]
    return Measured(
        seconds,
        time.process_time() - computed,
        min(report.steps for report in reports if report.role == "worker" or report.samples),
        max(report.train_seconds for report in reports),
        peak_memory() / 1e6,
    )


def _run(label: str, scale: Scale) -> Run:
    """An epoch of as many samples as the workers' steps need; servers come on top of them."""
    strategy = parse(SCALED[label], STRATEGIES, where=label)
    assert isinstance(strategy, Strategy)
    dedicated = getattr(strategy, "servers", 0)
    if getattr(strategy, "placement", "dedicated") != "dedicated":
        dedicated = 0
    batch_size = 32
    samples = scale.workers * scale.steps * batch_size
    training = Training(
        ranks=scale.workers + dedicated,
        batch_size=batch_size,
        equal="worker_batch",
        epochs=1,
        optimizer=Optimizer("SGD", {"lr": 0.1}),
        engine="simulation",
        tensors="shapes",
        cluster=f"lan_1gbit(nodes={scale.workers + dedicated})",
        snapshots=0,
        trace_steps=0,
        **SETTINGS.get(label, {}),
    )
    task = f"synthetic({scale.parameters}, samples={samples})"
    return Run(label, task, strategy, training=training)


@dataclass
class _Limited(PassingReporter):
    """It asks for a stop at the time `end`, as a user would."""

    end: float

    def stop_requested(self) -> bool:
        return self.inner.stop_requested() or time.perf_counter() > self.end


def table_of(rows: Sequence[ScaleRow], limit: float) -> PrintedTable:
    """Return the table with a line for each strategy."""
    lines = [
        (
            row.label,
            f"{row.aim_seconds:.0f}",
            _time_of(row, limit),
            "" if row.processor_seconds is None else f"{row.processor_seconds:.1f}",
            "" if row.peak_megabytes is None else f"{row.peak_megabytes:,.0f}",
            "" if row.virtual_seconds is None else f"{row.virtual_seconds:,.1f}",
        )
        for row in rows
    ]
    first = rows[0]
    title = f"{first.workers:,} workers, {first.parameters / 1e6:,.0f} million parameters"
    headings = ("strategy", "aim, s", "seconds", "processor s", "peak MB", "virtual seconds")
    return PrintedTable(f"simulations of time alone: {title}", headings, lines)


def _time_of(row: ScaleRow, limit: float) -> str:
    if row.seconds is None:
        return f"{row.steps} steps in {limit:.0f}" if row.steps else f"over {limit:.0f}"
    return f"{row.seconds:.1f}"


def main(arguments: list[str]) -> int:
    """Simulate, and print the times; those that were finished, if the user stops it."""
    parser = bench_parser("python -m benchmarks.shapes", DESCRIPTION)
    parser.add_argument("--strategies", metavar="LABEL,...", help="some of those that it prints")
    parser.add_argument(
        "--workers", type=int, default=1024, metavar="N", help="number of workers (default: 1024)"
    )
    parser.add_argument(
        "--limit", type=float, default=600.0, metavar="SECONDS",
        help="for each simulation (default: 600)",
    )  # fmt: skip
    options = read_options(parser, arguments)
    labels = list(listed("--strategies", options.strategies, SCALED))
    if options.workers < 32:
        raise InputError(f"--workers: {options.workers} is below 32: some strategies need as many")
    if not options.limit > 0:
        raise InputError(f"--limit: {options.limit:g} seconds leave no time; give more")
    rows: list[ScaleRow] = []
    try:
        with progress_line() as tell:
            for row in bench_scale(labels, Scale(options.workers), options.limit, tell):
                rows.append(row)
    finally:
        if rows:
            table = table_of(rows, options.limit)
            table.show()
            print_remarks(
                "Seconds from the settings to the reports, and those for which it had a "
                "processor: fewer, where other programs run. Memory with Python and torch."
            )
            write_figures(options.json, "shapes", rows, [table], options.command)
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main))
