"""What a worker's steps consist of, and numbers of all workers: what `Auto` compares by."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from orchestra.collectives import all_reduce
from orchestra.exchange.agreement import T
from orchestra.parameter_server.placement import Slice
from orchestra.transports.tags import Tag
from orchestra.worker.runtime import Work
from orchestra.worker.worker import Worker

CODING = ("encode", "decode")
"""The kinds of work that belong to an exchange."""


class Stopwatch:
    """Parts the time of the main flow of `worker` into its own steps, and all that exchanges take:
    communication, waiting, and the work of encoding and decoding.

    For the last it takes the place of the worker's `Compute`.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker, self._compute = worker, worker.compute
        self.reached, self.needs = worker.compute.reached, worker.compute.needs
        worker.compute = self
        self._began: float | None = None
        self._exchanged = self._coded = 0.0

    def begin(self) -> None:
        """Start the watch at a step's beginning, if it does not run yet."""
        if self._began is None:
            self.lap()

    def lap(self) -> tuple[float, float]:
        """Return the seconds since the last call, and those of them that no exchange took."""
        worker = self._worker
        now = worker.transport.now()
        exchanged = worker.transport.blocked() + self._coded + worker.measures.native_seconds
        wall = 0.0 if self._began is None else now - self._began
        own = max(wall - (exchanged - self._exchanged), 0.0)
        self._began, self._exchanged = now, exchanged
        return wall, own

    @property
    def seconds(self) -> float:
        return self._compute.seconds

    @property
    def main_seconds(self) -> float:
        return self._compute.main_seconds

    def run(self, work: Work, function: Callable[[], T]) -> T:
        if work.kind not in CODING:
            return self._compute.run(work, function)
        began = self._worker.transport.now()
        try:
            return self._compute.run(work, function)
        finally:
            self._coded += self._worker.transport.now() - began


def push_and_pull_once(worker: Worker, slices: Sequence[Slice], values: Tensor) -> None:
    """Collective over the workers, which are the servers of `slices` as well.

    Replaces flat `values` by their sum: each server adds up its slice, and sends it back.
    """
    transport, own = worker.transport, worker.rank
    others = [rank for rank in worker.workers.ranks if rank != own]
    parts = [(part.rank, values[part.first : part.end]) for part in slices]
    leaving = [transport.send(part, rank, Tag.REPLICAS) for rank, part in parts if rank != own]
    for rank, part in parts:
        if rank == own:
            arriving = [transport.receive(other, Tag.REPLICAS) for other in others]
            transport.add(part, *(each.wait() for each in arriving))
            leaving += [transport.send(part, other, Tag.REPLICAS) for other in others]
    for rank, part in parts:
        if rank != own:
            part.copy_(transport.receive(rank, Tag.REPLICAS).wait())
    for handle in leaving:
        handle.wait()


def gather_numbers(worker: Worker, numbers: Sequence[float]) -> list[list[float]]:
    """Collective over the workers: return the numbers of all, one row for each worker."""
    table = torch.zeros(worker.runtime.ranks, len(numbers), dtype=torch.float64)
    # Each in a row of its own, and zeros elsewhere: the sum has everybody's numbers, bit for bit.
    table[worker.rank] = torch.tensor(numbers, dtype=torch.float64)
    # The schedule with the fewest rounds: a decision costs a latency or two (decision 90).
    all_reduce(worker.transport, table.view(-1), "butterfly", worker.workers, Tag.AGREE)
    rows: list[list[float]] = table[list(worker.workers.ranks)].tolist()
    return rows
