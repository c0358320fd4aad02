"""The costs that ranks of a machine impose on each other: collectives in shared memory, the
slowdown of a core while all compute, and the time slice after which a thread gives its core to a
waiting one.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from orchestra.calibration.timing import Conditions, TimeBudget, rounds, total
from orchestra.calibration.training import Workload
from orchestra.cluster.nodes import MemoryCosts
from orchestra.collectives import Group, all_reduce
from orchestra.data.feed import open_samples
from orchestra.optimizers.spec import OptimizerSpec
from orchestra.tasks.task import load_task
from orchestra.transports.protocol import Transport
from orchestra.transports.shared_memory import CHUNK_BYTES
from orchestra.worker.runtime import RankActivity, Runtime, usable_cores

SMALL = 4096  # the bytes of a vector that takes no time beside the collective itself
LARGE = (1 << 18, 1 << 20, 4 << 20, 16 << 20)  # the bytes of vectors that do take time
CASES = 2 + len(LARGE)
IN_TURN = 64 << 20
"""The bytes of all vectors that take turns: a complete gradient is not in the caches."""
PASSES = 3
"""The passes over a vector: a rank publishes it, forms its share of the sums, and takes the
results."""
TAG = 1

Times = Mapping[tuple[int, int], tuple[float, float]]
"""By ranks and bytes: the processor seconds of one of the ranks, and the seconds that it waited."""
WINDOW = 2  # the all-reduces in a row within which ranks wait in turn
TURNS = 9
PAUSE = 0.0005  # the seconds between two looks at the clock that show that the thread was stopped


def ranks_wanted(cores: int) -> int:
    """Return how many ranks measure. A barrier of two ranks behaves unlike one of more ranks,
    whether or not each rank has a core."""
    # Three ranks are the fewest that separate the cost of a barrier from the rest.
    return max(3, min(cores, 8))


def measure_memory(runtime: Runtime, allowed: tuple[float, float]) -> tuple[Times, Conditions]:
    """Measure all-reduces of several sizes, on at least three ranks."""
    torch.set_num_threads(1)
    transport, kept, (seconds, until) = runtime.transport, Conditions(), allowed
    runtime.reporter.activity(RankActivity.TRAINING)  # so that memory is kept as it is there
    all_cores = max(2, min(len(usable_cores()), runtime.ranks))
    # Small vectors for what a collective and a barrier take, large ones for the copies
    cases = [(2, SMALL), (runtime.ranks, SMALL), *((all_cores, size) for size in LARGE)]
    budget = TimeBudget(until, CASES)
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
    """Time all-reduces over the first `count` ranks for `seconds`, but at most `most`. Return
    the processor seconds and the seconds of waiting.

    Of the waits the lower quartile counts: on a busy machine, ranks do not only wait for each
    other.
    """
    ranks = tuple(range(count))
    # A gradient is in no cache when it is complete, so vectors take turns
    vectors = torch.ones(min(IN_TURN // size, 1000), size // 4)
    used, waited = [], []

    turns = rounds(seconds, most, agreed=lambda own: total(transport, own, ranks) > 0)
    for vector, _ in zip(itertools.cycle(vectors), turns, strict=False):
        began, ran = time.perf_counter(), time.thread_time()
        all_reduce(transport, vector, "ring", Group(ranks), TAG)
        used.append(time.thread_time() - ran)
        # What passed less what the thread did: waiting for the other ranks
        waited.append(time.perf_counter() - began - used[-1])
    # In a row of two each rank waits once: a mean over both is that of either
    starts = range(0, max(len(waited) - WINDOW, 0) + 1, WINDOW)
    waits = sorted(statistics.mean(waited[start : start + WINDOW]) for start in starts)
    # The lower quartile counts: on a busy machine ranks also wait for other programs, and the mean
    # of a few repeats gave 6 ms to wake up where 0.07 ms are usual.
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
            # One barrier for each chunk, and one more, as in shared_memory.py of transports
            barriers = (1 + math.ceil(size / CHUNK_BYTES)) * (ranks - 1) * barrier
            copies.append((mean(ranks, size, 0) - collective - barriers) / (PASSES * size))
    return MemoryCosts(
        collective=collective,
        barrier=barrier,
        copy=max(statistics.median(copies), 0.0),
        wake=max(mean(2, SMALL, 1), 0.0),
    )


def measure_speeds(runtime: Runtime, order: Workload) -> tuple[tuple[float, float], Conditions]:
    """Measure how a step slows down beside others, on one rank more than there are cores.

    The first figure is how fast a core is while all cores take steps, over one alone. The second is
    what part of a step's processor seconds goes into filling caches anew, while one thread more
    than there are cores takes steps.

    A machine is faster at one time than at another: only what was measured in one turn is compared.
    Of the `TURNS` those that the time is too short for are left out.
    """
    torch.set_num_threads(1)
    step = _step_of(order)
    runtime.reporter.activity(RankActivity.TRAINING)  # so that memory is kept as it is there
    cores = max(runtime.ranks - 1, 1)
    shared, turns, kept = [], [], Conditions()
    budget = TimeBudget(order.until, 3 * TURNS)
    for turn in range(TURNS):
        alone, all_cores, one_more = (
            _crowd(runtime, crowd, step, min(order.seconds / 2, budget.share()), kept)
            for crowd in (1, cores, runtime.ranks)
        )
        # A ratio is taken within a turn: where a virtual machine changes its speed by half for
        # seconds at a time, ratios of medians over all turns were arbitrary.
        shared.append(alone / all_cores)
        turns.append(1 - all_cores / one_more)
        runtime.reporter.progress(step=turn + 1, samples=0)
        if total(runtime.transport, budget.over):  # they read their clock one after another
            break
    # Cores are no faster together, and a turn gains nothing: beyond that it is noise
    found = min(statistics.median(shared), 1.0), max(statistics.median(turns), 0.0)
    return found, kept


def _step_of(order: Workload) -> Callable[[], None]:
    """Return a function that computes a gradient and an update, always on the same batch."""
    task = load_task(order.task)
    module = task.model()
    # One batch again and again: reading is no part of the figure
    batch = open_samples(task.train, 0, task.collate).read(0, order.batch_size)
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    optimizer = OptimizerSpec.from_settings(order.optimizer, list(named)).build(named)

    def step() -> None:
        optimizer.zero_grad()
        task.loss(module, batch).backward()
        optimizer.step()

    return step


def _crowd(
    runtime: Runtime,
    crowd: int,
    step: Callable[[], None],
    seconds: float,
    kept: Conditions,
) -> float:
    """Return the processor seconds of a step while `crowd` ranks take steps at once."""
    total(runtime.transport)
    # The ranks that wait want no core
    with kept.watched(crowd):
        own = _pace(step, seconds) if runtime.rank < crowd else 0.0
        return total(runtime.transport, own) / crowd


def measure_slices(
    runtime: Runtime, allowed: tuple[float, float]
) -> tuple[list[float], Conditions]:
    """Return the lengths of the times for which this rank ran without a pause, on one rank more
    than there are cores; all of the seconds if it never paused.
    """
    kept, (seconds, _) = Conditions(), allowed
    total(runtime.transport)
    runs: list[float] = []
    with kept.watched(runtime.ranks):
        began = since = last = time.perf_counter()
        while last - began < seconds:
            now = time.perf_counter()
            # The loop asks for nothing but the time: between two looks somebody else had the core
            if now - last > PAUSE:
                runs.append(last - since)
                since = now
            last = now
    # The first one began in the midst of a slice
    return runs[1:] or [seconds], kept


def _pace(step: Callable[[], None], seconds: float) -> float:
    """Return the processor seconds of a step. The beginning and the end, where other ranks may
    be missing, do not count.
    """
    times: list[tuple[float, float]] = []
    for now in rounds(seconds, least=3 if seconds > 0 else 1, limit=math.inf):
        started = time.thread_time()
        step()
        times.append((now, time.thread_time() - started))
    # Where other ranks may be missing does not count
    inner = [spent for at, spent in times if 0.1 * seconds < at < 0.9 * seconds]
    return statistics.median(inner or [spent for _, spent in times])
