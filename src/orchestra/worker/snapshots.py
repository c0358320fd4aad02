"""Copies of the parameters along a run, taken in passing and evaluated after it."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

Buffers = Sequence[tuple[str, Tensor]]
"""Of a module, by name."""


@dataclass(frozen=True)
class Contribution:
    """A rank's contribution to snapshot `index`.

    Parameters: the slice that begins at `offset` of the flat vector; parts of other ranks that
    cover the same elements are replicas, and averaged by `weight`. Buffers: packed as `pack` gives
    them. Of kind "replica": this rank's own parameters, where what it offers as parameters is
    something else, such as a centre that all know. A `mirror` is what another rank has too, and
    counts only where that one is lost.
    """

    index: int
    samples: int
    seconds: float
    offset: int
    values: Tensor
    weight: float
    kind: str = "parameters"
    mirror: bool = False

    @property
    def covered(self) -> slice:
        """The elements of the flat vector that it covers."""
        return slice(self.offset, self.offset + self.values.numel())


@dataclass(frozen=True)
class ModelRange:
    """Elements [first, end) of what a rank offers lie at `offset` of the whole model's vector."""

    first: int
    end: int
    offset: int


Places = Mapping[str, Sequence[ModelRange]]


class Snapshots:
    """Takes a copy when the samples consumed by the cluster pass a due point.

    Seconds count from `started` on the clock of `now`. On a rank that has a part of the model only,
    `places` tells for parameters and for buffers what of that to copy, and where it belongs.
    """

    def __init__(self, due: Sequence[int], now: Callable[[], float]) -> None:
        self.due = tuple(due)
        self.parts: list[Contribution] = []
        self._now = now
        self.places: Places | None = None
        self.started = 0.0
        self._behind = 0
        self._next: dict[tuple[str, int], int] = {}

    def moved(self, now: Callable[[], float]) -> Snapshots:
        """Return these snapshots on another clock `now`, which shows the same time."""
        moved = Snapshots(self.due, now)
        moved.parts, moved.places, moved.started = self.parts, self.places, self.started
        return moved

    def skip(self, samples: int) -> None:
        """Skip due points up to `samples`, at which a run resumes or a phase begins."""
        self._behind = bisect_right(self.due, samples)

    def go_back_to(self, samples: int) -> None:
        """Go on from `samples`; forget what was copied after them."""
        self.parts = [part for part in self.parts if part.samples <= samples]
        self._next.clear()
        self.skip(samples)

    def is_due(self, samples: int, *, offset: int = 0, kind: str = "parameters") -> bool:
        """Return whether a due point has been passed since the last offer of this slice."""
        # A rank that took none in an earlier phase does not take those of that phase now.
        upcoming = max(self._next.get((kind, offset), 0), self._behind)
        return bisect_right(self.due, samples) > upcoming

    def offer(
        self,
        samples: int,
        values: Tensor,
        *,
        offset: int = 0,
        weight: float = 1.0,
        kind: str = "parameters",
        mirror: bool = False,
    ) -> None:
        """Copy `values` to the host if this slice is due."""
        if not self.is_due(samples, offset=offset, kind=kind):
            return
        passed = self._next[kind, offset] = bisect_right(self.due, samples)
        seconds = self._now() - self.started
        part = Contribution(passed - 1, samples, seconds, offset, values, weight, kind, mirror)
        self.parts += [replace(p, values=_copy_on_host(p.values)) for p in self._placed(part)]

    def conclude(self, kind: str, values: Tensor) -> list[Contribution]:
        """Return this rank's parts of the final model, without a copy."""
        return self._placed(Contribution(len(self.due), 0, 0.0, 0, values.detach(), 1.0, kind))

    def _placed(self, part: Contribution) -> list[Contribution]:
        if self.places is None:
            return [part]
        return [
            replace(part, offset=place.offset, values=part.values[place.first : place.end])
            for place in self.places[part.kind]
        ]

    def renew(self, samples: int, values: Tensor, *, offset: int = 0, weight: float = 1.0) -> None:
        """Copy `values` like `offer`, also if `samples` were offered before: more has arrived."""
        self.offer(samples, values, offset=offset, weight=weight)
        for place, part in enumerate(self.parts):
            if (part.kind, part.samples, part.offset) == ("parameters", samples, offset):
                seconds, copy = self._now() - self.started, _copy_on_host(values)
                self.parts[place] = replace(part, seconds=seconds, values=copy, weight=weight)


def _copy_on_host(values: Tensor) -> Tensor:
    """Return a copy in the memory of the host: a GPU has no room for a model at each snapshot."""
    values = values.detach()
    return values.cpu() if values.is_cuda else values.clone()


# Means of parts, and buffers


class RunningMean:
    """The weighted mean of vectors that come one at a time, each covering some elements.

    It is taken in float64. `square` is, for each element, sum_i w_i (x_i - mean)^2 (Welford's
    update with weights), so that no vector has to be kept.
    """

    def __init__(self, size: int) -> None:
        self.total = torch.zeros(size, dtype=torch.float64)
        self.weight = torch.zeros(size, dtype=torch.float64)
        self.square = torch.zeros(size, dtype=torch.float64)

    def add(self, part: Contribution) -> None:
        """Add one more vector."""
        total, weight = self.total[part.covered], self.weight[part.covered]
        values = part.values.double().cpu()
        # The first vector of an element has no distance from its mean.
        before = torch.where(weight > 0, total / weight, values)
        total += part.weight * values
        weight += part.weight
        self.square[part.covered] += part.weight * (values - before) * (values - total / weight)

    @property
    def complete(self) -> bool:
        """True if there is a mean of every element."""
        return bool((self.weight > 0).all())

    @property
    def mean(self) -> Tensor:
        """Shape: [size]."""
        return self.total / self.weight

    @property
    def distance(self) -> float:
        """sqrt(sum_i p_i ||x_i - mean||^2), p_i being the share of vector i in the weight."""
        return math.sqrt(max(0.0, float((self.square / self.weight).sum())))


def buffers_vector(named: Buffers) -> Tensor | None:
    """Return all buffers of a module end to end, in float64; None if it has none."""
    buffers = [buffer.detach().double().reshape(-1) for _, buffer in named]
    return torch.cat(buffers) if buffers else None


def set_buffers(buffers: Buffers, parts: Sequence[Contribution]) -> None:
    """Set floating buffers to the weighted mean of `parts`, others to those of the first part."""
    own = buffers_vector(buffers)
    if not parts or own is None:
        return
    first, mean = own.cpu(), RunningMean(len(own))
    # Backwards, so that the first part is written last.
    for part in reversed(parts):
        first[part.covered] = part.values
    for part in parts:
        mean.add(part)
    means = torch.where(mean.weight > 0, mean.mean, first)
    offset = 0
    for _, buffer in buffers:
        source = means if buffer.is_floating_point() else first
        with torch.no_grad():
            buffer.copy_(source[offset : offset + buffer.numel()].view(buffer.shape))
        offset += buffer.numel()
