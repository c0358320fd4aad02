"""Fixed shards and unequal shares: who owns what, and who reads what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.quadratic import start
from tests.support.training import train_threads
from torch.utils.data import Dataset, IterableDataset

from orchestra import AllReduce
from orchestra.data import IID, Contiguous, DataPlan, Dirichlet, Sharding, Stratified
from orchestra.data.feed import Feed, labels_of, open_shard
from orchestra.errors import InputError
from orchestra.tasks import TensorData
from orchestra.trainer.settings import Training

RULES = [IID(), Contiguous(), Stratified(), Dirichlet(0.1), Dirichlet(100.0)]


def classes(samples: int, kinds: int = 4) -> Any:
    return np.random.RandomState(1).randint(kinds, size=samples).astype(np.int64)


@pytest.mark.parametrize("rule", RULES, ids=repr)
@given(
    samples=st.integers(8, 200),
    weights=st.lists(st.sampled_from([1.0, 2.0, 0.5, 3.0]), min_size=1, max_size=6),
)
def test_every_sample_has_one_owner(rule: Sharding, samples: int, weights: list[float]) -> None:
    shares = [weight / sum(weights) for weight in weights]
    parts = rule.split(classes(samples), shares, seed=3)
    assert sorted(np.concatenate(parts).tolist()) == list(range(samples))
    assert all(len(part) for part in parts) or not isinstance(rule, Dirichlet)
    again = rule.split(classes(samples), shares, seed=3)
    assert all(np.array_equal(one, two) for one, two in zip(parts, again, strict=True))
    if not isinstance(rule, Dirichlet):
        for part, share in zip(parts, shares, strict=True):
            assert abs(len(part) - share * samples) <= 2


def spread(parts: list[Any], labels: Any) -> Any:
    """For each worker the parts of its samples that are of each class."""
    return np.array([np.bincount(labels[part], minlength=4) / len(part) for part in parts])


def test_what_the_workers_see_is_as_like_or_unlike_as_the_rule_says() -> None:
    labels = classes(4000)
    quarters = [0.25] * 4
    whole = np.bincount(labels) / len(labels)
    seen = {rule: spread(rule.split(labels, quarters, 0), labels) for rule in RULES}
    assert np.abs(seen[Stratified()] - whole).max() < 0.002
    assert np.abs(seen[IID()] - whole).max() < 0.06
    assert np.abs(seen[Dirichlet(100.0)] - whole).max() < 0.15
    assert np.abs(seen[Dirichlet(0.1)] - whole).max() > 0.4
    ordered = np.sort(labels)
    assert (spread(Contiguous().split(ordered, quarters, 0), ordered).max(1) > 0.95).all()


def test_a_seed_gives_other_shards() -> None:
    labels = classes(400)
    for rule in RULES:
        first, second = (rule.split(labels, [0.5, 0.5], seed)[0] for seed in (0, 1))
        assert np.array_equal(first, second) == isinstance(rule, Contiguous)


def numbers(samples: int = 40) -> TensorData:
    return TensorData(torch.arange(samples), torch.arange(samples) % 4)


def reads(shares: tuple[float, ...], rank: int, steps: range) -> list[int]:
    data, plan = numbers(), DataPlan(0, 400, 4 * len(shares), shares)
    shard = open_shard(data, 0, data.collate, Stratified(), shares, rank)
    feed = Feed(shard, plan, rank, own=True)
    return [int(place) for step in steps for place in feed.next(step)[0][0]]


def test_a_worker_reads_its_own_samples_once_in_each_pass() -> None:
    own = [reads((1.0, 1.0), rank, range(5)) for rank in range(2)]  # 20 samples each, 4 a step
    assert sorted(own[0] + own[1]) == list(range(40))
    next_pass = reads((1.0, 1.0), 0, range(5, 10))
    assert sorted(next_pass) == sorted(own[0])
    assert next_pass != own[0]


def test_larger_shares_read_more_from_larger_shards() -> None:
    shares = (3.0, 1.0)
    own = [reads(shares, rank, range(5)) for rank in range(2)]
    assert [len(part) for part in own] == [30, 10]
    assert sorted(own[0] + own[1]) == list(range(40))


class Labelled(Dataset[Any]):
    """As torchvision's have them."""

    targets = [2, 0, 1]  # noqa: RUF012

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("its labels are known")


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(5))


def test_labels_are_found_where_they_are() -> None:
    assert labels_of(Labelled()).tolist() == [2, 0, 1]
    assert labels_of(numbers(6)).tolist() == [0, 1, 2, 3, 0, 1]
    assert labels_of([("a", 1), ("b", 0)]).tolist() == [1, 0]
    with pytest.raises(InputError, match="has no classes to shard by"):
        labels_of(TensorData(torch.zeros(3, 2), torch.zeros(3, 2)))


def test_what_cannot_be_sharded_is_refused() -> None:
    with pytest.raises(InputError, match="have no places to be shared out"):
        open_shard(Stream(), 0, None, IID(), (1.0,), 0)
    with pytest.raises(InputError, match="2 samples are too few for 3 workers"):
        open_shard(numbers(2), 0, None, IID(), (1.0,) * 3, 1)
    with pytest.raises(InputError, match="2 weights for 3 ranks"):
        Training(ranks=3, shares=(1.0, 2.0))


def test_weights_keep_the_global_batch_and_one_process_has_it_all() -> None:
    training = Training(ranks=3, shares=(2.0, 1.0, 1.0))
    assert training.weighted((1.0, 1.0, 1.0)) == (1.5, 0.75, 0.75)
    assert training.weighted((1.0, 1.0, 0.0)) == pytest.approx((4 / 3, 2 / 3, 0.0))
    assert training.weighted((3.0,)) == (3.0,)


def test_shares_deal_out_unequal_batches_and_change_nothing_in_the_average(tmp_path: Path) -> None:
    task = "tests.support.quadratic:quadratic()"

    def final(folder: str, **training: Any) -> Any:
        ring = AllReduce("ring")
        given = {"batch_size": 4, "optimizer": "SGD(lr=0.1)", **training}
        return train_threads(ring, 3, tmp_path / folder, task, **given)

    equal, unequal = final("equal"), final("unequal", shares=(2.0, 1.0, 1.0))
    assert [line["samples"] for line in unequal.lines(0)] == [6] * 5
    assert [line["samples"] for line in unequal.lines(2)] == [3] * 5
    torch.testing.assert_close(equal.final, unequal.final, rtol=1e-12, atol=0)
    apart = final("sharded", sharding=Contiguous())
    assert not torch.allclose(apart.final["first"], equal.final["first"])
    assert not torch.allclose(apart.final["first"], torch.from_numpy(start()[:3]))
