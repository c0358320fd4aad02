"""What has to be alike on every worker, since each takes its part of it: draws, and a check."""

from __future__ import annotations

import contextlib
import random
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


class AlikeStreams:
    """Streams of random numbers that are equal where `seed` is."""

    def __init__(self, seed: str) -> None:
        python = random.Random(seed)
        numbers = np.random.RandomState(python.getrandbits(32))
        torchs = torch.Generator().manual_seed(python.getrandbits(63))
        self._states = (torchs.get_state(), python.getstate(), numbers.get_state())

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """Inside, torch's, Python's and NumPy's global generators draw from these streams."""
        before = _states()
        _set(self._states)
        try:
            yield
        finally:
            self._states = _states()
            _set(before)


def _states() -> tuple[Tensor, Any, Any]:
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def _set(states: tuple[Tensor, Any, Any]) -> None:
    torchs, python, numbers = states
    torch.set_rng_state(torchs)
    random.setstate(python)
    np.random.set_state(numbers)


def digest(item: Any, so_far: int = 0) -> int:
    """A checksum of the tensors, numbers and texts in nested tuples, lists and mappings."""
    if isinstance(item, Tensor):
        if item.layout is not torch.strided:
            return so_far
        flat = item.detach().cpu().contiguous().reshape(-1)
        return zlib.crc32(flat.view(torch.uint8).numpy().data, so_far)
    if isinstance(item, Mapping):
        return digest(list(item.items()), so_far)
    if isinstance(item, (tuple, list)):
        for part in item:
            so_far = digest(part, so_far)
        return so_far
    if isinstance(item, (int, float, str, bytes)):
        return zlib.crc32(repr(item).encode(), so_far)
    return so_far
