"""A user's own DataLoader, dealt out to workers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple, Protocol

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from orchestra.data.alike import AlikeStreams, digest
from orchestra.data.order import GlobalOrder
from orchestra.data.plan import Plan
from orchestra.errors import InputError
from orchestra.schedules.work_queue import WorkItem, WorkQueue
from orchestra.worker.batches import batch_samples


class Part(NamedTuple):
    """One worker's part of a global batch."""

    batch: Any
    samples: int  # behind `batch`; 0: a repeated batch, which must not count
    total: int | None  # of all workers in this step; None: each worker knows only its own


Loader = DataLoader[Any] | Iterable[Any]
"""A loader, or anything else that gives batches."""

Alike = Callable[[int], bool]
"""Collective over the workers: whether a number is the same on all of them."""


class ShardedLoader(Protocol):
    """The parts of one worker, epoch by epoch."""

    def __iter__(self) -> Iterator[Part]: ...

    def __len__(self) -> int: ...


def shard_loader(
    loader: Loader, workers: int, index: int, seed: int, alike: Alike | None = None
) -> ShardedLoader:
    """Worker `index`'s part of each epoch of `loader`, whose batch size is that of one worker.

    - One worker: `loader` itself, the random numbers that it draws included.
    - A map-style dataset, shuffled or in sequence, in batches: each epoch is one permutation,
      equal on all workers. Every worker gets equally many batches. In the last global batch,
      which may be smaller, a worker without samples repeats those of worker 0, and they count 0.
    - Any other loader (a sampler of the user's, an `IterableDataset`, a list of batches, an endless
      iterator): every `workers`-th batch. It has to give the same batches on every worker; while it
      is asked for them, the global generators draw the same numbers on all, and `alike` compares
      the first turn of an epoch. Where batches run out in mid-turn, a worker without one repeats
      that of worker 0, and it counts 0.

    Args:
        loader: its workers, collate function, pinning and other settings are kept.
        workers: how many ranks have data.
        index: which of them this one is, from 0.
        seed: of the permutations; equal on all workers.

    Raises:
        InputError: `loader` is distributed already, or gives no batches.
    """
    if not isinstance(loader, DataLoader):
        _check_gives_batches(loader)
        return _Whole(loader) if workers == 1 else _EveryNth(loader, workers, index, seed, alike)
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
        raise InputError(
            "the loader has a DistributedSampler, so its samples would be dealt out twice; "
            "remove the sampler and say shuffle=True"
        )
    if workers == 1:
        return _Whole(loader)
    if _is_standard(loader):
        return _Dealt(loader, workers, index, seed)
    return _EveryNth(loader, workers, index, seed, alike)


def _check_gives_batches(loader: object) -> None:
    if isinstance(loader, Dataset):
        raise InputError(
            f"batches: {type(loader).__name__} is a data set, which gives samples: wrap it in a "
            "DataLoader (with batch_size=None, if it gives batches)"
        )
    if not isinstance(loader, Iterable):
        remedy = "a DataLoader, or an iterable of batches"
        if callable(loader):
            remedy = "an iterable of batches, such as iter(get_batch, None) for a function"
        raise InputError(f"batches: expected {remedy}, got {type(loader).__name__}")


def _is_standard(loader: Loader) -> bool:
    """Whether an epoch of `loader` is each sample once, in order or shuffled, in batches."""
    if not isinstance(loader, DataLoader):
        return False
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        return False
    sampler = loader.sampler
    if type(sampler) is RandomSampler:
        return not sampler.replacement and len(sampler) == len(sampler.data_source)
    return type(sampler) is SequentialSampler


class _Whole:
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Part]:
        for batch in self._loader:
            samples = batch_samples(batch)
            yield Part(batch, samples, samples)

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]


class _Dealt:
    def __init__(self, loader: DataLoader[Any], workers: int, index: int, seed: int) -> None:
        self._parts = _Parts(loader, workers, index, seed)
        self._loader = _with_batches(loader, self._parts)

    @property
    def epoch(self) -> int:
        """The number of the next epoch, from which its permutation follows; set it to resume."""
        return self._parts.epoch

    @epoch.setter
    def epoch(self, number: int) -> None:
        self._parts.epoch = number

    def __iter__(self) -> Iterator[Part]:
        plan, index = self._parts.plan, self._parts.index
        for step, batch in enumerate(self._loader):
            counts = plan.counts(step)
            yield Part(batch, counts[index], sum(counts))

    def __len__(self) -> int:
        return self._parts.plan.steps


class _Parts:
    """A batch sampler: the indices of one worker's part of each step of an epoch."""

    def __init__(self, loader: DataLoader[Any], workers: int, index: int, seed: int) -> None:
        samples = len(loader.sampler)  # type: ignore[arg-type]
        batch_size = loader.batch_size
        assert batch_size is not None
        global_batch = batch_size * workers
        stop = samples - samples % global_batch if loader.drop_last else samples
        self.plan = Plan(0, stop, global_batch, (1.0,) * workers)
        self.index = index
        self.epoch = 0
        shuffled = isinstance(loader.sampler, RandomSampler)
        self._order = GlobalOrder(samples, seed) if shuffled else None

    def __iter__(self) -> Iterator[list[int]]:
        first = self.epoch * self._order.samples if self._order else 0
        self.epoch += 1
        for step in range(self.plan.steps):
            start, stop = self.plan.part(step, self.index)
            if start == stop:
                start, stop = self.plan.part(step, 0)
            if self._order:
                yield self._order.indices(first + start, first + stop).tolist()
            else:
                yield list(range(start, stop))

    def __len__(self) -> int:
        return self.plan.steps


class QueuedLoader:
    """A worker's batches out of a queue: one permutation of the dataset an epoch, equal on all.

    Positions in the queue count the samples that are trained on in all epochs. A batch is loaded
    when its item is there, in this process.
    """

    def __init__(self, loader: DataLoader[Any], seed: int) -> None:
        assert loader.batch_size is not None
        self.batch_size = loader.batch_size
        self._all = len(loader.sampler)  # type: ignore[arg-type]
        dropped = self._all % self.batch_size if loader.drop_last else 0
        self.samples = self._all - dropped  # of an epoch
        shuffled = isinstance(loader.sampler, RandomSampler)
        self._order = GlobalOrder(self._all, seed) if shuffled else None
        self._items: deque[WorkItem] = deque()
        self._batches = iter(_with_batches(loader, self))

    @staticmethod
    def fits(loader: Loader) -> bool:
        """Whether each sample of `loader` has a place in an epoch, and no batch is loaded early."""
        if not isinstance(loader, DataLoader) or not _is_standard(loader):
            return False
        return loader.num_workers == 0 and len(loader) > 0

    def queue(self, start: int, shares: tuple[float, ...]) -> WorkQueue | None:
        """The samples from `start` on, with a pause at the end of each epoch; None for a worker
        alone, which needs none."""
        sizes = tuple((rank, self.batch_size) for rank, share in enumerate(shares) if share)
        return WorkQueue(start, None, sizes, self.samples) if len(sizes) > 1 else None

    def load(self, item: WorkItem) -> Part:
        """The batch of `item`."""
        self._items.append(item)
        return Part(next(self._batches), item.samples, item.samples)

    def __iter__(self) -> Iterator[list[int]]:
        """The indices of the items, as they come."""
        while self._items:
            item = self._items.popleft()
            epoch, first = divmod(item.start, self.samples)
            if self._order is not None:
                first += epoch * self._all
                yield self._order.indices(first, first + item.samples).tolist()
            else:
                yield list(range(first, first + item.samples))


class _EveryNth:
    def __init__(
        self, loader: Loader, workers: int, index: int, seed: int, alike: Alike | None
    ) -> None:
        self._batches: _Strided | DataLoader[Any]
        if (
            isinstance(loader, DataLoader)
            and loader.batch_sampler is not None
            and not isinstance(loader.dataset, IterableDataset)
        ):  # the sampler alone is read whole, and the samples of others are never loaded
            self._strided = _Strided(loader.batch_sampler, workers, index, seed, alike)
            self._batches = _with_batches(loader, self._strided)
        else:
            self._batches = self._strided = _Strided(loader, workers, index, seed, alike)

    def __iter__(self) -> Iterator[Part]:
        for batch in self._batches:
            repeated = self._strided.repeated.popleft()
            yield Part(batch, 0 if repeated else batch_samples(batch), None)

    def __len__(self) -> int:
        return len(self._batches)


class _Strided:
    """Item `index` of each `step` items; the first of them where there are not so many left.

    `repeated` tells of each item that was given whether it is such a first one.
    """

    def __init__(self, items: Any, step: int, index: int, seed: int, alike: Alike | None) -> None:
        self.repeated: deque[bool] = deque()
        self._items = items
        self._step = step
        self._index = index
        self._seed = seed
        self._alike = alike
        self._epoch = 0

    def __iter__(self) -> Iterator[Any]:
        self.repeated.clear()
        streams = AlikeStreams(f"{self._seed}-{self._epoch}")
        self._epoch += 1
        with streams.drawing():
            items = iter(self._items)
            turn = list(islice(items, self._step))
        if self._alike is not None and not self._alike(digest(turn)):
            raise InputError(
                "the loader gives other batches on other workers, so that some samples would be "
                "read twice and others never: seed its own generators alike on all "
                "(torch.Generator().manual_seed(0)), and do not deal samples out by rank"
            )
        wanted = {0, self._index}
        turn = [item for n, item in enumerate(turn) if n in wanted]
        while turn:
            self.repeated.append(len(turn) < len(wanted))
            yield turn[-1]
            with streams.drawing():
                found = enumerate(islice(items, self._step))
                turn = [item for n, item in found if n in wanted]

    def __len__(self) -> int:
        return -(-len(self._items) // self._step)


def _with_batches(
    loader: DataLoader[Any], batches: _Parts | _Strided | QueuedLoader
) -> DataLoader[Any]:
    """A loader like `loader`, over other lists of indices."""
    kept = (
        "dataset",
        "num_workers",
        "collate_fn",
        "pin_memory",
        "timeout",
        "worker_init_fn",
        "multiprocessing_context",
        "generator",
        "prefetch_factor",
        "persistent_workers",
        "pin_memory_device",
        "in_order",
    )
    return DataLoader(batch_sampler=batches, **{name: getattr(loader, name) for name in kept})
