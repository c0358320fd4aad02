"""At which bandwidth one strategy begins to be faster than another, from short simulations."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from orchestra.cluster import Cluster, load_cluster
from orchestra.cluster.units import BANDWIDTH
from orchestra.engines.simulation.cost_source import CostSource
from orchestra.engines.simulation.training import simulate_run
from orchestra.errors import InputError
from orchestra.strategies.base import roles_of
from orchestra.trainer.settings import Run

if TYPE_CHECKING:
    from orchestra.worker.runtime import Reporter, Runtime

STRIDE = 4.0
"""Ratio of the bandwidths that are tried first."""
FURTHEST = 5
"""How many of these strides away the search ends: a thousand times as much, or as little."""
FURTHEST_FACTOR = STRIDE**FURTHEST
HALVINGS = 4
"""Of the stride in which the two change places: it is known to 9 % then."""
MOST_STEPS, FEWEST_STEPS = 100, 16
RANK_STEPS = 4000
"""Steps of all ranks together that a simulation has where it can have fewer than `MOST_STEPS`."""


@dataclass(frozen=True)
class Rival:
    """A run, and how many of its steps it needs: to the target, or for the samples of all."""

    run: Run
    steps: float
    source: CostSource


@dataclass(frozen=True)
class BreakEven:
    """Where a technique pays.

    Attributes:
        pays: "below" or "above" a bandwidth, "always" or "never" as far as was searched; None where
            that is not known.
        factor: that bandwidth over the cluster's.
        bandwidth: of the slowest link at that factor, in bytes/s.
        equal: whether all links have that bandwidth.
        reason: why it is not known.
    """

    pays: Literal["below", "above", "always", "never"] | None = None
    factor: float | None = None
    bandwidth: float | None = None
    equal: bool = True
    reason: str | None = None

    def __str__(self) -> str:
        if self.pays is None:
            return f"not known: {self.reason}"
        if self.bandwidth is None:
            most = f"{FURTHEST_FACTOR:.0f}"
            return f"{self.pays}, from 1/{most} to {most} times the bandwidth"
        links = "links of" if self.equal else "a slowest link of"
        return f"{self.pays} {links} {BANDWIDTH.write(float(f'{self.bandwidth:.2g}'))}"


def search(faster: Callable[[float], bool]) -> tuple[Literal["below", "above"], float] | bool:
    """Find the factor on the bandwidth at which `faster(factor)` changes, and the side it holds on.

    From a factor of 1 the search goes up first if it holds there, else down, and then the other
    way. Returns a bool if it is the same everywhere within `FURTHEST` strides.
    """
    now = faster(1.0)
    for sign in (1, -1) if now else (-1, 1):
        for stride in range(1, FURTHEST + 1):
            if faster(STRIDE ** (sign * stride)) is not now:
                # Bisect in the exponent: bandwidths are searched by ratios.
                inner, outer = float(sign * (stride - 1)), float(sign * stride)
                for _ in range(HALVINGS):
                    middle = (inner + outer) / 2
                    if faster(STRIDE**middle) is now:
                        inner = middle
                    else:
                        outer = middle
                side: Literal["below", "above"] = "below" if now is (sign > 0) else "above"
                return side, STRIDE ** ((inner + outer) / 2)
    return now


@dataclass(frozen=True)
class Question:
    """Where is `technique` faster than `plain`? To be answered within so many seconds."""

    technique: Rival
    plain: Rival
    seconds: float


def find_break_even(runtime: Runtime, question: Question) -> BreakEven:
    """Answer the question; the program of a process."""
    from orchestra.worker.runtime import SilentReporter

    name = question.plain.run.training.cluster
    cluster = load_cluster(name, where="cluster", folder=Path())
    links = cluster.links
    if not links:
        return BreakEven(reason="the cluster is one node, without links")
    reporter, done = SilentReporter(), itertools.count(1)
    deadline = time.perf_counter() + question.seconds

    def seconds(rival: Rival, factor: float) -> float:
        runtime.reporter.progress(step=next(done), samples=0)
        if runtime.reporter.stop_requested():
            raise InputError("stopped")
        if time.perf_counter() > deadline:
            raise InputError(f"not found within {question.seconds:g} s")
        return rival.steps * _step_seconds(rival, cluster.scaled(bandwidth=factor), reporter)

    def faster(factor: float) -> bool:
        return seconds(question.technique, factor) < seconds(question.plain, factor)

    try:
        found = search(faster)
    except InputError as error:
        return BreakEven(reason=str(error))
    if isinstance(found, bool):
        return BreakEven("always" if found else "never")
    side, factor = found
    equal = len({link.bandwidth for link in links}) == 1
    return BreakEven(side, factor, min(link.bandwidth for link in links) * factor, equal)


def _step_seconds(rival: Rival, cluster: Cluster, reporter: Reporter) -> float:
    """Return the seconds of a step, in a simulation of time alone.

    Raises:
        InputError: the strategy or the task needs values.
    """
    run, training = rival.run, rival.run.training
    most = min(max(RANK_STEPS // training.ranks, FEWEST_STEPS), MOST_STEPS)
    steps = max(1, min(most, math.ceil(rival.steps)))
    training = replace(
        training,
        epochs=None,
        steps=steps,
        tensors="shapes",
        clip_norm=None,
        target=None,
        checkpoint_every=None,
        snapshots=0,
        trace_steps=0,
        record_order=False,
        tensorboard=False,
    )
    short = replace(run, training=training)
    ranks = len(roles_of(run.strategy, training.ranks).shares)
    outcome, *_ = simulate_run(short, rival.source, cluster, ranks, Path(), reporter)
    if problem := outcome.bad_input or outcome.failure:
        raise InputError(problem)
    reports = [report for report in outcome.results if report is not None]
    return float(max(report.train_seconds for report in reports) / steps)
