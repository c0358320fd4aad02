"""Memory that the ranks of one host map, the barriers in it, and how these ranks find each other.

The memory is a memfd, which has no name: nothing is left behind, whatever happens to a rank. One
Unix socket joins each pair of ranks. A byte on it says that a rank has come to a barrier, which
needs no spinning, and its end says that a rank is gone.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import mmap
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

import torch
from torch import Tensor

from orchestra.errors import PeerLost
from orchestra.transports import compiled as compiled_code
from orchestra.transports.compiled import FLAG_BYTES, LOST, TIMED_OUT, CompiledEnd, Steps

CHUNK_BYTES = 2 << 20
"""Of a rank's part of the memory: few enough for the caches, enough to hide the barriers."""
SMALL_BYTES = 64 << 10
"""Up to here each rank adds up everything by itself, which takes one barrier in place of two."""

POLL_SECONDS = 0.2
"""Between two looks at whether a rank that has still to connect is gone."""

C = TypeVar("C")

_ARRIVED = b"\0"
_TOKEN_BYTES = 32
_HELLO = struct.Struct(f"<i{_TOKEN_BYTES}s")


class SharedMemory:
    """One rank's end of the memory and of the sockets.

    The code that makes it closes it, in forked processes as well. All ranks call barriers, and the
    operations built on barriers, in the same order. Each call raises `PeerLost`, with the lost
    rank, if another rank is gone.

    Args:
        rank: this rank.
        peers: what `connect_host` gave: a connected Unix socket for each other rank.
        memory: file descriptor of `memory_bytes(size)` bytes, which all ranks map; it is closed.
        timeout: seconds for another rank to join a collective; None: no limit.
        names: what `PeerLost` calls each rank; None: by its number here.
        compiled: whether all ranks use what is compiled.
    """

    def __init__(
        self,
        rank: int,
        peers: Mapping[int, socket.socket],
        memory: int,
        *,
        timeout: float | None = None,
        names: Sequence[int] | None = None,
        compiled: bool = False,
    ) -> None:
        self.rank, self.size = rank, len(peers) + 1
        self._awaited: int | None = None
        self._seconds_waiting = 0.0
        self._names = tuple(names or range(self.size))
        self._shut = False
        self._peers = dict(peers)
        self._doors = [(peer, connection.fileno()) for peer, connection in peers.items()]
        for connection in peers.values():
            # Plain blocking calls, which let go of the interpreter. With Python's own time-outs a
            # socket is non-blocking, and `os.read` would not wait; hence SO_RCVTIMEO.
            connection.setblocking(True)
            if timeout is not None:
                limit = struct.pack("@ll", int(timeout), int(timeout % 1 * 1e6))
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        everything = mapped(memory, memory_bytes(self.size), torch.uint8)
        # Two turns of (a part for each rank, and one for results); two turns of small parts; flags.
        large = 2 * (self.size + 1) * CHUNK_BYTES
        self._large = everything[:large].view(2, self.size + 1, CHUNK_BYTES)
        flags = large + 2 * self.size * SMALL_BYTES
        self._small = everything[large:flags].view(2, self.size, SMALL_BYTES)
        self._turn = 0
        self._compiled: CompiledEnd | None = None
        if compiled:
            self._compiled = CompiledEnd(rank, dict(self._doors), everything[flags:], timeout)

    @property
    def awaited(self) -> int | None:
        """The name of the rank that a barrier waits for; None outside of barriers."""
        if self._compiled is None:
            return self._awaited
        peer = self._compiled.awaited
        return None if peer is None else self._names[peer]

    @property
    def seconds_waiting(self) -> float:
        """Seconds that barriers took."""
        return self._seconds_waiting if self._compiled is None else self._compiled.seconds_waiting

    def add_up(self, vector: Tensor, steps: Callable[[], Steps]) -> bool:
        """Replace each rank's vector by the sums, if that is compiled; the others have to want it.

        False, and nothing done, where `pipeline` has to do it.
        """
        if self._compiled is None or vector.dtype != torch.float32 or not vector.is_contiguous():
            return False
        places = self._large.view(torch.float32)
        ended, self._turn = self._compiled.add_up(vector, steps(), places, 1 - self._turn)
        self._check(self._compiled, ended)
        return True

    def _check(self, compiled: CompiledEnd, ended: int) -> None:
        if ended == TIMED_OUT:
            raise TimeoutError(f"rank {compiled.lost} has not joined a collective in time")
        if ended == LOST:
            self._lose(compiled.lost)

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        if self._compiled is not None:
            self._check(self._compiled, self._compiled.barrier())
            return
        peer = self.rank
        started = time.perf_counter()
        try:
            for peer, door in self._doors:  # noqa: B007  (the handlers below name it)
                # All write before any reads. A byte always fits into the buffer, so that no write
                # blocks.
                os.write(door, _ARRIVED)
            for peer, door in self._doors:
                self._awaited = self._names[peer]
                news = os.read(door, 1)
                # Empty: the socket has ended. Otherwise 1 + the number of a rank that this one
                # knows is lost.
                if news != _ARRIVED:
                    self._lose(news[0] - 1 if news else peer)
        except BlockingIOError as error:
            raise TimeoutError(f"rank {peer} has not joined a collective in time") from error
        except (BrokenPipeError, ConnectionResetError):
            self._lose(peer)
        finally:
            self._awaited = None
            self._seconds_waiting += time.perf_counter() - started

    def _lose(self, lost: int) -> NoReturn:
        """Raise `PeerLost`; first tell the others, who would otherwise blame this rank."""
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
        # Two turns of places are enough. Chunk k + 1 overwrites the parts of chunk k - 1, whose
        # sums all had formed before they came to barrier k; and its results only after barrier k +
        # 1, to which each rank comes after it has taken those of k - 1.
        before: list[tuple[C, Tensor]] = []
        for chunk in chunks:
            parts, result = self.places(dtype)
            show(chunk, parts[self.rank])
            self.barrier()
            for each in before:
                take(*each)
            form(chunk, parts, result)
            before = [(chunk, result)]
        self.barrier()
        for each in before:
            take(*each)

    def places(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
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
        """Disconnect; the others notice it by the end of the sockets."""
        for connection in self._peers.values():
            connection.close()


def host_key() -> str:
    """Return a text that is equal for processes that can share memory and reach each other.

    It is empty where no memory can be shared.
    """
    if not hasattr(os, "memfd_create"):
        return ""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    return f"{boot.strip()} {Path('/proc/self/ns/net').readlink()}"


def connect_host(
    rank: int,
    size: int,
    publish: Callable[[bytes], object],
    lookup: Callable[[int], bytes],
    timeout: float,
    check: Callable[[], object] = lambda: None,
) -> tuple[dict[int, socket.socket], bool]:
    """Connect the ranks of one host by a Unix socket for each pair; every rank calls it.

    Args:
        publish: shows bytes to all other ranks.
        lookup: what another rank has shown, waiting for it.
        timeout: seconds for a connection.
        check: called while it waits; may raise.

    Returns:
        The sockets, and whether all ranks have what is compiled.

    Raises:
        ValueError: a rank is on another host.
        TimeoutError: a rank has not come in time.
    """
    token, host = secrets.token_bytes(_TOKEN_BYTES), host_key()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("")  # an abstract address that the kernel chooses: no file to remove
        listener.listen(size)
        own = [host, compiled_code.is_there(), token.hex(), listener.getsockname().hex()]
        # Before anything is waited for, or all would wait for each other.
        publish(json.dumps(own).encode())
        shown = {peer: json.loads(lookup(peer)) for peer in range(size) if peer != rank}
        for peer, (other, *_) in shown.items():
            if other != host:
                raise ValueError(
                    f"rank {peer} is on another host than rank {rank}, and shared memory "
                    "joins the ranks of one host: use the backend gloo between hosts"
                )
        peers = {}
        for peer in range(rank):
            *_, peer_token, address = shown[peer]
            connection = peers[peer] = socket.socket(socket.AF_UNIX)
            connection.settimeout(timeout)
            connection.connect(bytes.fromhex(address))
            connection.sendall(_HELLO.pack(rank, bytes.fromhex(peer_token)))
        while len(peers) < size - 1:
            connection = _accepted(listener, timeout, check)
            hello = connection.recv(_HELLO.size)  # it comes in one piece, as it was sent
            if len(hello) < _HELLO.size:
                raise ConnectionError("a rank closed its connection while the ranks connected")
            peer, proof = _HELLO.unpack(hello)
            # An abstract address has no permissions: any process in its namespace can connect.
            if hmac.compare_digest(proof, token):
                peers[peer] = connection
    return peers, all(compiled for _, compiled, *_ in (own, *shown.values()))


def _accepted(
    listener: socket.socket, timeout: float, check: Callable[[], object]
) -> socket.socket:
    deadline = time.monotonic() + timeout
    listener.settimeout(POLL_SECONDS)
    while True:
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            check()
            if time.monotonic() > deadline:
                raise
        else:
            connection.settimeout(timeout)
            return connection


def make_memory(length: int) -> int:
    """Make memory of `length` bytes, and return its file descriptor.

    Raises OSError where the limits of the process (on the size of files, for one) do not allow it.
    """
    memory = os.memfd_create("orchestra", os.MFD_CLOEXEC)
    try:
        os.ftruncate(memory, length)
    except OSError:
        os.close(memory)
        raise
    return memory


def memory_bytes(size: int) -> int:
    """Return the bytes that `size` ranks share: twice their parts and results, and flags."""
    return 2 * ((size + 1) * CHUNK_BYTES + size * SMALL_BYTES) + size * FLAG_BYTES


def buffer_bytes(vector_bytes: int) -> int:
    """Return the bytes of shared memory that a rank uses for a vector."""
    return vector_bytes if vector_bytes <= SMALL_BYTES else 4 * min(vector_bytes, CHUNK_BYTES)


def pass_on(peers: Mapping[int, socket.socket], memory: int | None) -> int:
    """Pass the `memory` of rank 0 on to the others; return this rank's file descriptor."""
    if memory is not None:
        for connection in peers.values():
            socket.send_fds(connection, [b"\0"], [memory])
        return memory
    _, descriptors, _, _ = socket.recv_fds(peers[0], 1, 1)
    if not descriptors:
        raise ConnectionError("a rank closed its connection while the ranks connected")
    return descriptors[0]


def mapped(memory: int, length: int, dtype: torch.dtype) -> Tensor:
    """Map `length` bytes of `memory` as a flat tensor, and close the descriptor."""
    try:
        return torch.frombuffer(mmap.mmap(memory, length), dtype=dtype)
    finally:
        os.close(memory)
