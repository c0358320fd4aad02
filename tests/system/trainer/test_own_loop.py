"""A loop of the user's own, distributed: alone, under torchrun, and with awkward data."""

from __future__ import annotations

import difflib
import json
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.commands import Ended, Started, torchrun
from tests.support.lab import some
from tests.support.paths import SCRIPTS
from tests.support.threads import run_ranks
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    TensorDataset,
    WeightedRandomSampler,
)

from orchestra.settings import parse
from orchestra.strategies.all_reduce import AllReduce
from orchestra.strategies.base import Strategy
from orchestra.strategies.local_sgd import LocalSGD
from orchestra.strategies.registry import STRATEGIES
from orchestra.trainer.own_loop import OwnLoop
from orchestra.worker.runtime import Runtime

PLAIN, DISTRIBUTED = SCRIPTS / "gpt_plain.py", SCRIPTS / "gpt_distributed.py"
ASYNCHRONOUS = "ParameterServer(consistency='asynchronous')"
SWITCH = (
    "Switch(AllReduce('ring'), ParameterServer(consistency='asynchronous'), when=AfterSteps(3))"
)
BESIDE = "ParameterServer(placement='beside')"
NEVER = f"Switch(AllReduce('ring'), {ASYNCHRONOUS}, when=AfterSteps(1000))"

State = dict[str, Tensor]


def alone(script: Path, folder: Path, **options: Any) -> State:
    """What `script` trains in one process, without any launcher."""
    folder.mkdir(exist_ok=True)
    variables = {"GPT_OPTIONS": json.dumps(options)}
    with Started([sys.executable, str(script)], folder, variables) as process:
        ended = process.end()
    assert (ended.status, ended.err) == (0, "")
    return saved(folder, 0)


def saved(folder: Path, rank: int) -> State:
    state: State = torch.load(folder / f"rank-{rank}.pt", weights_only=True)
    return state


def launched(ranks: int, folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Ended:
    """The distributed script under torchrun."""
    monkeypatch.setenv("GPT_OPTIONS", json.dumps(options))
    with torchrun(DISTRIBUTED, ranks, [], folder) as process:
        return process.end()


def equal(one: State, other: State) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def test_five_lines_are_all_that_changes() -> None:
    before, after = PLAIN.read_text().splitlines(), DISTRIBUTED.read_text().splitlines()
    changed = [
        line for line in difflib.ndiff(before, after) if line[0] in "+-" and line[2:].strip()
    ]
    assert 0 < len(changed) <= 5, changed
    assert any("orchestra.distribute" in line for line in changed)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> State:
    return alone(PLAIN, tmp_path_factory.mktemp("original"))


@pytest.mark.parametrize(
    "strategy",
    [
        "AllReduce('ring')",
        "AllReduce('native')",
        "Single",
        "ParameterServer(placement='beside')",
        "Gossip",
        "PairwiseAveraging",
    ],
)
def test_one_worker_is_the_original_bit_for_bit(
    strategy: str, original: State, tmp_path: Path
) -> None:
    assert equal(alone(DISTRIBUTED, tmp_path, strategy=strategy), original)


def test_the_rates_in_the_users_groups_travel_with_the_push(tmp_path: Path) -> None:
    """A schedule holds the rate at 0, while the optimizer was made with another."""
    strategy = "ParameterServer(placement='beside', consistency='asynchronous')"
    still = {"strategy": strategy, "rate": 0.0, "optimizer": "SGD"}
    assert equal(
        alone(DISTRIBUTED, tmp_path / "still", **still),
        alone(PLAIN, tmp_path / "none", **still, epochs=0),
    )
    assert not equal(
        alone(DISTRIBUTED, tmp_path / "moving", **{**still, "rate": 1.0}),
        saved(tmp_path / "still", 0),
    )


def test_two_processes_are_one_with_the_batch_of_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With accumulation, clipping, schedule and moments, in the order of the data set."""
    common = {"double": True, "dropout": 0.0, "shuffle": False, "samples": 48}
    union = alone(PLAIN, tmp_path / "union", **common, batch=8)
    ended = launched(2, tmp_path, monkeypatch, **common, batch=4)
    assert ended.status == 0, ended.err
    for rank in range(2):
        ours = saved(tmp_path, rank)
        for name, tensor in union.items():
            torch.testing.assert_close(ours[name], tensor, rtol=1e-9, atol=1e-12)
    assert equal(saved(tmp_path, 0), saved(tmp_path, 1))


@pytest.mark.parametrize("strategy", [pytest.param(ASYNCHRONOUS, marks=pytest.mark.lab), SWITCH])
def test_all_processes_end_with_equal_parameters(
    strategy: str, original: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of three serves: from the start, and then it saves nothing, or from the middle of an
    epoch on."""
    ended = launched(3, tmp_path, monkeypatch, strategy=strategy, samples=70)
    assert ended.status == 0, ended.err
    final = [saved(tmp_path, rank) for rank in range(3 if strategy == SWITCH else 2)]
    assert len(list(tmp_path.glob("*.pt"))) == len(final)
    assert all(equal(final[0], other) for other in final)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in final[0].values())
    assert not equal(final[0], original)


def test_an_exception_in_the_users_loop_ends_every_process_and_names_its_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = launched(2, tmp_path, monkeypatch, raise_on=1)
    assert ended.status != 0
    assert "ValueError: batch 3 is bad" in ended.err
    assert "orchestra: rank 1 on " in ended.err
    assert "failed: ValueError: batch 3 is bad" in ended.err
    assert list(tmp_path.glob("*.pt")) == []


@pytest.mark.parametrize(
    ("strategy", "workers"),
    [("AllReduce('ring')", 2), pytest.param(ASYNCHRONOUS, 1, marks=pytest.mark.lab)],
)
def test_breaking_out_of_the_loop_ends_in_order(
    strategy: str, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"strategy": strategy, "accumulation": 1, "break_at": 2, "samples": 70}
    ended = launched(2, tmp_path, monkeypatch, **options)
    assert (ended.status, ended.err) == (0, "")
    assert len(list(tmp_path.glob("*.pt"))) == workers


# Awkward data, on threads


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """A stream that does not know its length."""

    def __init__(self, data: TensorDataset) -> None:
        self._data = data

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (self._data[index] for index in range(len(self._data)))


BATCH = 2


def samples(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(count)
    features = torch.randn(count, 3, generator=generator, dtype=torch.float64)
    return TensorDataset(features, features.sum(1, keepdim=True).sin())


def loader_of(kind: str, data: TensorDataset) -> DataLoader[Any]:
    match kind:
        case "in order":
            return DataLoader(data, batch_size=BATCH)
        case "shuffled":
            return DataLoader(data, batch_size=BATCH, shuffle=True)
        case "own sampler":
            generator = torch.Generator().manual_seed(4)
            sampler = WeightedRandomSampler([1.0] * len(data), len(data), generator=generator)
            return DataLoader(data, batch_size=BATCH, sampler=sampler)
        case "loading ahead":
            order = list(reversed(range(len(data))))
            return DataLoader(data, batch_size=BATCH, sampler=order, num_workers=1)
    dataset: Dataset[Any] = Stream(data)
    return DataLoader(dataset, batch_size=BATCH)


def model_of() -> nn.Module:
    model = nn.Linear(3, 1, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.5, -0.25, 0.125]]))
        model.bias.zero_()
    return model


def trained(
    runtime: Runtime,
    strategy: Strategy,
    kind: str,
    count: int,
    epochs: int = 2,
    momentum: float = 0.5,
) -> tuple[State, int]:
    """A loop of the user's own on one rank: final parameters, and how often it stepped."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
    loop = OwnLoop(
        runtime,
        model,
        optimizer,
        loader_of(kind, samples(count)),
        strategy,
    )
    steps = 0
    for _ in range(epochs):
        for features, targets in loop.batches:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(features), targets).backward()
            optimizer.step()
            steps += 1
    loop.finish()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}, steps


def by_hand(order: list[list[int]], count: int, epochs: int = 2, momentum: float = 0.5) -> State:
    """The same loop in one process, over the samples of each step of all workers together."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
    features, targets = samples(count).tensors
    for _ in range(epochs):
        for indices in order:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(features[indices]), targets[indices]).backward()
            optimizer.step()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


COUNTS = 1, 7, 8  # fewer samples than ranks, fewer batches than ranks, a batch that is not full
UNEVEN = [
    *((count, "in order") for count in COUNTS),
    (7, "stream"),
    (7, "loading ahead"),
]


ON_UNEVEN = [
    "AllReduce('ring')", ASYNCHRONOUS, SWITCH, "ParameterServer", "Gossip",
    "AllReduce(compression=TopK(0.1))",
    "StochasticGradientPush(overlap=1)", "PairwiseAveraging", "ElasticAveraging(1)",
    "Hop(backup=1)", "Hop(staleness=4, skip=4)",
    "StochasticGradientPush(overlap=2, exchanges='one_at_a_time')", "LocalSGD(2)", "Prague(2)",
    "Switch(Gossip, AllReduce, when=AfterSteps(2), moments='reset')",
]  # fmt: skip
LOADING_AHEAD = ["PairwiseAveraging", "LocalSGD(2)"]
"""Their loaders have processes of their own also by default."""


def uneven(strategy: str, count: int, kind: str) -> Any:
    usual = (count, kind) in UNEVEN and (kind != "loading ahead" or strategy in LOADING_AHEAD)
    return pytest.param(strategy, count, kind, marks=() if usual else pytest.mark.lab)


@pytest.mark.parametrize(
    ("strategy", "count", "kind"),
    [
        uneven(strategy, count, kind)
        for strategy in ON_UNEVEN
        for kind in ("in order", "stream", "shuffled", "own sampler", "loading ahead")
        for count in COUNTS
    ],
)
def test_uneven_data_never_hangs(strategy: str, count: int, kind: str) -> None:
    parsed = parse(strategy, STRATEGIES, where="strategy")
    results = run_ranks(3, lambda runtime: trained(runtime, parsed, kind, count))
    final = [state for state, _ in results]
    assert equal(final[0], final[1])
    assert equal(final[0], final[2])
    assert not equal(final[0], model_of().state_dict())
    assert results[0][1] > 0


@pytest.mark.parametrize("kind", ["in order", "stream"])
@pytest.mark.parametrize("count", some([1, 7, 9]))
@pytest.mark.parametrize("strategy", ["AllReduce('ring')", BESIDE, NEVER])
def test_uneven_data_counts_each_sample_once(strategy: str, count: int, kind: str) -> None:
    """Three workers equal one process with the samples of all three, weighted by their number."""
    parsed = parse(strategy, STRATEGIES, where="strategy")
    results = run_ranks(3, lambda runtime: trained(runtime, parsed, kind, count))
    steps = [
        list(range(first, min(first + 3 * BATCH, count))) for first in range(0, count, 3 * BATCH)
    ]
    expected = by_hand(steps, count)
    for state, taken in results:
        assert taken == 2 * len(steps)
        for name, tensor in expected.items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["in order", "stream"])
@pytest.mark.parametrize("every", [1, None])
def test_averages_of_replicas_are_weighted_in_a_loop_of_ones_own(
    every: int | None, kind: str
) -> None:
    """The mean of three workers' steps is the step of the mean; they have 2, 2 and 1 samples."""
    strategy = LocalSGD(every)
    results = run_ranks(3, lambda runtime: trained(runtime, strategy, kind, 5, 1, momentum=0.0))
    expected = by_hand([list(range(5))], 5, 1, momentum=0.0)
    for state, _ in results:
        for name, tensor in expected.items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-12, atol=1e-12)


SELF_PACED = [  # and a worker that no other one waits for while it is held between two steps
    (ASYNCHRONOUS, 1),
    ("ParameterServer(servers=2, consistency='bounded', staleness=9, placement='beside')", 1),
    ("StochasticGradientPush(overlap=1)", 1),
    ("PairwiseAveraging", 2),
    ("Prague(2)", 1),
    ("ElasticAveraging(2)", 1),
    ("Switch(AllReduce('ring'), PairwiseAveraging, when=AfterSteps(2), moments='averaged')", 2),
]


def taken_by(
    runtime: Runtime,
    strategy: str,
    count: int,
    may_step: Callable[[int, int], bool] = lambda *_: True,
    **settings: Any,
) -> list[list[float]]:
    """The samples that this rank took in each of two epochs; `may_step` is told the rank and how
    many batches it has taken, and waits, or refuses the step."""
    data = TensorDataset(torch.arange(float(count)).unsqueeze(1).double())
    loader = DataLoader(data, batch_size=BATCH, **{"shuffle": True, **settings})
    model = nn.Linear(1, 1, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    loop = OwnLoop(
        runtime, model, optimizer, loader, parse(strategy, STRATEGIES, where="strategy"), seed=3
    )
    epochs: list[list[float]] = [[], []]
    batches = 0
    for epoch in epochs:
        for (numbers,) in loop.batches:
            epoch += numbers.flatten().tolist()
            batches += 1
            if may_step(runtime.rank, batches):
                optimizer.zero_grad()
                model(numbers).square().mean().backward()
                optimizer.step()
    loop.finish()
    return epochs


@pytest.mark.parametrize(("strategy", "held"), some(SELF_PACED))
def test_who_is_free_takes_the_next_batch(strategy: str, held: int) -> None:
    """One is held at its fifth batch until the others have taken 16; every sample is read once an
    epoch."""
    ahead = threading.Event()
    taken = dict.fromkeys(range(3), 0)

    def hold(rank: int, batches: int) -> bool:
        taken[rank] = batches
        if sum(taken.values()) - taken[held] >= 16:
            ahead.set()
        return rank != held or batches != 5 or ahead.wait(60)

    results = run_ranks(3, lambda runtime: taken_by(runtime, strategy, 61, hold))
    for epoch in range(2):
        read = sorted(number for epochs in results for number in epochs[epoch])
        assert read == list(range(61))
    assert ahead.is_set()


@pytest.mark.parametrize("strategy", some([name for name, _ in SELF_PACED if "Switch" not in name]))
def test_a_batch_without_a_step_is_passed_over(strategy: str) -> None:
    skip = lambda rank, batches: batches % 3 != 0  # noqa: E731
    results = run_ranks(3, lambda runtime: taken_by(runtime, strategy, 24, skip))
    for epoch in range(2):
        read = sorted(number for epochs in results for number in epochs[epoch])
        assert read == list(range(24))


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_queue_drops_the_last_short_batch_of_an_epoch(shuffle: bool) -> None:
    settings: dict[str, Any] = {"drop_last": True, "shuffle": shuffle}
    count, strategy = 4 * BATCH + 1, "ParameterServer(consistency='asynchronous')"
    results = run_ranks(3, lambda runtime: taken_by(runtime, strategy, count, **settings))
    read = [sorted(n for epochs in results for n in epochs[epoch]) for epoch in range(2)]
    assert [len(set(numbers)) for numbers in read] == [4 * BATCH] * 2
    assert all(len(numbers) == 4 * BATCH for numbers in read)
    assert (read[0] == read[1] == list(range(4 * BATCH))) != shuffle


def test_every_worker_has_as_many_batches() -> None:
    """A schedule that is as long as the loader is the same on all of them."""

    def lengths(runtime: Runtime) -> list[int]:
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        strategy = AllReduce("ring")
        found = []
        for kind in ("in order", "own sampler"):
            loader = loader_of(kind, samples(7))
            found.append(len(OwnLoop(runtime, model, optimizer, loader, strategy).batches))
        return found

    assert run_ranks(3, lengths) == [[2, 2]] * 3
