"""Collectives in the memory that the ranks of one host share, as far as they stay on it.

The rounds of a schedule that ranks of this host have with each other alone are not carried out
message by message. Each rank shows its elements, forms a share of the sums, in the order in which
the schedule would have added, and takes the others' shares. Results have the bits of the schedule,
and the traffic counts as its messages.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from orchestra.errors import InputError
from orchestra.schedules.sums import Pieces, SumStage
from orchestra.transports.asides import Asides
from orchestra.transports.collective import Exchange, cuts_in_memory, execute_in_stages
from orchestra.transports.compiled import SO_FAR, Steps
from orchestra.transports.large_messages import on_host
from orchestra.transports.matching import Flow
from orchestra.transports.progress import ProgressEngine
from orchestra.transports.protocol import CollectiveCall, SharedTensor, Transport
from orchestra.transports.shared_memory import (
    CHUNK_BYTES,
    SMALL_BYTES,
    SharedMemory,
    connect_host,
    make_memory,
    mapped,
    memory_bytes,
    pass_on,
)

MAX_MEMORIES = 16
"""Of a rank, which then refuses another one: each takes sockets, and some megabytes."""
CONNECT_SECONDS = 60.0
NOTICE_SECONDS = 2.0
"""Until the end of a rank's messages has come, after that of another connection to it."""


class Host:
    """What the flows of a rank share with the other ranks of its host.

    Every group of ranks has memory of its own for each tag, since flows with different tags may be
    under way together. It is made for the first collective.

    Args:
        engine: moves the messages by which ranks find each other.
        neighbours: the ranks of this host, this one included.
    """

    def __init__(self, engine: ProgressEngine, neighbours: frozenset[int]) -> None:
        self._engine = engine
        self._neighbours = neighbours
        self._memories: dict[tuple[tuple[int, ...], int], SharedMemory | None] = {}

    def execute(
        self, flow: Flow, transport: Transport, call: CollectiveCall, exchange: Exchange | None
    ) -> int:
        """Carry out `call` now, and return the bytes of buffer used.

        Args:
            flow: whose traffic it is.
            transport: that of the flow, or an interceptor of it, for what goes by messages.
            exchange: see `execute_in_stages`.
        """
        ranks = call.group.ranks
        local = frozenset(i for i, rank in enumerate(ranks) if rank in self._neighbours)

        def carry_out(stage: SumStage) -> tuple[float, float] | None:
            memory = self._memory(tuple(ranks[each] for each in stage.ranks), call)
            return None if memory is None else self._carry_out(stage, memory, flow, call)

        return execute_in_stages(transport, call, local, carry_out, exchange)

    def _carry_out(
        self, stage: SumStage, memory: SharedMemory, flow: Flow, call: CollectiveCall
    ) -> tuple[float, float]:
        started, waited = time.perf_counter(), memory.seconds_waiting
        flow.in_collective = memory
        try:
            with torch.no_grad():
                vector = on_host(call.vector)
                place = call.group.ranks.index(flow.rank)
                _form(stage, place, memory, vector, cuts_in_memory(call))
                if vector is not call.vector:
                    call.vector.copy_(vector)
        finally:
            flow.in_collective = None
            self._engine.check()  # who is told to leave says so, not which socket was shut
            waited = memory.seconds_waiting - waited
            flow.traffic.seconds_waiting += waited
            flow.traffic.seconds_communicating += time.perf_counter() - started - waited
        return started, started + waited

    def _memory(self, ranks: tuple[int, ...], call: CollectiveCall) -> SharedMemory | None:
        """Return the memory that `ranks` share for the tag of `call`; None if one refuses."""
        key = ranks, call.tag
        if key not in self._memories:
            made = sum(memory is not None for memory in self._memories.values())
            self._memories[key] = None
            length = memory_bytes(len(ranks))
            finding = _Finding(self._engine, ranks, call.tag)
            found = finding.find(length, made < MAX_MEMORIES)
            if found is not None:
                peers, descriptor, compiled = found
                memory = SharedMemory(
                    ranks.index(self._engine.rank),
                    peers,
                    descriptor,
                    names=ranks,
                    compiled=compiled,
                )
                self._memories[key] = memory
                self._engine.side_channels.append(memory)
        return self._memories[key]

    def share(self, like: Tensor, ranks: tuple[int, ...], tag: int) -> SharedTensor:
        """Collective over `ranks`: see `Transport.share`."""
        far = sorted(set(ranks) - self._neighbours)
        if far:
            raise InputError(
                f"rank {far[0]} cannot share memory with rank {self._engine.rank}: put all ranks "
                "on one host, where ORCHESTRA_SHARED_MEMORY is not 0"
            )
        if like.is_cuda:
            raise InputError("only memory on the CPU can be shared: set device to cpu")
        found = _Finding(self._engine, ranks, tag).find(like.nbytes, True, like)
        if found is None:
            raise InputError("ulimit -f does not allow shared memory as large as is needed")
        peers, memory, _ = found
        # The memory alone is wanted: no barriers.
        for connection in peers.values():
            connection.close()
        return SharedTensor(mapped(memory, like.nbytes, like.dtype))


class _Finding:
    """Lets `ranks` find each other by messages of a collective's tag, which are not counted."""

    def __init__(self, engine: ProgressEngine, ranks: tuple[int, ...], tag: int) -> None:
        self._engine, self._ranks = engine, ranks
        self._asides = Asides(engine, tag)

    def find(
        self, length: int, wanted: bool, content: Tensor | None = None
    ) -> tuple[dict[int, socket.socket], int, bool] | None:
        """A socket to each rank, memory of `length` bytes, which the first one makes, with
        `content`, and whether all have what is compiled; None where not all want to share it, or
        the first cannot make it."""
        place, memory = self._ranks.index(self._engine.rank), None
        if wanted and place == 0:
            try:
                # Before the others are asked, so that this rank can still refuse, as where
                # RLIMIT_FSIZE does not allow a file of this size.
                memory = make_memory(length)
            except OSError:  # messages need none
                wanted = False
        with self._naming_the_lost():
            self._tell(bytes([wanted]))
            answers = [self._hear(other) for other in range(len(self._ranks)) if other != place]
            if not (wanted and all(answer == b"\1" for answer in answers)):
                if memory is not None:
                    os.close(memory)
                return None
            peers, compiled = connect_host(
                place,
                len(self._ranks),
                self._tell,
                self._hear,
                CONNECT_SECONDS,
                lambda: self._engine.check(self._ranks),
            )
            if memory is not None and content is not None:
                # `mapped` closes its descriptor, and this one is still to be passed on.
                mapped(os.dup(memory), length, content.dtype).copy_(content)
            return peers, pass_on(peers, memory), compiled

    @contextlib.contextmanager
    def _naming_the_lost(self) -> Iterator[None]:
        """If a rank is lost while they connect, raise `PeerLost` as a message from it would."""
        try:
            yield
        except OSError:
            deadline = time.monotonic() + NOTICE_SECONDS
            while time.monotonic() < deadline:
                self._engine.check(self._ranks)
                time.sleep(0.01)
            raise

    def _tell(self, shown: bytes) -> None:
        for rank in self._ranks:
            if rank != self._engine.rank:
                self._asides.tell(rank, shown)

    def _hear(self, place: int) -> bytes:
        return self._asides.hear(self._ranks[place])


class Span(NamedTuple):
    """Elements [first, end) of a vector, which are shown from `place` on."""

    first: int
    end: int
    place: int


def _share(span: Span, rank: int, ranks: int) -> Span:
    """Return the elements of `span` that `rank` adds up for all."""
    low, high = (each * (span.end - span.first) // ranks for each in (rank, rank + 1))
    return Span(span.first + low, span.first + high, span.place + low)


def _form(
    stage: SumStage, index: int, memory: SharedMemory, vector: Tensor, cuts: Sequence[int]
) -> None:
    """Replace `vector` by what `stage` gives the rank at `index`."""
    length = vector.numel()
    own, ranks = memory.rank, stage.ranks
    if vector.nbytes <= SMALL_BYTES:
        parts = memory.small(vector.dtype)[:, :length]
        _show(vector, parts[own], Span(0, length, 0), stage.shown[index], cuts)
        memory.barrier()
        vectors = dict(zip(ranks, parts, strict=True))
        stage.whole[index].form(vectors, vector, cuts, 0, length)
        return
    # Compiled code forms chains of additions only; the conditions are the same on all ranks.
    if stage.chained_pieces == len(cuts) - 1 and memory.add_up(
        vector, partial(_steps, stage, cuts)
    ):
        return

    def show(spans: list[Span], part: Tensor) -> None:
        for span in spans:
            _show(vector, part, span, stage.shown[index], cuts)

    def form(spans: list[Span], parts: Tensor, results: Tensor) -> None:
        for span in spans:
            # `shared` sums are wanted by all, so each rank forms a part; those in `alone` by this
            # rank only.
            share = _share(span, own, len(ranks))
            here = results[share.place : share.place + share.end - share.first]
            for sums, part, out in (
                (stage.shared, share, here),
                (stage.alone[index], span, vector[span.first : span.end]),
            ):
                shown = parts[:, part.place : part.place + part.end - part.first]
                vectors = dict(zip(ranks, shown, strict=True))
                sums.form(vectors, out, cuts, part.first, part.end)

    def take(spans: list[Span], results: Tensor) -> None:
        for span in spans:
            for low, high in _clipped(stage.taken[index], span, cuts):
                begin = span.place + low - span.first
                vector[low:high].copy_(results[begin : begin + high - low])

    room = CHUNK_BYTES // vector.element_size()
    memory.pipeline(vector.dtype, _spans(stage, cuts, room), show, form, take)


def _steps(stage: SumStage, cuts: Sequence[int]) -> Steps:
    """Return the chains of an all-reduce, in elements, with ranks numbered as in their memory."""
    place = {rank: number for number, rank in enumerate(stage.ranks)}
    return Steps(
        (cuts[first], cuts[end], place[rank], SO_FAR if other is None else place[other])
        for first, end, rank, other in stage.shared.chained
    )


def _spans(stage: SumStage, cuts: Sequence[int], room: int) -> Iterator[list[Span]]:
    """Cut a vector into what there is room for at a time.

    Where ranks share the work on each sum, that is a run of elements. Otherwise it is a slice of
    each piece, so that every rank has something to do.
    """
    if stage.shared:
        for first in range(cuts[0], cuts[-1], room):
            yield [Span(first, min(first + room, cuts[-1]), 0)]
        return
    pieces = len(cuts) - 1
    # Pieces belong to ranks here: by runs of elements only one rank at a time would work.
    longest, width = max(end - first for first, end in pairwise(cuts)), room // pieces
    for start in range(0, longest, width):
        yield [
            Span(
                cuts[piece] + start,
                min(cuts[piece] + start + width, cuts[piece + 1]),
                piece * width,
            )
            for piece in range(pieces)
            if cuts[piece] + start < cuts[piece + 1]
        ]


def _show(vector: Tensor, part: Tensor, span: Span, shown: Pieces, cuts: Sequence[int]) -> None:
    for low, high in _clipped(shown, span, cuts):
        begin = span.place + low - span.first
        part[begin : begin + high - low].copy_(vector[low:high])


def _clipped(pieces: Pieces, span: Span, cuts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the runs of elements of `pieces` that lie in `span`."""
    for first, end in pieces:
        low, high = max(cuts[first], span.first), min(cuts[end], span.end)
        if low < high:
            yield low, high
