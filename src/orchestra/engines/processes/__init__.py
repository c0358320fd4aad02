"""One operating-system process a rank, in wall-clock time, on one machine or on many."""

from orchestra.engines.processes.launch import Outcome, launch

__all__ = ["Outcome", "launch"]
