"""What evaluation after a run needs: buffers, processor cores, and to be seen alive."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count

import torch
from torch import Tensor, nn

from orchestra.errors import PeerLost
from orchestra.transports.tags import Tag
from orchestra.worker.snapshots import Part
from orchestra.worker.threads import chosen_threads, usable_cores
from orchestra.worker.worker import Worker

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
