"""Copies of the parameters along a run, taken in passing and evaluated after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor


@dataclass(frozen=True)
class Part:
    """A rank's contribution to snapshot `index`.

    Parameters: the slice that begins at `offset` of the flat vector; parts of other ranks that
    cover the same elements are averaged by `weight`. Buffers: packed as `pack` gives them.
    """

    index: int
    samples: int
    seconds: float
    offset: int
    values: Tensor
    weight: float
    kind: str = "parameters"


class Snapshots:
    """Takes a copy when the samples consumed by the cluster pass a due point."""

    def __init__(self, due: Sequence[int], now: Callable[[], float]) -> None:
        self.due = tuple(due)
        self.parts: list[Part] = []
        self._now = now
        self._started = 0.0
        self._behind = 0
        self._next: dict[tuple[str, int], int] = {}

    def start_clock(self, at: float) -> None:
        """Seconds of later parts count from `at`."""
        self._started = at

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
    ) -> None:
        """Copy `values` if a due point has been passed since the last offer of this slice."""
        upcoming = self._next.get((kind, offset), self._behind)
        passed = upcoming
        while passed < len(self.due) and self.due[passed] <= samples:
            passed += 1
        if passed == upcoming:
            return
        self._next[kind, offset] = passed
        seconds = self._now() - self._started
        self.parts.append(
            Part(passed - 1, samples, seconds, offset, values.detach().clone(), weight, kind)
        )

    def renew(self, samples: int, values: Tensor, *, offset: int = 0, weight: float = 1.0) -> None:
        """Copy again what was last copied at `samples`, if it was: more has arrived since."""
        for place, part in enumerate(self.parts):
            if (part.kind, part.samples, part.offset) == ("parameters", samples, offset):
                seconds = self._now() - self._started
                self.parts[place] = replace(
                    part, seconds=seconds, values=values.detach().clone(), weight=weight
                )
