"""Run a schedule over a transport."""

from orchestra.collectives.executor import Group, all_reduce, broadcast, execute, gather_objects

__all__ = ["Group", "all_reduce", "broadcast", "execute", "gather_objects"]
