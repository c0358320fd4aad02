"""The curve of a run: its snapshots put together and evaluated, after the stopwatch.

Where replicas differ every rank evaluates its own, and the chief their average.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from orchestra.exchange.average import pack
from orchestra.records.report import Point
from orchestra.tasks.task import Task, evaluate
from orchestra.trainer.evaluation import set_buffers
from orchestra.trainer.gathering import Figures, Gathered
from orchestra.worker.layout import FlatModel
from orchestra.worker.snapshots import Part

EVALUATION_BATCH = 512
MOST_JUDGED = 16
"""Replicas that are evaluated at each snapshot; the average is of all."""


def judging_data(task: Task) -> Dataset[Any] | None:
    """What snapshots are evaluated on: validation data where the task has some, else test data."""
    return task.validation if task.validation is not None else task.test


def own_figures(model: FlatModel, task: Task, parts: Sequence[Part]) -> Figures:
    """What a rank's own replica was worth at each of its snapshots, with its own buffers."""
    dataset = judging_data(task)
    found: Figures = {}
    if dataset is None:
        return found
    with kept(model):
        for index in sorted({part.index for part in parts}):
            of_index = [part for part in parts if part.index == index and not part.mirror]
            own = [part for part in of_index if part.kind == "replica"]
            own = own or [part for part in of_index if part.kind == "parameters"]
            if sum(part.values.numel() for part in own) != model.layout.size:
                continue
            with torch.no_grad():
                for part in own:
                    covered = slice(part.offset, part.offset + part.values.numel())
                    model.parameters[covered] = part.values
            set_buffers(model.buffers, [part for part in of_index if part.kind == "buffers"])
            found[index] = evaluate(task, model.module, dataset, EVALUATION_BATCH)
    return found


def judged_ranks(gathered: Gathered, seed: int) -> list[int]:
    """The ranks whose replicas are evaluated: all that differ, or `MOST_JUDGED` of them, drawn by
    the `seed` of the run."""
    ranks = sorted({rank for index in gathered.indices for rank in gathered.replicas(index)})
    if len(ranks) <= MOST_JUDGED:
        return ranks
    return sorted(random.Random(seed).sample(ranks, MOST_JUDGED))


@dataclass(frozen=True)
class Assembled:
    """When a snapshot was taken, and how far its replicas were apart; see `Point`."""

    samples: int
    seconds: float
    consensus_distance: float | None = None
    relative_distance: float | None = None


def curve(
    model: FlatModel, task: Task, gathered: Gathered, nodes: Mapping[int, Figures], below: int
) -> list[Point]:
    """The figures of every snapshot whose index is `below` that, on the chief.

    Args:
        nodes: by rank, the figures of replicas; their mean is what a point's `metrics` are, and
            the figures of the average stand beside it.
    """
    dataset = judging_data(task)
    if dataset is None:
        return []
    points = []
    with kept(model):
        for index in gathered.indices:
            if index < below and (snapshot := _assemble(model, gathered, index)) is not None:
                figures = evaluate(task, model.module, dataset, EVALUATION_BATCH)
                own = {str(rank): each[index] for rank, each in nodes.items() if index in each}
                points.append(_point(snapshot, figures, own, gathered.replicas(index)))
    return points


def _point(
    snapshot: Assembled, figures: dict[str, float], own: dict[str, Any], replicas: list[int]
) -> Point:
    about: dict[str, Any] = asdict(snapshot)
    if not replicas or not own:
        return Point(metrics=figures, **about)
    mean = {name: fmean(each[name] for each in own.values()) for name in figures}
    return Point(metrics=mean, average=figures, nodes=own, replicas=len(replicas), **about)


class Mean:
    """The weighted mean of vectors that come one at a time, each covering some elements.

    It is taken in float64. `square` is, for each element, sum_i w_i (x_i - mean)^2 (Welford's
    update with weights), so that no vector has to be kept.
    """

    def __init__(self, size: int) -> None:
        self.total = torch.zeros(size, dtype=torch.float64)
        self.weight = torch.zeros(size, dtype=torch.float64)
        self.square = torch.zeros(size, dtype=torch.float64)

    def add(self, part: Part) -> None:
        """One more vector."""
        covered = slice(part.offset, part.offset + part.values.numel())
        total, weight = self.total[covered], self.weight[covered]
        values = part.values.double().cpu()
        before = torch.where(weight > 0, total / weight, values)
        total += part.weight * values
        weight += part.weight
        self.square[covered] += part.weight * (values - before) * (values - total / weight)

    @property
    def complete(self) -> bool:
        """Whether there is a mean of every element."""
        return bool((self.weight > 0).all())

    @property
    def mean(self) -> Tensor:
        """Shape: [size]."""
        return self.total / self.weight

    @property
    def distance(self) -> float:
        """sqrt(sum_i p_i ||x_i - mean||^2), p_i being the share of vector i in the weight."""
        return math.sqrt(max(0.0, float((self.square / self.weight).sum())))


def _assemble(model: FlatModel, gathered: Gathered, index: int) -> Assembled | None:
    """Set `model` to snapshot `index`.

    Parts that cover the same elements are averaged by their weights. None: it does not cover all
    parameters, since a run was stopped in between.
    """
    means: dict[str, Mean] = defaultdict(partial(Mean, model.layout.size))
    buffers, samples, seconds = [], 0, 0.0
    for part in gathered.parts(index):
        if part.kind == "buffers":
            buffers.append(part)
            continue
        means[part.kind].add(part)
        samples, seconds = max(samples, part.samples), max(seconds, part.seconds)
    agreed = means["parameters"]
    if not agreed.complete:
        return None
    with torch.no_grad():
        model.parameters.copy_(agreed.mean)
    set_buffers(model.buffers, buffers)
    if not gathered.replicas(index):
        return Assembled(samples, seconds)
    replicas = means.get("replica", agreed)
    distance, norm = replicas.distance, float(replicas.mean.norm())
    return Assembled(samples, seconds, distance, distance / norm if norm else None)


def moments(held: Sequence[Part], size: int) -> list[Point]:
    """When each snapshot was taken, of parameters that have no values, `size` in all; no figures.

    A snapshot that does not cover all of them is left out; what mirrors other
    parts counts where those are lost.
    """
    found = []
    for index in sorted({part.index for part in held}):
        slices = [p for p in held if p.index == index and p.kind == "parameters"]
        there = {part.offset for part in slices if not part.mirror}
        slices = [part for part in slices if not (part.mirror and part.offset in there)]
        covered = 0
        for part in sorted(slices, key=lambda part: part.offset):
            if part.offset <= covered:
                covered = max(covered, part.offset + part.values.numel())
        if covered == size:
            samples, seconds = (max(p.samples for p in slices), max(p.seconds for p in slices))
            found.append(Point(samples, seconds, {}))
    return found


@contextmanager
def kept(model: FlatModel) -> Iterator[None]:
    """Whatever its parameters and buffers are set to inside, outside they are what they were."""
    parameters = model.parameters.clone()
    buffers = [packed.values for packed in pack(model.buffers)]
    try:
        yield
    finally:
        with torch.no_grad():
            model.parameters.copy_(parameters)
        for packed, values in zip(pack(model.buffers), buffers, strict=True):
            packed.values.copy_(values)
            packed.unpack()
