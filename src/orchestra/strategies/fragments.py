"""Fragments of a replica, and their means over the workers. A fragment is averaged as a whole."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from orchestra import exchange
from orchestra.settings.base import COMMON

if TYPE_CHECKING:
    from torch import Tensor

    from orchestra.compression.base import Compressor
    from orchestra.strategies.outer import OuterState
    from orchestra.transports.protocol import Pending, Transport
    from orchestra.worker.worker import Worker

NEGLIGIBLE_WEIGHT = 2.0**-100
"""The weight of a replica without samples, so that the weights are never all 0."""

Counts = tuple[int, int | None]
"""The samples behind an average: of this worker, and of all; None in a loop that cannot know."""


@dataclass
class Fragment:
    """Elements [first, end) of the flat parameters, which are averaged at once."""

    first: int
    end: int
    outer: OuterState = field(metadata=COMMON)
    samples: int = 0  # of this worker since the last average
    total: int = 0  # of all workers
    averages: int = field(default=0, metadata=COMMON)  # begun so far
    # The last average, for compression, if `outer` keeps no x_0
    anchor: Tensor | None = field(default=None, metadata=COMMON)
    travelling: Tensor | None = None  # an average in flight
    sent: Tensor | None = None  # the values of this worker in it, for CoCoD-SGD
    due: int = 0  # the step at which the average in flight is applied
    flow: Pending[None] | None = field(default=None, init=False)

    @property
    def weight(self) -> float:
        """The weight of this replica in an exact mean: its samples since the last average."""
        return self.samples or NEGLIGIBLE_WEIGHT

    def replica(self, worker: Worker) -> Tensor:
        return worker.parameters[self.first : self.end]

    def end_round(self, worker: Worker) -> Counts:
        """Return the samples of the round; the next one begins."""
        counts = self.samples, None if worker.own_loop else self.total
        self.samples = self.total = 0
        self.averages += 1
        return counts

    @property
    def reference(self) -> Tensor:
        """The values that all workers know of this fragment: differences are taken from them."""
        known = self.anchor if self.outer.start is None else self.outer.start
        assert known is not None
        return known

    def land(self) -> None:
        """Wait for an average that is in flight."""
        if self.flow is not None:
            self.flow.wait()
            self.flow = None


@dataclass
class ReplicaMean:
    """The mean of the replicas, weighted by samples."""

    worker: Worker
    algorithm: str

    def take(
        self, transport: Transport, values: Tensor, fragment: Fragment, counts: Counts
    ) -> None:
        """Replace `values`, a copy of `fragment`, by their mean over the workers."""
        exchange.average_replicas(self.worker, transport, values, self.algorithm, *counts)


@dataclass
class CompressedMean(ReplicaMean):
    """The mean by compressed differences: x <- x_0 + sum_w C(x_w - x_0)."""

    compressor: Compressor
    state: exchange.CompressionState

    def take(
        self, transport: Transport, values: Tensor, fragment: Fragment, counts: Counts
    ) -> None:
        worker, algorithm = self.worker, self.algorithm
        if len(worker.workers) == 1:
            return
        part = exchange.part_of_samples(worker, transport, algorithm, *counts)
        values.sub_(fragment.reference).mul_(part)
        exchange.average_compressed(
            worker, transport, values, fragment.first, self.compressor, self.state, algorithm,
            fragment.averages - 1,
        )  # fmt: skip
        values.add_(fragment.reference)
        if fragment.anchor is not None:
            fragment.anchor.copy_(values)  # the same on all workers
