"""Simulated runs for tests: on a cluster, from settings or from a program of a rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest

from orchestra.cluster import Cluster, load_cluster
from orchestra.cluster.nodes import Line, MemoryCosts, Overhead, Tcp
from orchestra.engines.run import train_run
from orchestra.engines.simulation.costs import Costs, CostSource
from orchestra.engines.simulation.simulate import Simulation, SimulationOutcome
from orchestra.engines.simulation.training import Assignment, program
from orchestra.records.record import RunRecord
from orchestra.trainer.settings import AUTO, NONE, Run
from orchestra.worker.runtime import Runtime, SilentReporter, Work

FREE = Overhead(
    send=Line(1e-15, 0.0),
    receive=Line(1e-15, 0.0),
    add=0.0,
    buffer=0,
    wire=1.0,
    in_memory=MemoryCosts(0.0, 0.0, 0.0, 0.0),
    tcp=Tcp(0.0, first_window=1e18, window=1e18, queue=0.0),
)
"""Messages that cost nothing but their way."""


def cluster(text: str) -> Cluster:
    return load_cluster(text, where="test", folder=Path())


def simulated(run: Run, folder: Path, on: str = "lan_1gbit") -> RunRecord:
    """The record of `run` on the cluster `on`; its ranks are threads of this process."""
    folder.mkdir(parents=True, exist_ok=True)
    figures = NONE if run.training.calibration == AUTO else run.training.calibration
    training = replace(run.training, engine="simulation", cluster=on, calibration=figures)
    with patch("orchestra.engines.simulation.training.launch", _launch_here):
        return train_run(replace(run, training=training), folder, quiet=True)


def _launch_here(program: Callable[..., Any], argument: Any, ranks: int, **_: Any) -> Any:
    """What `launch` does with a process of its own, which takes a second."""
    assert ranks == 1
    runtime = SimpleNamespace(reporter=SilentReporter())
    return SimpleNamespace(results=(program(runtime, argument),))


def simulated_here(run: Run, folder: Path) -> SimulationOutcome:
    """The same in this process: what the ranks told of a `run` whose engine is the simulation."""
    ranks = len(run.strategy.roles(run.training.ranks).shares)
    runtime = cast(Runtime, SimpleNamespace(reporter=SilentReporter()))
    outcome = program(runtime, Assignment(run, folder, ranks, CostSource("assumed")))
    assert (outcome.failure, outcome.bad_input) == (None, None)
    return outcome


class Second:
    """Every unit of work takes a second; gradients become ready as the backward goes on evenly."""

    flops = 1e9

    def __init__(self, slots: int = 1) -> None:
        self.slots = slots

    def seconds(self, work: Work, threads: int = 1) -> float:
        return float(work.amount)

    def needed(self, slot: int) -> float:
        return 0.0

    def ready(self, slot: int) -> float:
        return 1 - slot / self.slots


def assert_agree(found: Sequence[Any], wanted: Sequence[Any]) -> None:
    """Times agree to 1e-12 of themselves, the rest exactly."""
    assert len(found) == len(wanted)
    for value, other in zip(found, wanted, strict=True):
        if isinstance(other, float):
            assert value == pytest.approx(other, rel=1e-12, abs=1e-15)
        else:
            assert value == other


def run_ranks(
    ranks: int,
    program: Callable[[Runtime], Any],
    on: str | Cluster = "lan_1gbit(nodes=32)",
    overhead: Overhead = FREE,
    costs: Costs | None = None,
) -> SimulationOutcome:
    """Simulate `program` on every rank, in this process."""
    there = cluster(on) if isinstance(on, str) else on
    return Simulation(there, ranks, costs or Second(), overhead, SilentReporter()).run(program)
