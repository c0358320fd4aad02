"""Batches of any nested shape: counting, splitting, moving, comparing."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from itertools import pairwise
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from orchestra.errors import InputError

Batch = Any


def leaves_of(batch: Batch) -> Iterator[Any]:
    """Yield what lies in nested tuples, lists, mappings and dataclasses."""
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    elif is_dataclass(batch) and not isinstance(batch, type):
        batch = [getattr(batch, field.name) for field in fields(batch)]
    if isinstance(batch, (tuple, list)):
        for value in batch:
            yield from leaves_of(value)
    else:
        yield batch


def tensors_of(batch: Batch) -> Iterator[Tensor]:
    """Yield every tensor in nested tuples, lists, mappings and dataclasses."""
    return (leaf for leaf in leaves_of(batch) if isinstance(leaf, Tensor))


def map_tensors(batch: Batch, function: Callable[[Tensor], Any]) -> Batch:
    """Return the same nest with `function` applied to every tensor."""
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
    """Return the number of samples: the first dimension of the first tensor."""
    for tensor in tensors_of(batch):
        if tensor.dim():
            return int(tensor.shape[0])
    raise InputError(
        "a batch holds no tensor with a first dimension to count its samples by: "
        "return tensors, or nested tuples, lists or dicts of them"
    )


def counted_samples(batch: Batch, listed: int | None = None) -> int | None:
    """Return how many samples a batch has; None if its tensors and arrays do not tell.

    `listed` is the number that a sampler chose. It holds unless the first dimensions are smaller:
    a collate function may have dropped samples. These tell the number if they are all the same.
    """
    arrays = (leaf for leaf in leaves_of(batch) if isinstance(leaf, (Tensor, np.ndarray)))
    shapes = [tuple(array.shape) for array in arrays if array.ndim]
    first = {shape[0] for shape in shapes}
    if listed is not None and (all(listed in shape for shape in shapes) or max(first) >= listed):
        return listed
    return int(first.pop()) if len(first) == 1 else None


def split_batch(batch: Batch, parts: int, setting: str = "accumulation") -> list[tuple[Batch, int]]:
    """Split into at most `parts` even micro-batches, each with its number of samples; `setting` is
    the name of what asks for them."""
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
    return [
        (map_tensors(batch, itemgetter(slice(first, end))), end - first)
        for first, end in pairwise(bounds)
    ]


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Move the tensors of a batch to `device`; on CPU and meta nothing is to be done."""
    if device.type in ("cpu", "meta"):
        return batch
    return map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))


def digest(item: Any, so_far: int = 0) -> int:
    """Compute a checksum of the tensors, arrays, images, numbers and texts in a nest."""
    for leaf in leaves_of(item):
        content: Any = b""
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
            flat = leaf.detach().cpu().contiguous().reshape(-1)
            content = flat.view(torch.uint8).numpy().data
        elif hasattr(leaf, "__array_interface__"):  # an image of PIL, too
            content = np.asarray(leaf).tobytes()
        elif isinstance(leaf, (int, float, str, bytes)):
            content = repr(leaf).encode()
        so_far = zlib.crc32(content, so_far)
    return so_far
