"""All-reduces in shared memory and over TCP, beside gloo's."""

from __future__ import annotations

import itertools
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path

import torch
import torch.distributed as dist

import orchestra.shm  # noqa: F401  (registers the backend)
from benchmarks import before, mpi
from benchmarks.gloo import join_gloo
from benchmarks.options import (
    PrintedTable,
    bench_parser,
    listed,
    print_remarks,
    rank_counts,
    read_options,
    write_figures,
)
from benchmarks.ratios import Ratio
from benchmarks.turns import Blocks, of_all_ranks, processor, take_turns, wall
from orchestra.calibration.timing import Progress, run_ranks
from orchestra.cli.main import guarded
from orchestra.cli.terminal import progress_line
from orchestra.collectives import all_reduce
from orchestra.schedules import ALL_REDUCE
from orchestra.transports.protocol import Group
from orchestra.transports.tags import Tag
from orchestra.worker.runtime import Runtime

GLOO, SHM, MPI, COPY, COMPUTE = "gloo", "shm", "MPI", "copy", "compute"
MEMORY, SOCKETS = "memory", "sockets"
SIZES = {"4 KB": 1_000, "256 KB": 64_000, "4 MB": 1_000_000, "100 MB": 25_000_000}
"""Elements of four bytes each."""
COMPUTING = ("4 KB", "4 MB")
"""Sizes that are also measured with computing between the calls."""
WIDTH = 512
"""Of the matrices that are multiplied between the calls."""
ARENA_BYTES = 400_000_000
"""That a rank reduces before it comes back to the same memory; more than a cache holds."""
PAGE = 1_024
"""Elements to a multiple of which tensors begin, so that each has pages of its own."""
BLOCK_BYTES = {MEMORY: 600_000_000, SOCKETS: 200_000_000}
"""That a block reduces, of small tensors less."""
MOST_CALLS = {MEMORY: 200, SOCKETS: 50}
DESCRIPTION = """\
Sum float32 tensors among ranks of this host, in turn with gloo, in the same processes.

Over memory: torch.distributed.all_reduce with the backend shm, beside that with the backend gloo,
and beside MPI where mpi4py and mpirun are installed. At least each rank has to read its tensor and
to write it: all ranks copy as many bytes at the same time, which is the copy limit. Then with a
product of matrices between the calls, whose own time is taken off.

Over sockets: each schedule of AllReduce over TCP on loopback, without any memory that ranks share,
beside gloo, which has TCP too.

Tensors are cold: a call takes the next one of 400 MB, which were written once at the beginning, so
that 400 MB are reduced before the same memory comes again. Ratios are medians of pairs of blocks
side by side, with the sign-based 95 % interval in brackets.
"""


@dataclass(frozen=True)
class Setup:
    """What a launch measures: one size, over memory or sockets, by these algorithms.

    Attributes:
        computing: whether the ranks compute between the calls.
    """

    over: str
    size: str
    algorithms: tuple[str, ...] = (SHM,)
    computing: bool = False

    @property
    def elements(self) -> int:
        return SIZES[self.size]

    @property
    def calls(self) -> int:
        """All-reduces in a block."""
        fitting = BLOCK_BYTES[self.over] // (4 * self.elements)
        return min(max(fitting, 1), MOST_CALLS[self.over])

    @property
    def groups(self) -> list[tuple[str, ...]]:
        """Who is compared with whom, block beside block."""
        if self.over == SOCKETS:
            return [(algorithm, GLOO) for algorithm in self.algorithms]
        if self.computing:
            return [(SHM, GLOO, COMPUTE)]
        return [(SHM, GLOO, COPY, *([MPI] if mpi.is_there() else []))]


@dataclass(frozen=True)
class Assignment:
    """What the ranks are to do: `rounds` blocks of each contestant of `setup`."""

    setup: Setup
    rounds: int
    folder: str


@dataclass(frozen=True)
class CollectiveRow:
    """Milliseconds of one all-reduce: medians over the rounds, by the clock of the slowest rank.

    Attributes:
        algorithm: the backend shm, or a schedule over sockets.
        ratio: our seconds over gloo's.
        processor_ms, gloo_processor_ms, processor_ratio: the same of the processor time of all
            ranks together.
        mpi_ms, mpi_ratio: MPI's, and our seconds over MPI's; None where it was not measured.
        copy_share: what copying as much takes, over what ours takes.
    """

    ranks: int
    over: str
    size: str
    computing: bool
    algorithm: str
    ms: float
    gloo_ms: float
    ratio: Ratio
    processor_ms: float
    gloo_processor_ms: float
    processor_ratio: Ratio
    mpi_ms: float | None = None
    mpi_ratio: Ratio | None = None
    copy_share: float | None = None


def setups_of(
    ways: Sequence[str] = (MEMORY, SOCKETS),
    sizes: Sequence[str] = tuple(SIZES),
    schedules: Sequence[str] = tuple(ALL_REDUCE),
) -> list[Setup]:
    """Return what there is to measure."""
    found = []
    if MEMORY in ways:
        found += [Setup(MEMORY, size) for size in sizes]
        found += [Setup(MEMORY, size, computing=True) for size in sizes if size in COMPUTING]
    if SOCKETS in ways:
        found += [Setup(SOCKETS, size, tuple(schedules)) for size in sizes]
    return found


def bench_collectives(
    setups: Sequence[Setup],
    ranks: Sequence[int] = (2, 4),
    rounds: int = 12,
    on_progress: Progress | None = None,
) -> Iterator[CollectiveRow]:
    """Measure each setup with each of these numbers of ranks.

    Raises KeyboardInterrupt where the user stopped it.
    """
    for count, setup in itertools.product(ranks, setups):
        with tempfile.TemporaryDirectory(prefix="orchestra-bench-") as folder:
            results: Sequence[list[Blocks]] = run_ranks(
                measure, Assignment(setup, rounds, folder), count,
                steps=sum(map(len, setup.groups)) * (rounds + 1),
                what=f"{count} ranks over {setup.over}, {setup.size}",
                on_progress=on_progress, shared_memory=setup.over == MEMORY,
            )  # fmt: skip
        for group in zip(*results, strict=True):
            yield _row(count, setup, group)


def _row(ranks: int, setup: Setup, group: Sequence[Blocks]) -> CollectiveRow:
    blocks = of_all_ranks(group)
    algorithm = next(iter(blocks))
    by_clock, spent = ({name: of(blocks[name]) for name in blocks} for of in (wall, processor))
    for times in (by_clock, spent):
        between = times.pop(COMPUTE, None)
        if between is not None:
            for name in times:
                times[name] = [a - b for a, b in zip(times[name], between, strict=True)]

    def milliseconds(seconds: Sequence[float]) -> float:
        return 1e3 * statistics.median(seconds) / setup.calls

    row = CollectiveRow(
        ranks, setup.over, setup.size, setup.computing, algorithm,
        milliseconds(by_clock[algorithm]), milliseconds(by_clock[GLOO]),
        Ratio.of(by_clock[algorithm], by_clock[GLOO]),
        milliseconds(spent[algorithm]), milliseconds(spent[GLOO]),
        Ratio.of(spent[algorithm], spent[GLOO]),
    )  # fmt: skip
    if MPI in by_clock:
        ratio = Ratio.of(by_clock[algorithm], by_clock[MPI])
        row = replace(row, mpi_ms=milliseconds(by_clock[MPI]), mpi_ratio=ratio)
    if COPY in by_clock:
        row = replace(row, copy_share=Ratio.of(by_clock[COPY], by_clock[algorithm]).median)
    return row


def measure(runtime: Runtime, assignment: Assignment) -> list[Blocks]:
    """On each rank: the blocks of each group of contestants."""
    setup = assignment.setup
    join_gloo(runtime, str(Path(assignment.folder) / "store"))
    arena = Arena(setup.elements)
    calls: dict[str, Callable[[torch.Tensor], object]] = {GLOO: _of_backend(GLOO)}
    if setup.over == SOCKETS:
        calls |= {name: _of_schedule(runtime, name) for name in setup.algorithms}
    else:
        calls[SHM] = _of_backend(SHM)
    if setup.computing:
        product = _product()
        calls = {name: _then(call, product) for name, call in calls.items()}
        calls[COMPUTE] = lambda _: product()
    elif setup.over == MEMORY:
        calls[COPY] = torch.full((setup.elements,), 0.0).copy_
    blocks: dict[str, Callable[[], object]] = {
        name: _block(arena, call, setup.calls) for name, call in calls.items()
    }
    with ExitStack() as stack:
        if any(MPI in group for group in setup.groups):
            blocks[MPI] = lambda: None  # the others wait for it at the next barrier
            if runtime.rank == 0:
                others = stack.enter_context(mpi.mpi_ranks(runtime.ranks, assignment.folder))
                blocks[MPI] = others.block(setup.elements, arena.tensors, setup.calls)
        found = take_turns(runtime, blocks, assignment.rounds, setup.groups)
    assert setup.over == MEMORY or not runtime.transport.traffic.bytes_in_memory
    return found


def _of_backend(name: str) -> Callable[[torch.Tensor], object]:
    return partial(dist.all_reduce, group=dist.new_group(backend=name))


def _of_schedule(runtime: Runtime, name: str) -> Callable[[torch.Tensor], object]:
    group = Group(tuple(range(runtime.ranks)))
    return lambda tensor: all_reduce(runtime.transport, tensor, name, group, Tag.GRADIENTS)


def _then(
    call: Callable[[torch.Tensor], object], then: Callable[[], object]
) -> Callable[[torch.Tensor], object]:
    def both(tensor: torch.Tensor) -> None:
        call(tensor)
        then()

    return both


def _block(arena: Arena, call: Callable[[torch.Tensor], object], calls: int) -> Callable[[], None]:
    def block() -> None:
        for _ in range(calls):
            call(arena.take())

    return block


class Arena:
    """Cold tensors: `ARENA_BYTES` are taken before the same memory comes again.

    All contestants take from it in turn. Zeros stay zeros, so none has to be filled again.
    """

    def __init__(self, elements: int) -> None:
        stride = -(-elements // PAGE) * PAGE
        self.tensors = max(ARENA_BYTES // (4 * stride), 2)
        # Filled, since pages of a new tensor of zeros are made only when they are first written
        self._memory = torch.full((self.tensors, stride), 0.0)[:, :elements]
        self._places = itertools.cycle(range(self.tensors))

    def take(self) -> torch.Tensor:
        return self._memory[next(self._places)]


def _product() -> Callable[[], object]:
    matrix = torch.full((WIDTH, WIDTH), 1.0)
    return partial(torch.mm, matrix, matrix)


def tables_of(rows: Iterable[CollectiveRow]) -> Iterator[PrintedTable]:
    """Yield a table for each way: one line for each size, algorithm and number of ranks."""
    for over, group in groupby(rows, lambda row: row.over):
        lines = [_line(row) for row in group]
        columns = HEADINGS if over == MEMORY else HEADINGS[:-3]
        cut = [line[: len(columns)] for line in lines]
        yield PrintedTable(f"all-reduces over {over}", columns, cut)


KEYS = ("algorithm", "ranks", "over", "size", "computing")
"""The fields that tell rows apart."""
HEADINGS = (
    "algorithm", "ranks", "size", "ms", "gloo, ms", "ratio", "processor ms", "gloo's", "ratio",
    "MPI, ms", "ratio", "of the copy limit",
)  # fmt: skip


def _line(row: CollectiveRow) -> tuple[str, ...]:
    return (
        row.algorithm,
        str(row.ranks),
        row.size + (", computing" if row.computing else ""),
        f"{row.ms:.3g}",
        f"{row.gloo_ms:.3g}",
        str(row.ratio),
        f"{row.processor_ms:.3g}",
        f"{row.gloo_processor_ms:.3g}",
        str(row.processor_ratio),
        "" if row.mpi_ms is None else f"{row.mpi_ms:.3g}",
        str(row.mpi_ratio or ""),
        "" if row.copy_share is None else f"{row.copy_share:.0%}",
    )


def main(arguments: list[str]) -> int:
    """Measure, and print the times."""
    parser = bench_parser(
        "python -m benchmarks.collectives", DESCRIPTION, rounds=12, rounds_of="pairs of blocks"
    )
    parser.option("--ranks", "N,...", "numbers of processes (default: 2,4)", default="2,4")
    parser.option("--over", "WAY,...", f"{MEMORY}, {SOCKETS} or both (default)")
    parser.option("--sizes", "SIZE,...", f"some of {', '.join(SIZES)}")
    parser.option("--schedules", "NAME,...", f"over sockets: some of {', '.join(ALL_REDUCE)}")
    before.add_option(parser)
    options = read_options(parser, arguments)
    earlier = before.read(options.before, "collectives", KEYS) if options.before else None
    ways = list(listed("--over", options.over, dict.fromkeys((MEMORY, SOCKETS))))
    setups = setups_of(
        ways,
        list(listed("--sizes", options.sizes, SIZES)),
        list(listed("--schedules", options.schedules, ALL_REDUCE)),
    )
    rows: list[CollectiveRow] = []
    try:
        with progress_line() as tell:
            for row in bench_collectives(setups, rank_counts(options.ranks), options.rounds, tell):
                rows.append(row)
    finally:
        # Also what was measured before Ctrl-C
        if rows:
            rows.sort(key=lambda row: ways.index(row.over))
            tables = list(tables_of(rows))
            for table in tables:
                table.show()
            print_remarks(
                "Ratios below 1: ours takes less than gloo, or MPI; in brackets the 95 % interval. "
                "Processor: ms of all ranks together."
            )
            write_figures(options.json, "collectives", rows, tables, options.command)
    if MEMORY in ways and not mpi.is_there():
        print(f"No figures of MPI: {mpi.INSTALL}.")
    if earlier is None:
        return 0
    return min(before.print_changes(KEYS, rows, earlier), 1)


if __name__ == "__main__":
    sys.exit(guarded(main))
