"""Who reads which samples: the plan of each step, which is equal everywhere, or fixed shards.

Without sharding the workers share one global order, and each step deals out its next part: every
worker sees every sample in the end. With it each worker sees only its own samples, in an order
of its own that changes with every pass.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, ClassVar, TypeAlias

from orchestra.settings import Registry, Settings, setting
from orchestra.settings.notation import LazyModule

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

    Indices = NDArray[numpy.int64]
else:
    numpy = LazyModule("numpy")

Shares: TypeAlias = tuple[float, ...]
"""The weight of each rank's part of the data."""


@dataclass(frozen=True)
class DataPlan:
    """Positions `start` to `stop` of the global order, dealt out in global batches.

    The parts of a global batch are disjoint, lie in the order of the ranks, and cover it exactly.
    The last one may be smaller; it is spread as evenly as the shares say, so that some workers may
    get nothing. The plan is pure: every rank computes the same one.
    """

    start: int
    stop: int  # the end of the budget; epochs do not matter here
    global_batch: int  # samples of a full step of all workers
    shares: Shares  # 0 is a rank without data

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

    def counts(self, step: int) -> tuple[int, ...]:
        """Return the samples of each rank in `step`."""
        samples = self.position(step + 1) - self.position(step)
        return self._full if samples == self.global_batch else apportion(samples, self.shares)

    # Of a full step, which may have a thousand ranks that ask one after the other.

    @cached_property
    def _full(self) -> tuple[int, ...]:
        return apportion(self.global_batch, self.shares)

    @cached_property
    def _full_before(self) -> list[int]:
        return list(accumulate(self._full, initial=0))

    def part(self, step: int, rank: int) -> tuple[int, int]:
        """Return the positions (start, stop) of the stream that `rank` reads in `step`."""
        counts = self.counts(step)
        before = self._full_before[rank] if counts is self._full else sum(counts[:rank])
        start = self.position(step) + before
        return start, start + counts[rank]

    def own_part(self, step: int, rank: int) -> tuple[int, int]:
        """Return the positions in the stream of the rank's own shard that it reads in `step`.

        What it read before `start` is what an equal plan would have dealt to it.
        """
        share = Fraction(self.shares[rank]) / sum(map(Fraction, self.shares))
        first = int(self.start * share) + step * (self.counts(0)[rank] if step else 0)
        return first, first + self.counts(step)[rank]


plan_of = lru_cache(maxsize=8)(DataPlan)
"""Return the plan of these arguments, which is made once."""


@lru_cache(maxsize=256)
def apportion(total: int, shares: Shares) -> tuple[int, ...]:
    """Split `total` in proportion to `shares`, by the largest remainder; ties to the first. Each
    count is the exact proportion rounded down or up; equal shares differ by one at most."""
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


def shares_of(speeds: Sequence[float]) -> Shares:
    """Return the weights of ranks with these speeds: 1 in the mean, to three decimals."""
    mean = sum(speeds) / len(speeds)
    # Three decimals are more than a measurement is worth; 0 would be a rank without data.
    return tuple(max(round(speed / mean, 3), 0.001) for speed in speeds)


# Fixed shards


@dataclass(frozen=True, repr=False)
class Sharding(Settings, ABC):
    """A rule that splits the training samples between the workers; every sample has one owner."""

    needs_labels: ClassVar[bool] = True
    """True if `split` looks at the labels."""

    @abstractmethod
    def split(self, labels: Indices, shares: Sequence[float], seed: int) -> list[Indices]:
        """Return the samples of each worker, whose part of the data is as large as its share.

        `labels` are those of all samples, shape (samples,), zeros where they are not needed. The
        `shares` of the workers sum to 1; `seed` is that of all that is drawn at random.
        """


@dataclass(frozen=True, repr=False)
class IID(Sharding):
    """At random, without a look at the labels."""

    needs_labels = False

    def split(self, labels: Indices, shares: Sequence[float], seed: int) -> list[Indices]:
        """Return a permutation, cut by the shares."""
        return _cut(_random(seed).permutation(len(labels)), shares)


@dataclass(frozen=True, repr=False)
class Contiguous(Sharding):
    """In the order of the data set: the first part to the first worker, and so on.

    Where the data set is sorted by label, or by place or time, workers see different worlds.
    """

    needs_labels = False

    def split(self, labels: Indices, shares: Sequence[float], seed: int) -> list[Indices]:
        """Return runs of samples; nothing is drawn."""
        return _cut(numpy.arange(len(labels)), shares)


@dataclass(frozen=True, repr=False)
class Stratified(Sharding):
    """Each class in the same proportions to all workers (Provatas et al., IEEE BigData 2021)."""

    def split(self, labels: Indices, shares: Sequence[float], seed: int) -> list[Indices]:
        """Cut each class, shuffled, by the shares; deal out in turns what is left over."""
        random = _random(seed)
        shuffled = random.permutation(len(labels))
        by_class = shuffled[numpy.argsort(labels[shuffled], kind="stable")]
        # The i-th sample goes to the worker whose share has the i-th place in even spacing.
        owners = _in_turns(len(labels), shares)
        return [by_class[owners == worker] for worker in range(len(shares))]


@dataclass(frozen=True, repr=False)
class Dirichlet(Sharding):
    """Distributes labels unevenly over the workers: not IID (Hsu, Qi and Brown, 2019).

    For each class the parts of the workers are drawn from a Dirichlet distribution: with a large
    alpha all are alike, with a small one each class belongs almost wholly to one worker. Shards
    differ in size; no worker is left without a sample.
    """

    alpha: float = setting(0.5, "concentration: small for unlike workers", low=0.01, high=1e6)

    def split(self, labels: Indices, shares: Sequence[float], seed: int) -> list[Indices]:
        """Draw p_c ~ Dirichlet(alpha N share) for each class c, and cut its samples by p_c."""
        random = _random(seed)
        parts: list[list[Indices]] = [[] for _ in shares]
        # With equal shares each worker has the concentration alpha.
        concentration = self.alpha * len(shares) * numpy.asarray(shares)
        for label in numpy.unique(labels):
            members = random.permutation(numpy.flatnonzero(labels == label))
            for worker, part in enumerate(_cut(members, random.dirichlet(concentration).tolist())):
                parts[worker].append(part)
        return _nobody_empty([numpy.concatenate(own) for own in parts])


SHARDINGS = Registry(
    "sharding",
    {
        rule.__name__: f"{__name__}:{rule.__name__}"
        for rule in (Contiguous, Dirichlet, IID, Stratified)
    },
)


def _random(seed: int) -> numpy.random.RandomState:
    """Return a RandomState, whose stream NumPy promises never to change."""
    return numpy.random.RandomState(numpy.random.MT19937(numpy.random.SeedSequence((seed, 1))))


def _cut(indices: Indices, shares: Sequence[float]) -> list[Indices]:
    ends = numpy.round(numpy.cumsum(shares)[:-1] * len(indices)).astype(int)
    return list(numpy.split(indices, ends))


def _in_turns(count: int, shares: Sequence[float]) -> Indices:
    """Return an owner for each of `count` places; every run of places is shared as `shares` say."""
    # Each worker's places are evenly spaced; whose place comes first owns the sample.
    due = [(numpy.arange(math.ceil(count * share)) + 0.5) / share for share in shares]
    owners = numpy.concatenate([numpy.full(len(at), k) for k, at in enumerate(due)])
    return owners[numpy.argsort(numpy.concatenate(due), kind="stable")[:count]]


def _nobody_empty(parts: list[Indices]) -> list[Indices]:
    """Give each worker without samples one of the largest part."""
    for worker, part in enumerate(parts):
        if not len(part):
            largest = max(range(len(parts)), key=lambda k: len(parts[k]))
            parts[worker], parts[largest] = numpy.split(parts[largest], [1])
    return parts
