"""Collectives as data: who sends which piece of a vector to whom, round by round."""

from orchestra.schedules.all_reduce import ALL_REDUCE, broadcast
from orchestra.schedules.schedule import COPY, REDUCE, Round, Schedule

__all__ = ["ALL_REDUCE", "COPY", "REDUCE", "Round", "Schedule", "broadcast"]
