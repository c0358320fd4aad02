"""What evaluation after a run needs: buffers, a whole model, processor cores, and signs of life."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, count, pairwise

import torch
from torch import Tensor, nn

from orchestra.errors import PeerLost
from orchestra.strategies.base import ModelPart
from orchestra.transports.tags import Tag
from orchestra.worker.layout import Layout, buffer_places
from orchestra.worker.snapshots import Part, Place, Places
from orchestra.worker.threads import chosen_threads, usable_cores
from orchestra.worker.worker import Worker

Buffers = Sequence[tuple[str, Tensor]]
Extents = dict[str, tuple[int, int]]


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
        total, weight = self.total[part.covered], self.weight[part.covered]
        values = part.values.double().cpu()
        before = torch.where(weight > 0, total / weight, values)
        total += part.weight * values
        weight += part.weight
        self.square[part.covered] += part.weight * (values - before) * (values - total / weight)

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


# Buffers


def buffers_vector(named: Buffers) -> Tensor | None:
    """All buffers of a module end to end, in float64; None if it has none."""
    buffers = [buffer.detach().double().reshape(-1) for _, buffer in named]
    return torch.cat(buffers) if buffers else None


def set_buffers(buffers: Buffers, parts: Sequence[Part]) -> None:
    """Set floating buffers to the weighted mean of `parts`, others to those of the first part."""
    own = buffers_vector(buffers)
    if not parts or own is None:
        return
    first, mean = own.cpu(), Mean(len(own))
    for part in reversed(parts):
        first[part.covered] = part.values
    for part in parts:
        mean.add(part)
    means = torch.where(mean.weight > 0, mean.mean, first)
    offset = 0
    for _, buffer in buffers:
        source = means if buffer.is_floating_point() else first
        with torch.no_grad():
            buffer.copy_(source[offset : offset + buffer.numel()].view(buffer.shape))
        offset += buffer.numel()


def agree_on_buffers(worker: Worker, samples: int, leader: int) -> None:
    """After an asynchronous run: the leader takes the sample-weighted mean of the buffers.

    `samples` are those of this rank. Only ranks that have data at the end take part.
    """
    vector = buffers_vector(worker.buffers)
    if vector is None:
        return
    weighted = torch.cat([vector, vector.new_tensor([samples])])
    if worker.rank != leader:
        if worker.rank in worker.workers.ranks:
            worker.transport.send(weighted, leader, Tag.PARTS).wait()
        return
    parts = []
    for rank in worker.workers.ranks:
        if rank != leader and rank not in worker.everyone.ranks:
            continue
        try:
            own = rank == leader
            message = weighted if own else worker.transport.receive(rank, Tag.PARTS).wait()
        except PeerLost:
            continue
        if not message.is_meta and message[-1] > 0:
            parts.append(Part(0, 0, 0.0, 0, message[:-1], float(message[-1]), "buffers"))
    set_buffers(worker.buffers, parts)


# Where each rank has a part of the model


def places_of(part: ModelPart, whole: nn.Module) -> Places:
    """Where in the vectors of `whole` the tensors lie that `part` answers for."""
    return {
        "parameters": _places(_slots(part.module), _slots(whole), part.owned),
        "buffers": _places(_buffers(part.module), _buffers(whole), part.owned),
    }


def _slots(module: nn.Module) -> Extents:
    """First element and end of each trainable parameter, with the gap behind it."""
    layout = Layout.of_module(module)
    edges = [*(slot.offset for slot in layout.slots), layout.size]
    return dict(zip((slot.name for slot in layout.slots), pairwise(edges), strict=True))


def _buffers(module: nn.Module) -> Extents:
    named = [(name, getattr(owner, leaf).numel()) for name, owner, leaf in buffer_places(module)]
    edges = [0, *accumulate(size for _, size in named)]
    return dict(zip((name for name, _ in named), pairwise(edges), strict=True))


def _places(part: Extents, whole: Extents, owned: frozenset[str]) -> Sequence[Place]:
    """Return one place for each run of tensors that lie side by side in both."""
    places: list[Place] = []
    for name, (first, end) in part.items():
        if name not in owned or name not in whole:
            continue
        offset = whole[name][0]
        last = places[-1] if places else None
        if last is not None and (last.end, last.offset + last.end - last.first) == (first, offset):
            places[-1] = Place(last.first, end, last.offset)
        else:
            places.append(Place(first, end, offset))
    return places


def release(whole: nn.Module, part: nn.Module) -> None:
    """Free the memory of all parameters of `whole` that are not in `part`."""
    kept = {id(parameter) for parameter in part.parameters()}
    for parameter in whole.parameters():
        if id(parameter) not in kept:
            parameter.data = parameter.new_empty(0)


def put_together(module: nn.Module, part: Part) -> None:
    """Give `module` the values of some rank's `part`."""
    if part.kind == "buffers":
        buffers = [(name, getattr(owner, leaf)) for name, owner, leaf in buffer_places(module)]
        set_buffers(buffers, [part])
        return
    named = dict(module.named_parameters())
    for slot in Layout.of_module(module).slots:
        first = slot.offset - part.offset
        if 0 <= first < part.values.numel():
            with torch.no_grad():
                named[slot.name].copy_(part.values[first : first + slot.size].view(slot.shape))


# While others wait


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
    """Use all cores that this process may, or as many threads as OMP_NUM_THREADS allows.

    The other ranks have nothing to do meanwhile.
    """
    threads = torch.get_num_threads()
    most = chosen_threads(os.environ) or len(usable_cores())
    torch.set_num_threads(max(threads, most))
    try:
        yield
    finally:
        torch.set_num_threads(threads)
