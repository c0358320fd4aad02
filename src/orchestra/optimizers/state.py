"""The state of a run as plain data: `capture`, `restore`, and the global random streams.

The streams are saved and restored here, and never seeded.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


def capture(value: Any) -> Any:
    """Return `value` as nested dicts and lists of tensors, numbers and text.

    Takes dataclasses (without their transient fields), optimizers, anything with a
    `state_dict()`, mappings, sequences, tensors and plain values. Tensors are not copied.
    """
    if value is None or isinstance(value, (Tensor, bool, int, float, str)):
        return value
    if isinstance(value, torch.optim.Optimizer):
        return capture(value.state_dict()["state"])
    if hasattr(value, "state_dict"):
        return capture(value.state_dict())
    if is_dataclass(value):
        return {
            item.name: capture(getattr(value, item.name))
            for item in fields(value)
            if not item.metadata.get("transient")
        }
    if isinstance(value, Mapping):
        return {str(key): capture(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [capture(item) for item in value]
    raise AssertionError(f"{type(value).__name__} cannot be kept in a checkpoint: {value!r}")


def restore(target: Any, saved: Any) -> Any:
    """Put what `capture` made of an equal structure back; return the value to use in its place.

    Tensors, dataclasses, optimizers and objects with `load_state_dict` are changed in place.
    """
    if isinstance(target, Tensor):
        with torch.no_grad():
            target.copy_(saved)
        return target
    if isinstance(target, torch.optim.Optimizer):
        state = {int(index): values for index, values in saved.items()}
        parameters = [each for group in target.param_groups for each in group["params"]]
        for index, values in state.items():
            _refuse_broadcast(values, parameters[index])
        # The options are those of this run's settings, not of the checkpoint.
        groups = target.state_dict()["param_groups"]
        target.load_state_dict({"state": state, "param_groups": groups})
        return target
    if hasattr(target, "load_state_dict"):
        target.load_state_dict(saved)
        return target
    if is_dataclass(target):
        for item in fields(target):
            # Checkpoints from before a field was there lack it.
            if item.name in saved:
                before = getattr(target, item.name)
                setattr(target, item.name, restore(before, saved[item.name]))
        return target
    if isinstance(target, list) and len(target) == len(saved):
        return [restore(before, item) for before, item in zip(target, saved, strict=True)]
    return tuple(saved) if isinstance(target, tuple) else saved


def _refuse_broadcast(moments: Mapping[str, Any], parameter: Tensor) -> None:
    """Refuse a vector of one element, which an optimizer would use for every element in silence."""
    for name, value in moments.items():
        if isinstance(value, Tensor) and value.shape == (1,) and parameter.numel() > 1:
            raise ValueError(f"{name} has shape (1,), its parameter {tuple(parameter.shape)}")


# The global random streams of a rank


def random_state() -> dict[str, Any]:
    """Return the state of torch's, Python's and NumPy's global generators."""
    state = _plain(torch.get_rng_state(), random, np.random)
    # To ask for its state would initialise CUDA in a rank that does not use it.
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
    """Restore the global random streams afterwards, whatever is drawn inside."""
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
        """Let torch's, Python's and NumPy's global generators draw from these streams inside."""
        with undisturbed():
            restore_random_state(self._state)
            try:
                yield
            finally:
                self._state = random_state()
