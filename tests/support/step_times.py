"""How long a step of a training takes in virtual time, where all figures are simple ones."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import Literal

from tests.support.simulated import FREE, cluster

from orchestra.cluster import Cluster
from orchestra.cluster.nodes import Jitter, Overhead
from orchestra.engines.simulation.simulate import Simulation
from orchestra.optimizers.settings import Optimizer
from orchestra.records.report import RankReport
from orchestra.settings import parse
from orchestra.strategies.base import Strategy
from orchestra.strategies.parameter_server import ParameterServer
from orchestra.strategies.registry import STRATEGIES
from orchestra.trainer.program import train
from orchestra.trainer.settings import Run, Training
from orchestra.worker.runtime import SilentReporter, Work

NEXT_TO_NOTHING = 1e-15
"""Seconds of work that a formula does not speak of: no work takes none."""


@dataclass(frozen=True)
class Figures:
    """Seconds of each sample of a gradient or a pass, and of each element of other work."""

    gradient: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    update: float = 0.0
    mix: float = 0.0
    encode: float = 0.0
    step: float = 0.0
    tensors: int = 1
    flops: float = 1e9

    def seconds(self, work: Work, threads: int = 1) -> float:
        each: float = getattr(self, work.kind)
        return max(each * work.amount, NEXT_TO_NOTHING)

    def needed(self, slot: int) -> float:
        return 0.0

    def ready(self, slot: int) -> float:
        """A backward pass reaches one tensor after the other, evenly from its beginning on."""
        return (slot + 1) / self.tensors


@dataclass(frozen=True)
class Timed:
    """A training of shapes: so many workers, each with batches of one sample."""

    strategy: str
    workers: int
    elements: int
    figures: Figures
    on: str | Cluster
    overhead: Overhead = FREE
    jitter: Jitter | None = None
    seed: int = 0
    bucket_megabytes: float = 1e9
    work: Literal["shared", "equal"] = "equal"

    def reports(self, steps: int) -> tuple[RankReport, ...]:
        """What each rank says after `steps` steps of each worker, times a small number.

        Dedicated servers have their part of the budget, so that workers take more.
        """
        strategy = parse(self.strategy, STRATEGIES, where="test")
        assert isinstance(strategy, Strategy)
        ranks = self.workers
        if isinstance(strategy, ParameterServer) and strategy.placement == "dedicated":
            ranks += strategy.servers
        training = Training(
            ranks=ranks,
            batch_size=1,
            equal="worker_batch",
            steps=steps * self.workers // gcd(self.workers, ranks),
            optimizer=Optimizer("SGD", {"lr": 0.1}),
            engine="simulation",
            tensors="shapes",
            bucket_megabytes=self.bucket_megabytes,
            work=self.work,
        )
        task = f"synthetic({self.elements}, tensors={self.figures.tensors}, sample_flops=1)"
        run = Run("test", task, strategy, self.seed, training)
        outcome = Simulation(
            cluster(self.on) if isinstance(self.on, str) else self.on,
            ranks,
            self.figures,
            self.overhead,
            SilentReporter(),
            seed_number=self.seed,
            jitter=self.jitter,
            values=False,
        ).run(lambda runtime: train(runtime, (run, Path())))
        assert (outcome.failure, outcome.bad_input) == (None, None)
        return outcome.results

    def step_seconds(self, one: int = 3, other: int = 6) -> float:
        """What each further step of a worker takes, between two lengths of the training."""
        few, many = self.reports(one), self.reports(other)
        return (_seconds(many) - _seconds(few)) / (many[0].steps - few[0].steps)


def _seconds(reports: tuple[RankReport, ...]) -> float:
    return max(report.train_seconds for report in reports)
