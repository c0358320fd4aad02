"""The samples that a rank reads, by their place in the global stream, and batches by their step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol, TypeVar

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset, default_collate

from orchestra.data import DataPlan, Sharding
from orchestra.errors import InputError

T = TypeVar("T")
Collate = Callable[[Any], Any]


class Samples(Protocol):
    """One endless stream of samples, equal on every rank."""

    def read(self, start: int, stop: int) -> Any:
        """Return the batch of the samples at positions `start` to `stop`; at least one."""


class GlobalOrder:
    """Epoch after epoch, each a permutation of its own of all samples, or all in sequence.

    The order of the `samples` of a dataset follows from the seed alone. It draws nothing from the
    global generators, and any place of the stream can be read at any time.
    """

    def __init__(self, samples: int, seed: int, *, shuffled: bool = True) -> None:
        assert samples > 0 or not shuffled
        assert seed >= 0
        self.samples = samples
        self.seed = seed
        self._epoch = -1 if shuffled else None
        self._permutation = torch.arange(0 if shuffled else samples)

    def indices(self, start: int, stop: int) -> Tensor:
        """Return the samples at positions `start` to `stop`, which may straddle epochs."""
        parts = [torch.empty(0, dtype=torch.long)]
        while start < stop:
            epoch, offset = divmod(start, self.samples)
            parts.append(self._of_epoch(epoch)[offset : offset + stop - start])
            start += len(parts[-1])
        return torch.cat(parts)

    def _of_epoch(self, epoch: int) -> Tensor:
        if self._epoch not in (None, epoch):
            # A SeedSequence mixes the two numbers, so that seeds 0, 1, 2 ... share no epochs.
            mixed = numpy.random.SeedSequence((self.seed, epoch)).generate_state(1, numpy.uint64)
            generator = torch.Generator().manual_seed(int(mixed[0]))
            self._permutation = torch.randperm(self.samples, generator=generator)
            self._epoch = epoch
        return self._permutation


class MapSamples:
    """A map-style dataset in its global order. Any place can be read at any time.

    With `members` it consists of these samples only, in an order of their own.
    """

    def __init__(self, dataset: Dataset[Any], seed: int, collate: Collate) -> None:
        self._dataset: Any = dataset
        self._collate = collate
        self._order = GlobalOrder(epoch_samples(dataset), seed)

    def read(self, start: int, stop: int) -> Any:
        """Return the batch; draw no random numbers but those of the dataset itself."""
        indices = self._order.indices(start, stop).tolist()
        if getattr(self._dataset, "__getitems__", None):
            return self._collate(self._dataset.__getitems__(indices))
        return self._collate([self._dataset[index] for index in indices])


class IterableSamples:
    """An `IterableDataset`, iterated again and again; to go back it begins anew.

    Every rank iterates a copy of its own and skips the samples of other ranks, so the dataset has
    to give the same samples in the same order everywhere. A dataset in random order needs a
    generator of its own; its `set_epoch(epoch)` is called before each epoch, if it has that method.
    Skipping leaves torch's global generator as it was; so a resumed run, which skips to its place,
    goes on exactly.
    """

    def __init__(self, dataset: IterableDataset[Any], collate: Collate) -> None:
        self._dataset = dataset
        self._collate = collate
        self._stream = _epochs(dataset)
        self._position = 0

    def read(self, start: int, stop: int) -> Any:
        # The batch of a lost worker comes back to another one, which has read beyond it.
        if start < self._position:
            self._stream, self._position = _epochs(self._dataset), 0
        if start > self._position:
            # Augmentation inside the dataset draws from the global generator, also for samples that
            # are skipped. Without devices: each GPU's state would be copied, too.
            with torch.random.fork_rng(devices=[]):
                # `islice` from n on draws what is before, and `next` the last of these.
                next(islice(self._stream, start - self._position - 1, None))
        self._position = stop
        return self._collate(list(islice(self._stream, stop - start)))


def _epochs(dataset: IterableDataset[T]) -> Iterator[T]:
    epoch = 0
    while True:
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(epoch)
        empty = True
        for sample in dataset:
            empty = False
            yield sample
        if empty:
            raise InputError(
                f"{type(dataset).__name__} gave no samples in epoch {epoch}; "
                "its __iter__ has to begin anew on each call"
            )
        epoch += 1


def open_samples(dataset: Dataset[Any], seed: int, collate: Collate | None) -> Samples:
    """Return the stream of `dataset`; `seed` shuffles a map-style one. Default: torch's collate."""
    collate = collate or default_collate
    if isinstance(dataset, IterableDataset):
        return IterableSamples(dataset, collate)
    return MapSamples(dataset, seed, collate)


def open_shard(
    dataset: Dataset[Any],
    seed: int,
    collate: Collate | None,
    sharding: Sharding,
    shares: Sequence[float],
    worker: int,
) -> Samples:
    """Return the stream of samples that `sharding` gives a worker; `shares` are those of all.
    InputError if the positions or the classes of the samples cannot be known."""
    if isinstance(dataset, IterableDataset):
        raise InputError(
            f"sharding: the samples of a {type(dataset).__name__} have no places to be shared out "
            "by; give a map-style dataset, or leave sharding out"
        )
    whole = sum(shares)
    samples = epoch_samples(dataset)
    labels = labels_of(dataset) if sharding.needs_labels else numpy.zeros(samples, numpy.int64)
    parts = sharding.split(labels, [share / whole for share in shares], seed)
    if not len(parts[worker]):
        raise InputError(f"sharding: {samples} samples are too few for {len(shares)} workers")
    # In an order of its own.
    return MapSamples(Subset(dataset, parts[worker].tolist()), seed, collate or default_collate)


def labels_of(dataset: Any) -> NDArray[numpy.int64]:
    """Return the class of every sample: the dataset's `targets` or `labels`, else read one by one;
    InputError if a sample's last part is no whole number."""
    known = getattr(dataset, "targets", getattr(dataset, "labels", None))
    if known is None and isinstance(tensors := getattr(dataset, "tensors", None), Sequence):
        known = tensors[-1]
    if known is None:
        known = [dataset[index][-1] for index in range(len(dataset))]
    labels = numpy.asarray(known)
    if labels.ndim != 1 or not numpy.issubdtype(labels.dtype, numpy.integer):
        raise InputError(
            f"sharding: a {type(dataset).__name__} has no classes to shard by (the last part of a "
            "sample is no whole number); use IID or Contiguous"
        )
    return labels.astype(numpy.int64)


def epoch_samples(dataset: Dataset[Any]) -> int:
    """Return the samples of an epoch, for a budget in epochs.

    Raises:
        InputError: the dataset does not know its length.
    """
    try:
        return len(dataset)  # type: ignore[arg-type]
    except TypeError:
        raise InputError(
            f"{type(dataset).__name__} has no __len__, so its epochs cannot be counted; "
            "give the budget in steps"
        ) from None


@dataclass(frozen=True)
class Feed:
    """The batches of one rank. At a switch, a new feed takes over.

    `own` tells that `samples` are this rank's shard, and not those of all.
    """

    samples: Samples
    plan: DataPlan
    rank: int
    own: bool = False

    def next(self, step: int) -> tuple[Any, int]:
        """Return the batch of `step` and its number of samples; (None, 0) if it has no samples.

        The first step may have any number (as in a resumed run); further steps must rise.
        """
        part = self.plan.own_part if self.own else self.plan.part
        start, stop = part(step, self.rank)
        return (self.samples.read(start, stop) if stop > start else None), stop - start
