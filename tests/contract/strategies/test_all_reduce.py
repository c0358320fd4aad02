"""The settings of `AllReduce`: algorithms, orders, nodes, and the optimizer in slices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.gradient_bytes import gradient_bytes
from tests.support.lab import some
from tests.support.quadratic import Vector, final, mean_samples, start
from tests.support.threads import run_ranks
from tests.support.training import Trained, distance, equal, train_threads
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from orchestra import exchange
from orchestra.errors import InputError
from orchestra.settings import parse
from orchestra.strategies.all_reduce import AllReduce, AllReduceMember
from orchestra.strategies.base import Strategy
from orchestra.strategies.registry import STRATEGIES
from orchestra.strategies.switch import Switch
from orchestra.strategies.switch_rules import AfterSteps
from orchestra.trainer.own_loop import OwnLoop
from orchestra.transports.protocol import Pending
from orchestra.transports.tags import Tag
from orchestra.worker.runtime import Runtime
from orchestra.worker.worker import Worker

OPTIMIZERS = {
    "SGD": "SGD(lr=0.1)",
    "momentum": "SGD(lr=0.05, momentum=0.9, weight_decay=0.01)",
    "Adam": "Adam(lr=0.01)",
}
MOMENTUM = OPTIMIZERS["momentum"]
SHARDED = AllReduce(shard="optimizer")
SMALL_BUCKETS = {"bucket_megabytes": 0.001}  # 1 kB: several buckets for a small model


# What is refused


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("AllReduce(order=(0, 2))", r"order: \(0, 2\) does not hold each of the ranks 0 to 1 once"),
        ("AllReduce(order=(1, 1))", "does not hold each of the ranks"),
        ("AllReduce(ranks_per_node=2)", "ranks_per_node needs algorithm='hierarchical'"),
        ("AllReduce('tree', shard='optimizer')", "shard='optimizer' needs algorithm='ring'"),
        ("AllReduce(shard='optimizer', backup=1)", "backup does not go with shard"),
        ("AllReduce('tree', shard='gradients')", "shard='gradients' needs algorithm='ring'"),
        ("AllReduce(shard='parameters', backup=1)", "backup does not go with shard='parameters'"),
        ("AllReduce(shard='parameters', compression=BF16())", "compression does not go with"),
        ("Switch(AllReduce(shard='parameters'), AllReduce())", "a part of the model.*use it alone"),
        ("AllReduce('native', backup=1)", "do not go with algorithm='native'"),
        ("AllReduce('native', order=(1, 0))", "do not go with algorithm='native'"),
        ("AllReduce('hierarchical', ranks_per_node=0)", "ranks_per_node: 0 is below 1"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        parse(text, STRATEGIES, where="here")


@pytest.mark.parametrize(
    ("strategy", "ranks", "words"),
    [
        (AllReduce(order=(1, 0)), 3, r"is an order of 2 ranks, but there are 3"),
        (AllReduce(backup=2), 2, "backup=2 of 2 ranks leaves no gradient to wait for"),
        (AllReduce(backup=1), 1, "raise ranks"),
    ],
)
def test_numbers_of_ranks_that_cannot_be_are_refused(
    strategy: AllReduce, ranks: int, words: str
) -> None:
    with pytest.raises(InputError, match=words):
        strategy.roles(ranks)


# Against NumPy


def followed(ranks: int, batch_size: int, rate: float, momentum: float) -> Vector:
    """v <- mu v + g, x <- x - eta v, with g over the samples of all workers."""
    x, velocity = start(), np.zeros_like(start())
    for parts in mean_samples(ranks, batch_size):
        total = sum(count for _, count in parts)
        gradient = sum(count / total * (x - mean) for mean, count in parts)
        velocity = momentum * velocity + gradient
        x = x - rate * velocity
    return x


@pytest.mark.parametrize(
    "text",
    [
        "AllReduce()",
        "AllReduce('halving_doubling')",
        "AllReduce('butterfly')",
        "AllReduce('tree')",
        "AllReduce('hierarchical', ranks_per_node=2)",
        "AllReduce(order=(2, 0, 1))",
        "AllReduce(shard='optimizer')",
        "AllReduce(shard='optimizer', order=(1, 0, 2))",
    ],
)
def test_it_is_the_equation_of_synchronous_sgd(text: str, tmp_path: Path) -> None:
    strategy = parse(text, STRATEGIES, where="here")
    trained = train_threads(
        strategy, 3, tmp_path, "tests.support.quadratic:quadratic()", batch_size=4,
        optimizer="SGD(lr=0.1, momentum=0.5)",
    )  # fmt: skip
    expected = followed(3, 4, 0.1, 0.5)
    for state in (trained.final, *trained.replicas):
        np.testing.assert_allclose(final(state), expected, rtol=1e-12)


# Who sends what to whom


def test_a_ring_follows_the_order_that_it_is_given(tmp_path: Path) -> None:
    sent = gradient_bytes(AllReduce(order=(0, 2, 1, 3)), 4, tmp_path)
    assert set(sent) == {(0, 2), (2, 1), (1, 3), (3, 0)}


@pytest.mark.parametrize(
    ("strategy", "local_ranks"),
    [
        (AllReduce("hierarchical", ranks_per_node=2), ()),
        (AllReduce("hierarchical"), (0, 1, 0, 1)),
        (AllReduce("hierarchical", ranks_per_node=2), (0, 1, 2, 3)),
    ],
    ids=["set", "as launched", "set against the launch"],
)
def test_a_hierarchy_sends_less_between_nodes_than_a_ring(
    strategy: AllReduce, local_ranks: Sequence[int], tmp_path: Path
) -> None:
    """Two nodes of two: the ring sends 2 x 3/4 n over each of its links, these n over two."""
    ring = gradient_bytes(AllReduce(), 4, tmp_path / "ring")
    sent = gradient_bytes(strategy, 4, tmp_path / "nodes", local_ranks)
    node = {0: 0, 1: 0, 2: 1, 3: 1}
    whole = sum(ring.values()) / 6  # 2 (N - 1) n
    between = sum(size for (a, b), size in sent.items() if node[a] != node[b])
    assert between == pytest.approx(2 * whole, rel=0.01)
    assert sum(sent.values()) == pytest.approx(sum(ring.values()), rel=0.01)
    assert set(sent) == {(0, 1), (1, 0), (2, 3), (3, 2), (0, 2), (2, 0), (1, 3), (3, 1)}


def test_ranks_that_are_not_launched_host_by_host_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"places on their hosts are 0, 0, 1, 1\).*order"):
        gradient_bytes(AllReduce("hierarchical"), 4, tmp_path, (0, 0, 1, 1))


# The optimizer in slices


class SameCuts(AllReduce):
    """Plain all-reduce, and a whole optimizer, with sums in the order of the slices' ring."""

    def member(self, worker: Worker) -> AllReduceMember:
        return SameCutsMember(self, worker, worker.local_optimizer())


class SameCutsMember(AllReduceMember):
    def open(self, *, fresh: bool) -> None:
        worker = self.worker
        shards = exchange.Shards(worker, worker.workers)

        def begin(bucket: Any, background: bool) -> list[Pending[int]]:
            begun = shards.sum(bucket, background)
            edges = next(unit.edges for unit in shards.units if unit.first == bucket.first)
            gather = shards._all_gather.begin(
                worker.transport, bucket.values[: edges[-1]], Tag.GRADIENTS, edges,
                background=background,
            )  # fmt: skip
            return [*begun, gather]

        self.average = exchange.GradientAverage(worker, begin)


def train_images(
    strategy: Strategy, ranks: int, folder: Path, optimizer: str = MOMENTUM, **training: Any
) -> Trained:
    task = f"images(samples={ranks * 64}, model={training.pop('model', 'cnn')!r})"
    return train_threads(strategy, ranks, folder, task, optimizer=optimizer, **training)


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("ranks", some([2, 3, 5]))
def test_slices_equal_whole_optimizers_bit_for_bit(
    ranks: int, optimizer: str, tmp_path: Path
) -> None:
    """With several buckets, and sums in the same order, as they always are with two ranks."""
    whole = AllReduce() if ranks == 2 else SameCuts()
    expected = train_images(whole, ranks, tmp_path / "whole", optimizer, **SMALL_BUCKETS)
    sharded = train_images(SHARDED, ranks, tmp_path / "slices", optimizer, **SMALL_BUCKETS)
    for state in (sharded.final, *sharded.replicas):
        assert equal(state, expected.final)


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Of the optimizer's moments, its counters of steps left out."""
    moments = (value for state in optimizer.state.values() for value in state.values())
    return sum(value.nbytes for value in moments if value.dim())


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_each_worker_keeps_its_part_of_the_state(ranks: int, tmp_path: Path) -> None:
    """Cut at multiples of 64 elements of a tensor: as much more than 1/N, at the most."""
    model = sum(p.numel() for p in nn.Sequential(nn.Linear(64, 24), nn.Linear(24, 4)).parameters())
    trained = train_images(SHARDED, ranks, tmp_path, OPTIMIZERS["Adam"], model="mlp")
    sizes = [state_bytes(state.optimizer) for state in trained.states]
    assert sum(sizes) == 2 * 4 * model
    assert max(sizes) <= 2 * 4 * (model / ranks + 2 * 64)
    whole = train_images(AllReduce(), ranks, tmp_path / "whole", OPTIMIZERS["Adam"], model="mlp")
    assert {state_bytes(state.optimizer) for state in whole.states} == {sum(sizes)}


@pytest.mark.parametrize("ranks", [1, 3])
def test_slices_are_clipped_by_the_norm_of_the_whole_gradient(ranks: int, tmp_path: Path) -> None:
    ends = [
        train_threads(
            strategy, ranks, tmp_path / strategy.shard, "images(samples=96, dtype='float64')",
            optimizer=MOMENTUM, clip_norm=0.05,
        ).final
        for strategy in (SHARDED, AllReduce())
    ]  # fmt: skip
    assert equal(*ends) if ranks == 1 else distance(*ends) < 1e-12
    loose = train_threads(
        SHARDED, ranks, tmp_path, "images(samples=96, dtype='float64')", optimizer=MOMENTUM
    )
    assert distance(loose.final, ends[0]) > 1e-3


@pytest.mark.parametrize("model", ["partial", "tied", "normalised"])
def test_slices_of_awkward_models(model: str, tmp_path: Path) -> None:
    """Tensors that no rank used, tied ones, and buffers."""
    sharded = train_images(SHARDED, 2, tmp_path / "slices", model=model)
    expected = train_images(AllReduce(), 2, tmp_path / "whole", model=model)
    assert equal(sharded.final, expected.final)


def test_optimizers_of_whole_tensors_are_cut_between_tensors(tmp_path: Path) -> None:
    optimizer = "Adafactor(lr=0.05)"
    sharded = train_images(SHARDED, 3, tmp_path / "slices", optimizer)
    owners = Counter(
        parameter.shape
        for state in sharded.states
        for group in state.optimizer.param_groups
        for parameter in group["params"]
    )
    shapes = Counter(parameter.shape for parameter in sharded.modules[0].parameters())
    assert owners == shapes
    expected = train_images(SameCuts(), 3, tmp_path / "whole", optimizer)
    assert equal(sharded.final, expected.final)


@pytest.mark.parametrize("optimizer", [MOMENTUM, OPTIMIZERS["Adam"]])
def test_slices_inherit_the_moments_of_a_phase_before(optimizer: str, tmp_path: Path) -> None:
    switch = Switch(AllReduce(), SHARDED, when=AfterSteps(3))
    switched = train_images(switch, 2, tmp_path / "switch", optimizer)
    plain = train_images(AllReduce(), 2, tmp_path / "plain", optimizer)
    assert {report.switched_at_step for report in switched.reports} == {3}
    assert equal(switched.final, plain.final)


@pytest.mark.parametrize("optimizer", [MOMENTUM, OPTIMIZERS["Adam"]])
def test_slices_resume_from_a_checkpoint_bit_for_bit(optimizer: str, tmp_path: Path) -> None:
    """The second run has the last of eight steps to do, with the moments of seven."""
    options: dict[str, Any] = {"checkpoint_every": 7}
    first = train_images(SHARDED, 3, tmp_path / "it", optimizer, **options)
    before = first.lines(0)
    resumed = train_images(SHARDED, 3, tmp_path / "it", optimizer, **options)
    assert resumed.lines(0)[:7] == before[:7]
    assert resumed.lines(0)[7] != before[7]
    assert equal(resumed.final, first.final)


def test_slices_hand_over_no_moments() -> None:
    with pytest.raises(InputError, match="set moments='reset'"):
        Switch(SHARDED, AllReduce(), when=AfterSteps(3)).roles(2)
    assert Switch(SHARDED, AllReduce(), when=AfterSteps(3), moments="reset").roles(2)


@pytest.mark.parametrize("strategy", [AllReduce(), SHARDED], ids=["whole", "slices"])
def test_a_loop_of_ones_own_may_clip_the_gradient(strategy: AllReduce) -> None:
    """Between backward and step every rank has the whole average."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(24, 6), torch.randn(24, 1))

    def train(runtime: Runtime, chosen: AllReduce) -> list[torch.Tensor]:
        model = nn.Linear(6, 1)
        with torch.no_grad():
            model.weight.fill_(0.1)
            model.bias.fill_(0.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        loop = OwnLoop(runtime, model, optimizer, DataLoader(data, batch_size=4), chosen)
        for inputs, targets in loop.batches:
            optimizer.zero_grad()
            (model(inputs) - targets).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        loop.finish()
        return [parameter.detach().clone() for parameter in model.parameters()]

    (expected,) = run_ranks(1, lambda runtime: train_alone(data))
    for replica in run_ranks(2, lambda runtime: train(runtime, strategy)):
        for ours, theirs in zip(replica, expected, strict=True):
            torch.testing.assert_close(ours, theirs)


def train_alone(data: TensorDataset) -> list[torch.Tensor]:
    """The same in plain PyTorch, with the batch of both ranks."""
    model = nn.Linear(6, 1)
    with torch.no_grad():
        model.weight.fill_(0.1)
        model.bias.fill_(0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for inputs, targets in DataLoader(data, batch_size=8):
        optimizer.zero_grad()
        (model(inputs) - targets).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def test_backup_is_refused_in_a_loop_of_ones_own() -> None:
    def program(runtime: Runtime) -> None:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(TensorDataset(torch.zeros(4, 2)))
        OwnLoop(runtime, model, optimizer, loader, AllReduce(backup=1))

    with pytest.raises(InputError, match="backup needs orchestra's own loop"):
        run_ranks(2, program)
