"""Sixteen bits in place of thirty-two: every element is rounded, and sums are taken in 16 bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from orchestra.compression.base import Context, Encoder
from orchestra.settings.registry import LazyModule

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = LazyModule("torch")  # settings load without it


@dataclass(frozen=True, repr=False)
class _Cast(Encoder):
    """Rounds each element to `dtype`, and sums in it."""

    adds = True
    whole = True
    passes = (0.9, 0.65)
    dtype: ClassVar[str]

    def size(self, elements: int, itemsize: int, step: int) -> int:
        return 2 * elements

    def encode(self, values: Tensor, context: Context) -> Tensor:
        return values.to(getattr(torch, self.dtype))

    def add(self, payload: Tensor, out: Tensor, context: Context, alpha: float = 1.0) -> None:
        out.add_(payload, alpha=alpha)

    def combine(self, payloads: Sequence[Tensor], out: Tensor, context: Context) -> None:
        (total,) = payloads
        out.copy_(total)


@dataclass(frozen=True, repr=False)
class FP16(_Cast):
    """Half the bytes: IEEE half precision, 11 bits of mantissa, from 6e-8 to 65504.

    Smaller elements of a gradient become 0, and a sum above 65504 becomes infinite.
    """

    dtype = "float16"


@dataclass(frozen=True, repr=False)
class BF16(_Cast):
    """Half the bytes: bfloat16, 8 bits of mantissa, the range of float32."""

    dtype = "bfloat16"
