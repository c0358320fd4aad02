"""What all ranks, or all workers, come to have alike: parameters, buffers, moments, plain data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from orchestra.collectives import (
    Group,
    all_reduce,
    broadcast,
    gather_objects,
    receive_object,
    send_object,
)
from orchestra.optimizers.state import Moments, export_moments
from orchestra.transports.tags import Tag
from orchestra.worker.worker import Worker


def agree_on_parameters(worker: Worker) -> None:
    """Everyone takes the parameters and buffers of the first rank that is there."""
    agree_within(worker, worker.everyone)


def agree_within(worker: Worker, group: Group) -> None:
    """Everyone in `group` takes the parameters and buffers of its first rank."""
    if worker.agrees:
        return
    broadcast(worker.transport, worker.parameters, group.ranks[0], group, Tag.AGREE)
    broadcast_buffers(worker, group)


def broadcast_buffers(worker: Worker, group: Group) -> None:
    """Everyone in `group` takes the buffers of its first rank, as DistributedDataParallel does."""
    if len(group) == 1 or worker.rank not in group.ranks:
        return
    for vector in pack(worker.buffers):
        broadcast(worker.transport, vector.values, group.ranks[0], group, Tag.BUFFERS)
        vector.unpack()


def wait_for_everyone(worker: Worker, number: int = 0) -> int:
    """Collective over all ranks: nobody returns before everybody has called. The sum of what they
    call with, up to 2^24."""
    everyone, total = worker.everyone, torch.tensor([float(number)])
    if len(everyone) > 1:
        all_reduce(worker.transport, total, "butterfly", everyone, Tag.AGREE)
    return int(total)


def wait_for_workers(worker: Worker) -> None:
    """Collective over the workers: the same, of them."""
    if len(worker.workers) > 1:
        all_reduce(worker.transport, torch.zeros(1), "ring", worker.workers, Tag.AGREE)


def start_together(worker: Worker, leader: int) -> None:
    """Collective over all ranks: how far apart they return does not depend on when each called.

    That depends on `leader` alone, which lets all go on. It tells a thousand ranks one after the
    other; after a butterfly all are at the same place again (exactly, where ranks and links are
    alike, for powers of two).
    """
    gather_objects(worker.transport, None, worker.everyone, leader)
    broadcast(worker.transport, torch.zeros(1), leader, worker.everyone, Tag.READY)
    wait_for_everyone(worker)


def agree_on_data(worker: Worker, data: Any, first: int) -> Any:
    """Collective over all ranks: the plain JSON data that the rank `first` has."""
    transport, own = worker.transport, worker.rank
    if own != first:
        return receive_object(transport, first)
    for rank in worker.everyone.ranks:
        if rank != own:
            send_object(transport, data, rank)
    return data


def exact_mean(worker: Worker, weight: float = 1.0, part: slice = slice(None)) -> None:
    """Everyone's parameters in `part` become the mean over the workers, weighted by `weight`.

    Summed in float64, where a sum of float32 numbers is exact in practice.
    """
    values = worker.parameters[part]
    values.copy_(_mean(worker, values, weight))


def exact_mean_of_buffers(worker: Worker, weight: float = 1.0) -> None:
    """Floating buffers become their mean, weighted by `weight`, others the first worker's."""
    workers = worker.workers
    for packed in pack(worker.buffers):
        if packed.values.is_floating_point():
            packed.values.copy_(_mean(worker, packed.values, weight))
        else:
            broadcast(worker.transport, packed.values, workers.ranks[0], workers, Tag.BUFFERS)
        packed.unpack()


def _mean(worker: Worker, values: Tensor, weight: float) -> Tensor:
    if len(worker.workers) == 1:
        return values
    total = torch.cat([weight * values.double(), values.new_tensor([weight]).double()])
    all_reduce(worker.transport, total, "ring", worker.workers, Tag.AGREE)
    return total[:-1] / total[-1]


class Packed:
    """Tensors of one dtype, copied end to end into `values`."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors
        self.values = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])

    def unpack(self) -> None:
        """Copy `values` back into the tensors."""
        sizes = [tensor.numel() for tensor in self.tensors]
        with torch.no_grad():
            for tensor, part in zip(self.tensors, self.values.split(sizes), strict=True):
                tensor.copy_(part.view(tensor.shape))


def pack(named: list[tuple[str, Tensor]]) -> list[Packed]:
    """One `Packed` for each dtype, in the order of first appearance."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for _, tensor in named:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    return [Packed(tensors) for tensors in by_dtype.values()]


def hand_over_moments(
    worker: Worker, optimizer: torch.optim.Optimizer | None, *, averaged: bool
) -> None:
    """Let the optimizers that this rank builds next inherit the moments of `optimizer`.

    With `averaged` the workers' mean of them; numbers stay as they are. Without an optimizer here
    (the servers kept it, in slices) there is nothing to inherit.
    """
    moments: Moments = {}
    if optimizer is not None:
        moments = export_moments(optimizer, worker.named_parameters())
    if averaged:
        moments = {
            name: {key: _averaged(worker, value) for key, value in moments[name].items()}
            for name in sorted(moments)
        }
    worker.inherited = moments


def _averaged(worker: Worker, value: Any) -> Any:
    if not isinstance(value, Tensor) or not value.dim():
        return value
    flat = value.detach().reshape(-1) / len(worker.workers)
    if len(worker.workers) > 1:
        all_reduce(worker.transport, flat, "ring", worker.workers, Tag.AGREE)
    return flat.view(value.shape)
