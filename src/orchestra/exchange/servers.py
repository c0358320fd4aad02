"""Parameter servers of a worker's model: who owns what, the server of a rank, collecting.

And the worker's side that pushes gradients, and pulls values, in parts while it computes.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from orchestra.collectives import Group, all_reduce
from orchestra.compression.base import Compressor
from orchestra.coordinator.core import Applied, Coordinator
from orchestra.exchange.agreement import charge
from orchestra.exchange.compression import SliceCodec
from orchestra.exchange.consensus import Learnt
from orchestra.optimizers.spec import install_moments
from orchestra.parameter_server.client import Client
from orchestra.parameter_server.held_slice import HeldSlice
from orchestra.parameter_server.how import (
    Application,
    Correction,
    OptimizerStep,
)
from orchestra.parameter_server.messages import Answer, Kind, Push, Request, encode_request
from orchestra.parameter_server.placement import Part, Piece, Slice, cut_into_parts
from orchestra.parameter_server.placement import place as place_slices
from orchestra.parameter_server.server import Server
from orchestra.parameter_server.state import ServerState
from orchestra.parameter_server.when import When
from orchestra.transports.protocol import Handle, Task, Transport
from orchestra.transports.tags import Tag
from orchestra.worker.layout import Layout
from orchestra.worker.worker import Worker


def slices_of(
    worker: Worker, servers: Sequence[int], *, updates: bool, weights: Sequence[float] = ()
) -> list[Slice]:
    """Cut the parameters over the ranks in `servers`, balanced by bytes, or by `weights`. Where the
    servers update, a tensor is cut only if the optimizer works element by element."""
    layout, divisible = worker.layout, worker.optimizer.elementwise or not updates
    spans = [(slot.offset, slot.size) for slot in layout.slots]
    slices = place_slices(spans, layout.size, len(servers), divisible=divisible, weights=weights)
    return [replace(part, rank=rank) for rank, part in zip(servers, slices, strict=True)]


@dataclass(frozen=True)
class ServerRules:
    """What the servers of a strategy do with the pushes of its workers."""

    when: When
    application: type[Application]
    corrections: Sequence[Correction] = ()
    clips: bool = False  # an averaged gradient is clipped by the norm of all slices
    # Where workers take batches from a queue, their shares of a step; the server of the first slice
    # hands the batches out.
    queue_shares: tuple[float, ...] | None = None
    parts: Sequence[Part] = ()  # what pushes come in; none if they come slice by slice
    apply_per_part: bool = False  # a part is applied once all workers have pushed it
    compression: Compressor | None = None  # of pushes


def make_server(
    worker: Worker, slices: Sequence[Slice], workers: Sequence[int], rules: ServerRules
) -> Server:
    """Make the server of this rank, with the moments that `worker` has inherited, if any."""
    own = next(part for part in slices if part.rank == worker.rank)
    return Server(make_slice(worker, slices, own, workers, rules))


def make_slice(
    worker: Worker, slices: Sequence[Slice], part: Slice, workers: Sequence[int], rules: ServerRules
) -> HeldSlice:
    """Make the server's side of `part`, one of `slices`, with its optimizer and its state."""
    clip = None
    if rules.clips and worker.clip_norm is not None:
        servers = Group(tuple(each.rank for each in slices))
        clip = partial(clip_together, worker.clip_norm, servers, "reduce_to_one")
    decode = None
    if rules.compression is not None:
        decode = partial(SliceCodec(worker, rules.compression).decode_push, part)
    offer = partial(worker.snapshots.offer, offset=part.first)
    return HeldSlice(
        _server_state(worker, workers, rules, hands_out=part == slices[0]),
        _application(worker, part, rules.application),
        partial(charge, worker),
        corrections=rules.corrections,
        clip=clip,
        on_update=offer if rules.application.holds_model else None,
        parts=[each for each in rules.parts if slices[each.place] == part],
        apply_per_part=rules.apply_per_part,
        decode=decode,
    )


def _application(worker: Worker, part: Slice, kind: type[Application]) -> Application:
    """Make what applies updates to `part`; an optimizer gets the moments that were inherited."""
    values = worker.parameters[part.first : part.end].clone()
    if not issubclass(kind, OptimizerStep):
        return kind(values)
    tensors = tensors_of(worker.layout, part.pieces, values, part.first)
    optimizer = worker.optimizer.build({name: each for name, (each, _) in tensors.items()})
    install_moments(optimizer, tensors, worker.inherited)
    return kind(values, tensors, optimizer)


def _server_state(
    worker: Worker, workers: Sequence[int], rules: ServerRules, *, hands_out: bool
) -> ServerState:
    """Make the state of a slice; with `hands_out` its server has the coordinator."""
    live = set(workers) - worker.transport.lost()
    state = ServerState(rules.when, live, consumed=worker.step.consumed)
    if rules.queue_shares is None:
        return state
    queue = worker.make_queue(rules.queue_shares)
    if queue is None:
        return state
    state.applied, state.round = Applied(queue.start), queue.round
    if hands_out:
        state.coordinator = Coordinator(queue, gone=set(workers) - live)
    return state


def tensors_of(
    layout: Layout, pieces: Sequence[Piece], vector: Tensor, first: int
) -> dict[str, tuple[Tensor, int]]:
    """Return the parts of parameters in a vector that begins at element `first` of the layout.

    By name, each with the element of the parameter at which it begins: one that is there whole in
    its shape, a cut one flat.
    """
    tensors = {}
    for piece in pieces:
        slot = layout.slots[piece.tensor]
        tensor = vector[piece.first - first : piece.end - first]
        if piece.end - piece.first == slot.size:
            tensor = tensor.view(slot.shape)
        tensors[slot.name] = (tensor, piece.first - slot.offset)
    return tensors


def clip_together(
    limit: float, group: Group, algorithm: str, transport: Transport, *gradients: Tensor
) -> None:
    """Clip by the norm of the whole gradient: each rank of `group` knows the square of its part."""
    square = torch.zeros(1, dtype=torch.float64)
    for gradient in gradients:
        square = square.to(gradient.device) + gradient.double().square().sum()
    all_reduce(transport, square, algorithm, group, Tag.NORM)
    # As `torch.nn.utils.clip_grad_norm_`, with its 1e-6.
    factor = limit / (float(square.sqrt()) + 1e-6)
    if factor < 1.0:
        for gradient in gradients:
            gradient.mul_(factor)


def learnt_slices(
    worker: Worker, slices: Sequence[Slice], server: Server | None
) -> Iterator[Learnt]:
    """Yield the slices of the model, each of which its server owns."""
    for part in slices:
        values = worker.parameters[part.first : part.end]
        if part.rank == worker.rank:
            assert server is not None
            values = server.own.values
            server.own.all_have_read()
        yield Learnt(part.first, values, float(part.rank == worker.rank), part.rank)


# In parts, while a worker computes

PART_BYTES = 1 << 20
"""Least bytes of a part, unless buckets are smaller: what is left to exchange after backward.

P3 has 200 KB, BytePS (Jiang et al., OSDI 2020) up to 4 MB.
"""

UNDER_WAY = 2
"""Parts that a worker sends to a server at a time: the next does not wait out a latency."""

PULLS, PUSHES = 1, 2
"""Lanes of background flows: the first one takes in values; those from `PUSHES` on push, to one
server each, so that no server waits while another one is busy."""


def parts_of(worker: Worker, slices: Sequence[Slice]) -> list[Part]:
    """Return the parts in which gradients are pushed, the same on all ranks. Empty: by slices.

    As with all-reduce, a model of one bucket is not worth it. What clips needs the whole gradient
    first. In a loop of the user's own, which may change it before the update, and look at the
    parameters, nothing leaves or arrives before.
    """
    one_bucket = worker.layout.bytes <= worker.bucket_bytes or not worker.overlap
    whole = worker.own_loop or worker.clip_norm is not None
    if one_bucket or whole or not all(part.pieces for part in slices):
        return []
    itemsize = worker.layout.dtype.itemsize
    most = worker.bucket_bytes // itemsize
    return cut_into_parts(slices, min(most, PART_BYTES // itemsize), most)


class PartsClient:
    """Pushes each part of the gradient as soon as backward has filled it; pulls values by parts.

    Parts are pushed by background flows of `worker`, one for each server, in their order, each with
    a request behind it; the push itself, which only tells of the gradient, follows when backward is
    over. Another flow takes in the values, while the next forward pass begins with the layers that
    are there.

    With `apply_per_part` gradients are weighted here, and servers send the values of a part once
    all workers have pushed it; else once they have applied the push, those of the first layers
    first (P3: Jayarajan et al., MLSys 2019). With `averages` they are averages that replace the
    gradients.
    """

    def __init__(
        self,
        worker: Worker,
        client: Client,
        parts: Sequence[Part],
        *,
        apply_per_part: bool,
        averages: bool,
    ) -> None:
        self._worker = worker
        self._client = client
        self._parts = parts
        self._apply_per_part = apply_per_part
        self._there = [False] * len(worker.layout.slots)  # slots that have their gradient
        self._next = 0  # the first part that was not pushed yet
        self._pushed: dict[int, Task[None]] = {}  # the last part that was, by server
        self._leaving: dict[int, deque[Handle]] = defaultdict(deque)  # of the background flows
        # A second vector: autograd may still need the old values while the new ones arrive.
        self._into = worker.gradients.vector if averages else torch.empty_like(worker.parameters)
        self._averages = averages
        self._pulling: dict[int, Task[Tensor]] = {}  # by part
        self._missing = 0  # parts before this one are not known to be there
        worker.gradients.on_ready = self._slots_are_ready

    @property
    def weight(self) -> float:
        """The factor by which gradients are multiplied before they are pushed."""
        return self._worker.step.weight if self._apply_per_part else 1.0

    def push(self, push: Push) -> list[Answer]:
        """Push what is left of the gradient, and pull values, which become the parameters."""
        worker = self._worker
        self.settle()
        while self._next < len(self._parts):
            self._push_next()
        for pushed in self._pushed.values():
            pushed.wait()
        self._next, self._there = 0, [False] * len(self._there)
        if not self._apply_per_part:
            self._pull()
        answers = self._client.push(push)
        self._missing = len(self._parts)
        if self._averages:
            self.settle()
        else:
            # The vectors change places, without a copy.
            self._into = worker.move_parameters(self._into)
            worker.arriving = self
        return answers

    def await_for(self, slot: int) -> None:
        """Called in forward: wait for the values of the parameter `slot`, and of all after it."""
        while self._missing and self._parts[self._missing - 1].tensors.stop > slot:
            self._missing -= 1
            needed = self._parts[self._missing].tensors.stop - 1
            self._worker.compute.wait_before_using(needed, self._pulling[self._missing].wait)

    def settle(self) -> None:
        """Wait until all values are there."""
        while self._missing:
            self._missing -= 1
            self._pulling[self._missing].wait()
        self._worker.arriving = None

    def close(self) -> None:
        """Wait for what is under way, and end the background flows."""
        self.settle()
        self._worker.gradients.on_ready = None
        self._worker.transport.end_background()

    def _slots_are_ready(self, first: int, end: int) -> None:
        """Called in backward: collect slots, and push parts that are complete, in their order."""
        worker = self._worker
        worker.gradients.collect_each(first, end, self.weight)
        self._there[first:end] = [True] * (end - first)
        while self._next < len(self._parts):
            tensors = self._parts[self._next].tensors
            if not all(self._there[tensors.start : tensors.stop]):
                return
            # In virtual time a part is there when backward has come to its last tensor.
            worker.compute.advance_to(tensors[-1])
            self._push_next()

    def _push_next(self) -> None:
        worker, step, part = self._worker, self._worker.step, self._parts[self._next]
        # Servers answer parts as they come: receives are posted before the first push.
        if self._apply_per_part and not self._next:
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
            # Two messages for each part.
            while len(leaving) > 2 * UNDER_WAY:
                leaving.popleft().wait()

        self._pushed[part.place] = worker.transport.in_background(send, PUSHES + part.place)
        self._next += 1

    def _pull(self) -> None:
        """Begin to receive the values of all parts, in the order in which they are sent."""
        parts, into, begin = self._parts, self._into, self._worker.transport.in_background
        # Parts begin with the last layer. A server that applies parts
        # answers in the order of pushes; others
        # answer when they have all, beginning with the layers that forward needs first.
        order = range(len(parts)) if self._apply_per_part else range(len(parts))[::-1]
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
