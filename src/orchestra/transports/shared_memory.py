"""Collectives between the ranks of one host, through memory that all of them map.

The memory is a memfd, which has no name: nothing is left behind, whatever happens to a rank. One
Unix socket joins each pair of ranks. A byte on it says that a rank has come to a barrier, which
needs no spinning, and its end says that a rank is gone.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import struct
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NoReturn, TypeVar

import torch
from torch import Tensor

from orchestra.errors import PeerLost
from orchestra.transports.host_rendezvous import pass_on

CHUNK_BYTES = 2 << 20
"""Of a rank's part of the memory: few enough for the caches, enough to hide the barriers."""
SMALL_BYTES = 64 << 10
"""Up to here each rank adds up everything by itself, which takes one barrier in place of two."""

C = TypeVar("C")

Operation = Callable[..., object]
"""operation(one, other, out=out): combines two tensors into `out`, which may be one of them."""

Window = Callable[..., Tensor]
"""Of a rank, the number of a row and its elements: the piece that is shown now."""

_ALIGNMENT = 64
_ARRIVED = b"\0"


class SharedMemory:
    """One rank's end of the memory and of the sockets.

    Every collective is called by all ranks, in the same order, with tensors of the same size. It
    blocks, and raises `PeerLost`, with its rank, if another one is gone.

    Args:
        rank: this rank.
        peers: a connected Unix socket for each other rank.
        memory: file descriptor of `memory_bytes(size)` bytes, which all ranks map.
        names: what `PeerLost` calls each rank; None: by its number here.

    Attributes:
        awaited: the name of the rank that a barrier waits for.
        seconds_waiting: that barriers took.
    """

    def __init__(
        self,
        rank: int,
        peers: Mapping[int, socket.socket],
        memory: int,
        names: Sequence[int] | None = None,
    ) -> None:
        self.rank, self.size = rank, len(peers) + 1
        self.awaited: int | None = None
        self.seconds_waiting = 0.0
        self._names = tuple(names or range(self.size))
        self._shut = False
        self._peers = dict(peers)
        self._doors = [(peer, connection.fileno()) for peer, connection in peers.items()]
        self._map = mmap.mmap(memory, memory_bytes(self.size))
        everything = torch.frombuffer(self._map, dtype=torch.uint8)
        large = 2 * (self.size + 1) * CHUNK_BYTES
        self._large = everything[:large].view(2, self.size + 1, CHUNK_BYTES)
        self._small = everything[large:].view(2, self.size, SMALL_BYTES)
        self._turn = 0
        _memories.add(self)

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        peer = self.rank
        started = time.perf_counter()
        try:
            for peer, door in self._doors:  # noqa: B007  (the handlers below name it)
                os.write(door, _ARRIVED)
            for peer, door in self._doors:
                self.awaited = self._names[peer]
                news = os.read(door, 1)
                if news != _ARRIVED:
                    self._lose(news[0] - 1 if news else peer)
        except BlockingIOError as error:
            raise TimeoutError(f"rank {peer} has not joined a collective in time") from error
        except (BrokenPipeError, ConnectionResetError):
            self._lose(peer)
        finally:
            self.awaited = None
            self.seconds_waiting += time.perf_counter() - started

    def _lose(self, lost: int) -> NoReturn:
        """Tell the others which rank is gone, who would blame this one when it leaves."""
        if not self._shut:
            for _, door in self._doors:
                with contextlib.suppress(OSError):
                    os.write(door, bytes([1 + lost]))
        raise PeerLost(self._names[lost])

    def shut(self, name: int | None = None) -> None:
        """Let barriers, in any thread, find the rank of that name gone; None: all of them."""
        self._shut = self._shut or name is None
        for peer, connection in self._peers.items():
            if name in (None, self._names[peer]):
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def all_reduce(
        self, vector: Tensor, combine: Operation = torch.add, root: int | None = None
    ) -> None:
        """Replace a contiguous `vector` by the combination of all ranks' in the order of ranks.

        For the torch.distributed backend; collectives by a schedule are carried out in `host.py`.

        With `root` only that rank is given the result, and the others keep their vectors.
        """
        flat = vector.view(-1)
        if flat.nbytes <= SMALL_BYTES:
            self._all_reduce_small(flat, combine, root)
            return

        def form(chunk: Tensor, parts: Tensor, result: Tensor) -> None:
            first, end = (each * len(chunk) // self.size for each in (self.rank, self.rank + 1))
            _combine(combine, parts[:, first:end], result[first:end])

        def take(chunk: Tensor, result: Tensor) -> None:
            if root in (None, self.rank):
                chunk.copy_(result[: len(chunk)])

        self.pipeline(
            flat.dtype,
            flat.split(CHUNK_BYTES // flat.element_size()),
            lambda chunk, part: part[: len(chunk)].copy_(chunk),
            form,
            take,
        )

    def pipeline(
        self,
        dtype: torch.dtype,
        chunks: Iterable[C],
        show: Callable[[C, Tensor], object],
        form: Callable[[C, Tensor, Tensor], object],
        take: Callable[[C, Tensor], object],
    ) -> None:
        """Carry out a collective chunk by chunk, with a barrier before each, and one at the end.

        Args:
            dtype: of the tensors that the functions are given.
            show: copies this rank's chunk to its part, shape [elements].
            form: this rank's share of the work on the parts of all ranks, shape [ranks, elements],
                into the place for results, shape [elements].
            take: copies the results, once all ranks have done their shares.
        """
        before: list[tuple[C, Tensor]] = []
        for chunk in chunks:
            parts, result = self._places(dtype)
            show(chunk, parts[self.rank])
            self.barrier()
            for each in before:
                take(*each)
            form(chunk, parts, result)
            before = [(chunk, result)]
        self.barrier()
        for each in before:
            take(*each)

    def _all_reduce_small(self, flat: Tensor, combine: Operation, root: int | None) -> None:
        here = self.small(flat.dtype)[:, : len(flat)]
        here[self.rank].copy_(flat)
        self.barrier()
        if root in (None, self.rank):
            _combine(combine, here, flat)

    def exchange(self, rows: Sequence[Tensor], length: int) -> Iterator[tuple[int, Window]]:
        """Show `rows` to all, a piece of each at a time.

        Args:
            rows: contiguous vectors of one dtype, the same number on every rank; a rank may have
                fewer elements than others, or none.
            length: of the longest vector of any rank.

        Yields:
            The offset of the piece, and a function that gives the piece (elements from that offset
            on) of a row of any rank. It is valid until the next one is asked for.
        """
        room = CHUNK_BYTES // rows[0].element_size()
        width = room // len(rows) // _ALIGNMENT * _ALIGNMENT
        for offset in range(0, length, width):
            parts, _ = self._places(rows[0].dtype)
            for number, row in enumerate(rows):
                piece = row[offset : offset + width]
                parts[self.rank, number * width : number * width + len(piece)].copy_(piece)
            self.barrier()

            def window(
                source: int, number: int, elements: int, at: int = offset, parts: Tensor = parts
            ) -> Tensor:
                begin = number * width
                return parts[source, begin : begin + max(0, min(width, elements - at))]

            yield offset, window

    def copy_rows(
        self, rows: Sequence[Tensor], wanted: Sequence[tuple[int, int, Tensor]], length: int
    ) -> None:
        """Copy rows of other ranks: broadcast, gather, scatter and all-to-all in one.

        Args:
            rows: what this rank shows, the same number of rows on every rank, some of them empty.
            wanted: the rank, the number of its row, and the tensor that it is copied to.
            length: the most bytes of any row of any rank.
        """
        targets = [(source, number, _bytes(target)) for source, number, target in wanted]
        for offset, window in self.exchange([_bytes(row) for row in rows], length):
            for source, number, target in targets:
                piece = window(source, number, len(target))
                target[offset : offset + len(piece)].copy_(piece)

    def reduce_scatter(
        self, rows: Sequence[Tensor], into: Tensor, combine: Operation = torch.add
    ) -> None:
        """Combine row `rank` of all ranks into the contiguous vector `into`, in their order."""
        flat = into.view(-1)
        for offset, window in self.exchange([row.reshape(-1) for row in rows], len(flat)):
            pieces = [window(source, self.rank, len(flat)) for source in range(self.size)]
            _combine(combine, pieces, flat[offset : offset + len(pieces[0])])

    def _places(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The parts of all ranks, shape [ranks, elements], and a place for results, in turn.

        The others may still read what they were shown last, and take the last results.
        """
        self._turn = 1 - self._turn
        here = self._large[self._turn].view(dtype)
        return here[:-1], here[-1]

    def small(self, dtype: torch.dtype) -> Tensor:
        """Parts of `SMALL_BYTES`, shape [ranks, elements], in turn: one barrier is enough."""
        self._turn = 1 - self._turn
        return self._small[self._turn].view(dtype)

    def close(self) -> None:
        """Disconnect; the others are told by the end of the sockets."""
        for connection in self._peers.values():
            connection.close()


def _combine(combine: Operation, vectors: Sequence[Tensor] | Tensor, out: Tensor) -> None:
    """Combine the vectors in their order."""
    if len(vectors) == 1:
        out.copy_(vectors[0])
        return
    combine(vectors[0], vectors[1], out=out)
    for vector in vectors[2:]:
        combine(out, vector, out=out)


def memory_bytes(size: int) -> int:
    """How much memory `size` ranks share: twice a part for each and one for results."""
    return 2 * ((size + 1) * CHUNK_BYTES + size * SMALL_BYTES)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


_memories: weakref.WeakSet[SharedMemory] = weakref.WeakSet()


def _close_after_fork() -> None:
    """A data loader's worker would keep the sockets of its dead rank open."""
    for memory in list(_memories):
        memory.close()


os.register_at_fork(after_in_child=_close_after_fork)


def share(
    rank: int,
    peers: Mapping[int, socket.socket],
    memory: int | None,
    timeout: float | None,
    names: Sequence[int] | None = None,
) -> SharedMemory:
    """Share memory over the sockets that `HostRendezvous.connect` gave; see `SharedMemory`.

    Args:
        memory: on rank 0, `memory_bytes(size)` of it.
        timeout: seconds for another rank to join a collective; None: no limit.
    """
    memory = pass_on(peers, memory)
    for connection in peers.values():
        connection.setblocking(True)
        if timeout is not None:
            limit = struct.pack("@ll", int(timeout), int(timeout % 1 * 1e6))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    try:
        return SharedMemory(rank, peers, memory, names)
    finally:
        os.close(memory)
