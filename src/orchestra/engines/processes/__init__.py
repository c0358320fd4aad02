"""One operating-system process per rank, in wall-clock time, on one machine or on many."""

from orchestra.engines.processes.launch import launch
from orchestra.engines.processes.watcher import Outcome

__all__ = ["Outcome", "launch"]
