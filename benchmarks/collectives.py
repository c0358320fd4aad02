"""All-reduces over shared memory, beside gloo's."""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path

import torch
import torch.distributed as dist

import orchestra.shm  # noqa: F401  (registers the backend)
from benchmarks import mpi
from orchestra.bench.timing import Progress, join_gloo, median_ratio, run_ranks, take_turns
from orchestra.cli.bench import bench_parser, print_remarks, read_options, write_figures
from orchestra.cli.main import guarded
from orchestra.cli.terminal import print_table, progress_line
from orchestra.worker.runtime import Runtime

GLOO, OURS, MPI, COPY, COMPUTE = "gloo", "shm", "MPI", "copy", "compute"
BACKENDS = (GLOO, OURS)
SIZES = {"4 KB": 1_000, "256 KB": 64_000, "4 MB": 1_000_000, "100 MB": 25_000_000}
"""Elements of four bytes each."""
COMPUTING = ("4 KB", "4 MB")
"""Sizes that are also measured with computing between the calls."""
WIDTH = 512
"""Of the matrices that are multiplied between the calls."""
MOST_BYTES = 400_000_000
"""Over which tensors are rotated, at the most; more than any cache holds."""
BLOCK_BYTES = 600_000_000
"""That a block reduces, of small tensors less."""
DESCRIPTION = """\
Sum float32 tensors among 2 and 4 ranks of this host, by torch.distributed.all_reduce with the
backends gloo and shm, in turn, in the same processes, and by MPI where mpi4py and mpirun are
installed. The tensors are ordinary ones, outside the shared memory, and each call has the next of
several, so that none is in a cache. At least each rank has to read its tensor and to write it: all
ranks copy as many bytes at the same time, which is the copy limit. Then with a product of matrices
between the calls, whose own time is taken off.
"""


@dataclass(frozen=True)
class Assignment:
    """What the ranks are to do: `rounds` blocks of each size and contestant."""

    rounds: int
    folder: str


@dataclass(frozen=True)
class CollectiveRow:
    """Milliseconds of one all-reduce: medians over the rounds, by the clock of the slowest rank.

    Attributes:
        computing: whether the ranks computed between the calls.
        ratio: the median of gloo's seconds over ours in the same round, between `least` and `most`.
        gloo_processor_ms, shm_processor_ms: processor time of all ranks together.
        mpi_ms, mpi_ratio: the same of MPI; None where it is not there.
        copy_share: what copying as much takes, over what ours takes.
    """

    ranks: int
    size: str
    computing: bool
    gloo_ms: float
    shm_ms: float
    ratio: float
    least: float
    most: float
    gloo_processor_ms: float
    shm_processor_ms: float
    mpi_ms: float | None
    mpi_ratio: float | None
    copy_share: float | None


@dataclass(frozen=True)
class Measured:
    """Seconds of each contestant's blocks; wall time, and processor time of one rank."""

    wall: dict[str, list[float]]
    processor: dict[str, list[float]]


Setup = tuple[str, bool]
"""A size, and whether the ranks compute between the calls."""
SETUPS: Sequence[Setup] = [(size, False) for size in SIZES] + [(size, True) for size in COMPUTING]


def bench_collectives(
    ranks: Sequence[int] = (2, 4),
    rounds: int = 7,
    on_progress: Progress | None = None,
    setups: Sequence[Setup] = SETUPS,
) -> list[CollectiveRow]:
    """Measure each size with each of these numbers of ranks.

    Raises KeyboardInterrupt where the user stopped it.
    """
    rows = []
    for count in ranks:
        for place, setup in enumerate(setups):
            with tempfile.TemporaryDirectory(prefix="orchestra-bench-") as folder:
                results: Sequence[Measured] = run_ranks(
                    measure, (Assignment(rounds, folder), setup), count,
                    steps=4 * (rounds + 1), what=f"{count} ranks, {place + 1} of {len(setups)}",
                    on_progress=on_progress,
                )  # fmt: skip
            rows.append(_row(count, *setup, results))
    return rows


def _row(ranks: int, size: str, computing: bool, results: Sequence[Measured]) -> CollectiveRow:
    wall, spent = (
        {
            name: [combine(each) for each in zip(*(row[name] for row in rows), strict=True)]
            for name in rows[0]
        }
        for combine, rows in (
            (max, [each.wall for each in results]),
            (sum, [each.processor for each in results]),
        )
    )
    for times in (wall, spent):
        between = times.pop(COMPUTE, None)
        if between is not None:
            for name in times:
                times[name] = [a - b for a, b in zip(times[name], between, strict=True)]
    ratios = [a / b for a, b in zip(wall[GLOO], wall[OURS], strict=True)]

    def milliseconds(seconds: Sequence[float]) -> float:
        return 1e3 * statistics.median(seconds) / calls_of(SIZES[size])

    return CollectiveRow(
        ranks, size, computing, milliseconds(wall[GLOO]), milliseconds(wall[OURS]),
        statistics.median(ratios), min(ratios), max(ratios),
        milliseconds(spent[GLOO]), milliseconds(spent[OURS]),
        milliseconds(wall[MPI]) if MPI in wall else None,
        median_ratio(wall[MPI], wall[OURS]) if MPI in wall else None,
        median_ratio(wall[COPY], wall[OURS]) if COPY in wall else None,
    )  # fmt: skip


def calls_of(elements: int) -> int:
    """All-reduces in a block."""
    return min(max(BLOCK_BYTES // (4 * elements), 1), 200)


def tensors_of(elements: int) -> int:
    """Over so many tensors the calls are rotated."""
    return min(max(MOST_BYTES // (4 * elements), 2), 64)


def measure(runtime: Runtime, chosen: tuple[Assignment, Setup]) -> Measured:
    """On each rank: the seconds of each contestant's blocks."""
    assignment, (size, computing) = chosen
    elements = SIZES[size]
    join_gloo(runtime, str(Path(assignment.folder) / "store"))
    reduce = {
        name: partial(dist.all_reduce, group=dist.new_group(backend=name)) for name in BACKENDS
    }
    compute = _product() if computing else None
    blocks: dict[str, Block | MPIBlock] = {
        name: Block(elements, each, compute) for name, each in reduce.items()
    }
    if computing:
        blocks[COMPUTE] = Block(1, lambda _: None, compute, calls_of(elements))
    else:
        other = torch.full((elements,), 0.0)
        blocks[COPY] = Block(elements, other.copy_)
    with ExitStack() as stack:
        if not computing and mpi.is_there():
            ranks = None
            if runtime.rank == 0:
                ranks = stack.enter_context(mpi.mpi_ranks(runtime.ranks, assignment.folder))
            blocks[MPI] = MPIBlock(ranks, elements)
        wall = take_turns(runtime, blocks, assignment.rounds)
    return Measured(wall, {name: block.processor[1:] for name, block in blocks.items()})


def _product() -> Callable[[], object]:
    matrix = torch.full((WIDTH, WIDTH), 1.0)
    return partial(torch.mm, matrix, matrix)


class Block:
    """A block of calls, each for the next tensor; zeros stay zeros, so none has to be filled again.

    Args:
        between: called after each.
    """

    def __init__(
        self,
        elements: int,
        call: Callable[[torch.Tensor], object],
        between: Callable[[], object] | None = None,
        calls: int | None = None,
    ) -> None:
        self.processor: list[float] = []
        self._call, self._between = call, between
        self._calls = calls or calls_of(elements)
        self._tensors = cycle([torch.full((elements,), 0.0) for _ in range(tensors_of(elements))])

    def __call__(self) -> None:
        began = time.process_time()
        for _ in range(self._calls):
            self._call(next(self._tensors))
            if self._between is not None:
                self._between()
        self.processor.append(time.process_time() - began)


class MPIBlock:
    """A block of MPI, which the first rank begins; the others wait for it at the next barrier."""

    def __init__(self, ranks: mpi.MPIRanks | None, elements: int) -> None:
        self.processor: list[float] = []
        self._run = None
        if ranks is not None:
            self._run = ranks.block(elements, tensors_of(elements), calls_of(elements))

    def __call__(self) -> None:
        self.processor.append(0.0 if self._run is None else self._run())


def print_rows(rows: Iterable[CollectiveRow]) -> None:
    """One line for each size and number of ranks."""
    lines = [
        (
            str(row.ranks),
            row.size + (", computing" if row.computing else ""),
            f"{row.gloo_ms:.3g}",
            f"{row.shm_ms:.3g}",
            f"{row.ratio:.1f} ({row.least:.1f} to {row.most:.1f})",
            f"{row.gloo_processor_ms:.3g}",
            f"{row.shm_processor_ms:.3g}",
            "" if row.mpi_ms is None else f"{row.mpi_ms:.3g}",
            "" if row.mpi_ratio is None else f"{row.mpi_ratio:.1f}",
            "" if row.copy_share is None else f"{row.copy_share:.0%}",
        )
        for row in rows
    ]
    headings = (
        "ranks", "size", "gloo, ms", "shm, ms", "ratio", "gloo, processor", "shm, processor",
        "MPI, ms", "ratio", "of the copy limit",
    )  # fmt: skip
    print_table("all-reduces on one host", headings, lines)
    print_remarks("Ratios above 1: shared memory is faster. Processor: ms of all ranks together.")
    if not mpi.is_there():
        print_remarks(f"No figures of MPI: {mpi.INSTALL}.")


def main(arguments: list[str]) -> int:
    """Measure, and print the times."""
    options = read_options(
        bench_parser("python -m benchmarks.collectives", DESCRIPTION, rounds=7), arguments
    )
    with progress_line() as tell:
        rows = bench_collectives(rounds=options.rounds, on_progress=tell)
    print_rows(rows)
    write_figures(options.json, "collectives", rows)
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main))
