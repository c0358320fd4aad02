"""Fixed shards: the samples that belong to each worker for the whole of a run.

Without sharding the workers share one global order, and each step deals out its next part: every
worker sees every sample in the end. With it each worker sees only its own samples, in an order
of its own that changes with every pass.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from orchestra.settings import Registry, Settings, setting
from orchestra.settings.notation import LazyModule

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

    Indices = NDArray[numpy.int64]
else:
    numpy = LazyModule("numpy")


@dataclass(frozen=True, repr=False)
class Sharding(Settings, ABC):
    """A rule that splits the training samples between the workers; every sample has one owner."""

    needs_labels: ClassVar[bool] = True
    """True if `split` looks at the labels."""

    @abstractmethod
    def split(self, labels: Indices, shares: Sequence[float], seed: int) -> list[Indices]:
        """Return the samples of each worker, whose part of the data is as large as its share.

        Args:
            labels: of all samples, shape (samples,); zeros where they are not needed.
            shares: of the workers, summing to 1.
            seed: of all that is drawn at random.
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
