"""How much slower a core is while all compute, and when a thread gives it to one that waits."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

import torch

from orchestra.bench.calibrate.stopwatch import Budget, Kept, rounds, total
from orchestra.bench.calibrate.training import Workload
from orchestra.data.feed import open_samples
from orchestra.optimizers.spec import OptimizerSpec
from orchestra.tasks.task import load_task
from orchestra.worker.runtime import Runtime

TURNS = 9
PAUSE = 0.0005
"""Seconds between two looks at the clock, from which on the thread must have been stopped."""


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
