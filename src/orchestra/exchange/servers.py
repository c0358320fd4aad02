"""Between a worker and the parameter servers: who owns what, pushing, pulling, collecting."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from orchestra.collectives import Group, all_reduce, receive_object, send_object
from orchestra.errors import PeerLost
from orchestra.exchange.agreement import agree_within
from orchestra.optimizers.state import OptimizerPart, capture, install_moments, restore
from orchestra.parameter_server.client import Client
from orchestra.parameter_server.placement import Slice, place
from orchestra.parameter_server.replicated_server import ReplicatedServer
from orchestra.parameter_server.server import DelayCompensation, Server
from orchestra.parameter_server.state import Consistency, Push, ServerState
from orchestra.schedules.work_queue import Applied, WorkQueue
from orchestra.transports.protocol import Transport
from orchestra.transports.tags import Tag
from orchestra.worker.runtime import Work
from orchestra.worker.worker import Worker

Compensate = Callable[[Tensor, Sequence[int]], DelayCompensation]


def slices_of(worker: Worker, servers: Sequence[int], *, updates: bool) -> list[Slice]:
    """Cut the parameters over the ranks in `servers`, balanced by bytes.

    Where the servers update, a tensor is cut only if the optimizer works element by element.
    """
    spans = [(slot.offset, slot.size) for slot in worker.layout.slots]
    divisible = worker.optimizer.elementwise or not updates
    slices = place(spans, worker.layout.size, len(servers), divisible=divisible)
    return [replace(part, rank=rank) for rank, part in zip(servers, slices, strict=True)]


def make_server(
    worker: Worker,
    slices: Sequence[Slice],
    workers: Sequence[int],
    consistency: Consistency,
    *,
    updates: bool,
    clips: bool = False,
    rate_divisor: Callable[[int], int] = lambda staleness: 1,
    compensate: Compensate | None = None,
    queue: WorkQueue | None = None,
    mirrors: Slice | None = None,
    elastic: bool = False,
) -> Server:
    """The server that lives on this rank, with the moments that `worker` inherited, if any.

    With `mirrors` it is a replica of that one. Where workers take batches from `queue`, the first
    server, or a replica of it, hands them out. Where it is `elastic` its slice is a centre.
    """
    part = mirrors or next(part for part in slices if part.rank == worker.rank)
    values = worker.parameters[part.first : part.end].clone()
    tensors = _tensors_of(worker, part, values)
    optimizer = None
    if updates:
        optimizer = worker.optimizer.build({name: tensor for name, (tensor, _) in tensors.items()})
        install_moments(optimizer, tensors, worker.inherited)

    def offer(consumed: int, now: Tensor) -> None:
        worker.snapshots.offer(consumed, now, offset=part.first, mirror=mirrors is not None)

    live = set(workers) - worker.transport.lost()
    state = ServerState(consistency, live, consumed=worker.step.consumed)
    if queue is not None:
        state.applied, state.round = Applied(queue.start), queue.round
        if part == slices[0]:
            for gone in queue.restart().keys() - live:
                queue.lose(gone)
            state.queue = queue
    servers = Group(tuple(each.rank for each in slices))
    places = [piece.first - part.first for piece in part.pieces]
    return Server(
        state,
        values,
        [(tensor, first) for (tensor, _), first in zip(tensors.values(), places, strict=True)],
        optimizer,
        lambda kind, amount, function: worker.compute.run(Work(kind, amount), function),
        clip=_clip_together(worker.clip_norm, servers) if clips else None,
        rate_divisor=rate_divisor,
        compensation=compensate(values, workers) if compensate is not None else None,
        on_update=offer if updates or elastic else None,
        elastic=elastic,
    )


def optimizer_parts(
    worker: Worker, slices: Sequence[Slice], server: Server | ReplicatedServer
) -> list[OptimizerPart]:
    """The optimizers of the slices on this rank, replicas last."""
    if isinstance(server, ReplicatedServer):
        held = [(slices[place], each) for place, each in server.servers]
    else:
        held = [(part, server) for part in slices if part.rank == worker.rank]
    parts = []
    for part, each in held:
        slots = [worker.layout.slots[piece.tensor] for piece in part.pieces]
        tensors = {
            slot.name: (tensor, piece.first - slot.offset)
            for slot, (tensor, _), piece in zip(slots, each.parts, part.pieces, strict=True)
        }
        if each.optimizer is not None:
            parts.append(OptimizerPart(each.optimizer, tensors))
    return parts


def make_replicated_server(
    worker: Worker, slices: Sequence[Slice], make: Callable[[Slice | None], Server]
) -> ReplicatedServer:
    """The server on this rank, with a replica of the one before it; `make(mirrors)` makes each."""
    ranks = tuple(part.rank for part in slices)
    place = ranks.index(worker.rank)
    own, mirror = make(None), make(slices[place - 1])
    before, after, lost = ranks[place - 1], ranks[(place + 1) % len(ranks)], worker.transport.lost()
    if after not in lost:
        _hand_on_moments(worker.transport, own.optimizer, after)
    if before not in lost:
        _take_over_moments(worker.transport, mirror.optimizer, before)

    def alone(text: str) -> None:
        worker.reporter.expendable(False)
        worker.reporter.notice(text)

    return ReplicatedServer(own, mirror, ranks, place, lost=lost, alone=alone)


def _hand_on_moments(transport: Transport, optimizer: Optimizer | None, to: int) -> None:
    """Ranks may have inherited different moments; replicas have the same."""
    moments = [
        (index, name, value)
        for index, state in capture(optimizer).items()
        for name, value in state.items()
    ]
    heads = [
        (index, name, True, None) if isinstance(value, Tensor) else (index, name, False, value)
        for index, name, value in moments
    ]
    send_object(transport, heads, to)
    for _, _, value in moments:
        if isinstance(value, Tensor):
            transport.send(value.contiguous(), to, Tag.AGREE).wait()


def _take_over_moments(transport: Transport, optimizer: Optimizer | None, source: int) -> None:
    state: dict[int, dict[str, Any]] = {}
    heads = receive_object(transport, source)
    for index, name, is_tensor, value in heads:
        arrived = transport.receive(source, Tag.AGREE).wait() if is_tensor else value
        state.setdefault(index, {})[name] = arrived
    restore(optimizer, state)


def _tensors_of(worker: Worker, part: Slice, values: Tensor) -> dict[str, tuple[Tensor, int]]:
    """By name, the parts of parameters in a slice and the element at which each begins.

    A parameter that is there whole has its shape; a cut one is flat.
    """
    tensors = {}
    for piece in part.pieces:
        slot = worker.layout.slots[piece.tensor]
        tensor = values[piece.first - part.first : piece.end - part.first]
        if piece.end - piece.first == slot.size:
            tensor = tensor.view(slot.shape)
        tensors[slot.name] = (tensor, piece.first - slot.offset)
    return tensors


def _clip_together(
    limit: float | None, servers: Group
) -> Callable[[Transport, Tensor], None] | None:
    """Clip by the norm of the whole gradient: each server knows the square of its part."""
    if limit is None:
        return None

    def clip(transport: Transport, average: Tensor) -> None:
        square = average.double().square().sum().reshape(1)
        if len(servers) > 1:
            all_reduce(transport, square, "reduce_to_one", servers, Tag.NORM)
        average.mul_(min(1.0, limit / (float(square.sqrt()) + 1e-6)))

    return clip


def push_and_pull(worker: Worker, client: Client, into: Tensor, *, synchronous: bool) -> None:
    """Push this step's gradient; pull flat `into`; note what the servers say of the step."""
    step, gradients = worker.step, worker.gradients
    push = Push(
        worker.rank, client.clock + 1, step.samples, step.total_samples, step.loss, step.stop,
        step.rates, tuple(gradients.used), step.position, step.report,
    )  # fmt: skip
    answers = client.push(push, gradients.vector, into)
    if synchronous:
        step.loss, step.stop = answers[0].loss, any(answer.stop for answer in answers)
        step.agreed = True
    else:
        step.consumed = max(answer.consumed for answer in answers)
        step.staleness = tuple(answer.staleness for answer in answers if not answer.dropped)
        worker.measures.staleness.extend(step.staleness)
        worker.measures.dropped += any(answer.dropped for answer in answers)
    for part, answer in zip(client.slices, answers, strict=True):
        for piece, used in zip(part.pieces, answer.used, strict=True):
            gradients.used[piece.tensor] = used


def collect_slices(worker: Worker, slices: Sequence[Slice], server: Server | None) -> None:
    """Every rank that is still there gets the servers' values into its parameters."""
    for part in slices:
        mine = worker.parameters[part.first : part.end]
        if part.rank != worker.rank:
            worker.transport.receive(part.rank, Tag.COLLECT, mine).wait()
            continue
        assert server is not None
        with torch.no_grad():
            mine.copy_(server.values)
        server.all_have_read()
        others = [rank for rank in worker.everyone.ranks if rank != worker.rank]
        for handle in [worker.transport.send(mine, rank, Tag.COLLECT) for rank in others]:
            try:
                handle.wait()
            except PeerLost as lost:
                if not server.state.consistency.tolerates_loss:
                    raise
                worker.reporter.notice(f"rank {lost.rank} left before the end")


def tell_servers(worker: Worker, servers: Sequence[int], leader: int) -> None:
    """The `servers` without data take the parameters and buffers of the `leader`, a worker."""
    if worker.rank in servers:
        agree_within(worker, Group((leader, worker.rank)))
    elif worker.rank == leader:
        for server in servers:
            with contextlib.suppress(PeerLost):
                agree_within(worker, Group((leader, server)))
