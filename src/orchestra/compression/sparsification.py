"""Sparsification: a few elements of each tensor are sent, those that are large or drawn."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING

from orchestra.compression.base import Context, Encoder, packing, torch
from orchestra.settings import MAX_STEPS, setting

if TYPE_CHECKING:
    from torch import Tensor


def kept(elements: int, part: float) -> int:
    """Return how many elements `part` of a tensor is: at least one."""
    return max(1, math.floor(elements * part + 0.5))


SAMPLE = 1 << 16


def largest(values: Tensor, count: int) -> Tensor:
    """Return the positions of the `count` elements of the largest magnitude, rising.

    A sample gives a threshold that about twice as many exceed, which are found in a few passes.
    """
    some = values[:: max(1, len(values) // SAMPLE)].abs()
    # Twice as many as wanted, so that chance seldom leaves too few; then all are sorted.
    enough = 2 * count * len(some) // len(values) + 16
    if enough < len(some) < len(values):
        threshold = float(some.topk(enough, sorted=False).values.min())
        candidates = packing.positions_of_large(values, threshold)
        if len(candidates) >= count:
            chosen = values[candidates].abs().topk(count, sorted=False).indices
            return candidates[chosen.sort().values]
    return values.abs().topk(count, sorted=False).indices.sort().values


@dataclass(frozen=True, repr=False)
class TopK(Encoder):
    """The largest elements of each tensor, by magnitude; the rest waits for a later step.

    Top-k (Aji and Heafield, EMNLP 2017; Stich et al., NeurIPS 2018).

    A payload is the k values as they are, and their positions: log2(n) bits for each, or n bits for
    all where that is shorter. Without `error_feedback` small elements would never arrive.
    """

    passes = (8.5, 1.4)

    keep: float = setting(0.01, "part of each tensor's elements that is sent", above=0, high=1)
    _: KW_ONLY
    error_feedback: bool = setting(True, "send in later steps what was left out in this one")

    def count(self, elements: int, step: int) -> int:
        """Return k."""
        return kept(elements, self.keep)

    def size(self, elements: int, itemsize: int, step: int) -> int:
        count = self.count(elements, step)
        return count * itemsize + packing.positions_bytes(count, elements)

    def encode(self, values: Tensor, context: Context) -> Tensor:
        return self._packed(values, largest(values, self.count(len(values), context.step)))

    def _packed(self, values: Tensor, positions: Tensor) -> Tensor:
        chosen = packing.to_bytes(values[positions])
        return torch.cat([chosen, packing.pack_positions(positions, len(values))])

    def add(self, payload: Tensor, out: Tensor, context: Context, alpha: float = 1.0) -> None:
        count = self.count(len(out), context.step)
        split = count * out.element_size()
        values = packing.from_bytes(payload[:split], out.dtype)
        positions = packing.unpack_positions(payload[split:], count, len(out))
        out[positions] += values.mul_(alpha)


@dataclass(frozen=True, repr=False)
class DGC(TopK):
    """The largest elements of what has accumulated, momentum included; for plain SGD.

    Deep Gradient Compression (Lin et al., ICLR 2018). For the gradient g of each tensor on each
    worker, with the momentum m,

        g <- clip(g);   u <- m u + g;   v <- v + u;   send the top k of v

    and set u and v to 0 there (momentum factor masking). v is what waits: error feedback is part of
    the method. Gradients are clipped where they arise, each tensor to `clip_norm` N^-1/2 with N
    workers. In `warm_up` steps the part that is sent falls from 1/4 by factors of 4 (sparsity 75,
    93.75, 98.44, 99.6 %) to `keep`. The optimizer has to be SGD without momentum of its own,
    and its weight decay does not pass through m.
    """

    passes = (5.0, 0.9)
    copies = 2.0
    brings_momentum = True

    keep: float = setting(0.001, "part of each tensor's elements that is sent", above=0, high=1)
    _: KW_ONLY
    momentum: float = setting(0.9, "m: of the momentum correction", low=0, high=1)
    clip_norm: float | None = setting(
        None, "of a tensor's gradient, times N^1/2; none: no clipping", above=0, high=1e9
    )
    warm_up: int = setting(0, "steps in which sparsity rises to its end", low=0, high=MAX_STEPS)
    error_feedback: bool = field(default=False, init=False)  # v does it

    def memory(self, tensor: Tensor, first: int) -> list[Tensor]:
        """Make u and v."""
        return [torch.zeros_like(tensor).view(-1) for _ in "uv"]

    def count(self, elements: int, step: int) -> int:
        part = self.keep
        if step < self.warm_up:
            # Four stages of equal length: 1/4, 1/16, 1/64, 1/256.
            part = max(part, 0.25 ** (1 + 4 * step // self.warm_up))
        return kept(elements, part)

    def encode(self, values: Tensor, context: Context) -> Tensor:
        u, v = context.memory
        if self.clip_norm is not None:
            limit = self.clip_norm * context.workers**-0.5
            values = values * (limit / (values.norm() + 1e-6)).clamp(max=1.0)
        u.mul_(self.momentum).add_(values)
        v.add_(u)
        positions = largest(v, self.count(len(v), context.step))
        payload = self._packed(v, positions)
        u[positions] = v[positions] = 0.0
        return payload


@dataclass(frozen=True, repr=False)
class Threshold(Encoder):
    """All elements of a tensor above a magnitude, which a sample of them gives, as in O.N.O.

    Of at most `sample` elements, spread evenly, the largest `keep` of all set the threshold: about
    that part of the tensor is sent, in half precision (above 65504 infinite), at any size of tensor
    in the time of a few passes. A payload says how many elements it holds; their positions take
    log2(n) bits each, or a bit for each element where that is shorter. Where even this is no
    shorter than all elements in half precision, they are sent in place of it.
    """

    sized = False
    passes = (6.0, 1.2)

    keep: float = setting(0.01, "about this part of each tensor is sent", above=0, high=1)
    _: KW_ONLY
    sample: int = setting(16_384, "elements that the threshold is taken from", low=1, high=2**31)
    error_feedback: bool = setting(True, "send in later steps what was left out in this one")

    def size(self, elements: int, itemsize: int, step: int) -> int:
        """Return the most bytes that a payload can have."""
        return 4 + 2 * elements

    def encode(self, values: Tensor, context: Context) -> Tensor:
        some = values[:: max(1, len(values) // self.sample)][: self.sample].abs()
        threshold = float(some.topk(kept(len(some), self.keep)).values[-1])
        if not threshold > 0:  # most of the sample is 0, or NaN: all elements that are not 0 count
            positions = packing.positions_of(values != 0)
        else:
            positions = packing.positions_of_large(values, threshold)
        chosen, where = values[positions].half(), packing.pack_positions(positions, len(values))
        # Positions cost more than they save: all elements, as `add` sees by their number.
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


@dataclass(frozen=True, repr=False)
class RandomK(Encoder):
    """Elements of each tensor at random, others in each step; all workers send the same ones.

    Random-k (Stich et al., NeurIPS 2018). The elements follow from the step, so that only values
    travel, and these add. A tensor is cut into k runs of nearly equal length, and one element of
    each run is drawn. So every element has the same chance, 1 / (length of its run), as with a
    random subset, and k random numbers are enough. An element counts length times, so that the sum
    is unbiased; with `error_feedback` it counts once, since the rest comes later.
    """

    adds = True
    passes = (1.0, 1.2)

    keep: float = setting(0.01, "part of each tensor's elements that is sent", above=0, high=1)

    def size(self, elements: int, itemsize: int, step: int) -> int:
        return kept(elements, self.keep) * itemsize

    def encode(self, values: Tensor, context: Context) -> Tensor:
        if values.is_meta:  # a shape alone: there is nothing to draw from
            return values.new_empty(kept(len(values), self.keep))
        positions, lengths = self._drawn(values, context)
        chosen = values[positions]
        return chosen if self.error_feedback else chosen * lengths.to(values)

    def add(self, payload: Tensor, out: Tensor, context: Context, alpha: float = 1.0) -> None:
        if not out.is_meta:
            out[self._drawn(out, context)[0]] += alpha * payload

    def _drawn(self, values: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """Return one position in each run, and the lengths of the runs."""
        count = kept(len(values), self.keep)
        starts = torch.arange(count + 1).mul_(len(values)).div_(count, rounding_mode="floor")
        lengths = starts.diff()
        random = torch.from_numpy(context.random(shared=True).random(count))
        places = random.mul_(lengths).long()
        return (starts[:-1] + places).to(values.device), lengths
