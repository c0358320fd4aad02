"""How much slower a core is while all compute, and when a thread gives it to one that waits."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from orchestra.bench.calibrate.training import Order, step_of
from orchestra.collectives import Group, all_reduce
from orchestra.transports.tags import Tag
from orchestra.worker.runtime import Runtime

TURNS = 3
PAUSE = 0.0005
"""Seconds between two looks at the clock, from which on the thread must have been stopped."""


@dataclass(frozen=True)
class Speeds:
    """Processor seconds of a step: on one core while the others are idle, while all cores take
    steps, and while one thread more than there are cores does."""

    alone: float
    all_cores: float
    one_more: float


def measure_speeds(runtime: Runtime, order: Order) -> Speeds:
    """On one rank more than there are cores."""
    torch.set_num_threads(1)
    step, everyone = step_of(order), Group(tuple(range(runtime.ranks)))
    runtime.reporter.phase("training")  # so that memory is kept as it is there
    crowds = {"alone": 1, "all_cores": max(runtime.ranks - 1, 1), "one_more": runtime.ranks}
    medians: dict[str, list[float]] = {name: [] for name in crowds}
    for _ in range(TURNS):  # so that a drift of the machine favours none
        for name, crowd in crowds.items():
            mine = torch.zeros(1, dtype=torch.float64)
            all_reduce(runtime.transport, mine, "ring", everyone, Tag.AGREE)  # a barrier
            if runtime.rank < crowd:
                mine += _pace(step, 2 * order.seconds / TURNS)
            all_reduce(runtime.transport, mine, "ring", everyone, Tag.AGREE)
            medians[name].append(float(mine) / crowd)
    return Speeds(**{name: statistics.median(times) for name, times in medians.items()})


def measure_slices(runtime: Runtime, seconds: float) -> list[float]:
    """On one rank more than there are cores: for how long this one ran without a pause, each time;
    all of the seconds where it never had to pause."""
    everyone = Group(tuple(range(runtime.ranks)))
    all_reduce(runtime.transport, torch.zeros(1), "ring", everyone, Tag.AGREE)
    runs: list[float] = []
    began = since = last = time.perf_counter()
    while last - began < seconds:
        now = time.perf_counter()
        if now - last > PAUSE:
            runs.append(last - since)
            since = now
        last = now
    return runs[1:] or [seconds]


def _pace(step: Callable[[], None], seconds: float) -> float:
    """Processor seconds of a step; the ends, where others may not be there, do not count."""
    times: list[tuple[float, float]] = []
    began = time.perf_counter()
    while (now := time.perf_counter() - began) < seconds or len(times) < 3:
        started = time.thread_time()
        step()
        times.append((now, time.thread_time() - started))
    inner = [spent for at, spent in times if 0.1 * seconds < at < 0.9 * seconds]
    return statistics.median(inner or [spent for _, spent in times])
