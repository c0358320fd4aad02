"""Collectives as data: who sends which piece of a vector to whom, round by round."""

from orchestra.schedules.all_reduce import (
    ALL_REDUCE,
    broadcast,
    ring_all_gather,
    ring_reduce_scatter,
)
from orchestra.schedules.hierarchical import hierarchical
from orchestra.schedules.pipeline import PIPELINE
from orchestra.schedules.ring_order import ring_order
from orchestra.schedules.schedule import COPY, REDUCE, Round, Schedule

__all__ = [
    "ALL_REDUCE",
    "COPY",
    "PIPELINE",
    "REDUCE",
    "Round",
    "Schedule",
    "broadcast",
    "hierarchical",
    "ring_all_gather",
    "ring_order",
    "ring_reduce_scatter",
]
