"""The global random streams of a rank, also where ranks share a process."""

from __future__ import annotations

import ctypes
import random
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


def seed(number: int) -> None:
    """Begin torch's, Python's and NumPy's global streams anew."""
    torch.manual_seed(number % 2**64)
    random.seed(number)
    np.random.seed(number % 2**32)


class Streams(NamedTuple):
    """The states of a rank's generators; `legacy` where NumPy keeps a second normal number."""

    torch: Tensor
    python: Any
    bits: Any
    legacy: Any


class RandomStreams:
    """Torch's, Python's and NumPy's global generators, in place for one rank at a time.

    Only a rank's main flow draws from them. NumPy's state takes long to copy, so each rank has a
    bit generator of its own, which is put in place whole.
    """

    def __init__(self) -> None:
        self._owner: int | None = None
        self._saved: dict[int | None, Streams] = {}
        self._given: bytes | None = None  # NumPy's state as it was put in place, without a normal

    def give(self, rank: int | None) -> None:
        """Put the streams of `rank` in place; None: those of the process itself."""
        if rank == self._owner:
            return
        self._saved[self._owner] = self.present()
        self._owner = rank
        if rank in self._saved:
            self._install(self._saved[rank])
        else:  # its program begins with a seed
            self._put(np.random.MT19937(0))

    def present(self) -> Streams:
        """The streams that are in place, as they are now."""
        bits = np.random.mtrand.get_bit_generator()
        legacy = self._second_normal(bits)
        return Streams(torch.default_generator.get_state(), random.getstate(), bits, legacy)

    def _second_normal(self, bits: Any) -> Any:
        """NumPy's state, if it keeps a normal number for later.

        Asking takes long. Without one to begin with, it has none until it has drawn something.
        """
        if self._given is not None and _bytes_of(bits) == self._given:
            return None
        state = np.random.get_state(legacy=False)
        return state if state["has_gauss"] else None

    def go_on_from(self, streams: Streams) -> None:
        """The streams in place go on as another rank's did from `streams`."""
        bits = np.random.MT19937(0)
        bits.state = streams.bits.state if streams.legacy is None else streams.legacy
        self._install(streams._replace(bits=bits))

    def _install(self, streams: Streams) -> None:
        torch.default_generator.set_state(streams.torch)
        random.setstate(streams.python)
        self._put(streams.bits)
        if streams.legacy is not None:
            np.random.set_state(streams.legacy)
            self._given = None

    def _put(self, bits: Any) -> None:
        np.random.mtrand.set_bit_generator(bits)
        self._given = _bytes_of(bits)


class _Twister(ctypes.Structure):
    """The state of NumPy's MT19937, at the address that its `ctypes` interface gives."""

    _fields_ = (("key", ctypes.c_uint32 * 624), ("position", ctypes.c_int))


def _bytes_of(bits: Any) -> bytes | None:
    """The state of a bit generator, if it is NumPy's own kind."""
    if not isinstance(bits, np.random.MT19937):
        return None
    return bytes(_Twister.from_address(bits.ctypes.state_address))
