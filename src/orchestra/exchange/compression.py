"""Compressed gradients: a `Begin` of `GradientAverage`, pushes to servers, and what is kept."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from orchestra.compression.base import Compressor, Context, Encoder
from orchestra.errors import InputError
from orchestra.exchange.average import Begin, BeginSum, Bucket, ScheduledGroup, note_buffer
from orchestra.parameter_server.placement import Piece, Slice
from orchestra.parameter_server.state import Push
from orchestra.schedules import ALL_REDUCE, ring_all_gather
from orchestra.transports.protocol import Group, Task, Transport
from orchestra.transports.tags import Tag
from orchestra.worker.runtime import Work
from orchestra.worker.worker import Worker


@dataclass
class CompressionState:
    """What compression keeps between steps on one worker.

    Attributes:
        steps: begun so far.
        residual: what error feedback has not sent yet; flat, shape [layout.size].
        memory: of each tensor, in the layout's order, what the compressor keeps for it.
        used: of each tensor 1 if this worker has had a gradient of it, so that some may wait here.
    """

    steps: int
    residual: Tensor | None
    memory: list[list[Tensor]]
    used: Tensor

    @staticmethod
    def of(worker: Worker, compressor: Compressor) -> CompressionState:
        """The state before the first step."""
        _check(worker, compressor)
        slots, views = worker.layout.slots, worker.layout.views(worker.gradients.vector)
        memory = [
            compressor.memory(view, slot.offset) for view, slot in zip(views, slots, strict=True)
        ]
        residual = torch.zeros_like(worker.parameters) if compressor.error_feedback else None
        return CompressionState(0, residual, memory, worker.parameters.new_zeros(len(slots)))

    def note_used(self, flags: Tensor) -> None:
        """What waits here of a tensor has to arrive, even if nobody uses the tensor in this step:
        `flags`, 1 for each tensor that this worker uses now, become those that it has ever used."""
        if not flags.is_meta and (self.residual is not None or any(self.memory)):
            flags.copy_(torch.maximum(self.used, flags, out=self.used))


def _check(worker: Worker, compressor: Compressor) -> None:
    """Refuse what this run cannot do."""
    if worker.parameters.is_meta and isinstance(compressor, Encoder) and not compressor.sized:
        raise InputError(
            f"tensors: shapes: how many bytes {compressor!r} sends depends on values, which a run "
            "of shapes does not have: set tensors to real"
        )
    if compressor.brings_momentum and not worker.optimizer.stateless:
        raise InputError(
            f"{compressor!r} brings the momentum along: set optimizer to SGD, without momentum"
        )


def _charge(worker: Worker, kind: str, elements: float, function: Callable[[], object]) -> None:
    worker.compute.run(Work(kind, max(1, round(elements))), function)


class CompressedSum:
    """Sums the gradient in each bucket by compressed payloads; the tail travels as it is.

    `begin_sum` sums payloads that add, and tails. Other payloads are gathered around `ring`, and
    decoded in the order of its ranks, so that everybody has the same bits; over `transport` (None:
    the worker's), with messages of `tag`.
    """

    def __init__(
        self,
        worker: Worker,
        compressor: Compressor,
        state: CompressionState,
        begin_sum: BeginSum,
        ring: Group,
        transport: Transport | None = None,
        tag: int = Tag.GRADIENTS,
    ) -> None:
        self._worker = worker
        self._transport = worker.transport if transport is None else transport
        self._tag = tag
        self._compressor = compressor
        self._state = state
        self._begin_sum = begin_sum
        self._gather = ScheduledGroup(ring_all_gather(len(ring)), ring)
        self._own = ring.index(worker.rank)

    def begin(self, bucket: Bucket, background: bool) -> Sequence[Task[int]]:
        """Encode the bucket of this step and begin its first round, and the sum of the tail."""
        if bucket.first == 0:
            self._state.steps += 1
        return self.sum(bucket, self._state.steps - 1, background=background)

    def sum(self, bucket: Bucket, step: int, *, background: bool) -> Sequence[Task[int]]:
        """The same for a bucket that is summed for the time number `step`."""
        size = min(bucket.values.numel(), self._worker.layout.size - bucket.first)
        gradient, tail = bucket.values[:size], bucket.values[size:]
        rounds = self._added if self._compressor.adds else self._gathered
        begun: list[Task[int]] = [_Rounds(rounds(bucket, step, gradient, background))]
        if tail.numel():
            self._state.note_used(tail[-len(self._state.used) :])
            begun.append(self._begin_sum(tail, background))
        return begun

    @property
    def _whole(self) -> bool:
        return isinstance(self._compressor, Encoder) and self._compressor.whole

    def _contexts(self, bucket: Bucket, step: int) -> list[Context]:
        worker = self._worker
        about = step, worker.rank, len(worker.workers)
        if self._whole:
            return [Context((len(bucket.values),), bucket.first, *about)]
        return [
            Context(tuple(slot.shape), slot.offset, *about, memory)
            for slot, memory in zip(worker.layout.slots, self._state.memory, strict=True)
        ][bucket.first_slot : bucket.end_slot]

    def _cut(self, bucket: Bucket, vector: Tensor) -> list[Tensor]:
        """Return the tensors of `bucket` in its part `vector` of a flat vector, each flat."""
        if self._whole:
            return [vector]
        slots = self._worker.layout.slots[bucket.first_slot : bucket.end_slot]
        starts = [slot.offset - bucket.first for slot in slots]
        return [
            vector[start : start + slot.size] for start, slot in zip(starts, slots, strict=True)
        ]

    def _with_residual(self, bucket: Bucket, gradient: Tensor) -> list[Tensor]:
        """p <- g + e, in place; return the residuals, cut as the gradient is."""
        if self._state.residual is None:
            return []
        residual = self._state.residual[bucket.first : bucket.first + gradient.numel()]
        gradient.add_(residual)
        return self._cut(bucket, residual)

    def _added(
        self, bucket: Bucket, step: int, gradient: Tensor, background: bool
    ) -> Iterator[Task[int]]:
        """One round after the other, each a sum by the strategy's own collective."""
        tensors = self._cut(bucket, gradient)
        contexts = self._contexts(bucket, step)
        rounds: Iterator[Tensor] | None = None
        vector: Tensor | None = None

        def advance() -> None:
            nonlocal rounds, vector
            if rounds is None:
                residuals = self._with_residual(bucket, gradient)
                rounds = self._compressor.rounds(tensors, residuals, contexts)
            vector = next(rounds, None)

        encoding, decoding = self._compressor.passes
        _charge(self._worker, "encode", encoding * gradient.numel(), advance)
        while vector is not None:
            yield self._begin_sum(vector, background)
            _charge(self._worker, "decode", decoding * gradient.numel(), advance)

    def _gathered(
        self, bucket: Bucket, step: int, gradient: Tensor, background: bool
    ) -> Iterator[Task[int]]:
        """Everybody's payloads, encoded at once and decoded one after the other."""
        compressor = self._compressor
        assert isinstance(compressor, Encoder)
        tensors, contexts = self._cut(bucket, gradient), self._contexts(bucket, step)
        encoding, decoding = compressor.passes
        sizes = [
            compressor.size(len(each), gradient.element_size(), step) for each in tensors
        ]  # of the payloads of each worker, where they are known
        payload = gradient.new_empty(sum(sizes) if gradient.is_meta else 0, dtype=torch.uint8)

        def encode() -> None:
            nonlocal payload, sizes
            residuals = self._with_residual(bucket, gradient)
            if gradient.is_meta:
                return
            payloads = compressor.encode_all(tensors, residuals, contexts)
            payload, lengths = torch.cat(payloads), [len(each) for each in payloads]
            assert lengths == sizes or not compressor.sized, compressor
            sizes = lengths

        _charge(self._worker, "encode", encoding * gradient.numel(), encode)
        ranks = len(self._gather.group)
        table = [sizes] * ranks
        if not compressor.sized:
            gather = _Gather(torch.tensor(sizes), [len(sizes)] * ranks, self._own)
            yield self._begin_gather(gather, background)
            table = [each.tolist() for each in gather.pieces()]
        gather = _Gather(payload, [sum(each) for each in table], self._own)
        yield self._begin_gather(gather, background)

        def decode() -> None:
            if gradient.is_meta:
                return
            pieces = zip(gather.pieces(), table, strict=True)
            arrived = [piece.split(lengths) for piece, lengths in pieces]
            for number, (values, context) in enumerate(zip(tensors, contexts, strict=True)):
                compressor.combine([each[number] for each in arrived], values, context)

        _charge(self._worker, "decode", decoding * ranks * gradient.numel(), decode)

    def _begin_gather(self, gather: _Gather, background: bool) -> Task[int]:
        return self._gather.begin(
            self._transport, gather.vector, self._tag, gather.edges, background=background
        )


class _Gather:
    """The vector of an all-gather around a ring, with the piece of the rank `own` in its place: the
    piece (i + 1) mod N is that of the i-th rank, which has `sizes[i]` elements."""

    def __init__(self, piece: Tensor, sizes: Sequence[int], own: int) -> None:
        self.edges = _edges((sizes[-1], *sizes[:-1]))
        self.vector = piece.new_empty(self.edges[-1])
        place = (own + 1) % len(sizes)
        self.vector[self.edges[place] : self.edges[place + 1]] = piece

    def pieces(self) -> list[Tensor]:
        """In the order of the ranks."""
        last, *others = [self.vector[first:end] for first, end in pairwise(self.edges)]
        return [*others, last]


@functools.lru_cache(maxsize=1024)
def _edges(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return where runs of these sizes begin, and the end; equal ones as the same object, by which
    the simulation knows them."""
    return tuple(accumulate(sizes, initial=0))


class _Rounds:
    """Collectives one after the other, the first of them begun at once, as one task."""

    def __init__(self, rounds: Iterator[Task[int]]) -> None:
        self._rounds = rounds
        self._under_way = next(rounds, None)

    def wait(self) -> int:
        buffer = 0
        while self._under_way is not None:
            buffer = max(buffer, self._under_way.wait())
            self._under_way = next(self._rounds, None)
        return buffer

    def done(self) -> bool:
        return self._under_way is None


def compressed(
    worker: Worker,
    compressor: Compressor,
    state: CompressionState,
    begin_sum: BeginSum,
    ring: Group,
) -> Begin:
    """Sum each bucket by payloads of `compressor`; see `CompressedSum`."""
    return CompressedSum(worker, compressor, state, begin_sum, ring).begin


class SliceCodec:
    """Slices of a flat vector as payloads, and back; the parts of tensors in them one by one."""

    def __init__(self, worker: Worker, compressor: Encoder) -> None:
        self._worker = worker
        self._compressor = compressor

    def encode(
        self, parts: Sequence[Slice], vector: Tensor, state: CompressionState, step: int
    ) -> list[Tensor]:
        """The payload of each of `parts`; what is left out stays in `state`."""
        compressor, residual = self._compressor, state.residual
        payloads: list[Tensor] = []

        def encode() -> None:
            if vector.is_meta:
                sizes = [sum(self._sizes(part, step)) for part in parts]
                payloads.extend(vector.new_empty(size, dtype=torch.uint8) for size in sizes)
                return
            values = vector if residual is None else vector + residual
            for part in parts:
                contexts = [
                    self._context(piece, step, self._worker.rank, self._memory(state, piece))
                    for piece in part.pieces
                ]
                tensors = [values[piece.first : piece.end] for piece in part.pieces]
                residuals = [residual[p.first : p.end] for p in part.pieces if residual is not None]
                own = compressor.encode_all(tensors, residuals, contexts)
                if not compressor.sized:
                    lengths = torch.tensor([len(each) for each in own], dtype=torch.int32)
                    own.insert(0, lengths.view(torch.uint8).to(vector.device))
                payloads.append(torch.cat(own) if own else vector[:0])  # a slice may hold nothing

        _charge(self._worker, "encode", compressor.passes[0] * vector.numel(), encode)
        return payloads

    def decode(self, part: Slice, payload: Tensor, step: int, rank: int) -> Tensor:
        """The elements of `part`, flat, that the `payload` of the worker `rank` stands for."""
        values = self._worker.parameters.new_zeros(part.end - part.first)

        def decode() -> None:
            if values.is_meta:
                return
            for piece, own in zip(part.pieces, self._split(part, payload, step), strict=True):
                there = values[piece.first - part.first : piece.end - part.first]
                self._compressor.combine([own], there, self._context(piece, step, rank))

        _charge(self._worker, "decode", self._compressor.passes[1] * values.numel(), decode)
        return values

    def _split(self, part: Slice, payload: Tensor, step: int) -> list[Tensor]:
        if self._compressor.sized:
            lengths = [size // payload.element_size() for size in self._sizes(part, step)]
        else:
            head = 4 * len(part.pieces)
            lengths, payload = payload[:head].clone().view(torch.int32).tolist(), payload[head:]
        return list(payload.split(lengths))

    def _sizes(self, part: Slice, step: int) -> list[int]:
        itemsize = self._worker.layout.dtype.itemsize
        elements = (piece.end - piece.first for piece in part.pieces)
        return [self._compressor.size(each, itemsize, step) for each in elements]

    def _context(
        self, piece: Piece, step: int, rank: int, memory: Sequence[Tensor] = ()
    ) -> Context:
        shape = (piece.end - piece.first,)
        return Context(shape, piece.first, step, rank, len(self._worker.workers), memory)

    def _memory(self, state: CompressionState, piece: Piece) -> list[Tensor]:
        start = piece.first - self._worker.layout.slots[piece.tensor].offset
        return [
            each[start : start + piece.end - piece.first] for each in state.memory[piece.tensor]
        ]


@dataclass(frozen=True)
class CompressedPushes:
    """What a worker pushes to the servers of `slices`, and how these read it.

    A push without samples is empty: servers would not apply it, so nothing is encoded.
    """

    codec: SliceCodec
    slices: Sequence[Slice]

    def encode(self, state: CompressionState, push: Push, gradient: Tensor) -> list[Tensor]:
        """The payload for each server; what is left out stays in `state`."""
        if not push.samples:
            return [gradient[:0] for _ in self.slices]
        return self.codec.encode(self.slices, gradient, state, push.clock)

    def decode(self, part: Slice, push: Push, payload: Tensor) -> Tensor:
        """On a server: the gradient of its slice `part`, flat, that `payload` stands for."""
        if not push.samples:
            return payload.new_zeros(part.end - part.first)
        return self.codec.decode(part, payload, push.clock, push.worker)


def average_compressed(
    worker: Worker,
    transport: Transport,
    values: Tensor,
    first: int,
    compressor: Compressor,
    state: CompressionState,
    algorithm: str,
    step: int,
) -> None:
    """values <- the sum of the workers' `values`, by compressed payloads, for the time `step`.

    `values` are whole tensors, from element `first` of the flat vector on; `transport` is that of
    the flow that does it.
    """
    slots = worker.layout.slots
    inside = [n for n, slot in enumerate(slots) if first <= slot.offset < first + len(values)]
    bucket = Bucket(first, values, inside[0], inside[-1] + 1)
    group = worker.workers
    ring = ScheduledGroup(ALL_REDUCE[algorithm](len(group)), group)
    begin_sum = ring.sums(transport, Tag.REPLICAS)
    summed = CompressedSum(worker, compressor, state, begin_sum, group, transport, Tag.REPLICAS)
    for task in summed.sum(bucket, step, background=False):
        note_buffer(worker, task.wait())
