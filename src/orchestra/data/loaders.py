"""The loaders of loops of the user's own, dealt out to workers."""

from __future__ import annotations

import operator
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import count, islice, zip_longest
from typing import Any, NamedTuple, TypeGuard

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler
from torch.utils.data.sampler import BatchSampler, RandomSampler, SequentialSampler

from orchestra.coordinator.batches import BatchQueue
from orchestra.coordinator.events import Take
from orchestra.coordinator.rest import Reason
from orchestra.data import DataPlan
from orchestra.data.feed import GlobalOrder
from orchestra.errors import InputError
from orchestra.optimizers.state import AlikeStreams
from orchestra.worker.batches import counted_samples, digest, leaves_of


class WorkerBatch(NamedTuple):
    """One worker's part of a global batch."""

    batch: Any
    samples: int | None  # behind `batch`; 0: a repeated one, which must not count; None: unknown
    total: int | None  # of all workers in this step; None: each worker knows only its own
    turn_digest: int = 0  # of the items dealt out to all workers in this step


Loader = DataLoader[Any] | Iterable[Any]
"""A loader, or any other iterable of batches."""

Alike = Callable[[int], bool]
"""Return whether a number is the same on all workers. Collective over the workers."""

UNLIKE = (
    "the loader gives other batches on other workers, so that some samples would be read twice and "
    "others never: give all the same data, seed what splits and shuffles them alike "
    "(torch.Generator().manual_seed(0)), and do not deal samples out by rank"
)
READS = 16
"""How often samples that differ are read, to tell whether they are random by themselves."""


def _read(loader: Loader, indices: list[Any], times: int) -> list[Any]:
    """Return the samples at `indices`, read several times as `loader` does, with alike numbers."""
    if not indices or not _has_sampler(loader):
        return []
    # In a worker process if there are some: data sets open files where they are read first, and
    # worker processes that begin later must not share them with this one.
    options = _options(loader) | {
        "num_workers": min(loader.num_workers, 1), "persistent_workers": False,
        "pin_memory": False, "generator": torch.Generator().manual_seed(0), "collate_fn": list,
    }  # fmt: skip
    with AlikeStreams("samples").drawing():
        return list(DataLoader(batch_sampler=[indices] * times, **options))


class ShardedLoader(ABC):
    """The parts of one worker, epoch by epoch.

    `epoch` is the number of the next epoch, from which its order follows; set it to resume.
    `knows_totals`: each part comes with the samples of all workers.
    """

    epoch = 0
    knows_totals = True
    _compared = False  # some samples, with those of the other workers

    def __init__(self, loader: Loader, alike: Alike | None = None) -> None:
        self._given, self._alike = loader, alike

    @abstractmethod
    def begin(self, first: int) -> Iterator[WorkerBatch]:
        """Return the next epoch, from its batch number `first` on.

        The ones before are not loaded where a sampler chooses them; else they are drawn and
        dropped. What the samplers draw from the global generators is drawn in here.
        """

    def __iter__(self) -> Iterator[WorkerBatch]:
        return self.begin(0)

    @abstractmethod
    def __len__(self) -> int: ...

    def compare(self) -> None:  # noqa: B027
        """Collective over the workers, before an epoch: refuse data that differ, in contents or
        length. Does nothing where `begin` does that.
        """

    def _refuse_unlike(self, facts: Any, indices: list[Any]) -> None:
        """Collective over the workers: refuse `facts`, or samples at `indices`, that differ.

        Samples may be random by themselves: what changes between two readings does not count.
        """
        alike, loader = self._alike, self._given
        if alike is None:
            return
        if self._compared and isinstance(loader, DataLoader) and loader.num_workers:
            indices = []  # another reading would start a worker process in each epoch
        self._compared = True
        if alike(digest([facts, _read(loader, indices, 1)])):
            return
        if not alike(digest(facts)):
            raise InputError(UNLIKE)
        readings = [list(map(digest, leaves_of(each))) for each in _read(loader, indices, READS)]
        steady = [each[0] if len(set(each)) == 1 else None for each in zip_longest(*readings)]
        random = [n for n, each in enumerate(steady) if each is None]
        # What changes seldom may be steady on one worker by chance.
        if alike(digest(random)) and not alike(digest(steady)):
            raise InputError(UNLIKE)


def shard_loader(
    loader: Loader, workers: int, index: int, seed: int, alike: Alike | None = None
) -> ShardedLoader:
    """Return worker `index`'s part of each epoch of `loader`, whose batch size is a worker's.

    - One worker: `loader` itself, the random numbers that it draws included.
    - A map-style dataset, shuffled or in sequence, in batches: each epoch is one permutation,
      equal on all workers, of the samples that there are then; `compare` reads a few of them.
      Every worker gets equally many batches. In the last global batch, which may be smaller, a
      worker without samples repeats those of worker 0, and they count 0.
    - Any other loader (a sampler of the user's, an `IterableDataset`, a list of batches, an endless
      iterator): every `workers`-th batch. It has to give the same batches on every worker; while it
      is asked for them, the global generators draw the same numbers on all, and `alike` compares
      the first turn of an epoch. Where batches run out in mid-turn, a worker without one repeats
      that of worker 0, and it counts 0.

    The worker processes, collate function, pinning and other settings of `loader` are kept. `seed`,
    of the permutations, is equal on all workers. InputError if `loader` is distributed already, or
    gives no batches.
    """
    _check_gives_batches(loader)
    if workers == 1:
        return _Whole(loader)
    if is_standard(loader):
        return DealtLoader(loader, workers, index, seed, alike)
    return _EveryNth(loader, workers, index, seed, alike)


def _check_gives_batches(loader: object) -> None:
    if isinstance(loader, DataLoader):
        sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
        if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
            raise InputError(
                "the loader has a DistributedSampler, so its samples would be dealt out twice; "
                "remove the sampler and say shuffle=True"
            )
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


def is_standard(loader: Loader) -> TypeGuard[DataLoader[Any]]:
    """Return whether an epoch of `loader` is each sample once, in order or shuffled, in batches."""
    if not isinstance(loader, DataLoader) or loader.batch_size is None:
        return False
    if type(loader.batch_sampler) is not BatchSampler:
        return False
    sampler = loader.sampler
    if type(sampler) is RandomSampler:
        return not sampler.replacement and len(sampler) == len(sampler.data_source)
    return type(sampler) is SequentialSampler


def _has_sampler(loader: Loader) -> TypeGuard[DataLoader[Any]]:
    """Return whether a sampler chooses the samples of each batch before they are loaded."""
    return (
        isinstance(loader, DataLoader)
        and loader.batch_sampler is not None
        and not isinstance(loader.dataset, IterableDataset)
    )


def generators_of(loader: Loader) -> list[torch.Generator]:
    """Return the generators of a loader and its samplers, without the global ones."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    inner = getattr(batch_sampler, "sampler", None)
    holders = (loader, getattr(loader, "sampler", None), batch_sampler, inner)
    found = {id(g): g for g in (getattr(holder, "generator", None) for holder in holders)}
    return [generator for generator in found.values() if isinstance(generator, torch.Generator)]


class _Whole(ShardedLoader):
    def begin(self, first: int) -> Iterator[WorkerBatch]:
        self.epoch += 1
        if first and _has_sampler(self._given):
            later = _Later(self._given.batch_sampler, first)
            # The loader begins first, and then its sampler draws, as in an epoch that is not
            # resumed: both draw from the global generator.
            batches: Iterator[Any] = iter(_with_batches(self._given, later.__iter__))
            later.skip()
        else:
            batches = iter(self._given)
            for _ in range(first):
                next(batches)
        return map(self._part, batches)

    def _part(self, batch: Any) -> WorkerBatch:
        samples = counted_samples(batch) or 1  # of one worker, whose weight is always 1
        return WorkerBatch(batch, samples, samples)

    def __len__(self) -> int:
        return len(self._given)  # type: ignore[arg-type]


class _Later:
    """The items of `items` from number `first` on, once; `skip` draws those before."""

    def __init__(self, items: Any, first: int) -> None:
        self._items = iter(items)
        self._first = first

    def skip(self) -> None:
        for _ in range(self._first):
            next(self._items)
        self._first = 0

    def __iter__(self) -> Iterator[Any]:
        self.skip()
        yield from self._items


def _order_of(loader: DataLoader[Any], seed: int) -> GlobalOrder:
    """Return the order of a standard loader: in sequence, or in permutations of its own."""
    samples = len(loader.sampler)  # type: ignore[arg-type]
    return GlobalOrder(samples, seed, shuffled=isinstance(loader.sampler, RandomSampler))


class DealtLoader(ShardedLoader):
    """A part of each global batch of a permutation.

    Where the workers change in mid-epoch, `begin_rest` deals out what is left of it.
    """

    def __init__(
        self, loader: DataLoader[Any], workers: int, index: int, seed: int, alike: Alike | None
    ) -> None:
        super().__init__(loader, alike)
        self._workers, self._index, self._seed = workers, index, seed
        self._loader = _with_batches(loader, self._indices)
        self._deal_out(loader)

    def _deal_out(self, loader: DataLoader[Any], start: int = 0) -> None:
        """Deal out the samples that there are now, from number `start` of each epoch on."""
        assert loader.batch_size is not None
        self._order = _order_of(loader, self._seed)
        samples, global_batch = self._order.samples, loader.batch_size * self._workers
        stop = samples
        if loader.drop_last:
            stop -= (samples - start) % global_batch
        self._plan = DataPlan(start, stop, global_batch, (1.0,) * self._workers)

    def compare(self) -> None:
        assert is_standard(self._given)
        self._deal_out(self._given)
        samples = self._order.samples
        start = self.epoch * samples
        both_ends = self._order.indices(start, start + samples)[[0, -1]].tolist() if samples else []
        self._refuse_unlike(samples, both_ends)

    def begin(self, first: int) -> Iterator[WorkerBatch]:
        self._begun = self.epoch, first
        self.epoch += 1
        return map(self._part, count(first), iter(self._loader))

    def begin_rest(self, start: int) -> Iterator[WorkerBatch]:
        """Return what is left of the next epoch behind its first `start` samples."""
        assert is_standard(self._given)
        self._deal_out(self._given, start)
        return self.begin(0)

    def position(self, batches: int) -> int:
        """Return the samples of the epoch before its batch of that number."""
        return self._plan.position(batches)

    def _indices(self) -> Iterator[list[int]]:
        epoch, first = self._begun
        for step in range(first, self._plan.steps):
            start, stop = self._plan.part(step, self._index)
            if start == stop:
                # A worker without samples takes part in the step; what it reads counts 0.
                start, stop = self._plan.part(step, 0)
            before = epoch * self._order.samples
            yield self._order.indices(before + start, before + stop).tolist()

    def _part(self, step: int, batch: Any) -> WorkerBatch:
        counts = self._plan.counts(step)
        listed = counts[self._index] or counts[0]
        # Of what other workers drop nothing is known here.
        fits = counted_samples(batch, listed) == listed
        return WorkerBatch(batch, counts[self._index] if fits else None, sum(counts))

    def __len__(self) -> int:
        return self._plan.steps


class _EveryNth(ShardedLoader):
    """Item `index` of each `workers` items; the first of them where too few are left.

    The turns before the first batch that is wanted are drawn and dropped.
    """

    knows_totals = False

    def __init__(
        self, loader: Loader, workers: int, index: int, seed: int, alike: Alike | None
    ) -> None:
        super().__init__(loader, alike)
        self._workers, self._index, self._seed = workers, index, seed
        # Of each item that was given: its samples, if a sampler or a stream has counted them, the
        # digest of its turn, and whether it stands in for another.
        self._notes: deque[tuple[int | None, int, bool]] = deque()
        self._items: Any = loader
        self._loader: DataLoader[Any] | None = None
        # The sampler alone is read whole: samples of other workers are never loaded.
        if _has_sampler(loader):
            self._items = loader.batch_sampler
            self._loader = _with_batches(loader, self._own_items)
        elif type(loader) is DataLoader and loader.batch_size is not None:
            options = _options(loader) | {"collate_fn": partial(_collate, loader.collate_fn)}
            self._items = DataLoader(
                batch_size=loader.batch_size, drop_last=loader.drop_last, **options
            )

    def begin(self, first: int) -> Iterator[WorkerBatch]:
        self._begun = self.epoch, first
        self.epoch += 1
        return map(self._part, self._own_items() if self._loader is None else iter(self._loader))

    def _own_items(self) -> Iterator[Any]:
        self._notes.clear()
        epoch, dropped = self._begun
        streams, chooses = AlikeStreams(f"{self._seed}-{epoch}"), self._loader is not None
        with streams.drawing():
            items = map(list, self._items) if chooses else iter(self._items)
            turn: list[Any] = list(islice(items, self._workers))
        length = operator.length_hint(self._items, -1)  # of a stream: none
        self._refuse_unlike([length, turn], turn[0][:2] if chooses and turn else [])
        # The first item of a turn stands in for one that is not there.
        wanted = {0, self._index}
        for number in count():
            if not turn:
                return
            # Lists of indices are short; to look through all that is loaded would take long.
            turn_digest = digest(turn) if chooses else len(turn)
            turn = [item for n, item in enumerate(turn) if n in wanted]
            if number >= dropped:
                item, samples = turn[-1], len(turn[-1]) if chooses else None
                if isinstance(item, _Collated):
                    samples, item = item
                self._notes.append((samples, turn_digest, len(turn) < len(wanted)))
                yield item
            with streams.drawing():
                turn = list(islice(items, self._workers))

    def _part(self, batch: Any) -> WorkerBatch:
        listed, turn_digest, repeated = self._notes.popleft()
        samples = 0 if repeated else counted_samples(batch, listed)
        return WorkerBatch(batch, samples, None, turn_digest)

    def __len__(self) -> int:
        return -(-len(self._items) // self._workers)


class QueuedLoader:
    """A worker's batches out of a queue: one permutation of the dataset an epoch, equal on all.

    Positions in the queue count the samples that are trained on in all epochs. A batch is loaded
    when its item is there, in this process.
    """

    def __init__(self, loader: DataLoader[Any], seed: int) -> None:
        assert loader.batch_size is not None
        self._given, self._batch_size = loader, loader.batch_size
        self._order = _order_of(loader, seed)
        dropped = self._order.samples % self._batch_size if loader.drop_last else 0
        self._samples = self._order.samples - dropped  # of an epoch
        self._items: deque[Take] = deque()
        self._batches = iter(_with_batches(loader, self._indices))

    @staticmethod
    def of(loader: Loader, seed: int) -> QueuedLoader | None:
        """Return the queue of `loader`; None if samples have no places, or are loaded early."""
        if not is_standard(loader):
            return None
        # Worker processes load batches before the queue has given them out.
        return None if loader.num_workers or not len(loader) else QueuedLoader(loader, seed)

    def queue(self, start: int, shares: tuple[float, ...]) -> BatchQueue | None:
        """Return the samples from `start` on, with a rest at the end of each epoch.

        None for a worker alone, which needs no queue.
        """
        sizes = tuple((rank, self._batch_size) for rank, share in enumerate(shares) if share)
        queue = BatchQueue(start, None, sizes, self._samples, Reason.EPOCH)
        return queue if len(sizes) > 1 else None

    def load(self, item: Take) -> WorkerBatch:
        """Return the batch of `item`."""
        self._items.append(item)
        return WorkerBatch(next(self._batches), item.samples, item.samples)

    def check_length(self) -> None:
        """Raise InputError if the data set has another length than the queue was made for."""
        now = len(self._given.sampler)  # type: ignore[arg-type]
        if now != self._order.samples:
            raise InputError(
                f"the data set had {self._order.samples} samples when distribute was called, and "
                f"has {now} now, which a queue of batches cannot follow: set work='equal'"
            )

    def _indices(self) -> Iterator[list[int]]:
        while self._items:
            item = self._items.popleft()
            epoch, first = divmod(item.start, self._samples)
            first += epoch * self._order.samples
            yield self._order.indices(first, first + item.samples).tolist()


class _Sampler:
    """Lists of indices, anew in each epoch, as a DataLoader takes them.

    `lists` is a method of what owns the DataLoader, and is held weakly: in a cycle persistent
    workers would end when garbage is collected, whichever thread does it, and take it five seconds.
    """

    def __init__(self, lists: Callable[[], Iterator[list[int]]]) -> None:
        self._lists = weakref.WeakMethod(lists)

    def __iter__(self) -> Iterator[list[int]]:
        lists = self._lists()
        assert lists is not None
        return lists()


def _options(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the settings of `loader`, except which samples it gives."""
    kept = (
        "dataset num_workers collate_fn pin_memory timeout worker_init_fn multiprocessing_context "
        "generator prefetch_factor persistent_workers pin_memory_device in_order"
    )
    return {name: getattr(loader, name) for name in kept.split()}


def _with_batches(
    loader: DataLoader[Any], lists: Callable[[], Iterator[list[int]]]
) -> DataLoader[Any]:
    """Return a loader like `loader`, over other lists of indices."""
    # A DataLoader cannot be given another sampler, nor be copied with its workers.
    return DataLoader(batch_sampler=_Sampler(lists), **_options(loader))


class _Collated(NamedTuple):
    """A batch of a stream, and the number of samples that were collated."""

    samples: int
    batch: Any


def _collate(collate: Callable[[list[Any]], Any], samples: list[Any]) -> _Collated:
    return _Collated(len(samples), collate(samples))
