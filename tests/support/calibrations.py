"""Calibrations with figures known beforehand."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from tests.support.training import settings

from orchestra.cluster.calibration import Calibration, Curve, Messages, Parameter, TaskCosts, Timing
from orchestra.cluster.nodes import MemoryCosts
from orchestra.engines.simulation.costs import key_of
from orchestra.optimizers.settings import Optimizer
from orchestra.strategies.base import Strategy
from orchestra.trainer.settings import Run

TASK = "digits(channels=2, hidden=8)"
SGD = Optimizer.parse("SGD(lr=0.1)", where="test")


def flat(seconds: float) -> Curve:
    return Curve(((1.0, seconds),))


def timing(threads: int, gradient: float, update: float, step: float) -> Timing:
    """Of a sample, of an element, of a step of one sample."""
    return Timing(threads, flat(gradient), flat(update), flat(step))


PARAMETERS = (
    Parameter("first", 30, 0.2, 1.0),
    Parameter("second", 10, 0.1, 0.5),
)
COSTS = TaskCosts(
    *key_of(TASK, SGD, "float32"),
    batch_size=4,
    cold=0.5,
    shared_speed=0.9,
    refill=0.001,
    sample_flops=1e6,
    timings=(timing(1, 1.0, 0.01, 0.1), timing(2, 0.6, 0.01, 0.1)),
    parameters=PARAMETERS,
)
CALIBRATION = Calibration(
    measured_at="2026-11-21T10:00:00+00:00",
    machine={"processor": "abacus", "cores": 2, "packages": {"torch": "2"}},
    cores=2,
    busy_with_others=0.0,
    time_slice=0.004,
    work={"add": Curve(((1.0, 1.0), (3.0, 5.0))), "mix": flat(2.0), "encode": flat(3.0)},
    messages=Messages(
        send=flat(0.1),
        receive=flat(0.2),
        local=flat(0.05),
        one_way=flat(0.4),
        handling=0.02,
        collective=0.03,
        buffer_bytes=100,
        latency=0.1,
        bandwidth=1e9,
    ),
    tasks=(COSTS,),
    in_memory=MemoryCosts(),
)


def run_of(strategy: Strategy, ranks: int, task: str = TASK, **training: Any) -> Run:
    return dataclasses.replace(settings(strategy, ranks, "images()", **training), task=task)


def kept(calibration: Calibration, folder: Path) -> Path:
    path = folder / "machine.json"
    path.write_text(calibration.to_json())
    return path
