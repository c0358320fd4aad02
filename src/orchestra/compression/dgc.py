"""Deep Gradient Compression (Lin et al., ICLR 2018): top-k with momentum that knows of it."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING

from orchestra.compression.base import Context, Encoder, kept
from orchestra.compression.top_k import add_sparse, largest, pack_sparse, sparse_bytes
from orchestra.settings import MAX_STEPS, setting
from orchestra.settings.registry import LazyModule

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = LazyModule("torch")  # settings load without it


@dataclass(frozen=True, repr=False)
class DGC(Encoder):
    """The largest elements of what has accumulated, momentum included; for plain SGD.

    For the gradient g of each tensor on each worker, with the momentum m,

        g <- clip(g);   u <- m u + g;   v <- v + u;   send the top k of v

    and set u and v to 0 there (momentum factor masking). v is what waits: error feedback is part of
    the method. Gradients are clipped where they arise, each tensor to `clip_norm` N^-1/2 with N
    workers. In `warm_up` steps the part that is sent falls from 1/4 by factors of 4 (sparsity 75,
    93.75, 98.44, 99.6 %) to `keep`. The optimizer has to be SGD without momentum of its own.
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
        """u and v."""
        return [torch.zeros_like(tensor).view(-1) for _ in "uv"]

    def _count(self, elements: int, step: int) -> int:
        part = self.keep
        if step < self.warm_up:
            part = max(part, 0.25 ** (1 + 4 * step // self.warm_up))
        return kept(elements, part)

    def size(self, elements: int, itemsize: int, step: int) -> int:
        return sparse_bytes(self._count(elements, step), elements, itemsize)

    def encode(self, values: Tensor, context: Context) -> Tensor:
        u, v = context.memory
        if self.clip_norm is not None:
            limit = self.clip_norm * context.workers**-0.5
            values = values * (limit / (values.norm() + 1e-6)).clamp(max=1.0)
        u.mul_(self.momentum).add_(values)
        v.add_(u)
        positions = largest(v, self._count(len(v), context.step))
        payload = pack_sparse(v, positions)
        u[positions] = 0.0
        v[positions] = 0.0
        return payload

    def add(self, payload: Tensor, out: Tensor, context: Context, alpha: float = 1.0) -> None:
        add_sparse(payload, out, self._count(len(out), context.step), alpha)
