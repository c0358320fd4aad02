"""Top-k sparsification (Aji and Heafield, EMNLP 2017; Stich et al., NeurIPS 2018)."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING

from orchestra.compression.base import Context, Encoder, kept
from orchestra.settings import setting
from orchestra.settings.registry import LazyModule

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from orchestra.compression import packing
else:
    torch = LazyModule("torch")  # settings load without it
    packing = LazyModule("orchestra.compression.packing")


@dataclass(frozen=True, repr=False)
class TopK(Encoder):
    """The largest elements of each tensor, by magnitude; the rest waits for a later step.

    A payload is the k values as they are, and their positions: log2(n) bits for each, or n bits for
    all where that is shorter. Without `error_feedback` small elements would never arrive.
    """

    passes = (8.5, 1.4)

    keep: float = setting(0.01, "part of each tensor's elements that is sent", above=0, high=1)
    _: KW_ONLY
    error_feedback: bool = setting(True, "send in later steps what was left out in this one")

    def size(self, elements: int, itemsize: int, step: int) -> int:
        return sparse_bytes(kept(elements, self.keep), elements, itemsize)

    def encode(self, values: Tensor, context: Context) -> Tensor:
        return pack_sparse(values, largest(values, kept(len(values), self.keep)))

    def add(self, payload: Tensor, out: Tensor, context: Context, alpha: float = 1.0) -> None:
        add_sparse(payload, out, kept(len(out), self.keep), alpha)


SAMPLE = 1 << 16


def largest(values: Tensor, count: int) -> Tensor:
    """The positions of the `count` elements of the largest magnitude, rising.

    A sample gives a threshold that about twice as many exceed, which are found in a few passes.
    """
    some = values[:: max(1, len(values) // SAMPLE)].abs()
    enough = 2 * count * len(some) // len(values) + 16
    if enough < len(some) < len(values):
        threshold = float(some.topk(enough, sorted=False).values.min())
        candidates = packing.positions_of_large(values, threshold)
        if len(candidates) >= count:
            chosen = values[candidates].abs().topk(count, sorted=False).indices
            return candidates[chosen.sort().values]
    return values.abs().topk(count, sorted=False).indices.sort().values


def sparse_bytes(count: int, elements: int, itemsize: int) -> int:
    """Of `pack_sparse`, for `count` of so many elements."""
    return count * itemsize + packing.positions_bytes(count, elements)


def pack_sparse(values: Tensor, positions: Tensor) -> Tensor:
    """The values at rising `positions`, then these."""
    chosen = packing.to_bytes(values[positions])
    return torch.cat([chosen, packing.pack_positions(positions, len(values))])


def add_sparse(payload: Tensor, out: Tensor, count: int, alpha: float) -> None:
    """Add alpha times the `count` values of a `pack_sparse` to `out`."""
    split = count * out.element_size()
    values = packing.from_bytes(payload[:split], out.dtype)
    positions = packing.unpack_positions(payload[split:], count, len(out))
    out[positions] += values.mul_(alpha)
