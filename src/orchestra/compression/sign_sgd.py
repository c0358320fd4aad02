"""signSGD with majority vote (Bernstein et al., ICML 2018), and EF-signSGD (Karimireddy et al.)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING

from orchestra.compression.base import Context, Encoder
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
class SignSGD(Encoder):
    """One bit an element: its sign; and for each tensor the mean magnitude |p|_1 / d.

    With `vote` each worker has one vote on the sign of each element, and the majority decides
    (a tie gives 0); the magnitude is the sum over the workers, so that learning rates mean what
    they mean without compression. Without it each worker counts with its own magnitude: the sum of
    (|p|_1 / d) sign(p), EF-signSGD (Karimireddy et al., ICML 2019). A sign of 0 counts as +.
    """

    passes = (8.0, 3.4)

    vote: bool = setting(True, "the majority decides on each sign; else magnitudes add")
    _: KW_ONLY
    error_feedback: bool = setting(True, "send in later steps what was left out in this one")

    @property
    def decodable_alone(self) -> bool:
        return not self.vote

    def size(self, elements: int, itemsize: int, step: int) -> int:
        return 4 + packing.packed_bytes(elements, 1)

    def encode(self, values: Tensor, context: Context) -> Tensor:
        magnitude = values.abs().mean().float().reshape(1)
        return torch.cat([packing.to_bytes(magnitude), packing.pack_signs(values)])

    def add(self, payload: Tensor, out: Tensor, context: Context, alpha: float = 1.0) -> None:
        magnitude = self._magnitude(payload)
        for part, signs in self._signs(payload, out):
            part.add_(signs, alpha=alpha * magnitude)

    def combine(self, payloads: Sequence[Tensor], out: Tensor, context: Context) -> None:
        if not self.vote:
            super().combine(payloads, out, context)
            return
        out.zero_()
        voters = [each for each in payloads if self._magnitude(each) != 0]  # others have no samples
        for payload in voters:
            for part, signs in self._signs(payload, out):
                part.add_(signs)
        out.sign_().mul_(sum(map(self._magnitude, voters)))

    def _magnitude(self, payload: Tensor) -> float:
        return float(packing.from_bytes(payload[:4], torch.float32))

    def _signs(self, payload: Tensor, out: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Give parts of `out` with their signs of 1 and -1: as many as stay in the cache."""
        bits = packing.unpack_bits(payload[4:], len(out))
        for part, own in zip(out.split(packing.CHUNK), bits.split(packing.CHUNK), strict=True):
            yield part, own.to(out.dtype).mul_(2).sub_(1)
