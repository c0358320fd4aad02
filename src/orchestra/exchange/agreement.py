"""Parameters and buffers: how ranks agree on them, mix them with neighbours, average them.

And what a worker's steps consist of, by which `Auto` compares.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, TypeVar

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
from orchestra.exchange.average import note_buffer
from orchestra.optimizers.state import require_alike
from orchestra.parameter_server.placement import Slice
from orchestra.settings.base import Mismatch
from orchestra.topologies import Graph, Topology, doubly_stochastic
from orchestra.transports.protocol import Transport
from orchestra.transports.tags import Tag
from orchestra.worker.carried import require_dense
from orchestra.worker.runtime import Work
from orchestra.worker.worker import Step, Worker

T = TypeVar("T")


def agree_on_parameters(worker: Worker, group: Group | None = None) -> None:
    """Give all of `group` (None: all that are there) its first rank's parameters and buffers."""
    if worker.parameters_equal:
        return
    group = worker.everyone if group is None else group
    broadcast(worker.transport, worker.parameters, group.ranks[0], group, Tag.AGREE)
    broadcast_buffers(worker, group)


def broadcast_buffers(worker: Worker, group: Group) -> None:
    """Give all of `group` the buffers of its first rank, as DistributedDataParallel does."""
    if not worker.buffers or len(group) == 1 or worker.rank not in group.ranks:
        return
    for vector in pack(worker.buffers):
        broadcast(worker.transport, vector.values, group.ranks[0], group, Tag.BUFFERS)
        if worker.rank != group.ranks[0]:
            vector.unpack()


def wait_for_everyone(worker: Worker, number: int = 0) -> int:
    """Collective over all ranks: nobody returns before everybody has called.

    Returns the sum of what they call with, below 2^31.
    """
    total = torch.tensor([number], dtype=torch.int32)
    all_reduce(worker.transport, total, "butterfly", worker.everyone, Tag.AGREE)
    return int(total)


def require_fit(worker: Worker, state: Any, saved: Any) -> None:
    """Collective over all ranks: raise `Mismatch` on each of them unless what every rank has
    `saved` fits its `state`. The message is empty where another rank's does not fit."""
    complaint = None
    try:
        require_alike(state, saved, "strategy")
    except Mismatch as mismatch:
        complaint = mismatch
    if wait_for_everyone(worker, int(complaint is not None)):
        raise complaint or Mismatch


def wait_for_workers(worker: Worker) -> None:
    """Collective over the workers: nobody returns before all have called."""
    ring_sum(worker, torch.zeros(1), Tag.AGREE)


def start_together(worker: Worker, leader: int) -> None:
    """Collective over all ranks: let them go on as close together as can be.

    How far apart they return does not depend on when each called. The `leader` tells a thousand
    ranks one after the other; after a butterfly all are at the same place again (exactly, where
    ranks and links are alike, for powers of two).
    """
    # First all tell the leader: what follows takes the same time, whenever each came.
    gather_objects(worker.transport, None, worker.everyone, leader)
    broadcast(worker.transport, torch.zeros(1), leader, worker.everyone, Tag.READY)
    wait_for_everyone(worker)


def agree_on_data(worker: Worker, data: Any, first: int) -> Any:
    """Collective over all ranks: return the plain JSON data that the rank `first` has."""
    transport, own = worker.transport, worker.rank
    if own != first:
        return receive_object(transport, first)
    for rank in worker.everyone.ranks:
        if rank != own:
            send_object(transport, data, rank)
    return data


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
    """Make one `Packed` for each dtype, in the order of first appearance."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    require_dense(named)
    for _, tensor in named:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    return [Packed(tensors) for tensors in by_dtype.values()]


def keep_gradient(worker: Worker) -> None:
    """Keep this worker's own gradient; one of no samples counts for nothing."""
    if not worker.step.samples:
        # So that its optimizer leaves all parameters alone.
        worker.gradients.used = [False] * len(worker.gradients.used)
    worker.gradients.leave_in_place()


def swap_with_neighbours(
    worker: Worker, transport: Transport, values: Tensor, graph: Graph, *, alike: bool = True
) -> dict[int, Tensor]:
    """Send `values` to neighbours in `graph`, and wait for theirs; by place among the workers.
    `alike`: theirs have the shape of `values`, and its device."""
    ranks, own = worker.workers.ranks, worker.workers.index(worker.rank)
    arriving = {
        peer: transport.receive(ranks[peer], Tag.MIX, torch.empty_like(values) if alike else None)
        for peer in sorted(doubly_stochastic(graph)[own])
        if peer != own
    }
    leaving = [transport.send(values, ranks[peer], Tag.MIX) for peer in graph[own]]
    arrived = {peer: handle.wait() for peer, handle in arriving.items()}
    for handle in leaving:
        handle.wait()
    return arrived


def mix_with_neighbours(
    worker: Worker, transport: Transport, into: Tensor, topology: Topology, step: int
) -> Tensor:
    """Set `into` to sum_j W_ij x_j over the neighbours j in the graph of `step`, and return it.
    Waits for their parameters. `transport` is that of the flow which does it."""
    own, graph = worker.workers.index(worker.rank), topology.graph(len(worker.workers), step)
    weights, x = doubly_stochastic(graph)[own], worker.parameters
    arrived = swap_with_neighbours(worker, transport, x, graph)

    def mix() -> None:
        torch.mul(x, weights[own] if arrived else 1.0, out=into)
        for peer, values in arrived.items():
            into.add_(values, alpha=weights[peer])

    charge(worker, "mix", len(arrived) * worker.layout.size, mix)
    return into


def average_replicas(
    worker: Worker,
    transport: Transport,
    values: Tensor,
    algorithm: str,
    samples: int,
    total: int | None,
) -> None:
    """Replace `values` by their mean over the workers, weighted by `samples`. `transport` is that
    of the flow which does it. Where `total` is None the workers add it up."""
    if len(worker.workers) == 1:
        return
    values.mul_(part_of_samples(worker, transport, algorithm, samples, total))
    note_buffer(worker, all_reduce(transport, values, algorithm, worker.workers, Tag.REPLICAS))


def part_of_samples(
    worker: Worker, transport: Transport, algorithm: str, samples: int, total: int | None
) -> float:
    """Return `samples` of this worker over the `total` of all. With None the workers add it up."""
    if total is None:
        counts = torch.tensor([samples], dtype=torch.float64)
        all_reduce(transport, counts, algorithm, worker.workers, Tag.REPLICAS)
        total = int(counts)
    return samples / total


def charge(
    worker: Worker, kind: str, amount: int, function: Callable[[], T], names: tuple[str, ...] = ()
) -> T:
    """Run `function`, and charge it as computation of a `Work` of this kind and amount."""
    return worker.compute.run(Work(kind, amount, names), function)


def copy_of(worker: Worker, values: Tensor) -> Tensor:
    """Return a copy of `values` to be averaged while the replica goes on; charged as work."""
    return charge(worker, "encode", values.numel(), values.clone)


def ring_sum(worker: Worker, vector: Tensor, tag: int, ranks: tuple[int, ...] | None = None) -> int:
    """Replace `vector` by its sum over `ranks`, or over the workers; return the bytes of buffer."""
    group = worker.workers if ranks is None else Group(ranks)
    return all_reduce(worker.transport, vector, "ring", group, tag)


def fragments_of(worker: Worker, count: int) -> list[tuple[int, int]]:
    """Cut the flat parameters into `count` runs (first, end) of whole tensors, about equally large.
    There are fewer where there are not as many tensors."""
    slots, size = worker.layout.slots, worker.layout.size
    # Cut k lies at the end of the tensor that is nearest to k / count of all elements.
    ends = [slot.offset for slot in slots[1:]] + [size]
    cuts = {min(ends, key=lambda end: abs(end - size * k / count)) for k in range(1, count + 1)}
    return list(pairwise([0, *sorted(cuts)]))


# What exchanges take, and numbers of all workers

CODING = ("encode", "decode")
"""The kinds of work that belong to an exchange."""


class Stopwatch:
    """Parts the time of the main flow of `worker` into its own steps, and all that exchanges take:
    communication, waiting, and the work of encoding and decoding.

    For the last it takes the place of the worker's `Compute`. It starts with the first step.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker, self._compute = worker, worker.compute
        self.advance_to, self.wait_before_using = (
            worker.compute.advance_to,
            worker.compute.wait_before_using,
        )
        worker.compute = self
        self._began: float | None = None
        self._exchanged = self._coded = 0.0

    def lap(self) -> tuple[float, float]:
        """Return the seconds since the last call, and those of them that no exchange took."""
        worker = self._worker
        now = worker.transport.now()
        exchanged = worker.transport.blocked() + self._coded + worker.measures.native_seconds
        wall = 0.0 if self._began is None else now - self._began
        own = max(wall - (exchanged - self._exchanged), 0.0)
        self._began, self._exchanged = now, exchanged
        return wall, own

    @property
    def seconds(self) -> float:
        return self._compute.seconds

    @property
    def main_seconds(self) -> float:
        return self._compute.main_seconds

    def run(self, work: Work, function: Callable[[], T]) -> T:
        if self._began is None and work.kind == "step":
            self.lap()
        if work.kind not in CODING:
            return self._compute.run(work, function)
        began = self._worker.transport.now()
        try:
            return self._compute.run(work, function)
        finally:
            self._coded += self._worker.transport.now() - began


def own_seconds(worker: Worker) -> float:
    """Return the seconds that `worker` has needed so far, without waiting for others."""
    traffic = worker.transport.traffic
    return worker.compute.seconds + traffic.seconds_communicating + traffic.seconds_in_background


def counted(position: int, budget: int | None) -> Step:
    """Make a step with what rules that count know of the round that ends at `position`."""
    assert budget is not None, "an open end has no fractions"
    return Step(planned=position, fraction=position / budget)


def push_and_pull_once(worker: Worker, slices: Sequence[Slice], values: Tensor) -> None:
    """Collective over the workers, which are the servers of `slices` as well. Replaces flat
    `values` by their sum: each server adds up its slice, and sends it back."""
    transport, own = worker.transport, worker.rank
    others = [rank for rank in worker.workers.ranks if rank != own]
    parts = [(part.rank, values[part.first : part.end]) for part in slices]
    leaving = [transport.send(part, rank, Tag.REPLICAS) for rank, part in parts if rank != own]
    for rank, part in parts:
        if rank == own:
            arriving = [transport.receive(other, Tag.REPLICAS) for other in others]
            transport.add(part, *(each.wait() for each in arriving))
            leaving += [transport.send(part, other, Tag.REPLICAS) for other in others]
    for rank, part in parts:
        if rank != own:
            part.copy_(transport.receive(rank, Tag.REPLICAS).wait())
    for handle in leaving:
        handle.wait()


def gather_numbers(
    worker: Worker, numbers: Sequence[float], group: Group | None = None
) -> list[list[float]]:
    """Collective over `group`, or the workers: return the numbers of all, one row for each rank."""
    group = worker.workers if group is None else group
    table = torch.zeros(worker.runtime.ranks, len(numbers), dtype=torch.float64)
    # Each in a row of its own, and zeros elsewhere: the sum has everybody's numbers, bit for bit.
    table[worker.rank] = torch.tensor(numbers, dtype=torch.float64)
    # The schedule with the fewest rounds: a decision costs a latency or two.
    all_reduce(worker.transport, table.view(-1), "butterfly", group, Tag.AGREE)
    rows: list[list[float]] = table[list(group.ranks)].tolist()
    return rows
