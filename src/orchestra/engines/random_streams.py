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
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number % 2**32)


class Streams(NamedTuple):
    """Where the generators of a rank stand; `legacy` where NumPy's was used."""

    torch: Tensor
    python: Any
    bits: Any
    legacy: Any


class RandomStreams:
    """Torch's, Python's and NumPy's global generators, put in place for the rank whose turn it is.

    Only a rank's main flow draws from them. NumPy's state is dear to copy, so each rank has a bit
    generator of its own, which is put in place whole.
    """

    def __init__(self) -> None:
        self._owner: int | None = None
        self._saved: dict[int | None, Streams] = {}

    def give(self, rank: int | None) -> None:
        """The streams of `rank` are in place from now on; None: those of the process itself."""
        if rank == self._owner:
            return
        self._saved[self._owner] = self.present()
        self._owner = rank
        if rank in self._saved:
            self._install(self._saved[rank])
        else:  # its program begins with a seed
            np.random.mtrand.set_bit_generator(np.random.MT19937(0))

    def present(self) -> Streams:
        """The streams that are in place, as they are now."""
        bits = np.random.mtrand.get_bit_generator()
        legacy = np.random.get_state(legacy=False) if _used(bits) else None
        return Streams(torch.default_generator.get_state(), _python_state(), bits, legacy)

    def go_on_from(self, streams: Streams) -> None:
        """The streams in place go on as another rank's did from `streams`."""
        bits = np.random.MT19937(0)
        bits.state = streams.bits.state if streams.legacy is None else streams.legacy
        self._install(streams._replace(bits=bits))

    def _install(self, streams: Streams) -> None:
        torch.default_generator.set_state(streams.torch)
        _set_python_state(streams.python)
        np.random.mtrand.set_bit_generator(streams.bits)
        if streams.legacy is not None:
            np.random.set_state(streams.legacy)


class _Twister(ctypes.Structure):
    """NumPy's MT19937, as it lies in memory."""

    _fields_ = (("key", ctypes.c_uint32 * 624), ("position", ctypes.c_int))


class _PythonTwister(ctypes.Structure):
    """Python's, as it lies in memory behind the head of its object."""

    _fields_ = (("position", ctypes.c_int), ("key", ctypes.c_uint32 * 624))


def _python_twister() -> _PythonTwister | None:
    """That of the global stream, if it lies where CPython has had it so far."""
    generator = random.random.__self__  # type: ignore[attr-defined]
    if type(generator).__basicsize__ < object.__basicsize__ + ctypes.sizeof(_PythonTwister):
        return None
    twister = _PythonTwister.from_address(id(generator) + object.__basicsize__)
    _, state, _ = random.getstate()
    return twister if state == (*twister.key, twister.position) else None


_GLOBAL = _python_twister()


def _python_state() -> Any:
    """As `random.getstate`, which makes an object of each of 625 numbers, at every turn."""
    if _GLOBAL is None:
        return random.getstate()
    return bytes(_GLOBAL), random.random.__self__.gauss_next  # type: ignore[attr-defined]


def _set_python_state(state: Any) -> None:
    if _GLOBAL is None:
        random.setstate(state)
        return
    twister, random.random.__self__.gauss_next = state  # type: ignore[attr-defined]
    ctypes.memmove(ctypes.addressof(_GLOBAL), twister, len(twister))


def _used(bits: Any) -> bool:
    """Whether anything was drawn since the generator was seeded, which leaves it at its end.

    Only then has NumPy perhaps kept a second normal number for later.
    """
    if not isinstance(bits, np.random.MT19937):
        return True
    position: int = _Twister.from_address(bits.ctypes.state_address).position
    return position != 624
