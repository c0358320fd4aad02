"""Random-k sparsification, the same elements on every worker (Stich et al., NeurIPS 2018)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestra.compression.base import Context, Encoder, kept
from orchestra.settings import setting
from orchestra.settings.registry import LazyModule

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = LazyModule("torch")  # settings load without it


@dataclass(frozen=True, repr=False)
class RandomK(Encoder):
    """Elements of each tensor at random, others in each step; all workers send the same ones.

    They follow from the step, so that only values travel, and these add. A tensor is cut into k
    runs, as equal as can be, of each of which one element is drawn: every element has the same
    chance, 1 / (length of its run), as with a random subset, and k random numbers are enough. An
    element counts length times, so that the sum is unbiased; with `error_feedback` it counts once,
    since the rest comes later.
    """

    adds = True
    passes = (1.0, 1.2)

    keep: float = setting(0.01, "part of each tensor's elements that is sent", above=0, high=1)

    def size(self, elements: int, itemsize: int, step: int) -> int:
        return kept(elements, self.keep) * itemsize

    def encode(self, values: Tensor, context: Context) -> Tensor:
        positions, lengths = self._drawn(values, context)
        chosen = values[positions]
        return chosen if self.error_feedback else chosen * lengths.to(values)

    def add(self, payload: Tensor, out: Tensor, context: Context, alpha: float = 1.0) -> None:
        out[self._drawn(out, context)[0]] += alpha * payload

    def _drawn(self, values: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """Return one position in each run, and the lengths of the runs."""
        count = kept(len(values), self.keep)
        starts = torch.arange(count + 1).mul_(len(values)).div_(count, rounding_mode="floor")
        lengths = starts.diff()
        random = torch.from_numpy(context.random(shared=True).random(count))
        places = random.mul_(lengths).long()
        return (starts[:-1] + places).to(values.device), lengths
