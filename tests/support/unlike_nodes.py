"""Clusters of unlike nodes, and runs on them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.support.simulated import simulated

from orchestra.optimizers.settings import Optimizer
from orchestra.records.record import RunRecord
from orchestra.settings import parse
from orchestra.strategies.base import Strategy
from orchestra.strategies.registry import STRATEGIES
from orchestra.trainer.settings import Run, Training

LINK = "link: {bandwidth: 1 Gbit/s, latency: 50 us}"
TASK = "synthetic(100_000, tensors=2, sample_flops=1e9)"


def made(
    folder: Path, on: str, strategy: str = "Single()", *, task: str = TASK, **settings: object
) -> RunRecord:
    written = parse(strategy, STRATEGIES, where="test")
    assert isinstance(written, Strategy)
    training = Training(
        ranks=4, batch_size=32, steps=4, optimizer=Optimizer("SGD", {"lr": 0.1}),
        engine="simulation", tensors="shapes",
    )  # fmt: skip
    run = Run("test", task, written, training=replace(training, **settings))  # type: ignore[arg-type]
    return simulated(run, folder, on)
