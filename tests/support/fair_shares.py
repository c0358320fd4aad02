"""Max-min fair shares and the ends of what is shared, computed slowly: for tests to compare with.

Rates come from a bisection for the level up to which all can rise; time goes from one event to the
next, and everything is computed anew at each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Job:
    """An activity to be: `crosses` are numbers of resources."""

    start: float
    amount: float
    crosses: tuple[int, ...]
    bound: float = inf
    cancelled: float = inf
    weight: float = 1.0


@dataclass(frozen=True)
class Change:
    """A resource gets another capacity."""

    time: float
    resource: int
    capacity: float


def fair_rates(capacities: Floats, crosses: Floats, bounds: Floats, weights: Floats) -> Floats:
    """One rate for each row of `crosses`, whose columns are the resources."""
    rates = np.zeros(len(bounds))
    rising = np.ones(len(bounds), dtype=bool)
    highest = max(capacities.max(), bounds[np.isfinite(bounds)].max(initial=0)) / weights.min()
    while rising.any():
        low, high = 0.0, highest
        for _ in range(120):
            middle = (low + high) / 2
            tried = np.where(rising, np.minimum(bounds, middle * weights), rates)
            if (tried @ crosses <= capacities * (1 + 1e-13)).all():
                low = middle
            else:
                high = middle
        rates = np.where(rising, np.minimum(bounds, low * weights), rates)
        full = rates @ crosses >= capacities * (1 - 1e-9)
        stopped = rising & ((bounds <= low * weights * (1 + 1e-9)) | crosses[:, full].any(axis=1))
        assert stopped.any()
        rising &= ~stopped
    return rates


def slow_ends(
    capacities: Sequence[float], jobs: Sequence[Job], changes: Sequence[Change] = ()
) -> tuple[list[float], list[float]]:
    """For each job: when it ends (never, where it stalls or is cancelled), and what it carried."""
    now = 0.0
    left = np.array([job.amount for job in jobs], dtype=float)
    ends = [inf] * len(jobs)
    present = np.array(capacities, dtype=float)
    crosses = np.zeros((len(jobs), len(capacities)))
    for number, job in enumerate(jobs):
        crosses[number, job.crosses] = 1
    bounds = np.array([job.bound for job in jobs])
    weights = np.array([job.weight for job in jobs])
    times = {*(j.start for j in jobs), *(j.cancelled for j in jobs), *(c.time for c in changes)}
    coming = sorted(times | {inf})
    while True:
        for change in changes:
            if change.time == now:
                present[change.resource] = change.capacity
        runs = [n for n, j in enumerate(jobs) if j.start <= now < min(j.cancelled, ends[n])]
        for number in [n for n in runs if left[n] == 0]:
            ends[number] = now
            runs.remove(number)
        rates = np.zeros(len(jobs))
        if runs:
            rates[runs] = fair_rates(present, crosses[runs], bounds[runs], weights[runs])
        until = next((time for time in coming if time > now), inf)
        durations = {n: left[n] / rates[n] for n in runs if rates[n] > 0}
        soonest = min(durations.values(), default=inf)
        if until == soonest == inf:
            return ends, [job.amount - float(rest) for job, rest in zip(jobs, left, strict=True)]
        step = min(until - now, soonest)
        left -= rates * step
        for number, duration in durations.items():
            if duration <= step * (1 + 1e-12):
                left[number] = 0.0
        now = until if step == until - now else now + step
