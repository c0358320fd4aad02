"""Synchronous strategies equal torch's DistributedDataParallel (invariant 5)."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tests.support.lab import in_lab, some
from tests.support.tasks_for_tests import Unequal
from tests.support.training import (
    Case,
    State,
    distance,
    distributed_data_parallel,
    equal,
    settings,
    single_process,
    train_processes,
    train_threads,
)

from orchestra.strategies.all_reduce import AllReduce
from orchestra.strategies.parameter_server import ParameterServer
from orchestra.strategies.single import Single

STEPS = 20
BATCH = 8
OPTIMIZERS = (
    "SGD(lr=0.1)",
    "SGD(lr=0.05, momentum=0.9, weight_decay=0.01)",
    "Adam(lr=0.01)",
)
WHOLE = "Adafactor(lr=0.05)"
"""An optimizer that looks at whole tensors."""
MOMENTUM = OPTIMIZERS[1]

ALGORITHMS = (
    "ring", "halving_doubling", "butterfly", "tree", "ring_gather", "parallel", "reduce_to_one",
)  # fmt: skip
SYNCHRONOUS = {
    **{name: AllReduce(name) for name in ALGORITHMS},  # type: ignore[arg-type]
    "hierarchical": AllReduce("hierarchical", ranks_per_node=2),
    "sharded": AllReduce(shard="optimizer"),
    "one server": ParameterServer(placement="beside"),
    "two servers": ParameterServer(placement="beside", servers=2),
}


def task(workers: int, model: str, dtype: str) -> str:
    """One epoch is `STEPS` steps of `workers` workers."""
    return f"images(samples={STEPS * workers * BATCH}, model={model!r}, dtype={dtype!r})"


@functools.cache
def references(ranks: int, dtype: str) -> dict[Case, State]:
    text = task(ranks, "cnn", dtype)
    cases = [Case(text, optimizer) for optimizer in (*OPTIMIZERS, WHOLE)]
    with tempfile.TemporaryDirectory() as folder:
        return distributed_data_parallel(ranks, cases, Path(folder))


def reference(ranks: int, optimizer: str, dtype: str) -> State:
    return references(ranks, dtype)[Case(task(ranks, "cnn", dtype), optimizer)]


def trained(
    strategy: Any, ranks: int, workers: int, optimizer: str, dtype: str, folder: Path
) -> list[State]:
    """What the leader wrote, and the replica of every rank."""
    result = train_threads(
        strategy, ranks, folder, task(workers, "cnn", dtype), optimizer=optimizer
    )
    assert {report.steps for report in result.reports if report.samples} == {STEPS}
    return [result.final, *result.replicas]


@pytest.mark.parametrize("optimizer", some(OPTIMIZERS))
@pytest.mark.parametrize("strategy", SYNCHRONOUS.values(), ids=SYNCHRONOUS)
def test_two_ranks_equal_it_bit_for_bit(strategy: Any, optimizer: str, tmp_path: Path) -> None:
    expected = reference(2, optimizer, "float32")
    for state in trained(strategy, 2, 2, optimizer, "float32", tmp_path):
        assert equal(state, expected)


@pytest.mark.parametrize("optimizer", some(OPTIMIZERS, every=3))
def test_two_ranks_on_native_collectives_equal_it_bit_for_bit(
    optimizer: str, tmp_path: Path
) -> None:
    run = settings(AllReduce("native"), 2, task(2, "cnn", "float32"), optimizer=optimizer)
    record = train_processes(run, tmp_path)
    assert record.learned.steps == STEPS
    assert equal(load_file(tmp_path / "parameters.safetensors"), reference(2, optimizer, "float32"))


def test_the_reference_is_no_constant() -> None:
    """Two optimizers, and two numbers of ranks, end with other parameters."""
    states = [reference(2, optimizer, "float32") for optimizer in OPTIMIZERS]
    assert distance(states[0], states[1]) > 1e-3
    assert distance(states[1], states[2]) > 1e-3


@pytest.mark.parametrize("optimizer", some(OPTIMIZERS, every=3))
@pytest.mark.parametrize("strategy", SYNCHRONOUS.values(), ids=SYNCHRONOUS)
@pytest.mark.parametrize(
    "ranks", [3, *(pytest.param(ranks, marks=pytest.mark.lab) for ranks in (4, 5))]
)
def test_more_ranks_equal_it_in_float64(
    strategy: Any, ranks: int, optimizer: str, tmp_path: Path
) -> None:
    expected = reference(ranks, optimizer, "float64")
    for state in trained(strategy, ranks, ranks, optimizer, "float64", tmp_path):
        assert distance(state, expected) < 1e-9


WEIGHTED = {
    **SYNCHRONOUS,
    "gradients": ParameterServer(placement="beside", servers=2, returns="gradients"),
    "unequal shares": Unequal(),
    "single": Single(),
}


@pytest.mark.parametrize(
    ("ranks", "left"),  # fewer samples than ranks, or uneven parts
    [
        (3, 13),
        *in_lab([(2, 1), (2, 13), (3, 1), (4, 1), (4, 13), (5, 1), (5, 13)]),
    ],
)
@pytest.mark.parametrize("strategy", some(WEIGHTED.values()), ids=WEIGHTED)
def test_unequal_batches_give_the_gradient_over_their_union(
    strategy: Any, ranks: int, left: int, tmp_path: Path
) -> None:
    """The last global batch is smaller, and its workers have unequal parts of it."""
    samples = 5 * ranks * BATCH + left
    text = f"images(samples={samples}, dtype='float64')"
    expected = single_process(Case(text, MOMENTUM, BATCH * ranks))
    result = train_threads(strategy, ranks, tmp_path, text, optimizer=MOMENTUM)
    assert sum(report.samples for report in result.reports) == samples
    parts = {line["samples"] for rank in range(len(result.reports)) for line in result.lines(rank)}
    assert len(parts) > 1
    assert max(report.steps for report in result.reports) == 6
    for state in (result.final, *result.replicas):
        assert distance(state, expected) < 1e-9


@pytest.mark.parametrize("clip_norm", [None, 0.5])
@pytest.mark.parametrize("optimizer", some(OPTIMIZERS))
def test_returning_gradients_equals_returning_parameters(
    optimizer: str, clip_norm: float | None, tmp_path: Path
) -> None:
    ends = [
        train_threads(
            ParameterServer(servers=2, returns=returns),
            4,
            tmp_path / returns,
            task(2, "cnn", "float64"),
            optimizer=optimizer,
            clip_norm=clip_norm,
        )
        for returns in ("gradients", "parameters")
    ]
    assert distance(ends[0].final, ends[1].final) < 1e-9
    for replica in (*ends[0].replicas[:2], *ends[1].replicas):
        assert distance(replica, ends[1].final) < 1e-9


@pytest.mark.parametrize(("workers", "servers"), some([(2, 1), (2, 2), (2, 3), (3, 2)]))
@pytest.mark.parametrize("returns", ["parameters", "gradients"])
def test_dedicated_servers_equal_it_with_as_many_ranks_as_workers(
    returns: Any, workers: int, servers: int, tmp_path: Path
) -> None:
    strategy = ParameterServer(servers=servers, returns=returns)
    dtype = "float32" if workers == 2 else "float64"
    expected = reference(workers, MOMENTUM, dtype)
    states = trained(strategy, workers + servers, workers, MOMENTUM, dtype, tmp_path)
    for state in states:
        assert equal(state, expected) if workers == 2 else distance(state, expected) < 1e-9


@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, WHOLE])
@pytest.mark.parametrize("servers", some([2, 3]))
def test_tensors_are_cut_only_where_the_optimizer_allows_it(
    servers: int, optimizer: str, tmp_path: Path
) -> None:
    """Bit for bit the parameters of one server, whichever tensors are cut."""
    strategy = ParameterServer(servers=servers)
    result = train_threads(
        strategy, 2 + servers, tmp_path, task(2, "cnn", "float32"), optimizer=optimizer
    )
    assert equal(result.final, reference(2, optimizer, "float32"))
    owners: dict[int, int] = {}
    for part in result.states[0].connection.slices:
        for piece in part.pieces:
            owners[piece.tensor] = owners.get(piece.tensor, 0) + 1
    assert any(count > 1 for count in owners.values()) == (optimizer != WHOLE)
