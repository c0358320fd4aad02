"""The rate of pushes and pulls of an asynchronous server, beside gloo's send and receive."""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from orchestra.bench.turns import Progress, join_gloo, median_ratio, run_ranks, take_turns
from orchestra.cli.bench import (
    bench_parser,
    print_remarks,
    print_table,
    progress_line,
    read_options,
    write_figures,
)
from orchestra.cli.main import guarded
from orchestra.optimizers.spec import OptimizerSpec
from orchestra.strategies.parameter_server import ParameterServer
from orchestra.worker.runtime import Runtime
from orchestra.worker.worker import Step, Worker

OURS = ParameterServer(consistency="asynchronous")
PEER = "gloo send and receive"
PUSHES = 100
RATE = 0.01
DESCRIPTION = """\
Count the pushes and pulls a second of an asynchronous ParameterServer with a model of 4 MB and
1 to 3 workers, and of the same messages by gloo's send and receive, in turn, in the same
processes.
"""


@dataclass(frozen=True)
class Assignment:
    """What the ranks are to do: `rounds` blocks of `pushes` pushes of each worker."""

    pushes: int
    rounds: int
    store: str


@dataclass(frozen=True)
class ServerRow:
    """Pushes with their pulls a second, all workers together: medians over the rounds.

    `ratio` is the median of ours over the peer's in the same round.
    """

    workers: int
    ours_per_second: float
    peer_per_second: float
    ratio: float


def bench_server(
    workers: Sequence[int] = (1, 2, 3),
    rounds: int = 7,
    pushes: int = PUSHES,
    on_progress: Progress | None = None,
) -> list[ServerRow]:
    """Measure a dedicated server of a model of 4 MB with each of these numbers of workers.

    Raises KeyboardInterrupt where the user stopped it.
    """
    rows = []
    for count in workers:
        with tempfile.TemporaryDirectory(prefix="orchestra-bench-") as folder:
            assignment = Assignment(pushes, rounds, str(Path(folder) / "store"))
            results = run_ranks(
                measure, assignment, count + 1,
                steps=2 * (rounds + 1), what=f"{count} workers", on_progress=on_progress,
            )  # fmt: skip
        blocks = results[count]  # the server's clock: from the first push to the last
        ours, peer = blocks[repr(OURS)], blocks[PEER]
        total = count * pushes
        rows.append(
            ServerRow(
                count,
                total / statistics.median(ours),
                total / statistics.median(peer),
                median_ratio(peer, ours),
            )
        )
    return rows


def measure(runtime: Runtime, assignment: Assignment) -> dict[str, list[float]]:
    """On each rank, the last being the server: the seconds of each contestant's blocks."""
    join_gloo(runtime, assignment.store)
    contestants = {
        repr(OURS): _ours(runtime, assignment.pushes),
        PEER: _peer(runtime, assignment.pushes),
    }
    return take_turns(runtime, contestants, assignment.rounds)


def _ours(runtime: Runtime, pushes: int) -> Callable[[], None]:
    worker = make_worker(runtime)
    state = OURS.start(worker)
    if worker.rank in OURS.roles(runtime.ranks).servers:
        return lambda: _served(OURS.serve(worker, state))
    OURS.gradient(worker, state, torch.ones(1, 1_000))

    def block() -> None:
        for _ in range(pushes):
            worker.begin_step(Step(1, runtime.ranks - 1, rates=(RATE,)))
            OURS.update(worker, state)
        OURS.quiesce(worker, state, pushes)

    return block


def _served(paused: object) -> None:
    assert paused is not None, "the workers pause after each block; they do not leave"


def make_worker(
    runtime: Runtime,
    loss: Callable[[torch.nn.Module, torch.Tensor], torch.Tensor] | None = None,
) -> Worker:
    """A worker with the model of 4 MB; its loss is the mean output unless one is given."""
    model = torch.nn.Linear(1_000, 1_000, bias=False)  # 4 MB
    names = frozenset(name for name, _ in model.named_parameters())
    spec = OptimizerSpec(torch.optim.SGD, {"lr": RATE}, ((names, {}),))
    return Worker(runtime, model, spec, loss=loss or mean_output)


def mean_output(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """A loss without a meaning, and a gradient for every parameter."""
    output: torch.Tensor = model(batch)
    return output.mean()


def _peer(runtime: Runtime, pushes: int) -> Callable[[], None]:
    """The same messages and the same update, as one would write them by hand on gloo."""
    values = torch.zeros(1_000_000)
    gradient = torch.zeros_like(values)
    server = runtime.ranks - 1

    def push() -> None:
        for _ in range(pushes):
            dist.send(gradient, server)
            dist.recv(values, server)

    def serve() -> None:
        for _ in range(pushes * server):
            source = dist.recv(gradient)
            values.add_(gradient, alpha=-RATE)
            dist.send(values, source)

    return serve if runtime.rank == server else push


def print_rates(rows: Iterable[ServerRow]) -> None:
    """One line for each number of workers."""
    lines = [
        (
            str(row.workers),
            f"{row.ours_per_second:.0f}",
            f"{row.peer_per_second:.0f}",
            f"{row.ratio:.2f}",
        )
        for row in rows
    ]
    headings = ("workers", "ParameterServer", "gloo", "ratio")
    print_table("pushes with pulls a second, 4 MB each way, asynchronous server", headings, lines)
    print_remarks("Ratios above 1: faster than gloo's send and receive.")


def main(arguments: list[str]) -> int:
    """Measure, and print the rates."""
    options = read_options(
        bench_parser("python -m benchmarks.server", DESCRIPTION, rounds=7), arguments
    )
    with progress_line() as tell:
        rows = bench_server(rounds=options.rounds, on_progress=tell)
    print_rates(rows)
    write_figures(options.json, "server", rows)
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main))
