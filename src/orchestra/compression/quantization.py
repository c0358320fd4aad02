"""Quantization: every element in fewer bits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from orchestra.compression.base import Context, Encoder, packing, torch
from orchestra.settings import setting

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


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


@dataclass(frozen=True, repr=False)
class QSGD(Encoder):
    """Each element at random one of two neighbouring levels, so that it is itself in expectation.

    QSGD (Alistarh et al., NeurIPS 2017). In each run of d elements ("bucket" in the paper), with
    the norm |v| of the run and s levels,

        Q(v_i) = |v| sgn(v_i) xi_i / s,   xi_i = l + 1 with probability s |v_i| / |v| - l, else l,

    where l <= s |v_i| / |v| < l + 1. A payload is a float32 norm for each run and, for each
    element, one of 2s + 1 digits. A byte holds as many digits as fit: 2 with 2 to 7 levels.
    levels=1, norm="max" is the quantizer of TernGrad (Wen et al., NeurIPS 2017), with 5 digits a
    byte; TernGrad clips gradients first, and has one norm for each tensor: run=2**31. The more
    elements a run has, the larger is the variance; the maximum instead of the Euclidean norm makes
    it smaller.

    With `error_feedback` Q(v) / tau is sent, tau = 1 + min(d / s^2, d^1/2 / s), a contraction
    (Koloskova et al., ICML 2019): errors of Q itself can be larger than v, and would add up.
    """

    passes = (17.0, 5.0)

    levels: int = setting(7, "s: levels of magnitude beside 0", low=1, high=127)
    _: KW_ONLY
    norm: Literal["l2", "max"] = setting("l2", "of a run: Euclidean, or its largest magnitude")
    run: int = setting(512, "d: elements that share a norm", low=1, high=2**31)

    def size(self, elements: int, itemsize: int, step: int) -> int:
        digits = packing.digits_in_a_byte(2 * self.levels + 1)
        return 4 * -(-elements // self.run) + -(-elements // digits)

    def encode(self, values: Tensor, context: Context) -> Tensor:
        rows, random = self._in_runs(values), context.random(shared=False)
        parts = rows.split(max(1, packing.CHUNK // rows.shape[1]))
        norms, digits = zip(*(self._quantized(part, random) for part in parts), strict=True)
        flat = torch.cat(digits).view(-1)[: len(values)]
        packed = packing.pack_digits(flat, 2 * self.levels + 1)
        return torch.cat([packing.to_bytes(torch.cat(norms) / self._tau(rows.shape[1])), packed])

    def _tau(self, elements: int) -> float:
        """Return what Q(v) is divided by, for runs of d `elements`."""
        if not self.error_feedback:
            return 1.0
        return 1 + min(elements / self.levels**2, math.sqrt(elements) / self.levels)

    def _quantized(self, rows: Tensor, random: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Return |v| of each run, and s + sgn(v_i) xi_i of each element."""
        norms = (rows.abs().amax(1) if self.norm == "max" else rows.norm(dim=1)).float()
        scale = torch.where(norms > 0, self.levels / norms, 0.0).to(rows.dtype)
        xi = torch.from_numpy(random.random(rows.shape, "float32")).to(rows)
        # floor(u + s |v_i| / |v|) with u uniform in [0, 1) is l + 1 with the probability above.
        # Rounding may exceed s: hence the clamp.
        xi.addcmul_(rows.abs(), scale[:, None]).floor_().clamp_(max=self.levels)
        # From 0 to 2s, as digits have no sign.
        return norms, xi.copysign_(rows).add_(self.levels).to(torch.uint8)

    def add(self, payload: Tensor, out: Tensor, context: Context, alpha: float = 1.0) -> None:
        count = -(-len(out) // self.run)
        norms = packing.from_bytes(payload[: 4 * count], torch.float32).to(out.dtype)
        digits = packing.unpack_digits(payload[4 * count :], 2 * self.levels + 1, len(out))
        levels = self._in_runs(digits.to(out.dtype).sub_(self.levels))
        levels.mul_((norms / self.levels)[:, None])
        out.add_(levels.view(-1)[: len(out)], alpha=alpha)

    def _in_runs(self, values: Tensor) -> Tensor:
        """Return `values` as rows of `run` elements, the last one filled up with zeros."""
        run = min(self.run, len(values))
        if missing := -len(values) % run:
            values = torch.nn.functional.pad(values, (0, missing))
        return values.view(-1, run)


@dataclass(frozen=True, repr=False)
class SignSGD(Encoder):
    """One bit an element: its sign; and for each tensor the mean magnitude |p|_1 / d.

    With `vote` (signSGD; Bernstein et al., ICML 2018) each worker has one vote on the sign of each
    element, and the majority decides (a tie gives 0); the magnitude is the sum over the workers, so
    that learning rates mean what they mean without compression. Without it each worker counts with
    its own magnitude: the sum of (|p|_1 / d) sign(p), EF-signSGD (Karimireddy et al., ICML 2019). A
    sign of 0 counts as +.
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
        # The sum of the votes has the majority's sign, or is 0 at a tie.
        out.sign_().mul_(sum(map(self._magnitude, voters)))

    def _magnitude(self, payload: Tensor) -> float:
        return float(packing.from_bytes(payload[:4], torch.float32))

    def _signs(self, payload: Tensor, out: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Give parts of `out` with their signs of 1 and -1: as many as stay in the cache."""
        bits = packing.unpack_bits(payload[4:], len(out))
        for part, own in zip(out.split(packing.CHUNK), bits.split(packing.CHUNK), strict=True):
            yield part, own.to(out.dtype).mul_(2).sub_(1)
