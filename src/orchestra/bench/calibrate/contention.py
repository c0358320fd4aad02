"""What ranks of a machine cost each other: collectives in shared memory, how much slower a core is
while all compute, and when a thread gives it to one that waits."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from orchestra.bench.calibrate.training import Workload
from orchestra.bench.timing import Budget, Kept, rounds, total
from orchestra.cluster.costs import MemoryCosts
from orchestra.collectives import Group, all_reduce
from orchestra.data.feed import open_samples
from orchestra.optimizers.spec import OptimizerSpec
from orchestra.tasks.task import load_task
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
TURNS = 9
PAUSE = 0.0005
"""Seconds between two looks at the clock, from which on the thread must have been stopped."""


def ranks_wanted(cores: int) -> int:
    """Return how many ranks measure: barriers of two and of more differ, whoever has a core."""
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

    def agreed(enough: bool) -> bool:
        return total(transport, enough, ranks) > 0

    for number, _ in enumerate(rounds(seconds, most, agreed=agreed)):
        vector = vectors[number % len(vectors)]
        began, ran = time.perf_counter(), time.thread_time()
        all_reduce(transport, vector, "ring", Group(ranks), TAG)
        used.append(time.thread_time() - ran)
        waited.append(time.perf_counter() - began - used[-1])
    starts = range(0, max(len(waited) - WINDOW, 0) + 1, WINDOW)
    waits = sorted(statistics.mean(waited[start : start + WINDOW]) for start in starts)
    return statistics.median(used), waits[len(waits) // 4]


def memory_costs(measured: Sequence[Times]) -> MemoryCosts:
    def mean(ranks: int, size: int, which: int) -> float:
        return statistics.mean(times[ranks, size][which] for times in measured[:ranks])

    most = len(measured)
    used = mean(2, SMALL, 0)
    # Between two ranks a collective has one barrier, which takes no longer than all of it. Where
    # other programs ran beside more ranks, the difference alone would say so, and leave the copies
    # below no time.
    barrier = min(max((mean(most, SMALL, 0) - used) / (most - 2), 0.0), used)
    collective = used - barrier
    copies = []
    for ranks, size in measured[0]:
        if size > SMALL:
            barriers = (1 + math.ceil(size / CHUNK_BYTES)) * (ranks - 1) * barrier
            copies.append((mean(ranks, size, 0) - collective - barriers) / (PASSES * size))
    return MemoryCosts(
        collective=collective,
        barrier=barrier,
        copy=max(statistics.median(copies), 0.0),
        wake=max(mean(2, SMALL, 1), 0.0),
    )


def measure_speeds(runtime: Runtime, order: Workload) -> tuple[tuple[float, float], Kept]:
    """On one rank more than there are cores, measure what becomes of a step beside others.

    The first figure is how fast a core is while all cores take steps, over one alone. The second is
    what part of a step's processor seconds goes into filling caches anew, while one thread more
    than there are cores takes steps.

    A machine is faster at one time than at another: only what was measured in one turn is compared.
    Of the `TURNS` those that the time is too short for are left out.
    """
    torch.set_num_threads(1)
    step = _step_of(order)
    runtime.reporter.phase("training")  # so that memory is kept as it is there
    cores = max(runtime.ranks - 1, 1)
    shared, turns, kept = [], [], Kept()
    budget = Budget(order.until, 3 * TURNS)
    for turn in range(TURNS):
        alone, all_cores, one_more = (
            _crowd(runtime, crowd, step, min(order.seconds / 2, budget.share()), kept)
            for crowd in (1, cores, runtime.ranks)
        )
        shared.append(alone / all_cores)
        turns.append(1 - all_cores / one_more)
        runtime.reporter.progress(step=turn + 1, samples=0)
        if total(runtime.transport, budget.over):  # they read their clock one after another
            break
    found = min(statistics.median(shared), 1.0), max(statistics.median(turns), 0.0)
    return found, kept


def _step_of(order: Workload) -> Callable[[], None]:
    """Return what takes a gradient and an update at each call, always on the same batch."""
    task = load_task(order.task)
    module = task.model()
    batch = open_samples(task.train, 0, task.collate).read(0, order.batch_size)
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    optimizer = OptimizerSpec.from_settings(order.optimizer, list(named)).build(named)

    def step() -> None:
        optimizer.zero_grad()
        task.loss(module, batch).backward()
        optimizer.step()

    return step


def _crowd(
    runtime: Runtime, crowd: int, step: Callable[[], None], seconds: float, kept: Kept
) -> float:
    """Return processor seconds of a step, where as many ranks as `crowd` take them at once."""
    total(runtime.transport)
    with kept.watched(crowd):
        own = _pace(step, seconds) if runtime.rank < crowd else 0.0
        return total(runtime.transport, own) / crowd


def measure_slices(runtime: Runtime, allowed: tuple[float, float]) -> tuple[list[float], Kept]:
    """On one rank more than there are cores: for how long this one ran without a pause, each time;
    all of the seconds where it never had to pause."""
    kept, (seconds, _) = Kept(), allowed
    total(runtime.transport)
    runs: list[float] = []
    with kept.watched(runtime.ranks):
        began = since = last = time.perf_counter()
        while last - began < seconds:
            now = time.perf_counter()
            if now - last > PAUSE:
                runs.append(last - since)
                since = now
            last = now
    return runs[1:] or [seconds], kept


def _pace(step: Callable[[], None], seconds: float) -> float:
    """Return processor seconds of a step; the ends, where others may not be there, do not count."""
    times: list[tuple[float, float]] = []
    for now in rounds(seconds, least=3 if seconds > 0 else 1, limit=math.inf):
        started = time.thread_time()
        step()
        times.append((now, time.thread_time() - started))
    inner = [spent for at, spent in times if 0.1 * seconds < at < 0.9 * seconds]
    return statistics.median(inner or [spent for _, spent in times])
