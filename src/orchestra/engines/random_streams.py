"""The global random streams of a rank, also where ranks share a process."""

from __future__ import annotations

import random
import threading
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
    """The states of a rank's generators; `legacy`: the second normal number that NumPy keeps."""

    torch: Tensor
    python: Any
    bits: Any
    legacy: Any


class RandomStreams:
    """Torch's, Python's and NumPy's global generators, put in place for the rank whose turn it is.

    Only a rank's main flow draws from them. To copy NumPy's state takes a hundred times as long as
    to copy torch's, so each rank has a bit generator of its own, which is put in place whole; the
    state is copied only after a turn in which the rank has used it.
    """

    def __init__(self) -> None:
        self._owner: int | None = None
        self._saved: dict[int | None, Streams] = {}

    def give(self, rank: int | None) -> None:
        """Put the streams of `rank` in place; None: those of the process itself."""
        if rank == self._owner:
            return
        self._saved[self._owner] = self.present()
        self._owner = rank
        if rank in self._saved:
            self._install(self._saved[rank])
        else:  # its program begins with a seed
            np.random.mtrand.set_bit_generator(MT19937())

    def present(self) -> Streams:
        """Return the streams that are in place, as they are now."""
        bits, legacy = np.random.mtrand.get_bit_generator(), None
        if not isinstance(bits, MT19937) or bits.noted.taken:
            # 90 us, so only after a turn that has drawn: see `MT19937.lock`.
            state = np.random.get_state(legacy=False)
            legacy = state if state["has_gauss"] else None
        return Streams(torch.default_generator.get_state(), random.getstate(), bits, legacy)

    def go_on_from(self, streams: Streams) -> None:
        """Let the streams in place go on from a copy of `streams`, another rank's."""
        bits = MT19937()
        bits.state = streams.bits.state if streams.legacy is None else streams.legacy
        self._install(streams._replace(bits=bits))

    def _install(self, streams: Streams) -> None:
        torch.default_generator.set_state(streams.torch)
        random.setstate(streams.python)
        np.random.mtrand.set_bit_generator(streams.bits)  # it forgets the second normal number
        if isinstance(streams.bits, MT19937):
            streams.bits.noted.taken = False
        if streams.legacy is not None:
            np.random.set_state(streams.legacy)


class _NotedLock:
    """A lock that notes that it was `taken`."""

    def __init__(self) -> None:
        self.taken = False
        # Reentrant, as NumPy's own lock is.
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self.taken = True
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class MT19937(np.random.MT19937):
    """NumPy's bit generator, whose lock notes its use; named as NumPy's is, as states tell.

    Each function that draws holds the lock meanwhile (`numpy.random.BitGenerator.lock`); a new
    state may bring a second normal number with it.
    """

    def __init__(self) -> None:
        super().__init__(0)
        self.noted = _NotedLock()

    @property
    def lock(self) -> Any:  # type: ignore[override]
        return self.noted

    @property
    def state(self) -> Any:
        return _STATE.__get__(self)

    @state.setter
    def state(self, value: Any) -> None:
        self.noted.taken = True
        _STATE.__set__(self, value)


_STATE: Any = np.random.MT19937.state
