"""Between a worker and the parameter servers: who owns what, pushing, pulling, collecting."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from orchestra.collectives import Group, all_reduce, receive_object, send_object
from orchestra.errors import PeerLost
from orchestra.exchange.agreement import agree_within
from orchestra.exchange.compression import CompressionState
from orchestra.exchange.parts import PartsClient
from orchestra.optimizers.spec import install_moments
from orchestra.optimizers.state import capture, restore
from orchestra.parameter_server.client import Client
from orchestra.parameter_server.held_slice import DelayCompensation, HeldSlice
from orchestra.parameter_server.placement import Part, Slice
from orchestra.parameter_server.placement import place as place_slices
from orchestra.parameter_server.server import Server
from orchestra.parameter_server.state import Consistency, Push, ServerState
from orchestra.schedules.work_queue import Applied
from orchestra.transports.protocol import Transport
from orchestra.transports.tags import Tag
from orchestra.worker.runtime import Work
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
    queue_shares: tuple[float, ...] | None = None,
    replicas: bool = False,
    parts: Sequence[Part] = (),
    early: bool = False,
    elastic: bool = False,
    decode: Callable[[Slice, Push, Tensor], Tensor] | None = None,
) -> Server:
    """The server that lives on this rank, with the moments that `worker` inherited, if any.

    With `replicas` it holds the slice before its own, too. Where workers take batches from a queue,
    by their `queue_shares` of a step, the server of the first slice hands them out. Pushes come in
    `parts`, if there are any, and with `early` each is applied once all have pushed it. Where it
    is `elastic` its slice is a centre. `decode` reads a push that was compressed.
    """
    lost = worker.transport.lost()
    live = frozenset(workers) - lost
    ranks = tuple(part.rank for part in slices)
    place = ranks.index(worker.rank)
    clip = _clip_together(worker.clip_norm, Group(ranks)) if clips else None

    def hold(part: Slice) -> HeldSlice:
        values = worker.parameters[part.first : part.end].clone()
        tensors = _tensors_of(worker, part, values)
        optimizer = None
        if updates:
            optimizer = worker.optimizer.build({name: each for name, (each, _) in tensors.items()})
            install_moments(optimizer, tensors, worker.inherited)

        def offer(consumed: int, now: Tensor) -> None:
            is_mirror = part.rank != worker.rank
            worker.snapshots.offer(consumed, now, offset=part.first, mirror=is_mirror)

        state = ServerState(consistency, set(live), consumed=worker.step.consumed)
        queue = None if queue_shares is None else worker.make_queue(queue_shares)
        if queue is not None:
            state.applied, state.round = Applied(queue.start), queue.round
            if part == slices[0]:
                for gone in queue.restart().keys() - live:
                    queue.lose(gone)
                state.queue = queue
        return HeldSlice(
            state,
            values,
            tensors,
            optimizer,
            lambda kind, amount, function: worker.compute.run(Work(kind, amount), function),
            clip=clip,
            rate_divisor=rate_divisor,
            compensation=compensate(values, workers) if compensate is not None else None,
            on_update=offer if updates or elastic else None,
            parts=[each for each in parts if slices[each.place] == part],
            early=early,
            elastic=elastic,
            decode=None if decode is None else functools.partial(decode, part),
        )

    own = hold(slices[place])
    if not replicas:
        return Server(own)
    return _with_replica(worker, own, hold(slices[place - 1]), ranks)


def _with_replica(
    worker: Worker, own: HeldSlice, mirror: HeldSlice, ranks: tuple[int, ...]
) -> Server:
    """Return the server of both slices, once their moments are with those who hold them."""
    place, lost = ranks.index(worker.rank), worker.transport.lost()
    before, after = ranks[place - 1], ranks[(place + 1) % len(ranks)]
    if after not in lost:
        _hand_on_moments(worker.transport, own.optimizer, after)
    if before not in lost:
        _take_over_moments(worker.transport, mirror.optimizer, before)

    def alone(text: str) -> None:
        worker.reporter.expendable(False)
        worker.reporter.notice(text)

    return Server(own, mirror, ranks, place, lost=lost, alone=alone)


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


def push_and_pull(
    worker: Worker,
    client: Client,
    into: Tensor,
    *,
    synchronous: bool,
    parts: PartsClient | None = None,
    compression: CompressionState | None = None,
) -> None:
    """Push this step's gradient; pull flat `into`; note what the servers say of the step.

    With `parts` it knows where to pull to.
    """
    step, gradients = worker.step, worker.gradients
    if compression is not None and step.samples and not compression.used.is_meta:
        flags = compression.used.new_tensor(gradients.used)
        compression.note_used(flags)
        gradients.used = [flag > 0 for flag in flags.tolist()]
    push = Push(
        worker.rank, client.clock + 1, step.samples, step.total_samples, step.loss, step.stop,
        step.rates, tuple(gradients.used), step.position, step.report,
    )  # fmt: skip
    answers = parts.push(push) if parts else client.push(push, gradients.vector, into)
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
    """The `servers` without data take the parameters and buffers of the `leader`, a worker."""
    if worker.rank in servers:
        agree_within(worker, Group((leader, worker.rank)))
    elif worker.rank == leader:
        for server in servers:
            with contextlib.suppress(PeerLost):
                agree_within(worker, Group((leader, server)))
