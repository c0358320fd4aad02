"""All-reduces over shared memory, beside gloo's."""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import orchestra.shm  # noqa: F401  (registers the backend)
from orchestra.bench.timing import Progress, join_gloo, median_ratio, run_ranks, take_turns
from orchestra.cli.bench import (
    bench_parser,
    print_remarks,
    print_table,
    progress_line,
    read_options,
    write_figures,
)
from orchestra.cli.main import guarded
from orchestra.worker.runtime import Runtime

BACKENDS = ("gloo", "shm")
SIZES = {"4 KB": 1_000, "256 KB": 64_000, "4 MB": 1_000_000, "100 MB": 25_000_000}
"""Elements of four bytes each."""
MOST_BYTES = 400_000_000
"""Over which tensors are rotated, at the most; more than any cache holds."""
BLOCK_BYTES = 200_000_000
"""That a block reduces, of small tensors less."""
DESCRIPTION = """\
Sum float32 tensors among 2 and 4 ranks of this host, by torch.distributed.all_reduce with the
backends gloo and shm, in turn, in the same processes. The tensors are ordinary ones, outside the
shared memory, and each call has the next of several, so that none is in a cache.
"""


@dataclass(frozen=True)
class Assignment:
    """What the ranks are to do: `rounds` blocks of each size and backend."""

    rounds: int
    store: str


@dataclass(frozen=True)
class CollectiveRow:
    """Milliseconds of one all-reduce: medians over the rounds, of the slowest rank's clock.

    `ratio` is the median of gloo's seconds over ours in the same round, between its `least` and
    `most`; `processor_ratio` that of the processor time of all ranks.
    """

    ranks: int
    size: str
    gloo_ms: float
    shm_ms: float
    ratio: float
    least: float
    most: float
    processor_ratio: float


@dataclass(frozen=True)
class Measured:
    """Seconds of each backend's blocks, by size; wall time, and processor time of one rank."""

    wall: dict[str, dict[str, list[float]]]
    processor: dict[str, dict[str, list[float]]]


def bench_collectives(
    ranks: Sequence[int] = (2, 4), rounds: int = 7, on_progress: Progress | None = None
) -> list[CollectiveRow]:
    """Measure each size with each of these numbers of ranks.

    Raises KeyboardInterrupt where the user stopped it.
    """
    rows = []
    for count in ranks:
        with tempfile.TemporaryDirectory(prefix="orchestra-bench-") as folder:
            results: Sequence[Measured] = run_ranks(
                measure, Assignment(rounds, str(Path(folder) / "store")), count,
                steps=len(BACKENDS) * (rounds + 1), what=f"{count} ranks", on_progress=on_progress,
            )  # fmt: skip
        rows += [_row(count, size, results) for size in SIZES]
    return rows


def _row(ranks: int, size: str, results: Sequence[Measured]) -> CollectiveRow:
    gloo, shm = (
        [max(blocks) for blocks in zip(*(each.wall[size][name] for each in results), strict=True)]
        for name in BACKENDS
    )
    spent = [
        [sum(each) for each in zip(*(r.processor[size][name] for r in results), strict=True)]
        for name in BACKENDS
    ]
    ratios = [a / b for a, b in zip(gloo, shm, strict=True)]
    calls = calls_of(SIZES[size])
    return CollectiveRow(
        ranks,
        size,
        1e3 * statistics.median(gloo) / calls,
        1e3 * statistics.median(shm) / calls,
        median_ratio(gloo, shm),
        min(ratios),
        max(ratios),
        median_ratio(*spent),
    )


def calls_of(elements: int) -> int:
    """All-reduces in a block."""
    return min(max(BLOCK_BYTES // (4 * elements), 1), 200)


def measure(runtime: Runtime, assignment: Assignment) -> Measured:
    """On each rank: the seconds of each backend's blocks."""
    join_gloo(runtime, assignment.store)
    groups = {name: dist.new_group(backend=name) for name in BACKENDS}
    found = Measured({}, {})
    for size, elements in SIZES.items():
        blocks = {name: Block(group, elements) for name, group in groups.items()}
        found.wall[size] = take_turns(runtime, blocks, assignment.rounds)
        found.processor[size] = {name: block.processor[1:] for name, block in blocks.items()}
    return found


class Block:
    """A block of all-reduces in `group`; zeros stay zeros, so nothing has to be filled again."""

    def __init__(self, group: Any, elements: int) -> None:
        self.processor: list[float] = []
        self._group = group
        self._calls = calls_of(elements)
        number = min(max(MOST_BYTES // (4 * elements), 2), 64)
        self._tensors = cycle([torch.full((elements,), 0.0) for _ in range(number)])

    def __call__(self) -> None:
        began = time.process_time()
        for _ in range(self._calls):
            dist.all_reduce(next(self._tensors), group=self._group)
        self.processor.append(time.process_time() - began)


def print_rows(rows: Iterable[CollectiveRow]) -> None:
    """One line for each size and number of ranks."""
    lines = [
        (
            str(row.ranks),
            row.size,
            f"{row.gloo_ms:.3g}",
            f"{row.shm_ms:.3g}",
            f"{row.ratio:.1f}",
            f"{row.least:.1f} to {row.most:.1f}",
            f"{row.processor_ratio:.1f}",
        )
        for row in rows
    ]
    headings = ("ranks", "size", "gloo ms", "shm ms", "ratio", "spread", "processor time")
    print_table("all-reduces on one host", headings, lines)
    print_remarks("Ratios above 1: shared memory is faster, or takes less processor time.")


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
