"""Sparsification by a threshold that a sample of the gradient gives, as in O.N.O."""

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
class Threshold(Encoder):
    """All elements of a tensor above a magnitude, which a sample of them gives.

    Of at most `sample` elements, spread evenly, the largest `keep` of all set the threshold: about
    that part of the tensor is sent, in half precision, at any size of tensor in the time of a few
    passes. A payload says how many elements it holds; their positions take log2(n) bits each, or a
    bit for each element where that is shorter. Where even this is no shorter than all elements in
    half precision, they are sent in place of it.
    """

    sized = False
    passes = (6.0, 1.2)

    keep: float = setting(0.01, "about this part of each tensor is sent", above=0, high=1)
    _: KW_ONLY
    sample: int = setting(16_384, "elements that the threshold is taken from", low=1, high=2**31)
    error_feedback: bool = setting(True, "send in later steps what was left out in this one")

    def size(self, elements: int, itemsize: int, step: int) -> int:
        """The most bytes."""
        return 4 + 2 * elements

    def encode(self, values: Tensor, context: Context) -> Tensor:
        some = values[:: max(1, len(values) // self.sample)][: self.sample].abs()
        threshold = float(some.topk(kept(len(some), self.keep)).values[-1])
        if threshold == 0:
            positions = packing.positions_of(values != 0)
        else:
            positions = packing.positions_of_large(values, threshold)
        chosen, where = values[positions].half(), packing.pack_positions(positions, len(values))
        if 2 * len(chosen) + len(where) >= 2 * len(values):
            chosen, where = values.half(), where[:0]
        head = torch.tensor([len(chosen)], dtype=torch.int32, device=values.device)
        return torch.cat([packing.to_bytes(head), packing.to_bytes(chosen), where])

    def add(self, payload: Tensor, out: Tensor, context: Context, alpha: float = 1.0) -> None:
        count = int(packing.from_bytes(payload[:4], torch.int32))
        end = 4 + 2 * count
        values = packing.from_bytes(payload[4:end], torch.float16).to(out.dtype).mul_(alpha)
        if count == len(out):
            out.add_(values)
        else:
            out[packing.unpack_positions(payload[end:], count, len(out))] += values
