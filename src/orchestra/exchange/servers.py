"""Between a worker and the parameter servers: who owns what, pushing, pulling, collecting.

Gradients are pushed and values are pulled in parts, while a worker computes (`PartsClient`).
"""

from __future__ import annotations

import contextlib
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
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
from orchestra.parameter_server.client import Client
from orchestra.parameter_server.held_slice import DelayCompensation, HeldSlice
from orchestra.parameter_server.messages import Answer, Kind, Push, Request, encode_request
from orchestra.parameter_server.placement import Part, Slice, cut_into_parts
from orchestra.parameter_server.placement import place as place_slices
from orchestra.parameter_server.server import Server
from orchestra.parameter_server.state import Consistency, ServerState
from orchestra.schedules.work_queue import Applied
from orchestra.transports.protocol import Handle, Task, Transport
from orchestra.transports.tags import Tag
from orchestra.worker.worker import Worker

PART_BYTES = 1 << 20
"""Of a part, at least, if buckets are not smaller: what is left to be exchanged after backward.

P3 has 200 KB, BytePS (Jiang et al., OSDI 2020) up to 4 MB.
"""

UNDER_WAY = 2
"""Parts that a worker sends to a server at a time: the next one does not wait for the latency of
the last."""

PULLS, PUSHES = 1, 2
"""Lanes of background flows: the first one takes in values; those from `PUSHES` on push, to one
server each, so that no server waits while another one is busy."""

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
    clip = None
    if clips and worker.clip_norm is not None:
        clip = partial(_clip_together, worker.clip_norm, Group(ranks))

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
            partial(charge, worker),
            clip=clip,
            rate_divisor=rate_divisor,
            compensation=compensate(values, workers) if compensate is not None else None,
            on_update=offer if updates or elastic else None,
            parts=[each for each in parts if slices[each.place] == part],
            early=early,
            elastic=elastic,
            decode=None if decode is None else partial(decode, part),
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


def _clip_together(limit: float, servers: Group, transport: Transport, average: Tensor) -> None:
    """Clip by the norm of the whole gradient: each server knows the square of its part."""
    square = average.double().square().sum().reshape(1)
    if len(servers) > 1:
        all_reduce(transport, square, "reduce_to_one", servers, Tag.NORM)
    average.mul_(min(1.0, limit / (float(square.sqrt()) + 1e-6)))


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
        agree_on_parameters(worker, Group((leader, worker.rank)))
    elif worker.rank == leader:
        for server in servers:
            with contextlib.suppress(PeerLost):
                agree_on_parameters(worker, Group((leader, server)))


def parts_of(worker: Worker, slices: Sequence[Slice]) -> list[Part]:
    """The parts in which gradients are pushed, the same on all ranks; none: slice by slice.

    As with all-reduce, a model of one bucket is not worth it. What clips needs the whole gradient
    first. In a loop of the user's own, which may change it before the update, and look at the
    parameters, nothing leaves or arrives before.
    """
    one_bucket = worker.layout.bytes <= worker.bucket_bytes or not worker.overlap
    whole = worker.own_loop or worker.clip_norm is not None
    if one_bucket or whole or not all(part.pieces for part in slices):
        return []
    limit = min(worker.bucket_bytes, PART_BYTES) // worker.layout.dtype.itemsize
    return cut_into_parts(slices, limit)


class PartsClient:
    """Pushes each part of the gradient as soon as backward has filled it; pulls values by parts.

    Parts are pushed by background flows of `worker`, one for each server, in their order, each with
    a request behind it; the push itself, which only tells of the gradient, follows when backward is
    over. Another flow takes in the values, while the next forward pass begins with the layers that
    are there.

    With `early` gradients are weighted here, and servers send the values of a part once all workers
    have pushed it; else once they have applied the push, those of the first layers first (P3:
    Jayarajan et al., MLSys 2019). With `averages` they are averaged gradients, which replace the
    worker's own.
    """

    def __init__(
        self, worker: Worker, client: Client, parts: Sequence[Part], *, early: bool, averages: bool
    ) -> None:
        self._worker = worker
        self._client = client
        self._parts = parts
        self._early = early
        self._there = [False] * len(worker.layout.slots)  # slots that have their gradient
        self._next = 0  # the first part that was not pushed yet
        self._pushed: dict[int, Task[None]] = {}  # the last part that was, by server
        self._leaving: dict[int, deque[Handle]] = defaultdict(deque)  # of the background flows
        own = worker.gradients.vector
        self._into = own if averages else torch.empty_like(worker.parameters)
        self._averages = averages
        self._pulling: dict[int, Task[Tensor]] = {}  # by part
        self._missing = 0  # parts before this one are not known to be there
        worker.gradients.on_ready = self._slots_are_ready

    @property
    def weight(self) -> float:
        """What gradients are multiplied by before they are pushed."""
        return self._worker.step.weight if self._early else 1.0

    def push(self, push: Push) -> list[Answer]:
        """Push what is left of the gradient; what is pulled becomes the parameters."""
        worker = self._worker
        self.settle()
        while self._next < len(self._parts):
            self._push_next()
        for pushed in self._pushed.values():
            pushed.wait()
        self._next, self._there = 0, [False] * len(self._there)
        if not self._early:
            self._pull()
        answers = self._client.push(push)
        self._missing = len(self._parts)
        if self._averages:
            self.settle()
        else:
            self._into = worker.move_parameters(self._into)
            worker.arriving = self
        return answers

    def await_for(self, slot: int) -> None:
        """In forward: wait for the values of the parameter `slot`, and of all after it."""
        while self._missing and self._parts[self._missing - 1].tensors.stop > slot:
            self._missing -= 1
            needed = self._parts[self._missing].tensors.stop - 1
            self._worker.compute.needs(needed, self._pulling[self._missing].wait)

    def settle(self) -> None:
        """Return when all values are there."""
        while self._missing:
            self._missing -= 1
            self._pulling[self._missing].wait()
        self._worker.arriving = None

    def close(self) -> None:
        """Nothing goes on in the background any more."""
        self.settle()
        self._worker.gradients.on_ready = None
        self._worker.transport.end_background()

    def _slots_are_ready(self, first: int, end: int) -> None:
        """In backward: collect them, and push the parts that are complete, in their order."""
        worker = self._worker
        for slot in range(first, end):
            worker.gradients.collect(slot, self.weight)
            self._there[slot] = True
        while self._next < len(self._parts):
            tensors = self._parts[self._next].tensors
            if not all(self._there[tensors.start : tensors.stop]):
                return
            worker.compute.reached(tensors[-1])
            self._push_next()

    def _push_next(self) -> None:
        worker, step, part = self._worker, self._worker.step, self._parts[self._next]
        if self._early and not self._next:
            self._pull()
        used = tuple(worker.gradients.used[part.tensors.start : part.tensors.stop])
        push = Push(
            worker.rank, self._client.clock + 1, step.samples, step.total_samples, 0.0, False,
            step.rates, used,
        )  # fmt: skip
        request = encode_request(Request(worker.rank, Kind.PART, push, part.number))
        gradient = worker.gradients.vector[part.first : part.end]
        to, leaving = self._client.slices[part.place].rank, self._leaving[part.place]

        def send(transport: Transport) -> None:
            leaving.append(transport.send(gradient, to, Tag.GRADIENT))
            leaving.append(transport.send(request, to, Tag.REQUEST))  # behind all of the part
            while len(leaving) > 2 * UNDER_WAY:
                leaving.popleft().wait()

        lane = PUSHES + part.place
        self._pushed[part.place] = worker.transport.in_background(send, lane)
        self._next += 1

    def _pull(self) -> None:
        """Begin to receive the values of all parts, in the order in which they are sent."""
        parts, into, begin = self._parts, self._into, self._worker.transport.in_background
        order = range(len(parts)) if self._early else range(len(parts))[::-1]
        arriving: dict[int, Handle] = {}

        def post(transport: Transport) -> None:
            for number in order:
                there = into[parts[number].first : parts[number].end]
                rank = self._client.slices[parts[number].place].rank
                arriving[number] = transport.receive(rank, Tag.VALUES, there)

        def wait(number: int, transport: Transport) -> Tensor:
            return arriving[number].wait()

        begin(post, PULLS)
        self._pulling = {number: begin(partial(wait, number), PULLS) for number in order}
