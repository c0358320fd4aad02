"""After the run: put the snapshots together on the chief, and see what they are worth."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import count

import torch
from torch import Tensor, nn

from orchestra.collectives import Group, gather_objects
from orchestra.errors import PeerLost
from orchestra.exchange.average import pack
from orchestra.records.report import Point
from orchestra.tasks.evaluation import evaluate
from orchestra.tasks.task import Task
from orchestra.trainer.settings import Target
from orchestra.transports.tags import Tag
from orchestra.worker.layout import FlatModel
from orchestra.worker.snapshots import Part
from orchestra.worker.threads import chosen_threads, usable_cores
from orchestra.worker.worker import Worker


def gather_parts(worker: Worker, chief: int, *, tolerant: bool) -> list[Part]:
    """All ranks' parts of the snapshots on the chief; nothing on the others.

    With `tolerant` the parts of a rank that is lost meanwhile are left out; what mirrors those of
    a rank that is there is left out, too.
    """
    own = worker.snapshots.parts
    if worker.rank != chief:
        heads = [{**asdict(replace(part, values=torch.empty(0))), "values": None} for part in own]
        gather_objects(worker.transport, heads, Group((worker.rank, chief)), chief)
        for part in own:
            worker.transport.send(part.values, chief, Tag.PARTS).wait()
        return []
    parts = list(own)
    for rank in worker.everyone.ranks:
        if rank == chief:
            continue
        try:
            parts += _receive_parts(worker, rank)
        except PeerLost:
            if not tolerant:
                raise
    return without_mirrors(parts)


def without_mirrors(parts: Sequence[Part]) -> list[Part]:
    """`parts`, without what mirrors one that is there."""
    there = {(part.kind, part.index, part.offset) for part in parts if not part.mirror}
    return [
        part
        for part in parts
        if not (part.mirror and (part.kind, part.index, part.offset) in there)
    ]


def _receive_parts(worker: Worker, rank: int) -> list[Part]:
    _, heads = gather_objects(worker.transport, None, Group((worker.rank, rank)), worker.rank)
    return [
        Part(**{**head, "values": worker.transport.receive(rank, Tag.PARTS).wait()})
        for head in heads
    ]


@dataclass(frozen=True)
class Assembled:
    """A snapshot that was put together: its samples and seconds, and its replicas' distance."""

    samples: int
    seconds: float
    consensus_distance: float | None


def assembled(model: FlatModel, parts: Sequence[Part]) -> Iterator[Assembled]:
    """For each snapshot in turn, `model` is set to it.

    Parts that cover the same elements are averaged by their weights. A snapshot that does not
    cover all parameters (a run was stopped in between) is left out.
    """
    for index in sorted({part.index for part in parts}):
        slices = [p for p in parts if p.index == index and p.kind == "parameters"]
        total = torch.zeros(model.layout.size, dtype=torch.float64)
        weight = torch.zeros(model.layout.size, dtype=torch.float64)
        for part in slices:
            covered = slice(part.offset, part.offset + part.values.numel())
            total[covered] += part.weight * part.values.double().cpu()
            weight[covered] += part.weight
        if not bool((weight > 0).all()):
            continue
        mean = total / weight
        with torch.no_grad():
            model.parameters.copy_(mean)
        set_buffers(model.buffers, [p for p in parts if p.index == index and p.kind == "buffers"])
        yield Assembled(
            max(part.samples for part in slices),
            max(part.seconds for part in slices),
            _consensus_distance(slices, mean, weight) if _are_replicas(slices) else None,
        )


def moments(parts: Sequence[Part], size: int) -> list[Point]:
    """When each snapshot was taken, of parameters that have no values, `size` in all; no figures.

    As in `assembled`, a snapshot that does not cover all of them is left out.
    """
    found = []
    for index in sorted({part.index for part in parts}):
        slices = [p for p in parts if p.index == index and p.kind == "parameters"]
        covered = 0
        for part in sorted(slices, key=lambda part: part.offset):
            if part.offset <= covered:
                covered = max(covered, part.offset + part.values.numel())
        if covered == size:
            samples, seconds = (max(p.samples for p in slices), max(p.seconds for p in slices))
            found.append(Point(samples, seconds, {}))
    return found


def _are_replicas(slices: Sequence[Part]) -> bool:
    """Whether several cover the same elements; servers' slices do not."""
    return len({part.offset for part in slices}) < len(slices)


def _consensus_distance(parts: Sequence[Part], mean: Tensor, weight: Tensor) -> float:
    """sqrt(sum_i p_i ||x_i - mean||^2), p_i being the share of replica i in the `weight`."""
    square = 0.0
    for part in parts:
        covered = slice(part.offset, part.offset + part.values.numel())
        apart = (part.values.double().cpu() - mean[covered]).square()
        square += float((part.weight / weight[covered] * apart).sum())
    return math.sqrt(square)


Buffers = Sequence[tuple[str, Tensor]]


def buffers_vector(named: Buffers) -> Tensor | None:
    """All buffers of a module end to end, in float64; None if it has none."""
    buffers = [buffer.detach().double().reshape(-1) for _, buffer in named]
    return torch.cat(buffers) if buffers else None


def set_buffers(buffers: Buffers, parts: Sequence[Part]) -> None:
    """The weighted mean of the floating buffers; of others, those of the first part."""
    first = buffers_vector(buffers)
    if not parts or first is None:
        return
    first = first.cpu()
    total, weight = torch.zeros_like(first), torch.zeros_like(first)
    for part in parts:
        covered = slice(part.offset, part.offset + part.values.numel())
        total[covered] += part.weight * part.values.cpu()
        weight[covered] += part.weight
    for part in reversed(parts):
        first[part.offset : part.offset + part.values.numel()] = part.values
    mean = torch.where(weight > 0, total / weight, first)
    offset = 0
    for _, buffer in buffers:
        source = mean if buffer.is_floating_point() else first
        with torch.no_grad():
            buffer.copy_(source[offset : offset + buffer.numel()].view(buffer.shape))
        offset += buffer.numel()


def curve(model: FlatModel, task: Task, parts: Sequence[Part], batch_size: int) -> list[Point]:
    """The figures of every snapshot, on validation data where the task has some, else on test."""
    dataset = task.validation if task.validation is not None else task.test
    if dataset is None or not parts:
        return []
    final = model.parameters.clone()
    final_buffers = [packed.values for packed in pack(model.buffers)]
    points: list[Point] = []
    for snapshot in assembled(model, parts):
        figures = evaluate(task, model.module, dataset, batch_size)
        points.append(Point(metrics=figures, **asdict(snapshot)))
    with torch.no_grad():
        model.parameters.copy_(final)
    for packed, values in zip(pack(model.buffers), final_buffers, strict=True):
        packed.values.copy_(values)
        packed.unpack()
    return points


@contextmanager
def signs_of_life(worker: Worker, module: nn.Module, steps: int) -> Iterator[None]:
    """Every forward pass inside is progress, lest a long evaluation be taken for a hang."""
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
    """The other ranks have nothing to do meanwhile, so that this one may use all cores that its
    process may, or as many threads as OMP_NUM_THREADS allows."""
    threads = torch.get_num_threads()
    most = chosen_threads(os.environ) or len(usable_cores())
    torch.set_num_threads(max(threads, most))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def time_to_target(points: Sequence[Point], target: Target | None) -> float | None:
    """Seconds at the first snapshot that reaches `target`; None where none does."""
    if target is None:
        return None
    for point in points:
        if target.metric in point.metrics and target.reached(point.metrics[target.metric]):
            return point.seconds
    return None


def agree_on_buffers(worker: Worker, samples: int, chief: int) -> None:
    """After an asynchronous run: the chief takes the sample-weighted mean of the buffers.

    `samples` are those of this rank. Only ranks that have data at the end take part.
    """
    vector = buffers_vector(worker.buffers)
    if vector is None:
        return
    own = Part(0, 0, 0.0, 0, vector, float(samples), "buffers")
    if worker.rank != chief:
        if worker.rank in worker.workers.ranks:
            weighted = torch.cat([vector, vector.new_tensor([samples])])
            worker.transport.send(weighted, chief, Tag.PARTS).wait()
        return
    parts = []
    for rank in worker.workers.ranks:
        if rank == chief:
            parts.append(own)
        elif rank in worker.everyone.ranks:
            try:
                message = worker.transport.receive(rank, Tag.PARTS).wait()
            except PeerLost:
                continue
            if not message.is_meta:
                parts.append(Part(0, 0, 0.0, 0, message[:-1], float(message[-1]), "buffers"))
    if vector.is_meta:
        return
    set_buffers(worker.buffers, [part for part in parts if part.weight > 0])
