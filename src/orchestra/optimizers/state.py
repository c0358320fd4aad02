"""The state of a run as plain data: `capture`, `restore`, and the global random streams.

The streams are saved and restored here, and never seeded.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from orchestra.settings.base import Mismatch


def capture(value: Any) -> Any:
    """Return `value` as nested dicts and lists of tensors, numbers and text.

    Takes dataclasses (without fields that are no arguments of theirs), optimizers, anything with a
    `state_dict()`, mappings, sequences, tensors and plain values. Tensors are not copied.
    """
    value = value.state_dict()["state"] if isinstance(value, Optimizer) else _opened(value)
    if value is None or isinstance(value, (Tensor, bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): capture(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [capture(item) for item in value]
    kind = type(value).__name__
    article = "an" if kind[0].lower() in "aeiou" else "a"
    raise AssertionError(f"{article} {kind} cannot be kept in a checkpoint")


def _opened(value: Any) -> Any:
    """Return an object with a state, or a dataclass, as a mapping of what a checkpoint keeps."""
    if isinstance(value, Tensor):
        return value
    if hasattr(value, "state_dict"):
        return value.state_dict()
    if is_dataclass(value):
        kept = [item.name for item in fields(value) if item.init]
        return {name: getattr(value, name) for name in kept}
    return value


def restore(target: Any, saved: Any) -> Any:
    """Put what `capture` made of an equal structure back; return the value to use in its place.

    Tensors, dataclasses, optimizers and objects with `load_state_dict` are changed in place.
    """
    if isinstance(target, Tensor):
        with torch.no_grad():
            target.copy_(saved)
        return target
    if isinstance(target, Optimizer):
        state = {int(index): values for index, values in saved.items()}
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


def common_of(target: Any, saved: Any) -> Any:
    """Return the part of `saved`, what `capture` made of another worker's `target`, that any worker
    could have kept: fields with the metadata `COMMON`, and those inside of other fields."""
    found: dict[str, Any] = {}
    for item in fields(target) if is_dataclass(target) else ():
        if not item.init or item.name not in saved:
            continue
        own, there = getattr(target, item.name), saved[item.name]
        common = item.metadata.get("common", False)
        if common(target) if callable(common) else common:
            found[item.name] = _plainly(there)
        elif is_dataclass(own) and isinstance(there, Mapping):
            found[item.name] = common_of(own, there)
        elif isinstance(own, list) and own and is_dataclass(own[0]) and len(own) == len(there):
            found[item.name] = [common_of(*pair) for pair in zip(own, there, strict=True)]
    return {name: part for name, part in found.items() if part != {}}


def _plainly(value: Any) -> Any:
    """Return mappings as dicts."""
    if isinstance(value, Mapping):
        return {key: _plainly(item) for key, item in value.items()}
    return [_plainly(item) for item in value] if isinstance(value, list) else value


def require_alike(target: Any, saved: Any, place: str) -> None:
    """Raise `Mismatch` unless `restore(target, saved)` puts values back into values of their kind:
    tensors of equal types and shapes, moments as the optimizer makes them. `place` opens a message.

    What only one of them has may be optional, or from before there was such a value.
    """
    optimizer = target if isinstance(target, Optimizer) else None
    target = {} if optimizer else _opened(target)
    have, want = _kind(saved), _kind(target)
    if target is None or (saved is None and want in ("a number", "a text")):
        return
    if have != want:
        raise Mismatch(f"{place} is {have}, and {want} in this run")
    if optimizer:
        _require_moments(optimizer, saved, place)
    elif isinstance(target, Mapping):
        for key, item in target.items():
            if str(key) in saved:
                require_alike(item, saved[str(key)], f"{place}/{key}")
    elif want == "a list" and len(target) == len(saved):
        for index, item in enumerate(target):
            require_alike(item, saved[index], f"{place}/{index}")


def _kind(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    kinds = (
        (Mapping, "a mapping"),
        (str, "a text"),
        (Sequence, "a list"),
        ((int, float), "a number"),
    )
    return next((name for kind, name in kinds if isinstance(value, kind)), type(value).__name__)


def _require_moments(optimizer: Optimizer, saved: Any, place: str) -> None:
    own = [(each, group) for group in optimizer.param_groups for each in group["params"]]
    for index, moments in saved.items():
        if not (index.isdecimal() and int(index) < len(own)):
            raise Mismatch(f"{place} has moments of {index!r}, with {len(own)} parameters")
        # Another optimizer's moments may have any shape, and a parameter without a step has none.
        if moments and type(optimizer).__module__.startswith("torch.optim."):
            expected = _moments(optimizer, *own[int(index)])
            require_alike(expected, moments, f"{place}/{index}")
            if lacking := expected.keys() - moments.keys():
                raise Mismatch(f"{place}/{index} lacks {', '.join(sorted(lacking))}")


def _moments(optimizer: Optimizer, parameter: Tensor, group: dict[str, Any]) -> dict[str, Any]:
    """Return the moments of `parameter`: those it has, or such as it has after a step."""
    if parameter in optimizer.state:
        return dict(optimizer.state[parameter])
    trial, like = copy.copy(optimizer), torch.zeros_like(parameter, requires_grad=True)
    like.grad = torch.zeros_like(like)
    trial.param_groups, trial.state = [{**group, "params": [like]}], defaultdict(dict)
    trial.step()
    return dict(trial.state[like])


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
