"""Memory for large messages: shared with another process of this host, and kept for the next.

A sender copies a large message into a segment, memory that both ends map, and is done with it. The
receiver is handed a tensor in the segment itself, or copies it into place in the thread that waits
for it. Once nobody has that tensor any more, a byte at the end of the segment says so, and the
sender uses the segment again. A message that is in a segment does not depend on its sender.

A segment is a memfd, which has no name. The sender tells its descriptor, which the receiver opens
through /proc, and a key: 16 random bytes that lie in it, by which the receiver knows that it has
opened the right one. Only what the receiver has mapped carries messages.

The allocator gives tensors of more than 32 MB back to the system when they are freed, and takes
every page of the next one anew, filled with zeros: several times what it takes to copy a message.
So the memory of messages that come over sockets is taken from the system once.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import secrets
import weakref
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from orchestra.transports.shared_memory import make_memory

LEAST_BYTES = 32 << 20
"""Of smaller tensors the allocator keeps the memory, once `keep_freed_memory` was called."""
KEPT_BYTES = 256 << 20
"""That lie here unused, at most; the oldest go first."""
SEGMENT_BYTES = 256 << 20
"""Of the segments for one receiver together, unless a single one is larger."""

KEY_BYTES = 16
_END_BYTES = KEY_BYTES + 1  # behind the place for a message: the key, and whether it is in use
_FREE, _USED = 0, 1


_WITHOUT_NUMPY = {torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2}


def byte_view(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU `tensor` as writable bytes, without a copy.

    The view keeps the memory alive.
    """
    if tensor.numel() == 0:
        return memoryview(bytearray())
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.dtype in _WITHOUT_NUMPY:
        tensor = tensor.view(torch.uint8 if tensor.itemsize == 1 else torch.int16)
    return tensor.numpy().data.cast("B")


def on_host(tensor: Tensor) -> Tensor:
    """Return `tensor`, or if it is on a GPU a copy on the host."""
    if not tensor.is_cuda:
        return tensor
    # Pinned memory can be copied to and from a GPU without one more copy in between.
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)


class Segment:
    """Memory for one message at a time, as its sender has it.

    Attributes:
        number: by which both ends know it.
        capacity: bytes of the largest message.
        descriptor: of the memfd, until the receiver has mapped it.
        key: what proves to the receiver that it has opened this segment.
        is_mapped: the receiver has mapped it.
    """

    def __init__(self, number: int, capacity: int) -> None:
        self.number = number
        self.capacity = capacity
        self.key = secrets.token_bytes(KEY_BYTES)
        self.is_mapped = False
        self.descriptor = make_memory(capacity + _END_BYTES)
        self._memory = mmap.mmap(self.descriptor, capacity + _END_BYTES)
        self._memory[capacity:-1] = self.key
        self._place = np.frombuffer(self._memory, np.uint8)

    @property
    def is_free(self) -> bool:
        """True once the receiver has no tensor in it."""
        return self._memory[-1] == _FREE

    def take(self) -> None:
        """Claim a free segment for the next message."""
        self._memory[-1] = _USED

    def fill(self, tensor: Tensor) -> None:
        """Copy a contiguous `tensor` into it."""
        # NumPy copies bytes as fast as numbers; torch takes a quarter longer for bytes.
        self._place[: tensor.nbytes] = np.frombuffer(byte_view(on_host(tensor)), np.uint8)

    def give_up_descriptor(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1


class Outbox:
    """The segments for messages to one receiver. The caller holds a lock."""

    def __init__(self) -> None:
        self._segments: list[Segment] = []
        self._refused = False

    def take(self, length: int) -> Segment | None:
        """Claim and return a free segment for a message of `length` bytes; None if none is free."""
        fitting = [s for s in self._segments if s.capacity >= length and s.is_mapped and s.is_free]
        if not fitting:
            return None
        segment = min(fitting, key=lambda segment: segment.capacity)
        segment.take()
        return segment

    def grow(self, length: int) -> Segment | None:
        """Return a new segment for messages of `length` bytes, or None. The caller has to announce
        it to the receiver.

        At most one segment at a time is not yet mapped by the receiver: a receiver that cannot map
        any never gets a second one.
        """
        # Pages that no message has touched take no memory, and powers of two fit messages of many
        # lengths.
        capacity = max(1 << (length - 1).bit_length(), mmap.PAGESIZE)
        total = sum(segment.capacity for segment in self._segments)
        waits = any(not segment.is_mapped for segment in self._segments)
        if self._refused or waits or (self._segments and total + capacity > SEGMENT_BYTES):
            return None
        try:
            segment = Segment(len(self._segments), capacity)
        except (OSError, ValueError):  # a limit of the process: messages go over the socket
            self._refused = True
            return None
        self._segments.append(segment)
        return segment

    def mapped(self, number: int) -> None:
        """Note that the receiver has mapped this segment."""
        if 0 <= number < len(self._segments):
            self._segments[number].is_mapped = True
            self._segments[number].give_up_descriptor()

    def close(self) -> None:
        for segment in self._segments:
            segment.give_up_descriptor()
        self._segments = []


class PeerSegments:
    """The segments of one sender, as the receiver has them."""

    def __init__(self) -> None:
        self._mapped: dict[int, mmap.mmap] = {}
        self._watched: dict[int, weakref.ref[memoryview]] = {}  # messages that somebody may have

    def map(self, number: int, process: int, descriptor: int, key: bytes) -> bool:
        """Map the segment that `process` has open as `descriptor`; False where that fails."""
        memory = _opened(process, descriptor)
        if memory is None or memory[-_END_BYTES:-1] != key:
            return False
        self._mapped[number] = memory
        return True

    def holds(self, number: int, length: int) -> bool:
        """True if there can be a message of `length` bytes in this segment."""
        memory = self._mapped.get(number)
        return memory is not None and length <= len(memory) - _END_BYTES

    def message(self, number: int, length: int) -> memoryview:
        """Return the message in this segment, which is free again when nobody has its bytes."""
        memory = self._mapped[number]
        content = memoryview(memory)[:length]  # lives as long as a tensor has this memory
        release = functools.partial(_release, memory, os.getpid())
        # Not `weakref.finalize`, which takes as long as all else here.
        self._watched[number] = weakref.ref(content, release)
        return content


def _opened(process: int, descriptor: int) -> mmap.mmap | None:
    # Another namespace of process numbers, other users, seccomp: messages go over the socket.
    path = Path(f"/proc/{process}/fd/{descriptor}")
    with contextlib.suppress(OSError, ValueError):
        if not str(path.readlink()).startswith("/memfd:"):  # what it is should not be opened
            return None
        own = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return mmap.mmap(own, os.fstat(own).st_size)
        finally:
            os.close(own)
    return None


def _release(memory: mmap.mmap, process: int, message: weakref.ref[memoryview]) -> None:
    # A forked process (of a data loader) has a copy of every tensor, and may not free this one.
    if os.getpid() == process:
        memory[-1] = _FREE


class KeptMemory:
    """Makes tensors, and uses their memory again when they are gone.

    The caller of `empty` holds a lock. A tensor goes in any thread, and at any moment: also while
    this thread holds the lock, as garbage is collected. So memory comes back into a list to which
    `_keep` only appends, and from which `empty` only takes.
    """

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []
        self._returned: list[mmap.mmap] = []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, length: int) -> Tensor:
        """Return a tensor of `length` bytes, with any content."""
        if length < LEAST_BYTES:
            return torch.empty(shape, dtype=dtype)
        while self._returned:
            self._free.append(self._returned.pop(0))
        while sum(map(len, self._free)) > KEPT_BYTES:
            del self._free[0]
        # The newest of this size; sizes repeat, as a model's messages do.
        memory = next((each for each in reversed(self._free) if len(each) == length), None)
        if memory is None:
            memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:
            self._free.remove(memory)
        content = np.frombuffer(memory, np.uint8)  # lives as long as a tensor has this memory
        weakref.finalize(content, self._keep, memory).atexit = False
        return torch.from_numpy(content).view(dtype).view(shape)

    def _keep(self, memory: mmap.mmap) -> None:
        # Else it is unmapped now: without further messages nobody would do it.
        if sum(map(len, self._returned)) + len(memory) <= KEPT_BYTES:
            self._returned.append(memory)
