"""Compressed gradients: how they are summed, or pushed to servers, and what is kept."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise

import torch
from torch import Tensor

from orchestra.compression.base import Compressor, Context, Encoder
from orchestra.errors import InputError
from orchestra.exchange.agreement import T, charge
from orchestra.exchange.average import BeginSum, Bucket, ScheduledGroup, note_buffer
from orchestra.parameter_server.messages import Push
from orchestra.parameter_server.placement import Piece, Slice
from orchestra.schedules import ALL_REDUCE, ring_all_gather
from orchestra.settings.base import COMMON
from orchestra.transports.protocol import Group, Pending, Transport
from orchestra.transports.tags import Tag
from orchestra.worker.worker import Worker

Rounds = Iterator[Pending[int]]
"""Collectives in sequence: each is begun when the one before is over."""


@dataclass
class CompressionState:
    """What compression keeps between steps on one worker."""

    steps: int = field(metadata=COMMON)  # begun so far
    residual: Tensor | None  # what error feedback has not sent yet; flat, shape [layout.size]
    # Of each tensor, in the layout's order, what the compressor keeps
    memory: list[list[Tensor]] = field(metadata={"common": lambda state: state.is_shared})
    used: Tensor  # of each tensor 1 if this worker has had a gradient: some of it may wait here
    is_shared: bool = field(init=False, default=False)  # `memory` is the same on all workers

    @staticmethod
    def of(worker: Worker, compressor: Compressor) -> CompressionState:
        """The state before the first step; refuses a compressor that this run cannot use."""
        if worker.parameters.is_meta and isinstance(compressor, Encoder) and not compressor.sized:
            raise InputError(
                f"tensors: shapes: how many bytes {compressor!r} sends depends on values, which a "
                "run of shapes does not have: set tensors to real"
            )
        if compressor.brings_momentum and not worker.optimizer.stateless:
            raise InputError(
                f"{compressor!r} brings the momentum along: set optimizer to SGD, without momentum"
            )
        if isinstance(compressor, Encoder) and compressor.error_feedback:
            _require_contraction(compressor)
        slots, views = worker.layout.slots, worker.layout.views(worker.gradients.vector)
        memory = [
            compressor.memory(view, slot.offset) for view, slot in zip(views, slots, strict=True)
        ]
        residual = torch.zeros_like(worker.parameters) if compressor.error_feedback else None
        state = CompressionState(0, residual, memory, worker.parameters.new_zeros(len(slots)))
        state.is_shared = compressor.shares_memory
        return state

    def begin_sum(self, worker: Worker) -> None:
        """Begin the sum of a step, which may be void: then what it changes here is undone."""
        if worker.steps_may_be_void:
            if worker.step.rescale != 1.0:
                kept = chain(*self.memory, () if self.residual is None else (self.residual,))
                for tensor in kept:
                    tensor.mul_(worker.step.rescale)
            before = copy.deepcopy(vars(self))
            worker.undo_exchange = lambda: vars(self).update(before)
        self.steps += 1

    def note_used(self, flags: Tensor) -> None:
        """Replace `flags`, 1 for each tensor used in this step, by those of tensors ever used here.

        What error feedback has kept of a tensor has to arrive, even if nobody uses the tensor now.
        """
        if not flags.is_meta and (self.residual is not None or any(self.memory)):
            flags.copy_(torch.maximum(self.used, flags, out=self.used))


def _require_contraction(compressor: Encoder) -> None:
    """Refuse a compressor whose error is larger than what it compresses: kept, it would grow."""
    values = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0))
    context = Context((len(values),), 0, 0, 0, 1, compressor.memory(values, 0))
    residual = torch.empty_like(values)
    compressor.encode_all([values], [residual], [context])
    if residual.norm() > values.norm():
        raise InputError(
            f"{compressor!r} leaves out more than there was, so that what waits for later steps "
            "would grow: divide what it sends, as QSGD does, or leave out error_feedback and Gossip"
        )


class _Codec:
    """Encodes and decodes pieces of the flat vector: tensors, or parts of them."""

    def __init__(self, worker: Worker, compressor: Compressor) -> None:
        self._worker = worker
        self._compressor = compressor

    @property
    def _encoder(self) -> Encoder:
        assert isinstance(self._compressor, Encoder)
        return self._compressor

    def _charge(self, kind: str, elements: float, function: Callable[[], T]) -> T:
        return charge(self._worker, kind, max(1, round(elements)), function)

    def _contexts(
        self, pieces: Sequence[Piece], step: int, rank: int, state: CompressionState | None = None
    ) -> list[Context]:
        """Make the context of each piece for the compressor; without `state` one for decoding."""
        contexts, workers = [], len(self._worker.workers)
        for piece in pieces:
            slot, size = self._worker.layout.slots[piece.tensor], piece.end - piece.first
            shape, start = tuple(slot.shape), piece.first - slot.offset
            memory = [] if state is None else state.memory[piece.tensor]
            if size < slot.size:
                shape, memory = (size,), [each[start : start + size] for each in memory]
            contexts.append(Context(shape, piece.first, step, rank, workers, memory))
        return contexts

    def _sizes(self, pieces: Sequence[Piece], step: int) -> list[int]:
        """Return the bytes of the payload of each piece, where they are known."""
        itemsize = self._worker.layout.dtype.itemsize
        return [self._encoder.size(piece.end - piece.first, itemsize, step) for piece in pieces]


def _cut(pieces: Sequence[Piece], vector: Tensor | None, first: int = 0) -> list[Tensor]:
    """Return the pieces in a flat vector that begins at element `first`; [] without a vector."""
    if vector is None:
        return []
    return [vector[piece.first - first : piece.end - first] for piece in pieces]


def _add_residual(gradient: Tensor, residual: Tensor) -> Tensor:
    """p <- g + e, in place. Where g is infinite or NaN somewhere, all of p becomes NaN: the few
    elements that are sent show it then, and not those of a later step."""
    if not gradient.is_meta and not gradient.sum().isfinite():
        return gradient.fill_(float("nan"))
    return gradient.add_(residual)


class CompressedSum(_Codec):
    """Sums the gradient in each bucket by compressed payloads; the tail travels as it is.

    `begin_sum` sums payloads that add, and tails. Other payloads are gathered around `ring`, and
    decoded in the order of its ranks, so that everybody has the same bits; over `transport` (None:
    the worker's), with messages of `tag`. `begin` is a `Begin` of `GradientAverage`.
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
        super().__init__(worker, compressor)
        self._transport, self._tag = transport or worker.transport, tag
        self._state = state
        self._begin_sum = begin_sum
        self._gather = ScheduledGroup(ring_all_gather(len(ring)), ring)
        self._own = ring.index(worker.rank)

    def begin(self, bucket: Bucket, background: bool) -> Sequence[Pending[int]]:
        """Encode the bucket of this step and begin its first round, and the sum of the tail."""
        if bucket.first == 0:
            self._state.begin_sum(self._worker)
        return self.sum(bucket, self._state.steps - 1, background)

    def sum(self, bucket: Bucket, step: int, background: bool) -> Sequence[Pending[int]]:
        """Like `begin`, for a bucket that is summed for the time number `step`."""
        gradient, tail = bucket.values.tensor_split([self._worker.layout.size - bucket.first])
        rounds = self._added if self._compressor.adds else self._gathered
        begun: list[Pending[int]] = []
        if gradient.numel():  # not of tensors without elements alone
            begun.append(_Rounds(rounds(bucket, step, gradient, background)))
        if tail.numel():
            self._state.note_used(tail[-len(self._state.used) :])
            begun.append(self._begin_sum(tail, background))
        return begun

    def _pieces(self, bucket: Bucket, gradient: Tensor) -> list[Piece]:
        """Return the tensors of `bucket`, or all as one where the compressor takes it `whole`."""
        if isinstance(self._compressor, Encoder) and self._compressor.whole:
            return [Piece(bucket.first_slot, bucket.first, bucket.first + len(gradient))]
        slots = self._worker.layout.slots[bucket.first_slot : bucket.end_slot]
        return [
            Piece(number, slot.offset, slot.offset + slot.size)
            for number, slot in enumerate(slots, bucket.first_slot)
            if slot.size
        ]

    def _with_residual(self, gradient: Tensor, first: int) -> Tensor | None:
        """p <- g + e, in place; return e, if there is error feedback."""
        if self._state.residual is None:
            return None
        residual = self._state.residual[first : first + gradient.numel()]
        _add_residual(gradient, residual)
        return residual

    def _added(self, bucket: Bucket, step: int, gradient: Tensor, background: bool) -> Rounds:
        """Yield one round after the other: sums by the strategy's own collective."""
        pieces, first = self._pieces(bucket, gradient), bucket.first
        contexts = self._contexts(pieces, step, self._worker.rank, self._state)

        def all_rounds() -> Iterator[Tensor]:
            residuals = _cut(pieces, self._with_residual(gradient, first), first)
            yield from self._compressor.rounds(_cut(pieces, gradient, first), residuals, contexts)

        # `all_rounds` gives a vector, and finds the sum in its place when it goes on.
        rounds, (encoding, decoding) = all_rounds(), self._compressor.passes
        advance = functools.partial(next, rounds, None)
        vector = self._charge("encode", encoding * gradient.numel(), advance)
        while vector is not None:
            yield self._begin_sum(vector, background)
            vector = self._charge("decode", decoding * gradient.numel(), advance)

    def _gathered(self, bucket: Bucket, step: int, gradient: Tensor, background: bool) -> Rounds:
        """Yield the gathers of all workers' payloads, and decode them one after the other."""
        compressor, pieces, first = self._encoder, self._pieces(bucket, gradient), bucket.first
        tensors = _cut(pieces, gradient, first)
        contexts = self._contexts(pieces, step, self._worker.rank, self._state)
        expected = self._sizes(pieces, step)
        encoding, decoding = compressor.passes

        def encode() -> tuple[Tensor, list[int]]:
            residuals = _cut(pieces, self._with_residual(gradient, first), first)
            if gradient.is_meta:
                return gradient.new_empty(sum(expected), dtype=torch.uint8), expected
            payloads = compressor.encode_all(tensors, residuals, contexts)
            lengths = [len(each) for each in payloads]
            assert lengths == expected or not compressor.sized, compressor
            return torch.cat(payloads), lengths

        payload, sizes = self._charge("encode", encoding * gradient.numel(), encode)
        ranks = len(self._gather.group)
        table = [sizes] * ranks
        if not compressor.sized:
            # Lengths first: how much a rank sends depends on its values.
            gather = _Gather(torch.tensor(sizes), [len(sizes)] * ranks, self._own)
            yield self._begin_gather(gather, background)
            table = [each.tolist() for each in gather.pieces()]
        gather = _Gather(payload, [sum(each) for each in table], self._own)
        yield self._begin_gather(gather, background)

        def decode() -> None:
            if gradient.is_meta:
                return
            arrived = [own.split(cuts) for own, cuts in zip(gather.pieces(), table, strict=True)]
            for number, (values, context) in enumerate(zip(tensors, contexts, strict=True)):
                compressor.combine([each[number] for each in arrived], values, context)

        self._charge("decode", decoding * ranks * gradient.numel(), decode)

    def _begin_gather(self, gather: _Gather, background: bool) -> Pending[int]:
        return self._gather.begin(
            self._transport, gather.vector, self._tag, gather.edges, background=background
        )


class _Gather:
    """The vector of an all-gather around a ring, with the piece of the rank `own` in its place: the
    piece (i + 1) mod N is that of the i-th rank, which has `sizes[i]` elements."""

    def __init__(self, piece: Tensor, sizes: Sequence[int], own: int) -> None:
        # `ring_all_gather` is the ring's second half: after the first, rank i has piece i + 1.
        self.edges = _edges((sizes[-1], *sizes[:-1]))
        self.vector = piece.new_empty(self.edges[-1])
        place = (own + 1) % len(sizes)
        self.vector[self.edges[place] : self.edges[place + 1]] = piece

    def pieces(self) -> list[Tensor]:
        """Return the pieces in the order of the ranks."""
        last, *others = [self.vector[first:end] for first, end in pairwise(self.edges)]
        # Piece 0 is that of the last rank.
        return [*others, last]


@functools.lru_cache(maxsize=1024)
def _edges(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return where runs of these sizes begin, and the end; equal ones as the same object, by which
    the simulation knows them."""
    return tuple(accumulate(sizes, initial=0))


class _Rounds:
    """Collectives one after the other, the first of them begun at once, as one task."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds, self._under_way = rounds, next(rounds, None)

    def wait(self) -> int:
        buffer = 0
        while self._under_way is not None:
            buffer = max(buffer, self._under_way.wait())
            self._under_way = next(self._rounds, None)
        return buffer

    def done(self) -> bool:
        return self._under_way is None


class SliceCodec(_Codec):
    """Slices of the flat vector, such as servers own, as payloads, and back."""

    def encode(
        self, parts: Sequence[Slice], vector: Tensor, state: CompressionState, step: int
    ) -> list[Tensor]:
        """Return the payload of each of `parts` of `vector`; `state` keeps what is left out."""
        encoder, residual = self._encoder, state.residual

        def payload_of(part: Slice, values: Tensor) -> Tensor:
            contexts = self._contexts(part.pieces, step, self._worker.rank, state)
            residuals = _cut(part.pieces, residual)
            own = encoder.encode_all(_cut(part.pieces, values), residuals, contexts)
            if not encoder.sized:
                lengths = torch.tensor([len(each) for each in own], dtype=torch.int32)
                # The server cannot know the lengths beforehand: they come first, 4 bytes each.
                own.insert(0, lengths.view(torch.uint8).to(vector.device))
            return torch.cat(own) if own else vector[:0]  # a slice may hold nothing

        def encode() -> list[Tensor]:
            if vector.is_meta:
                sizes = [sum(self._sizes(part.pieces, step)) for part in parts]
                return [vector.new_empty(size, dtype=torch.uint8) for size in sizes]
            values = vector if residual is None else _add_residual(vector.clone(), residual)
            return [payload_of(part, values) for part in parts]

        return self._charge("encode", encoder.passes[0] * vector.numel(), encode)

    def decode(self, part: Slice, payload: Tensor, step: int, rank: int) -> Tensor:
        """Return the elements of `part`, flat, for which the `payload` of worker `rank` stands."""
        values = self._worker.parameters.new_zeros(part.end - part.first)

        def decode() -> None:
            if values.is_meta:
                return
            body = payload
            if self._encoder.sized:
                sizes = self._sizes(part.pieces, step)
                lengths = [size // payload.element_size() for size in sizes]
            else:
                head, body = payload.tensor_split([4 * len(part.pieces)])
                # A copy: a view of another dtype has to begin at a multiple of its size.
                lengths = head.clone().view(torch.int32).tolist()
            contexts = self._contexts(part.pieces, step, rank)
            there = _cut(part.pieces, values, part.first)
            for own, out, context in zip(body.split(lengths), there, contexts, strict=True):
                self._encoder.combine([own], out, context)

        self._charge("decode", self._encoder.passes[1] * values.numel(), decode)
        return values

    def encode_push(
        self, parts: Sequence[Slice], state: CompressionState, push: Push, gradient: Tensor
    ) -> list[Tensor]:
        """Return the payloads of `push` for the servers of `parts`, empty if it has no samples."""
        if not push.samples:
            return [gradient[:0] for _ in parts]
        return self.encode(parts, gradient, state, push.clock)

    def decode_push(self, part: Slice, push: Push, payload: Tensor) -> Tensor:
        """On a server: return the gradient of its slice `part`, flat, that `payload` encodes."""
        if not push.samples:
            return payload.new_zeros(part.end - part.first)
        return self.decode(part, payload, push.clock, push.worker)


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
    """Replace `values` by their sum over the workers, by compressed payloads of number `step`.

    `values` are whole tensors, from element `first` of the flat vector on; `transport` is that of
    the flow that does it.
    """
    slots, group = worker.layout.slots, worker.workers
    inside = [n for n, slot in enumerate(slots) if first <= slot.offset < first + len(values)]
    bucket = Bucket(first, values, inside[0], inside[-1] + 1)
    collective = ScheduledGroup(ALL_REDUCE[algorithm](len(group)), group)
    begin_sum = collective.sums(transport, Tag.REPLICAS)
    summed = CompressedSum(worker, compressor, state, begin_sum, group, transport, Tag.REPLICAS)
    for task in summed.sum(bucket, step, False):
        note_buffer(worker, task.wait())
