"""Memory for large messages: that of another process of this host, and what is kept for the next.

`process_vm_readv` (Linux) copies once, from the memory of the sender into that of the receiver,
while the sender does something else. That it reads the right process, and a tensor that is still
being sent, is known by a key: 16 random bytes in the sender's memory, which are zeroed before it
gives up what it has offered.

The allocator gives tensors of more than 32 MB back to the system when they are freed, and takes
every page of the next one anew, filled with zeros: several times what it takes to copy a message.
So their memory is taken from the system once.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import secrets
import weakref

import numpy as np
import torch
from torch import Tensor

LEAST_BYTES = 32 << 20
"""Of smaller tensors the allocator keeps the memory, once `keep_freed_memory` was called."""
KEPT_BYTES = 256 << 20
"""That lie here unused, at most; the oldest go first."""

KEY_BYTES = 16
_PR_SET_PTRACER = 0x59616D61


class _Vector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


_vectors = ctypes.POINTER(_Vector)
_libc = ctypes.CDLL(None, use_errno=True)
_read = getattr(_libc, "process_vm_readv", None)
if _read is not None:
    _read.restype = ctypes.c_ssize_t
    _read.argtypes = [
        ctypes.c_int, _vectors, ctypes.c_ulong, _vectors, ctypes.c_ulong, ctypes.c_ulong
    ]  # fmt: skip


class OfferedMemory:
    """This process's end: the key for one receiver.

    Attributes:
        pid: of this process.
        address: where the key lies.
        key: its bytes while the memory is open.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.key = secrets.token_bytes(KEY_BYTES)
        self._place = ctypes.create_string_buffer(self.key, KEY_BYTES)
        self.address = ctypes.addressof(self._place)

    def close(self) -> None:
        """Zero the key: what is read from now on does not count."""
        ctypes.memset(self._place, 0, KEY_BYTES)


class PeerMemory:
    """The memory of process `pid`, which has shown `key` at `address`."""

    def __init__(self, pid: int, address: int, key: bytes) -> None:
        self._pid = pid
        self._address = address
        self._key = key
        self._found = ctypes.create_string_buffer(KEY_BYTES)

    def read(self, address: int, into: int, length: int) -> int:
        """Copy up to `length` bytes from `address` there to `into` here; return how many.

        Raises OSError where they cannot be read.
        """
        if _read is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        own, other = _Vector(into, length), _Vector(address, length)
        count = int(_read(self._pid, ctypes.byref(own), 1, ctypes.byref(other), 1, 0))
        # 0 bytes: nothing is mapped there (any more). errno says nothing then.
        if count <= 0:
            reason = ctypes.get_errno() if count else errno.EFAULT
            raise OSError(reason, os.strerror(reason))
        return count

    def is_open(self) -> bool:
        """Return whether the key is still there: then all that was read until now is as offered."""
        try:
            count = self.read(self._address, ctypes.addressof(self._found), KEY_BYTES)
        except OSError:
            return False
        return count == KEY_BYTES and self._found.raw == self._key


def let_siblings_read() -> None:
    """Let the launcher and all that it started read this process's memory.

    Needed where Yama restricts ptrace (`ptrace_scope` 1); no effect on kernels without Yama.
    """
    if hasattr(_libc, "prctl"):
        # The declared process and its descendants may read: the parent has started the other ranks.
        _libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(os.getppid()), 0, 0, 0)


class KeptMemory:
    """Makes tensors, and uses their memory again when they are gone."""

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, length: int) -> Tensor:
        """Return a tensor of `length` bytes, with any content."""
        if length < LEAST_BYTES:
            return torch.empty(shape, dtype=dtype)
        # The newest of this size; sizes repeat, as a model's messages do.
        memory = next((each for each in reversed(self._free) if len(each) == length), None)
        if memory is None:
            memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:
            self._free.remove(memory)
        bytes_of = np.frombuffer(memory, np.uint8)  # lives as long as a tensor has this memory
        weakref.finalize(bytes_of, self._keep, memory).atexit = False
        return torch.from_numpy(bytes_of).view(dtype).view(shape)

    def _keep(self, memory: mmap.mmap) -> None:
        self._free.append(memory)
        while sum(map(len, self._free)) > KEPT_BYTES:
            del self._free[0]
