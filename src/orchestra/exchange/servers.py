"""Parameter servers of a worker's model: who owns what, the server of a rank, collecting.

`parts.py` pushes gradients and pulls values while the worker computes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from orchestra.collectives import Group, all_reduce, receive_object, send_object
from orchestra.errors import PeerLost
from orchestra.exchange.agreement import agree_on_parameters, charge
from orchestra.optimizers.spec import install_moments
from orchestra.optimizers.state import capture, restore
from orchestra.parameter_server.held_slice import DelayCompensation, HeldSlice
from orchestra.parameter_server.messages import Push
from orchestra.parameter_server.placement import Part, Slice
from orchestra.parameter_server.placement import place as place_slices
from orchestra.parameter_server.server import Server
from orchestra.parameter_server.state import Consistency, ServerState
from orchestra.schedules.work_queue import Applied
from orchestra.transports.protocol import Transport
from orchestra.transports.tags import Tag
from orchestra.worker.worker import Worker

Compensate = Callable[[Tensor, Sequence[int]], DelayCompensation]


def slices_of(
    worker: Worker, servers: Sequence[int], *, updates: bool, weights: Sequence[float] = ()
) -> list[Slice]:
    """Cut the parameters over the ranks in `servers`, balanced by bytes, or by `weights`.

    Where the servers update, a tensor is cut only if the optimizer works element by element.
    """
    spans = [(slot.offset, slot.size) for slot in worker.layout.slots]
    divisible = worker.optimizer.elementwise or not updates
    size = worker.layout.size
    slices = place_slices(spans, size, len(servers), divisible=divisible, weights=weights)
    return [replace(part, rank=rank) for rank, part in zip(servers, slices, strict=True)]


@dataclass(frozen=True)
class ServerRules:
    """What the servers of a strategy do with the pushes of its workers.

    Attributes:
        consistency: when pushes are applied, and when pulls are answered.
        updates: servers run the optimizer on their slices; without it they only average.
        clips: an averaged gradient is clipped by the norm of all slices.
        rate_divisor: what learning rates are divided by, for the staleness of an update.
        compensate: makes what corrects a push for its staleness.
        queue_shares: where workers take batches from a queue, their shares of a step; the server of
            the first slice hands the batches out.
        replicas: each server also holds the slice of the one before it.
        parts: what pushes come in; none if they come slice by slice.
        early: a part is applied once all workers have pushed it.
        elastic: a slice is the centre of elastic averaging.
        decode: reads a push that was compressed.
    """

    consistency: Consistency
    updates: bool
    clips: bool = False
    rate_divisor: Callable[[int], int] = lambda staleness: 1
    compensate: Compensate | None = None
    queue_shares: tuple[float, ...] | None = None
    replicas: bool = False
    parts: Sequence[Part] = ()
    early: bool = False
    elastic: bool = False
    decode: Callable[[Slice, Push, Tensor], Tensor] | None = None


def make_server(
    worker: Worker, slices: Sequence[Slice], workers: Sequence[int], rules: ServerRules
) -> Server:
    """Make the server of this rank, with the moments that `worker` has inherited, if any."""
    ranks = tuple(part.rank for part in slices)
    place = ranks.index(worker.rank)
    own = _held_slice(worker, slices, slices[place], workers, rules)
    if not rules.replicas:
        return Server(own)
    # Of the server before this one; that of the first is the last (place - 1 is -1 then).
    mirror = _held_slice(worker, slices, slices[place - 1], workers, rules)
    before, after = ranks[place - 1], ranks[(place + 1) % len(ranks)]
    lost = worker.transport.lost()
    if after not in lost:
        _hand_on_moments(worker.transport, own.optimizer, after)
    if before not in lost:
        _take_over_moments(worker.transport, mirror.optimizer, before)

    def alone(text: str) -> None:
        worker.reporter.expendable(False)
        worker.reporter.notice(text)

    return Server(own, mirror, ranks, place, lost=lost, alone=alone)


def _held_slice(
    worker: Worker, slices: Sequence[Slice], part: Slice, workers: Sequence[int], rules: ServerRules
) -> HeldSlice:
    """Make the server's side of `part`, one of `slices`, with its optimizer and its state."""
    values = worker.parameters[part.first : part.end].clone()
    tensors = _tensors_of(worker, part, values)
    optimizer = clip = None
    if rules.updates:
        optimizer = worker.optimizer.build({name: each for name, (each, _) in tensors.items()})
        install_moments(optimizer, tensors, worker.inherited)
    if rules.clips and worker.clip_norm is not None:
        servers = Group(tuple(each.rank for each in slices))
        clip = partial(_clip_together, worker.clip_norm, servers)
    offer = partial(worker.snapshots.offer, offset=part.first, mirror=part.rank != worker.rank)
    return HeldSlice(
        _server_state(worker, workers, rules, hands_out=part == slices[0]),
        values,
        tensors,
        optimizer,
        partial(charge, worker),
        clip=clip,
        rate_divisor=rules.rate_divisor,
        compensation=None if rules.compensate is None else rules.compensate(values, workers),
        on_update=offer if rules.updates or rules.elastic else None,
        parts=[each for each in rules.parts if slices[each.place] == part],
        early=rules.early,
        elastic=rules.elastic,
        decode=None if rules.decode is None else partial(rules.decode, part),
    )


def _server_state(
    worker: Worker, workers: Sequence[int], rules: ServerRules, *, hands_out: bool
) -> ServerState:
    """Make the state of a slice; with `hands_out` its server has the queue of batches."""
    live = set(workers) - worker.transport.lost()
    state = ServerState(rules.consistency, live, consumed=worker.step.consumed)
    if rules.queue_shares is None:
        return state
    queue = worker.make_queue(rules.queue_shares)
    if queue is None:
        return state
    state.applied, state.round = Applied(queue.start), queue.round
    if hands_out:
        for gone in queue.restart().keys() - live:
            queue.lose(gone)
        state.queue = queue
    return state


def _hand_on_moments(transport: Transport, optimizer: Optimizer | None, to: int) -> None:
    """Send the moments to the replica: ranks may have inherited different ones."""
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
    """Return, by name, the parts of parameters in a slice, and the element at which each begins: a
    parameter that is there whole in its shape, a cut one flat."""
    tensors = {}
    for piece in part.pieces:
        slot = worker.layout.slots[piece.tensor]
        tensor = values[piece.first - part.first : piece.end - part.first]
        if piece.end - piece.first == slot.size:
            tensor = tensor.view(slot.shape)
        tensors[slot.name] = (tensor, piece.first - slot.offset)
    return tensors


def _clip_together(limit: float, servers: Group, transport: Transport, average: Tensor) -> None:
    """Clip by the norm of the whole gradient: each server knows the square of its part."""
    square = average.double().square().sum().reshape(1)
    all_reduce(transport, square, "reduce_to_one", servers, Tag.NORM)
    # As `torch.nn.utils.clip_grad_norm_`, with its 1e-6.
    average.mul_(min(1.0, limit / (float(square.sqrt()) + 1e-6)))


def collect_slices(worker: Worker, slices: Sequence[Slice], server: Server | None) -> None:
    """Collective over all that are there: copy the servers' values into everyone's parameters."""
    for part in slices:
        mine = worker.parameters[part.first : part.end]
        if part.rank != worker.rank:
            worker.transport.receive(part.rank, Tag.COLLECT, mine).wait()
            continue
        assert server is not None
        with torch.no_grad():
            mine.copy_(server.own.values)
        server.own.all_have_read()
        others = [rank for rank in worker.everyone.ranks if rank != worker.rank]
        for handle in [worker.transport.send(mine, rank, Tag.COLLECT) for rank in others]:
            try:
                handle.wait()
            except PeerLost as lost:
                if not server.own.state.consistency.tolerates_loss:
                    raise
                worker.reporter.notice(f"rank {lost.rank} left before the end")


def tell_servers(worker: Worker, servers: Sequence[int], leader: int) -> None:
    """Give `servers` without data the parameters and buffers of the `leader`, a worker."""
    if worker.rank in servers:
        agree_on_parameters(worker, Group((leader, worker.rank)))
    elif worker.rank == leader:
        for server in servers:
            with contextlib.suppress(PeerLost):
                agree_on_parameters(worker, Group((leader, server)))
