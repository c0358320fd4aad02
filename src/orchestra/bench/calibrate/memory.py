"""What collectives in shared memory take on this machine."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Mapping, Sequence
from math import ceil

import torch

from orchestra.bench.calibrate.stopwatch import Budget, Kept, rounds, total
from orchestra.cluster.costs import MemoryCosts
from orchestra.collectives import Group, all_reduce
from orchestra.transports.protocol import Transport
from orchestra.transports.shared_memory import CHUNK_BYTES
from orchestra.worker.runtime import Runtime
from orchestra.worker.threads import usable_cores

SMALL = 4096
"""Bytes of a vector that takes no time beside the collective itself."""
LARGE = (1 << 18, 1 << 20, 4 << 20, 16 << 20)
"""Bytes of vectors whose bytes take time."""
CASES = 2 + len(LARGE)
IN_TURN = 64 << 20
"""Bytes of the vectors that take turns: a gradient is not in the caches when it is complete."""
PASSES = 3
"""Over a vector: a rank shows it, forms its share of the sums, and takes the results."""
TAG = 1

Times = Mapping[tuple[int, int], tuple[float, float]]
"""By ranks and bytes: processor seconds of one of the ranks, and those that it waited."""
WINDOW = 2
"""All-reduces in a row, in which ranks wait by turns."""


def ranks_wanted(cores: int) -> int:
    """How many ranks measure: barriers of two and of more differ, whoever has a core."""
    return max(3, min(cores, 8))


def measure_memory(runtime: Runtime, allowed: tuple[float, float]) -> tuple[Times, Kept]:
    """On at least three ranks: all-reduces of several sizes."""
    torch.set_num_threads(1)
    transport, kept, (seconds, until) = runtime.transport, Kept(), allowed
    runtime.reporter.phase("training")  # so that memory is kept as it is there
    all_cores = max(2, min(len(usable_cores()), runtime.ranks))
    cases = [(2, SMALL), (runtime.ranks, SMALL), *((all_cores, size) for size in LARGE)]
    budget = Budget(until, CASES)
    found: dict[tuple[int, int], tuple[float, float]] = {}
    for done, (count, size) in enumerate(cases, start=1):
        share = budget.share()
        if runtime.rank < count:
            with kept.watched(count):
                found[count, size] = _all_reduces(transport, count, size, seconds, share)
        total(transport)  # the others wait
        runtime.reporter.progress(step=done, samples=0)
    return found, kept


def _all_reduces(
    transport: Transport, count: int, size: int, seconds: float, most: float
) -> tuple[float, float]:
    """Time all-reduces over the first ranks for `seconds`, which take `most` at most.

    Of the waits the lower quartile counts: on a busy machine, ranks do not only wait for each
    other.
    """
    ranks = tuple(range(count))
    vectors = torch.ones(min(IN_TURN // size, 1000), size // 4)
    used, waited = [], []
    agreed = functools.partial(_agreed, transport, ranks)
    for number, _ in enumerate(rounds(seconds, most, agreed=agreed)):
        vector = vectors[number % len(vectors)]
        began, ran = time.perf_counter(), time.thread_time()
        all_reduce(transport, vector, "ring", Group(ranks), TAG)
        used.append(time.thread_time() - ran)
        waited.append(time.perf_counter() - began - used[-1])
    starts = range(0, max(len(waited) - WINDOW, 0) + 1, WINDOW)
    waits = sorted(statistics.mean(waited[start : start + WINDOW]) for start in starts)
    return statistics.median(used), waits[len(waits) // 4]


def _agreed(transport: Transport, ranks: Sequence[int], enough: bool) -> bool:
    return total(transport, enough, ranks) > 0


def memory_costs(measured: Sequence[Times]) -> MemoryCosts:
    """The costs, from what every rank measured."""

    def mean(ranks: int, size: int, which: int) -> float:
        return statistics.mean(times[ranks, size][which] for times in measured[:ranks])

    most = len(measured)
    used = mean(2, SMALL, 0)
    barrier = max((mean(most, SMALL, 0) - used) / (most - 2), 0.0)
    collective = max(used - barrier, 0.0)
    copies = []
    for ranks, size in measured[0]:
        if size > SMALL:
            barriers = (1 + ceil(size / CHUNK_BYTES)) * (ranks - 1) * barrier
            copies.append((mean(ranks, size, 0) - collective - barriers) / (PASSES * size))
    return MemoryCosts(
        collective=collective,
        barrier=barrier,
        copy=max(statistics.median(copies), 0.0),
        wake=max(mean(2, SMALL, 1), 0.0),
    )
