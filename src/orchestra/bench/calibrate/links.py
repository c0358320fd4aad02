"""What a message between each two ranks takes, for the order of a ring."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from itertools import combinations

import torch

from orchestra.bench.turns import Progress, check_stopped, teller
from orchestra.collectives import Group, all_reduce, gather_objects
from orchestra.engines.processes.environment import Launched
from orchestra.engines.processes.launch import launch
from orchestra.transports.tags import Tag
from orchestra.worker.runtime import Runtime

REPEATS = 15
TAG = 1

Matrix = list[list[float]]


def calibrate_links(
    ranks: int, size: int, launched: Launched | None = None, on_progress: Progress | None = None
) -> Matrix | None:
    """Seconds of a message of `size` bytes, one way, from each rank (row) to each (column).

    Between processes of this machine, or those that a launcher started (`launched`): then rank 0
    has the result, and the others None.
    """
    if launched is not None:
        from orchestra.engines.processes.join import join

        outcome = join(measure_links, size, launched)
        return outcome.results[0] if launched.rank == 0 else None
    tell = teller(on_progress, "links", ranks * (ranks - 1) // 2)
    outcome = launch(measure_links, size, ranks, on_event=tell)
    check_stopped(outcome)
    matrix: Matrix = outcome.results[0]
    return matrix


def measure_links(runtime: Runtime, size: int) -> Matrix | None:
    """On each rank: pair after pair, so that none is in the way of another."""
    everyone = Group(tuple(range(runtime.ranks)))
    own: dict[str, float] = {}
    for done, (one, other) in enumerate(combinations(everyone.ranks, 2), start=1):
        all_reduce(runtime.transport, torch.zeros(1), "ring", everyone, Tag.AGREE)
        if runtime.rank in (one, other):
            seconds = _one_way(runtime, other if runtime.rank == one else one, size)
            if runtime.rank == one:
                own[str(other)] = seconds
        runtime.reporter.progress(step=done, samples=0)
    rows = gather_objects(runtime.transport, own, everyone, 0)
    return _matrix(rows) if runtime.rank == 0 else None


def _one_way(runtime: Runtime, peer: int, size: int) -> float:
    """Half of the median time there and back."""
    transport = runtime.transport
    leaving, arriving = torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        if runtime.rank < peer:
            transport.send(leaving, peer, TAG).wait()
            transport.receive(peer, TAG, arriving).wait()
        else:
            transport.receive(peer, TAG, arriving).wait()
            transport.send(leaving, peer, TAG).wait()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:]) / 2


def _matrix(rows: Sequence[dict[str, float]]) -> Matrix:
    count = len(rows)
    matrix = [[0.0] * count for _ in range(count)]
    for one in range(count):
        for other, seconds in rows[one].items():
            matrix[one][int(other)] = matrix[int(other)][one] = seconds
    return matrix
