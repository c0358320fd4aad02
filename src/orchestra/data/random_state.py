"""The global random streams of a rank, as plain data: saved, restored, never seeded here."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor


def random_state() -> dict[str, Any]:
    """The state of torch's, Python's and NumPy's global generators."""
    state = _plain(torch.get_rng_state(), random, np.random)
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _plain(torch_state: Tensor, python: Any, numbers: Any) -> dict[str, Any]:
    version, internal, gauss = python.getstate()
    legacy = numbers.get_state(legacy=False)
    return {
        "torch": torch_state,
        "python": [version, list(internal), gauss],
        "numpy": {**legacy, "state": {**legacy["state"], "key": legacy["state"]["key"].tolist()}},
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Continue the global generators from `state`."""
    torch.set_rng_state(state["torch"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    numpy_state = state["numpy"]
    key = np.array(numpy_state["state"]["key"], dtype=np.uint32)
    np.random.set_state({**numpy_state, "state": {**numpy_state["state"], "key": key}})
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Whatever is drawn inside, the streams go on afterwards as if it had not been."""
    before = random_state()
    try:
        yield
    finally:
        restore_random_state(before)


class AlikeStreams:
    """Streams of random numbers that are equal where `seed` is."""

    def __init__(self, seed: str) -> None:
        python = random.Random(seed)
        numbers = np.random.RandomState(python.getrandbits(32))
        torchs = torch.Generator().manual_seed(python.getrandbits(63))
        self._state = _plain(torchs.get_state(), python, numbers)

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """Inside, torch's, Python's and NumPy's global generators draw from these streams."""
        with undisturbed():
            restore_random_state(self._state)
            try:
                yield
            finally:
                self._state = random_state()
