"""Copies of the parameters along a run, taken in passing and evaluated after it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor


@dataclass(frozen=True)
class Part:
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
class Place:
    """Elements [first, end) of what a rank offers lie at `offset` of the whole model's vector."""

    first: int
    end: int
    offset: int


Places = Mapping[str, Sequence[Place]]


class Snapshots:
    """Takes a copy when the samples consumed by the cluster pass a due point.

    Seconds count from `started` on the clock of `now`. On a rank that has a part of the model only,
    `places` tells for parameters and for buffers what of that to copy, and where it belongs.
    """

    def __init__(
        self, due: Sequence[int], now: Callable[[], float], places: Places | None = None
    ) -> None:
        self.due = tuple(due)
        self.parts: list[Part] = []
        self._now = now
        self.places = places
        self.started = 0.0
        self._behind = 0
        self._next: dict[tuple[str, int], int] = {}

    def skip(self, samples: int) -> None:
        """Due points up to `samples` are behind a run that resumes there."""
        self._behind = sum(point <= samples for point in self.due)

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
        """Copy `values` if a due point has been passed since the last offer of this slice."""
        upcoming = self._next.get((kind, offset), self._behind)
        passed = upcoming
        while passed < len(self.due) and self.due[passed] <= samples:
            passed += 1
        if passed == upcoming:
            return
        self._next[kind, offset] = passed
        seconds = self._now() - self.started
        part = Part(passed - 1, samples, seconds, offset, values, weight, kind, mirror)
        self.parts += [replace(p, values=p.values.detach().clone()) for p in self._placed(part)]

    def conclude(self, kind: str, values: Tensor) -> list[Part]:
        """What this rank has to give to the final model; not a copy."""
        return self._placed(Part(len(self.due), 0, 0.0, 0, values.detach(), 1.0, kind))

    def _placed(self, part: Part) -> list[Part]:
        if self.places is None:
            return [part]
        return [
            replace(part, offset=place.offset, values=part.values[place.first : place.end])
            for place in self.places[part.kind]
        ]

    def renew(self, samples: int, values: Tensor, *, offset: int = 0, weight: float = 1.0) -> None:
        """Copy again what was last copied at `samples`, if it was: more has arrived since."""
        for place, part in enumerate(self.parts):
            if (part.kind, part.samples, part.offset) == ("parameters", samples, offset):
                seconds = self._now() - self.started
                self.parts[place] = replace(
                    part, seconds=seconds, values=values.detach().clone(), weight=weight
                )
