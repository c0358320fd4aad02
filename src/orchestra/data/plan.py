"""The plan: the part of the global order that each rank reads in each step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import NamedTuple

STEPS_KEPT = 16
"""The steps that each plan keeps: ranks that take turns are seldom further apart."""


class Deal(NamedTuple):
    """A global batch: positions `start` to `stop` of the stream, of which rank i reads `counts[i]`
    after the `before[i]` of those before it."""

    start: int
    stop: int
    counts: tuple[int, ...]
    before: tuple[int, ...]

    @property
    def samples(self) -> int:
        """The samples of all ranks together."""
        return self.stop - self.start

    def part(self, rank: int) -> tuple[int, int]:
        """Return the positions (start, stop) that `rank` reads."""
        start = self.start + self.before[rank]
        return start, start + self.counts[rank]


@dataclass(frozen=True)
class Plan:
    """Positions `start` to `stop` of the global order, dealt out in global batches.

    The parts of a global batch are disjoint, lie in the order of the ranks, and cover it exactly.
    The last one may be smaller; it is spread as evenly as the shares say, so that some workers may
    get nothing. The plan is pure: every rank computes the same one.

    Args:
        start: the first position of the stream to read.
        stop: the end of the budget; epochs do not matter here.
        global_batch: samples of a full step of all workers.
        shares: the weight of each rank; 0 is a rank without data.
    """

    start: int
    stop: int
    global_batch: int
    shares: tuple[float, ...]

    def __post_init__(self) -> None:
        assert 0 <= self.start <= self.stop, "the budget ends before it begins"
        assert self.global_batch > 0
        assert min(self.shares) >= 0
        assert max(self.shares) > 0, "no rank has data"

    @cached_property
    def steps(self) -> int:
        """Steps until the budget is used up, the smaller last one included."""
        return -(-(self.stop - self.start) // self.global_batch)

    def position(self, step: int) -> int:
        """Return the position in the stream at which `step` begins: all before is consumed."""
        return min(self.start + step * self.global_batch, self.stop)

    def deal(self, step: int) -> Deal:
        """Return the part that each rank reads in `step`."""
        deal = self._deals.get(step)
        if deal is None:
            start, stop = self.position(step), self.position(step + 1)
            if len(self._deals) == STEPS_KEPT:
                self._deals.clear()
            counts = apportion(stop - start, self.shares)
            before = tuple(accumulate(counts, initial=0))
            deal = self._deals[step] = Deal(start, stop, counts, before)
        return deal

    @cached_property
    def _deals(self) -> dict[int, Deal]:
        """The deals of some steps: ranks of one process share a plan, and take turns."""
        return {}

    def counts(self, step: int) -> tuple[int, ...]:
        """Return the samples of each rank in `step`."""
        return self.deal(step).counts

    def part(self, step: int, rank: int) -> tuple[int, int]:
        """Return the positions (start, stop) of the stream that `rank` reads in `step`."""
        return self.deal(step).part(rank)

    def own_part(self, step: int, rank: int) -> tuple[int, int]:
        """Return the positions in the stream of the rank's own shard that it reads in `step`.

        What it read before `start` is what an equal plan would have dealt to it.
        """
        share = Fraction(self.shares[rank]) / sum(map(Fraction, self.shares))
        first = int(self.start * share) + step * (self.counts(0)[rank] if step else 0)
        return first, first + self.counts(step)[rank]


plan_of = lru_cache(maxsize=8)(Plan)
"""Return the plan of these arguments, which is made once."""


@lru_cache(maxsize=256)
def apportion(total: int, shares: tuple[float, ...]) -> tuple[int, ...]:
    """Split `total` in proportion to `shares`, by the largest remainder; ties to the first.

    Each count is the exact proportion rounded down or up; equal shares differ by one at most.
    """
    # As fractions: every rank has to find the same counts, and ties have to be ties.
    weights = [Fraction(share) for share in shares]
    whole = sum(weights)
    exact = [total * weight / whole for weight in weights]
    counts = [int(quota) for quota in exact]
    # `sorted` is stable, so that of equal remainders the first rank gets the sample.
    by_remainder = sorted(range(len(shares)), key=lambda rank: counts[rank] - exact[rank])
    for rank in by_remainder[: total - sum(counts)]:
        counts[rank] += 1
    return tuple(counts)


def shares_of(speeds: Sequence[float]) -> tuple[float, ...]:
    """Return the weights of ranks with these speeds: 1 in the mean, to three decimals."""
    mean = sum(speeds) / len(speeds)
    # Three decimals are more than a measurement is worth; 0 would be a rank without data.
    return tuple(max(round(speed / mean, 3), 0.001) for speed in speeds)
