"""Processor time of an asynchronous server beside each worker, beside that of a ring."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks.options import (
    PrintedTable,
    bench_parser,
    print_remarks,
    read_options,
    write_figures,
)
from benchmarks.ratios import Ratio
from benchmarks.turns import order
from orchestra.calibration.timing import Progress, run_ranks
from orchestra.cli.main import guarded
from orchestra.cli.terminal import progress_line
from orchestra.collectives import all_reduce
from orchestra.coordinator.rest import Reason, Rest
from orchestra.optimizers.spec import OptimizerSpec
from orchestra.strategies.all_reduce import AllReduce
from orchestra.strategies.base import Strategy
from orchestra.strategies.parameter_server import ParameterServer
from orchestra.tasks import Synthetic
from orchestra.tasks.regression import synthetic
from orchestra.transports.tags import Tag
from orchestra.worker.batches import Batch
from orchestra.worker.runtime import RankActivity, Runtime
from orchestra.worker.worker import Step, Worker

RANKS = 2
RING, SERVERS, ONE_BUCKET = "ring", "servers", "servers, one bucket"
RATE = 0.01
BUCKET_BYTES = 25_000_000
WARM_UP = 3
"""Steps of each block that do not count."""


@dataclass(frozen=True)
class Size:
    """A model of `megabytes`, and the steps of a block."""

    megabytes: float
    steps: int

    @property
    def parameters(self) -> int:
        return round(self.megabytes * 250_000)

    @property
    def contestants(self) -> tuple[str, ...]:
        """The ring, and what is compared with it; small models have one bucket anyhow."""
        has_parts = self.megabytes * 1e6 > BUCKET_BYTES
        return (RING, SERVERS, ONE_BUCKET) if has_parts else (RING, SERVERS)


SIZES = (Size(0.25, 200), Size(2.7, 100), Size(30.0, 20))
DESCRIPTION = """\
Measure the processor time that all ranks together take to exchange a gradient and to update: of
ParameterServer(servers=2, consistency="asynchronous", placement="beside") and of AllReduce("ring"),
which moves as many bytes. Two ranks have the model of synthetic(), and connections over sockets,
without memory that they share. Gradients are given, not computed. The strategies take turns.
"""


@dataclass(frozen=True)
class CostRow:
    """Processor milliseconds a step of all ranks together: medians over the rounds.

    `ratio` is of the times within a round; above 1 the servers take longer.
    """

    megabytes: float
    contestant: str
    ring_ms: float
    servers_ms: float
    ratio: Ratio


@dataclass(frozen=True)
class Assignment:
    """What the ranks are to do."""

    size: Size
    rounds: int


def bench_server_cost(
    rounds: int, sizes: Sequence[Size] = SIZES, on_progress: Progress | None = None
) -> list[CostRow]:
    """Measure each size.

    Raises KeyboardInterrupt where the user stopped it.
    """
    rows = []
    for size in sizes:
        by_rank = run_ranks(
            measure, Assignment(size, rounds), RANKS,
            steps=len(size.contestants) * (rounds + 1), what=f"{size.megabytes} MB",
            on_progress=on_progress, shared_memory=False,
        )  # fmt: skip
        seconds = {
            name: [sum(ranks) for ranks in zip(*(rank[name] for rank in by_rank), strict=True)]
            for name in size.contestants
        }
        rows += [_row(size, name, seconds[RING], seconds[name]) for name in size.contestants[1:]]
    return rows


def _row(size: Size, name: str, ring: Sequence[float], servers: Sequence[float]) -> CostRow:
    def milliseconds(blocks: Sequence[float]) -> float:
        return 1e3 * statistics.median(blocks) / size.steps

    ratio = Ratio.of(servers, ring)
    return CostRow(size.megabytes, name, milliseconds(ring), milliseconds(servers), ratio)


def measure(runtime: Runtime, assignment: Assignment) -> dict[str, list[float]]:
    """Return the processor seconds of this rank in each contestant's blocks.

    The first round warms up.
    """
    runtime.reporter.activity(RankActivity.TRAINING)  # so that memory is kept as it is there
    size = assignment.size
    seconds: dict[str, list[float]] = {name: [] for name in size.contestants}
    for number in range(assignment.rounds + 1):
        for name in order(size.contestants, number):
            passed = _block(runtime, size, name)
            if number:
                seconds[name].append(passed)
            runtime.reporter.progress(step=number * len(seconds), samples=0)
    return seconds


def _block(runtime: Runtime, size: Size, name: str) -> float:
    """Return the processor seconds of one block.

    Each block has a worker and a member of its own: a server's flow would otherwise wait beside
    the ring.
    """
    worker = GivenGradient(runtime, size, BUCKET_BYTES if name != ONE_BUCKET else sys.maxsize)
    member = strategy_of(name).join(worker)

    def steps(count: int) -> None:
        for _ in range(count):
            worker.begin_step(Step(1, runtime.ranks, rates=(RATE,)))
            member.gradient(None)
            member.update()
        member.rest(Rest(Reason.CHECKPOINT))  # values of the last step land, too
        all_reduce(
            worker.transport, torch.zeros(1), "butterfly", worker.everyone, Tag.AGREE
        )  # a server works until the slowest worker is done

    steps(WARM_UP)
    started = time.process_time()
    steps(size.steps)
    passed = time.process_time() - started
    member.rest(Rest(Reason.END))
    return passed


def strategy_of(name: str) -> Strategy:
    if name == RING:
        return AllReduce("ring")
    return ParameterServer(servers=RANKS, consistency="asynchronous", placement="beside")


class GivenGradient(Worker):
    """Has the same gradient in each step, which appears tensor by tensor, without computation."""

    def __init__(self, runtime: Runtime, size: Size, bucket_bytes: int) -> None:
        model = synthetic(Synthetic(size.parameters)).model()
        names = frozenset(name for name, _ in model.named_parameters())
        spec = OptimizerSpec(torch.optim.SGD, {"lr": RATE}, ((names, {}),))
        super().__init__(runtime, model, spec, bucket_bytes=bucket_bytes)
        self._given = [torch.ones_like(each) for each in self.gradients.parameters]

    def backward(self, batch: Batch | None) -> None:
        """Take the gradient, as the hooks of autograd do."""
        gradients = self.gradients
        gradients.clear()
        if self.arriving is not None:  # as a forward pass
            self.arriving.await_for(0)
        for index, (parameter, given) in enumerate(
            zip(gradients.parameters, self._given, strict=True)
        ):
            parameter.grad = given
            gradients.used[index] = True
            if gradients.on_ready is not None:
                gradients.on_ready(index, index + 1)


def table_of(rows: Sequence[CostRow]) -> PrintedTable:
    """Return the table with a line for each size and way."""
    lines = [
        (
            f"{row.megabytes:g} MB", row.contestant, f"{row.ring_ms:.3g}",
            f"{row.servers_ms:.3g}", str(row.ratio),
        )
        for row in rows
    ]  # fmt: skip
    return PrintedTable(
        "processor time a step, asynchronous servers on the workers' ranks",
        ("size", "contestant", "ring, ms", "servers, ms", "ratio"),
        lines,
    )


def main(arguments: list[str]) -> int:
    """Measure, and print the figures."""
    options = read_options(
        bench_parser("python -m benchmarks.server_cost", DESCRIPTION, rounds=7), arguments
    )
    with progress_line() as tell:
        rows = bench_server_cost(options.rounds, on_progress=tell)
    table = table_of(rows)
    table.show()
    print_remarks("Ratios below 1: the servers take less processor time than the ring.")
    write_figures(options.json, "server_cost", rows, [table], options.command)
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main))
