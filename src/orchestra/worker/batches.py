"""Batches of any nested shape: counting, splitting, moving."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from orchestra.errors import InputError

Batch = Any


def tensors_of(batch: Batch) -> Iterator[Tensor]:
    """Every tensor in nested tuples, lists and mappings."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors_of(value)
    elif isinstance(batch, (tuple, list)):
        for value in batch:
            yield from tensors_of(value)


def map_tensors(batch: Batch, function: Callable[[Tensor], Any]) -> Batch:
    """The same nest with `function` applied to every tensor."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return {key: map_tensors(value, function) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(value, function) for value in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(map_tensors(value, function) for value in batch)
    return batch


def batch_samples(batch: Batch) -> int:
    """How many samples: the first dimension of the first tensor."""
    for tensor in tensors_of(batch):
        if tensor.dim():
            return int(tensor.shape[0])
    raise InputError(
        "a batch holds no tensor with a first dimension to count its samples by: "
        "return tensors, or nested tuples, lists or dicts of them"
    )


def split_batch(batch: Batch, parts: int, setting: str = "accumulation") -> list[tuple[Batch, int]]:
    """At most `parts` micro-batches, as even as can be, each with its number of samples.

    `setting` is the name of what asks for them.
    """
    samples = batch_samples(batch)
    parts = min(parts, samples)
    if parts <= 1:
        return [(batch, samples)]
    if any(not t.dim() or t.shape[0] != samples for t in tensors_of(batch)):
        raise InputError(
            f"{setting}: this batch cannot be split: not every tensor in it has {samples} "
            f"rows; set {setting} to 1"
        )
    bounds = [samples * part // parts for part in range(parts + 1)]

    def rows(first: int, end: int) -> Callable[[Tensor], Tensor]:
        return lambda tensor: tensor[first:end]

    return [(map_tensors(batch, rows(first, end)), end - first) for first, end in pairwise(bounds)]


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch with its tensors on `device`, where one can be computed."""
    return mover(device)(batch)


def mover(device: torch.device) -> Callable[[Batch], Batch]:
    """`to_device`, for batch after batch."""
    if device.type in ("cpu", "meta"):
        return lambda batch: batch
    return partial(map_tensors, function=lambda tensor: tensor.to(device, non_blocking=True))
