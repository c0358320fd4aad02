"""How long a message takes to a rank that computes: emulated nodes beside the simulation.

Rank 0 of two sends a message at once; rank 1 computes first, and waits for it then. Figures are
seconds since both began: when rank 1 has the message, and when rank 0 is free. Linux, root.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from orchestra.bench.timing import run_ranks
from orchestra.cluster import Cluster, load_cluster
from orchestra.cluster.calibration import assumed_overhead
from orchestra.engines.emulation.nodes import EmulatedCluster
from orchestra.engines.simulation.simulate import Simulation
from orchestra.worker.runtime import Runtime, SilentReporter, Work

TAG = 7
CASES = ((2, 1.0), (5, 0.2), (5, 1.0), (20, 1.0), (20, 3.0))
"""MB of the message, and seconds that its receiver computes."""


class Seconds:
    """A unit of work takes a second on the nodes of a cluster."""

    flops = 1e9

    def __init__(self, speed: float) -> None:
        self._speed = speed

    def seconds(self, work: Work, threads: int = 1) -> float:
        return float(work.amount) * self._speed

    def needed(self, slot: int) -> float:
        return 0.0

    def ready(self, slot: int) -> float:
        return 1.0
