"""Evaluate after the stopwatch: the curve of a run, and its final model.

First every rank hands in what it has, without values; so the leader knows that all have ended, and
nothing of what follows takes time from one that still trains. From then on the others answer the
leader's requests, so that no rank ever holds more than its own snapshots and one part of another's.
Where replicas differ every rank evaluates its own, and the leader their average.
"""

from __future__ import annotations

import os
import random
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import count
from statistics import fmean
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from orchestra.collectives import receive_object, send_object
from orchestra.errors import InputError, PeerLost, nearest
from orchestra.optimizers.state import undisturbed
from orchestra.records.report import Point
from orchestra.tasks.task import Task, evaluate
from orchestra.transports.tags import Tag
from orchestra.worker.layout import FlatModel, Layout, buffer_places
from orchestra.worker.runtime import chosen_threads, usable_cores
from orchestra.worker.snapshots import Contribution, RunningMean, buffers_vector, set_buffers
from orchestra.worker.worker import Worker

T = TypeVar("T")
EVALUATION_BATCH = 512
# To evaluate all of 64 ranks took a simulation 59 s in place of 37.
MAX_EVALUATED_REPLICAS = 16
"""The most replicas that are evaluated at each snapshot; the average is over all of them."""

SnapshotMetrics = dict[int, dict[str, float]]
"""The loss and the metrics of each snapshot, by its index."""

OwnMetrics = Callable[[], SnapshotMetrics]

_EVALUATE, _DONE = -1, -2
"""Requests other than the number of a part."""


def hand_in(worker: Worker, leader: int, metrics: OwnMetrics) -> None:
    """Tell the leader which parts this rank has, and answer its requests; on all other ranks.
    `metrics`: those of this rank's own snapshots."""
    parts, transport = worker.snapshots.parts, worker.transport
    send_object(transport, [{**vars(part), "values": None} for part in parts], leader)
    # The leader makes no requests of a rank without parts.
    while parts:
        wanted = int(transport.receive(leader, Tag.PARTS).wait())
        if wanted == _DONE:
            return
        if wanted == _EVALUATE:
            send_object(transport, list(metrics().items()), leader)
        else:
            transport.send(parts[wanted].values, leader, Tag.PARTS).wait()


class Held(NamedTuple):
    """A part that lies on `rank`, `number` in its list; `head` has no values where it is away."""

    rank: int
    number: int
    head: Contribution


class Gathered:
    """The parts of all ranks, on the leader; those that lie elsewhere come when they are read.

    Where it is `tolerant`, the parts of a rank that is lost meanwhile are left out.
    """

    def __init__(self, worker: Worker, *, tolerant: bool) -> None:
        self._worker = worker
        self._tolerant = tolerant
        self._lost: set[int] = set()
        own = worker.snapshots.parts
        self._held = [Held(worker.rank, number, part) for number, part in enumerate(own)]
        for rank in worker.everyone.ranks:
            if rank != worker.rank:
                heads = self._asked(rank, partial(receive_object, worker.transport, rank)) or ()
                for number, head in enumerate(heads):
                    part = Contribution(**{**head, "values": torch.empty(0)})
                    self._held.append(Held(rank, number, part))

    @property
    def indices(self) -> list[int]:
        """The snapshots that there is a part of."""
        return sorted({held.head.index for held in self._held})

    def parts(self, index: int) -> Iterator[Contribution]:
        """Yield contributions to snapshot `index`, with values; mirrors replace what was lost."""
        there = set()
        for held in sorted(self._of(index), key=lambda held: held.head.mirror):
            key = held.head.kind, held.head.offset
            if held.head.mirror and key in there:
                continue
            values = self._values(held)
            if values is not None:
                there.add(key)
                yield replace(held.head, values=values)

    def replicas(self, index: int) -> list[int]:
        """Return the ranks that had replicas of their own at snapshot `index`.

        Empty where all had the same model.
        """
        of_index = self._of(index)
        kind = _kind_of_own(held.head for held in of_index)
        apart = [held for held in of_index if held.head.kind == kind and not held.head.mirror]
        # Parts at different offsets are slices of one model, as servers hold them.
        overlapping = len({held.head.offset for held in apart}) < len(apart)
        return sorted({held.rank for held in apart}) if overlapping else []

    def evaluated(self, seed: int, metrics: OwnMetrics) -> dict[int, SnapshotMetrics]:
        """Return the metrics of replicas that differ, at each snapshot, by rank.

        All ranks evaluate at the same time. `seed`: draws `MAX_EVALUATED_REPLICAS` of the ranks
        where there are more. `metrics`: those of this rank's own snapshots.
        """
        ranks: Collection[int] = {rank for i in self.indices for rank in self.replicas(i)}
        if len(ranks) > MAX_EVALUATED_REPLICAS:
            ranks = random.Random(seed).sample(sorted(ranks), MAX_EVALUATED_REPLICAS)
        own = self._worker.rank
        others = [rank for rank in sorted(ranks) if rank != own]
        # All are asked before anybody is waited for, so that ranks evaluate at the same time.
        for rank in others:
            self._ask(rank, _EVALUATE)
        found = {own: metrics()} if own in ranks else {}
        for rank in others:
            answer = self._asked(rank, partial(receive_object, self._worker.transport, rank))
            if answer is not None:
                found[rank] = {int(index): metrics for index, metrics in answer}
        return found

    def close(self) -> None:
        """Tell the others that nothing more is needed of them."""
        for rank in {held.rank for held in self._held} - {self._worker.rank}:
            self._ask(rank, _DONE)

    def _of(self, index: int) -> list[Held]:
        return [held for held in self._held if held.head.index == index]

    def _values(self, held: Held) -> Tensor | None:
        if held.rank == self._worker.rank:
            return held.head.values
        self._ask(held.rank, held.number)
        transport = self._worker.transport
        return self._asked(held.rank, lambda: transport.receive(held.rank, Tag.PARTS).wait())

    def _ask(self, rank: int, request: int) -> None:
        transport = self._worker.transport
        self._asked(rank, lambda: transport.send(torch.tensor([request]), rank, Tag.PARTS).wait())

    def _asked(self, rank: int, ask: Callable[[], T]) -> T | None:
        """Return what `ask` gets of `rank`; None where that is lost, if it may be."""
        if rank not in self._lost:
            try:
                return ask()
            except PeerLost as lost:
                if not self._tolerant:
                    raise
                self._lost.add(lost.rank)
        return None


def _kind_of_own(parts: Iterable[Contribution]) -> str:
    """Return the kind of the parts that tell what a rank's own parameters were."""
    return "replica" if any(part.kind == "replica" for part in parts) else "parameters"


def evaluation_data(task: Task) -> Dataset[Any] | None:
    """Return the data that snapshots are evaluated on: validation data if there are any."""
    return task.validation if task.validation is not None else task.test


def require_metric(metric: str, task: Task, model: nn.Module, dataset: Dataset[Any]) -> None:
    """Raise `InputError` unless `task` gives `metric`: a run towards it would never arrive."""
    with undisturbed():
        known = evaluate(task, model, dataset, EVALUATION_BATCH)
    if metric not in known:
        raise InputError(f"target: the task has no metric {metric!r}; {nearest(metric, known)}")


def own_metrics(model: FlatModel, task: Task, parts: Sequence[Contribution]) -> SnapshotMetrics:
    """Return the metrics of a rank's own replica and buffers at each of its snapshots."""
    dataset = evaluation_data(task)
    found: SnapshotMetrics = {}
    if dataset is None:
        return found
    with ExitStack() as stack:
        stack.callback(model.keep())
        for index in sorted({part.index for part in parts}):
            of_index = [part for part in parts if part.index == index and not part.mirror]
            own = [part for part in of_index if part.kind == _kind_of_own(of_index)]
            # The run was stopped between the parts of this snapshot.
            if sum(part.values.numel() for part in own) != model.layout.size:
                continue
            with torch.no_grad():
                for part in own:
                    model.parameters[part.covered] = part.values
            set_buffers(model.buffers, [part for part in of_index if part.kind == "buffers"])
            found[index] = evaluate(task, model.module, dataset, EVALUATION_BATCH)
    return found


def points_of(
    model: FlatModel,
    task: Task,
    gathered: Gathered,
    nodes: Mapping[int, SnapshotMetrics],
    below: int,
) -> list[Point]:
    """Return the figures of all snapshots with an index less than `below`, on the leader.

    `nodes`: the figures of replicas, by rank; their mean becomes the `metrics` of a point, and the
    figures of the average model its `average`.
    """
    dataset, points = evaluation_data(task), []
    if dataset is None:
        return []
    with ExitStack() as stack:
        stack.callback(model.keep())
        for index in gathered.indices:
            point = _assemble(model, gathered, index) if index < below else None
            if point is None:
                continue
            figures = evaluate(task, model.module, dataset, EVALUATION_BATCH)
            own = {str(rank): each[index] for rank, each in nodes.items() if index in each}
            replicas = gathered.replicas(index)
            if replicas and own:
                mean = {name: fmean(each[name] for each in own.values()) for name in figures}
                point = replace(point, average=figures, nodes=own, replicas=len(replicas))
                figures = mean
            points.append(replace(point, metrics=figures))
    return points


def _assemble(model: FlatModel, gathered: Gathered, index: int) -> Point | None:
    """Set `model` to snapshot `index`; return when that was taken, without any figures.

    Parts that cover the same elements are averaged by their weights. Return None if the parts do
    not cover all parameters, as where a run was stopped in between.
    """
    means: dict[str, RunningMean] = defaultdict(partial(RunningMean, model.layout.size))
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
        return Point(samples, seconds, {})
    replicas = means.get("replica", agreed)
    distance, norm = replicas.distance, float(replicas.mean.norm())
    return Point(samples, seconds, {}, distance, distance / norm if norm else None)


def moments(held: Sequence[Contribution], size: int) -> list[Point]:
    """Return when each snapshot of a run of shapes was taken, without figures.

    `size` is the number of parameters. A snapshot that does not cover all of them is left out; a
    mirror counts where the part that it mirrors is lost.
    """
    found = []
    for index in sorted({part.index for part in held}):
        slices = [part for part in held if (part.index, part.kind) == (index, "parameters")]
        there = {part.offset for part in slices if not part.mirror}
        slices = [part for part in slices if not (part.mirror and part.offset in there)]
        # Equal ones are the same slice of the model, on several ranks; others do not overlap.
        if sum(count for _, count in {(p.offset, p.values.numel()) for p in slices}) == size:
            seconds = max(part.seconds for part in slices)
            found.append(Point(max(part.samples for part in slices), seconds, {}))
    return found


# Buffers, and parts of a model


def agree_on_buffers(worker: Worker, samples: int, leader: int) -> None:
    """After an asynchronous run: the leader takes the sample-weighted mean of the buffers.
    `samples` are those of this rank. Only ranks that have data at the end take part."""
    vector, workers = buffers_vector(worker.buffers), worker.workers.ranks
    if vector is None:
        return
    weighted = torch.cat([vector, vector.new_tensor([samples])])
    if worker.rank != leader:
        if worker.rank in workers:
            worker.transport.send(weighted, leader, Tag.PARTS).wait()
        return
    parts, there = [], {leader, *worker.everyone.ranks}
    for rank in (rank for rank in workers if rank in there):
        with suppress(PeerLost):
            own = rank == leader
            given = weighted if own else worker.transport.receive(rank, Tag.PARTS).wait()
            # A run of shapes has no values, and the weight of a rank without samples is 0.
            if not given.is_meta and given[-1] > 0:
                parts.append(Contribution(0, 0, 0.0, 0, given[:-1], float(given[-1]), "buffers"))
    set_buffers(worker.buffers, parts)


def put_together(module: nn.Module, part: Contribution) -> None:
    """Give `module` the values of some rank's `part`."""
    if part.kind == "buffers":
        buffers = [(name, getattr(owner, leaf)) for name, owner, leaf in buffer_places(module)]
        set_buffers(buffers, [part])
        return
    named = dict(module.named_parameters())
    for slot in Layout.of_module(module).slots:
        start, end = part.covered.start - slot.offset, part.covered.stop - slot.offset
        first, last = max(start, 0), min(end, slot.size)  # of the tensor's elements
        if first < last:
            with torch.no_grad():
                named[slot.name].view(-1)[first:last] = part.values[first - start : last - start]


# While others wait


@contextmanager
def signs_of_life(worker: Worker, module: nn.Module, steps: int) -> Iterator[None]:
    """Report every forward pass inside as progress, so that a long evaluation is not a hang."""
    batches = count(1)

    def forward(*_: object) -> None:
        worker.reporter.progress(step=steps, samples=next(batches))

    hook = module.register_forward_hook(forward)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def all_cores() -> Iterator[None]:
    """Use all cores that this process may, or as many threads as OMP_NUM_THREADS allows. The other
    ranks have nothing to do meanwhile."""
    threads = torch.get_num_threads()
    # Where cores are busy, threads that wait for each other take ten times as long as one thread
    # does. OMP_NUM_THREADS is the user's way to say so.
    torch.set_num_threads(max(threads, chosen_threads(os.environ) or len(usable_cores())))
    try:
        yield
    finally:
        torch.set_num_threads(threads)
