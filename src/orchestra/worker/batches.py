"""Batches of any nested shape: counting, splitting, moving, comparing."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from orchestra.errors import InputError

Batch = Any


def tensors_of(batch: Batch) -> Iterator[Tensor]:
    """Yield every tensor in nested tuples, lists and mappings."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors_of(value)
    elif isinstance(batch, (tuple, list)):
        for value in batch:
            yield from tensors_of(value)


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
    """Compute a checksum of the tensors, numbers and texts in nested tuples, lists, mappings."""
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
    elif isinstance(item, (int, float, str, bytes)):
        return zlib.crc32(repr(item).encode(), so_far)
    return so_far
