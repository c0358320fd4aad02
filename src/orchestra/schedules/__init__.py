"""Collectives as data: who sends which piece of a vector to whom, round by round."""

from orchestra.schedules.collectives import (
    ALL_REDUCE,
    COPY,
    REDUCE,
    Round,
    Schedule,
    broadcast,
    hierarchical,
    ring_all_gather,
    ring_reduce_scatter,
)
from orchestra.schedules.ring_order import ring_order

__all__ = [
    "ALL_REDUCE", "COPY", "REDUCE", "Round", "Schedule", "broadcast", "hierarchical",
    "ring_all_gather", "ring_order", "ring_reduce_scatter",
]  # fmt: skip
