"""Memory for large messages, taken from the system once.

The allocator gives tensors of more than 32 MB back to the system when they are freed, and takes
every page of the next one anew, filled with zeros: several times what it takes to copy a message.
"""

from __future__ import annotations

import mmap
import weakref

import numpy as np
import torch
from torch import Tensor

LEAST_BYTES = 32 << 20
"""Of smaller tensors the allocator keeps the memory, once `keep_freed_memory` was called."""
KEPT_BYTES = 256 << 20
"""That lie here unused, at most; the oldest go first."""


class KeptMemory:
    """Makes tensors, and uses their memory again when they are gone."""

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, length: int) -> Tensor:
        """A tensor of `length` bytes, with any content."""
        if length < LEAST_BYTES:
            return torch.empty(shape, dtype=dtype)
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
