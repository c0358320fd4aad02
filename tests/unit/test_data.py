"""Who reads which samples: the global order, the plan, the feed, and a user's own loader."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
)

from orchestra.data import DataPlan, apportion
from orchestra.data.feed import Feed, GlobalOrder, epoch_samples, open_samples
from orchestra.data.loaders import shard_loader
from orchestra.errors import InputError

SHARE = st.sampled_from([0.0, 0.3, 1.0, 1.0, 1.0, 2.5])
SHARES = st.lists(SHARE, min_size=1, max_size=7).filter(any)
PLANS = st.builds(
    lambda start, samples, batch, shares: DataPlan(start, start + samples, batch, tuple(shares)),
    st.integers(0, 50),
    st.integers(0, 400),
    st.integers(1, 9),
    SHARES,
)


class Numbers(Dataset[Tensor]):
    """Sample i is the number i, plus noise from the global generator where it is asked for."""

    def __init__(self, samples: int, noise: bool = False) -> None:
        self.samples = samples
        self.noise = noise
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Tensor:
        self.loaded.append(index)
        value = torch.tensor(float(index), dtype=torch.float64)
        return value + torch.rand(()) if self.noise else value


class Stream(IterableDataset[Tensor]):
    """The numbers of an epoch, 1000 x epoch on; one draw from the global generator for each."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Tensor]:
        for number in range(self.samples):
            torch.rand(())
            yield torch.tensor(1000 * self.epoch + number)


# The global order


@given(st.integers(1, 20), st.integers(0, 3), st.integers(0, 70), st.integers(0, 70))
def test_any_range_of_the_order_is_a_range_of_its_permutations(
    samples: int, seed: int, start: int, count: int
) -> None:
    order = GlobalOrder(samples, seed)
    whole = torch.cat([order.indices(e * samples, (e + 1) * samples) for e in range(150)])
    assert order.indices(start, start + count).tolist() == whole[start : start + count].tolist()
    for epoch in torch.split(whole[: 5 * samples], samples):
        assert sorted(epoch.tolist()) == list(range(samples))


def test_the_order_depends_on_seed_and_epoch_and_on_nothing_else() -> None:
    before = torch.get_rng_state()
    epochs = [
        tuple(GlobalOrder(100, seed).indices(100 * epoch, 100 * epoch + 100).tolist())
        for seed in range(4)
        for epoch in range(4)
    ]
    assert len(set(epochs)) == 16
    assert torch.equal(torch.get_rng_state(), before)
    assert GlobalOrder(100, 2).indices(100, 200).tolist() == list(epochs[9])


# The plan


@given(st.integers(0, 1000), SHARES)
def test_apportioned_counts_are_the_exact_proportion_rounded(
    total: int, shares: list[float]
) -> None:
    counts = apportion(total, tuple(shares))
    assert sum(counts) == total
    for count, share in zip(counts, shares, strict=True):
        assert abs(count - total * share / sum(shares)) < 1
        assert share > 0 or count == 0
    equal = [count for count, share in zip(counts, shares, strict=True) if share == 1.0]
    assert equal == sorted(equal, reverse=True)


@given(PLANS)
def test_parts_cover_the_budget_once_and_in_order(plan: DataPlan) -> None:
    read = [
        position
        for step in range(plan.steps)
        for rank in range(len(plan.shares))
        for position in range(*plan.part(step, rank))
    ]
    assert read == list(range(plan.start, plan.stop))
    for step in range(plan.steps):
        parts = [plan.part(step, rank) for rank in range(len(plan.shares))]
        sizes = [stop - start for start, stop in parts]
        assert tuple(sizes) == plan.counts(step)
        assert sum(sizes) == plan.global_batch or step == plan.steps - 1


@given(st.integers(0, 300), st.integers(1, 9), st.lists(st.booleans(), min_size=1, max_size=6))
def test_equal_workers_read_the_same_whatever_the_other_ranks(
    samples: int, batch_size: int, working: list[bool]
) -> None:
    if not any(working):
        return
    ranks = [rank for rank, yes in enumerate(working) if yes]
    global_batch = batch_size * len(ranks)
    plan = DataPlan(0, samples, global_batch, tuple(float(yes) for yes in working))
    alone = DataPlan(0, samples, global_batch, (1.0,) * len(ranks))
    for step in range(plan.steps):
        parts = [plan.part(step, rank) for rank in ranks]
        assert parts == [alone.part(step, worker) for worker in range(len(ranks))]
        sizes = {stop - start for start, stop in parts}
        assert sizes == {batch_size} if step < plan.steps - 1 else max(sizes) - min(sizes) <= 1


def test_the_last_global_batch_is_spread_and_some_may_get_nothing() -> None:
    plan = DataPlan(0, 10, 8, (1.0, 1.0, 0.0, 1.0, 1.0))
    assert [plan.counts(step) for step in range(plan.steps)] == [(2, 2, 0, 2, 2), (1, 1, 0, 0, 0)]
    assert DataPlan(0, 20, 10, (1.0, 3.0)).counts(0) == (
        3,
        7,
    )  # of 2.5 and 7.5, the first is rounded up
    assert DataPlan(5, 5, 2, (1.0,)).steps == 0


@given(PLANS, st.integers(0, 8), SHARES)
def test_a_plan_goes_on_with_other_roles(plan: DataPlan, step: int, shares: list[float]) -> None:
    position = plan.position(min(step, plan.steps))
    rest = replace(plan, start=position, shares=tuple(shares))
    assert (rest.start, rest.stop) == (position, plan.stop)
    assert rest.shares == tuple(shares)
    before = sum(sum(plan.counts(number)) for number in range(min(step, plan.steps)))
    after = sum(sum(rest.counts(number)) for number in range(rest.steps))
    assert before + after == plan.stop - plan.start


# The feed


def feeds(dataset: Dataset[Any], plan: DataPlan) -> list[Feed]:
    return [Feed(open_samples(dataset, 3, None), plan, rank) for rank in range(len(plan.shares))]


def test_feeds_of_all_ranks_read_each_sample_once_an_epoch() -> None:
    dataset = Numbers(23)
    plan = DataPlan(0, 46, 8, (1.0, 0.0, 1.0))
    first, server, last = feeds(dataset, plan)
    assert server.next(0) == (None, 0)
    read: list[float] = []
    for step in range(plan.steps):
        for feed in (first, last):
            batch, samples = feed.next(step)
            assert samples == (0 if batch is None else len(batch))
            read += [] if batch is None else batch.tolist()
    assert read == GlobalOrder(23, 3).indices(0, 46).tolist()


def test_a_feed_of_a_map_style_dataset_starts_at_any_step_without_drawing() -> None:
    plan = DataPlan(0, 60, 10, (1.0, 1.0))
    through, jumping = feeds(Numbers(23), plan)[1], feeds(Numbers(23), plan)[1]
    batches = [through.next(step)[0] for step in range(plan.steps)]
    before = torch.get_rng_state()
    assert torch.equal(jumping.next(4)[0], batches[4])
    assert torch.equal(torch.get_rng_state(), before)


def test_a_feed_reads_whole_batches_where_the_dataset_can() -> None:
    class Batches(Numbers):
        def __getitems__(self, indices: list[int]) -> list[Tensor]:
            return [torch.tensor(-float(index)) for index in indices]

    (feed,) = feeds(Batches(7), DataPlan(0, 7, 7, (1.0,)))
    assert sorted((-feed.next(0)[0]).tolist()) == list(range(7))


def test_a_feed_collates_as_told() -> None:
    feed = Feed(open_samples(Numbers(4), 0, len), DataPlan(0, 3, 4, (1.0,)), 0)
    assert feed.next(0) == (3, 3)


def test_ranks_share_an_iterable_dataset_by_blocks_over_its_epochs() -> None:
    plan = DataPlan(0, 13, 4, (1.0, 1.0))
    ranks = feeds(Stream(5), plan)[:1] + feeds(Stream(5), plan)[1:]
    read = [
        [None if (batch := feed.next(step)[0]) is None else batch.tolist() for feed in ranks]
        for step in range(plan.steps)
    ]
    assert read == [
        [[0, 1], [2, 3]],
        [[4, 1000], [1001, 1002]],
        [[1003, 1004], [2000, 2001]],
        [[2002], None],
    ]


def test_skipping_leaves_the_global_generator_alone() -> None:
    plan = DataPlan(0, 40, 4, (1.0, 1.0))
    for feed, step in ((feeds(Stream(50), plan)[1], 0), (feeds(Stream(50), plan)[0], 6)):
        torch.manual_seed(1)
        feed.next(step)
        drawn = torch.rand(())
        torch.manual_seed(1)
        torch.rand(()), torch.rand(())  # for its own two samples
        assert torch.equal(drawn, torch.rand(()))


def test_an_iterable_dataset_goes_on_after_a_switch_of_roles() -> None:
    plan = DataPlan(0, 20, 4, (1.0, 1.0))
    feed = feeds(Stream(100), plan)[1]
    assert feed.next(0)[0].tolist() == [2, 3]
    then = Feed(feed.samples, replace(plan, start=plan.position(1), shares=(0.0, 1.0)), 1)
    assert then.next(0)[0].tolist() == [4, 5, 6, 7]


def test_an_iterable_dataset_is_begun_anew_for_an_earlier_batch() -> None:
    """Of a worker that was lost, taken from the queue."""
    samples = open_samples(Stream(10), 3, None)
    assert samples.read(12, 14).tolist() == [1002, 1003]
    assert samples.read(3, 5).tolist() == [3, 4]
    assert samples.read(20, 21).tolist() == [2000]


def test_an_iterable_dataset_that_ends_for_good_is_refused() -> None:
    class Once(IterableDataset[int]):
        def __init__(self) -> None:
            self.numbers = iter(range(3))

        def __iter__(self) -> Iterator[int]:
            return self.numbers

    (feed,) = feeds(Once(), DataPlan(0, 4, 2, (1.0,)))
    feed.next(0)
    with pytest.raises(InputError, match="Once gave no samples in epoch 1"):
        feed.next(1)


def test_epochs_of_unknown_length_are_refused_with_the_remedy() -> None:
    assert epoch_samples(Numbers(9)) == 9
    with pytest.raises(InputError, match=r"Stream has no __len__.*in steps"):
        epoch_samples(Stream(3))


# A user's own loader


@pytest.mark.parametrize("arguments", [{"shuffle": True}, {"drop_last": True}, {"batch_size": 1}])
def test_one_worker_gets_the_loader_itself_bit_for_bit(arguments: dict[str, Any]) -> None:
    def epochs(sharded: bool) -> tuple[list[list[float]], Tensor]:
        torch.manual_seed(5)
        loader = DataLoader(Numbers(11, noise=True), **{"batch_size": 4, **arguments})
        if not sharded:
            return [batch.tolist() for _ in range(2) for batch in loader], torch.rand(1)
        parts = [part for _ in range(2) for part in shard_loader(loader, 1, 0, seed=9)]
        assert all(part.samples == part.total == len(part.batch) for part in parts)
        return [part.batch.tolist() for part in parts], torch.rand(1)

    assert epochs(True) == epochs(False)


@pytest.mark.parametrize("workers", [2, 3, 5])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("samples", [40, 41, 58])
def test_workers_share_each_epoch_of_a_loader(samples: int, shuffle: bool, workers: int) -> None:
    loader = DataLoader(Numbers(samples), batch_size=4, shuffle=shuffle)
    shards = [shard_loader(loader, workers, index, seed=1) for index in range(workers)]
    epochs = []
    for _ in range(2):
        steps = list(zip(*shards, strict=True))  # strict: equally many batches
        assert len(steps) == len(shards[0]) == -(-samples // (4 * workers))
        read = []
        for parts in steps:
            counted = [part.batch.tolist() for part in parts if part.samples]
            assert {part.total for part in parts} == {sum(map(len, counted))}
            assert all(len(part.batch) == (part.samples or 1) for part in parts)
            read += [number for batch in counted for number in batch]
        assert all(part.samples == 4 for parts in steps[:-1] for part in parts)
        epochs.append(read)
        assert sorted(read) == list(range(samples))
    assert (epochs[0] == sorted(epochs[0])) is not shuffle
    assert (epochs[0] == epochs[1]) is not shuffle


def test_a_loader_goes_on_in_a_later_epoch() -> None:
    loader = DataLoader(Numbers(20), batch_size=4, shuffle=True)
    through, resumed = (shard_loader(loader, 2, 1, seed=1) for _ in range(2))
    epochs = [[part.batch.tolist() for part in through] for _ in range(3)]
    resumed.epoch = 2
    assert [part.batch.tolist() for part in resumed] == epochs[2]


def test_a_worker_left_without_samples_repeats_some_that_do_not_count() -> None:
    loader = DataLoader(Numbers(7), batch_size=2)
    last = [list(shard_loader(loader, 3, index, seed=0))[-1] for index in range(3)]
    assert [(part.batch.tolist(), part.samples, part.total) for part in last] == [
        ([6.0], 1, 1),
        ([6.0], 0, 1),
        ([6.0], 0, 1),
    ]


def test_drop_last_drops_the_last_global_batch() -> None:
    loader = DataLoader(Numbers(11), batch_size=2, drop_last=True)
    parts = [list(shard_loader(loader, 2, index, seed=0)) for index in range(2)]
    assert [[part.batch.tolist() for part in own] for own in parts] == [
        [[0, 1], [4, 5]],
        [[2, 3], [6, 7]],
    ]


def test_settings_of_the_loader_are_kept() -> None:
    before = {*multiprocessing.active_children()}
    loader = DataLoader(
        Numbers(9),
        batch_size=2,
        num_workers=1,
        persistent_workers=True,
        collate_fn=_negated,
        shuffle=True,
    )
    shards = [shard_loader(loader, 2, index, seed=0) for index in range(2)]
    for _ in range(2):
        read = [part.batch for shard in shards for part in shard if part.samples]
        assert torch.cat(read).sort().values.tolist() == [-8, -7, -6, -5, -4, -3, -2, -1, 0]
    workers = {*multiprocessing.active_children()} - before
    assert len(workers) == 2
    del shards
    assert not workers & {*multiprocessing.active_children()}, "they end with their loaders"


def _negated(samples: list[Tensor]) -> Tensor:
    return -torch.stack(samples)


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(Numbers(10), batch_sampler=BatchSampler(SequentialSampler(range(10)), 3, False)),
        DataLoader(Numbers(10), batch_size=3, sampler=range(10)),
        DataLoader(Stream(10), batch_size=3),
    ],
)
def test_of_any_other_loader_each_worker_takes_every_nth_batch(loader: DataLoader[Any]) -> None:
    read = []
    for index in range(3):
        parts = list(shard_loader(loader, 3, index, seed=0))
        assert all(part.samples in (0, len(part.batch)) and part.total is None for part in parts)
        read.append([((part.batch % 1000).tolist(), part.samples) for part in parts])
    repeated = ([9], 0)
    assert read == [
        [([0, 1, 2], 3), ([9], 1)],
        [([3, 4, 5], 3), repeated],
        [([6, 7, 8], 3), repeated],
    ]


def test_a_sampler_of_the_users_loads_no_samples_of_other_workers() -> None:
    dataset = Numbers(12)
    shard = shard_loader(DataLoader(dataset, batch_size=3, sampler=range(12)), 2, 1, seed=0)
    assert len(shard) == 2
    list(shard)
    assert dataset.loaded == [3, 4, 5, 9, 10, 11]


@pytest.mark.parametrize(
    "sampler",
    [
        RandomSampler(range(8), replacement=True),
        RandomSampler(range(8), num_samples=5),
        SubsetRandomSampler([1, 2, 3]),
    ],
)
def test_samplers_that_do_not_give_each_sample_once_are_not_replaced(sampler: Any) -> None:
    parts = list(shard_loader(DataLoader(Numbers(8), batch_size=2, sampler=sampler), 2, 0, seed=0))
    assert all(part.total is None for part in parts)


def test_a_loader_that_is_distributed_already_is_refused() -> None:
    dataset = Numbers(8)
    sampler: DistributedSampler[Tensor] = DistributedSampler(dataset, num_replicas=2, rank=0)
    with pytest.raises(InputError, match=r"DistributedSampler.*shuffle=True"):
        shard_loader(DataLoader(dataset, batch_size=2, sampler=sampler), 2, 0, seed=0)
