"""Schedules, accumulation, clipping, precision, groups and unusual models, under every strategy."""

from __future__ import annotations

import functools
import math
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.lab import by_turns, some
from tests.support.training import (
    Case,
    State,
    distance,
    distributed_data_parallel,
    equal,
    settings,
    single_process,
    step_lines,
    train_processes,
    train_threads,
)

from orchestra.data.feed import GlobalOrder
from orchestra.errors import InputError, RunFailed
from orchestra.optimizers.settings import Constant, Cosine, Optimizer, ParameterGroup, StepDecay
from orchestra.strategies.all_reduce import AllReduce
from orchestra.strategies.parameter_server import ParameterServer
from orchestra.strategies.single import Single
from orchestra.strategies.switch import Switch
from orchestra.strategies.switch_rules import AfterSteps
from orchestra.trainer.curve import all_cores

MOMENTUM = "SGD(lr=0.05, momentum=0.9, weight_decay=0.01)"
WORKERS = 2
BATCH = 8
ASYNCHRONOUS = ParameterServer(consistency="asynchronous")
ASYNCHRONOUS_BESIDE = ParameterServer(consistency="asynchronous", placement="beside")
BESIDE = ParameterServer(servers=2, placement="beside")

# Each with two workers: label, strategy, ranks.
SYNCHRONOUS = {
    "ring": (AllReduce(), 2),
    "server": (ParameterServer(), 3),
    "servers": (ParameterServer(servers=2), 4),
    "gradients": (ParameterServer(servers=2, returns="gradients"), 4),
    "switch to server": (Switch(AllReduce(), BESIDE, when=AfterSteps(3)), 2),
}
STALE = {
    "asynchronous": (ASYNCHRONOUS, 3),
    "strategy-switch": (
        Switch(AllReduce(), ASYNCHRONOUS_BESIDE, when=AfterSteps(3)),
        2,
    ),
}
# The same, with so few workers at a time that nothing depends on who is first.
ONE_WORKER = {
    "asynchronous alone": (ASYNCHRONOUS, 2),
    "switch alone": (Switch(AllReduce(), ASYNCHRONOUS, when=AfterSteps(3)), 2),
}
EVERY = SYNCHRONOUS | STALE
REPEATABLE = SYNCHRONOUS | ONE_WORKER


def table(rows: dict[str, Any]) -> Any:
    return pytest.mark.parametrize(("strategy", "ranks"), rows.values(), ids=rows)


def images(steps: int, model: str = "mlp", dtype: str = "float64", left: int = 0) -> str:
    """One epoch is `steps` steps of two workers, and `left` samples."""
    return f"images(samples={steps * WORKERS * BATCH + left}, model={model!r}, dtype={dtype!r})"


SCHEDULES = [
    (Constant(warmup=0.25), [0.0, 0.5, 1, 1, 1, 1, 1, 1]),
    (StepDecay((0.5, 0.75), 0.1), [1, 1, 1, 1, 0.1, 0.1, 0.01, 0.01]),
    (Cosine(), [(1 + math.cos(math.pi * k / 8)) / 2 for k in range(8)]),
    (Cosine(warmup=0.5), [0, 0.25, 0.5, 0.75, 1, (2 + 2**0.5) / 4, 0.5, (2 - 2**0.5) / 4]),
]


@pytest.mark.parametrize(("schedule", "factors"), some(SCHEDULES))
@table(SYNCHRONOUS)
def test_rates_follow_the_samples_of_the_cluster(
    strategy: Any, ranks: int, schedule: Any, factors: list[float], tmp_path: Path
) -> None:
    options: dict[str, Any] = {
        "task": images(8),
        "optimizer": "Adam(lr=0.01)",
        "schedule": schedule,
    }
    result = train_threads(strategy, ranks, tmp_path / "one", **options)
    for rank in range(WORKERS):
        lines = result.lines(rank)
        assert [line["consumed"] for line in lines] == [16 * k for k in range(1, 9)]
        assert [line["rates"][0] for line in lines] == pytest.approx([0.01 * f for f in factors])
    single = train_threads(Single(), WORKERS, tmp_path / "single", **options)
    assert distance(result.final, single.final) < 1e-9


@pytest.mark.parametrize("schedule", [schedule for schedule, _ in SCHEDULES])
@table(STALE)
def test_rates_follow_the_samples_that_servers_have_seen(
    strategy: Any, ranks: int, schedule: Any, tmp_path: Path
) -> None:
    result = train_threads(
        strategy, ranks, tmp_path, images(8), optimizer="SGD(lr=0.1)", schedule=schedule
    )
    last = []
    for rank in range(WORKERS):
        before = 0
        for line in result.lines(rank):
            done = line.get("position", before)  # before a batch of the queue, in the global order
            assert line["rates"] == pytest.approx([0.1 * schedule.factor(done / 128)])
            assert line["consumed"] >= before + line["samples"]
            before = line["consumed"]
        last.append(before)
    assert max(last) == 128


@pytest.mark.parametrize("parts", some([3, 8]))
@table(REPEATABLE)
def test_accumulation_changes_nothing(
    strategy: Any, ranks: int, parts: int, tmp_path: Path
) -> None:
    ends = [
        train_threads(
            strategy,
            ranks,
            tmp_path / str(k),
            images(6, left=5),
            optimizer=MOMENTUM,
            accumulation=k,
        ).final
        for k in (1, parts)
    ]
    assert distance(*ends) < 1e-12
    assert not equal(*ends)  # the sums were formed in another order, so it did split


CLIPPED = Case(images(8), MOMENTUM, clip_norm=0.3)
DDP_CASES = [
    CLIPPED,
    *(Case(images(8, model, "float32"), MOMENTUM) for model in ("normalised", "tied", "partial")),
]


@functools.cache
def references() -> dict[Case, State]:
    with tempfile.TemporaryDirectory() as folder:
        return distributed_data_parallel(WORKERS, DDP_CASES, Path(folder))


@table({**SYNCHRONOUS, "three servers": (ParameterServer(servers=3), 5)})
def test_clipping_is_of_the_norm_of_the_whole_average(
    strategy: Any, ranks: int, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"task": CLIPPED.task, "optimizer": MOMENTUM}
    result = train_threads(strategy, ranks, tmp_path / "yes", clip_norm=0.3, **options)
    free = train_threads(strategy, ranks, tmp_path / "no", **options)
    assert distance(result.final, references()[CLIPPED]) < 1e-6
    assert distance(result.final, free.final) > 1e-3


@table(ONE_WORKER | {"beside": (ASYNCHRONOUS_BESIDE, 1)})
def test_an_asynchronous_worker_clips_its_own_gradient(
    strategy: Any, ranks: int, tmp_path: Path
) -> None:
    result = train_threads(
        strategy, ranks, tmp_path, CLIPPED.task, optimizer=MOMENTUM, clip_norm=0.3
    )
    if isinstance(strategy, Switch):
        free = train_threads(strategy, ranks, tmp_path / "no", CLIPPED.task, optimizer=MOMENTUM)
        assert distance(result.final, free.final) > 1e-3
    else:
        assert distance(result.final, single_process(CLIPPED)) < 1e-6


@table(REPEATABLE)
def test_bf16_runs_and_makes_a_difference(strategy: Any, ranks: int, tmp_path: Path) -> None:
    ends = [
        train_threads(
            strategy, ranks, tmp_path / kind, images(8, "cnn", "float32"), precision=kind
        ).final
        for kind in ("float32", "bf16")
    ]
    assert 1e-6 < distance(*ends) < 0.3
    assert {tensor.dtype for tensor in ends[1].values()} == {torch.float32}


@table(REPEATABLE)
def test_parameter_groups_keep_their_arguments(strategy: Any, ranks: int, tmp_path: Path) -> None:
    groups = (ParameterGroup(r"bias$", arguments={"weight_decay": 0.0, "lr": 0.2}),)
    optimizer = Optimizer("SGD", {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.3}, groups=groups)
    result = train_threads(strategy, ranks, tmp_path, images(8), optimizer=optimizer)
    if "alone" in label_of(strategy, ranks):
        assert {tuple(line["rates"]) for line in result.lines(0)} == {(0.05, 0.2)}
        return
    case = Case(images(8), repr(optimizer), BATCH * WORKERS, groups=groups)
    assert distance(result.final, single_process(case)) < 1e-9


def label_of(strategy: Any, ranks: int) -> str:
    return next(label for label, row in REPEATABLE.items() if row == (strategy, ranks))


@table(SYNCHRONOUS)
def test_batch_norm_statistics_are_the_first_workers(
    strategy: Any, ranks: int, tmp_path: Path
) -> None:
    """Those of DistributedDataParallel, in the final state and in every snapshot."""
    task = images(8, "normalised", "float32")
    result = train_threads(strategy, ranks, tmp_path, task, optimizer=MOMENTUM, snapshots=2)
    expected = references()[Case(task, MOMENTUM)]
    assert equal(result.final, expected)
    leader = next(report.leader for report in result.reports if report.leader is not None)
    assert leader.curve[-1].metrics["loss"] == leader.final_loss
    alone = train_threads(AllReduce(), 2, tmp_path / "half", task, optimizer=MOMENTUM, steps=4)
    assert leader.curve[0].samples == 4 * WORKERS * BATCH
    assert leader.curve[0].metrics["loss"] == alone.reports[0].leader.final_loss  # type: ignore[union-attr]


@table(STALE | {"switch to roles": (Switch(AllReduce(), ASYNCHRONOUS, when=AfterSteps(3)), 3)})
def test_batch_norm_statistics_become_the_mean_over_the_samples(
    strategy: Any, ranks: int, tmp_path: Path
) -> None:
    task = images(8, "normalised", left=5)
    result = train_threads(strategy, ranks, tmp_path, task, snapshots=2)
    samples = [report.samples for report in result.reports[:WORKERS]]
    assert samples[0] != samples[1]
    for name in ("1.running_mean", "1.running_var"):
        local = [replica[name] for replica in result.replicas[:WORKERS]]
        if ranks > WORKERS:  # the leader is no worker, so these are the workers' own
            assert not torch.equal(local[0], local[1])
            mean = (samples[0] * local[0] + samples[1] * local[1]) / sum(samples)
            assert torch.allclose(result.final[name], mean, rtol=1e-12)
    assert result.final["1.num_batches_tracked"] == result.reports[0].steps


@table(SYNCHRONOUS)
def test_tied_weights_stay_tied(strategy: Any, ranks: int, tmp_path: Path) -> None:
    task = images(8, "tied", "float32")
    result = train_threads(strategy, ranks, tmp_path, task, optimizer=MOMENTUM)
    assert torch.equal(result.final["into.weight"], result.final["again.weight"])
    assert equal(result.final, references()[Case(task, MOMENTUM)])


@table(EVERY)
def test_unused_parameters_keep_their_values(strategy: Any, ranks: int, tmp_path: Path) -> None:
    """`rarely` is used in some steps, on some ranks; `never` has no gradient at all."""
    task = images(8, "partial", "float32")
    result = train_threads(strategy, ranks, tmp_path, task, optimizer=MOMENTUM)
    before = train_threads(AllReduce(), 2, tmp_path / "start", task, optimizer="SGD(lr=0.0)").final
    for name, tensor in result.final.items():
        assert torch.equal(tensor, before[name]) == name.startswith("never")
    for module in result.modules[:WORKERS]:
        assert module.never.weight.grad is None
    if (strategy, ranks) in SYNCHRONOUS.values():
        assert equal(result.final, references()[Case(task, MOMENTUM)])


@table(SYNCHRONOUS)
def test_several_inputs_in_dicts(strategy: Any, ranks: int, tmp_path: Path) -> None:
    task = "pairs(samples=71)"
    result = train_threads(strategy, ranks, tmp_path, task, optimizer=MOMENTUM, accumulation=2)
    assert distance(result.final, single_process(Case(task, MOMENTUM, BATCH * WORKERS))) < 1e-9


@table(SYNCHRONOUS)
def test_an_iterable_dataset_without_a_length(strategy: Any, ranks: int, tmp_path: Path) -> None:
    """The budget is one of samples; the stream begins anew at its end."""
    options: dict[str, Any] = {"task": "stream(samples=50)", "optimizer": MOMENTUM}
    result = train_threads(strategy, ranks, tmp_path / "one", steps=12, **options)
    assert sum(report.samples for report in result.reports) == 12 * ranks * BATCH
    single = train_threads(Single(), 2, tmp_path / "single", steps=6 * ranks, **options)
    assert distance(result.final, single.final) < 1e-9


@table(EVERY)
def test_epochs_of_a_stream_cannot_be_counted(strategy: Any, ranks: int, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="give the budget in steps"):
        train_threads(strategy, ranks, tmp_path, "stream()", epochs=1)


ANY_SIZE = {
    "ring": AllReduce(),
    "server": ParameterServer(),
    "beside": BESIDE,
    "asynchronous": ASYNCHRONOUS,
    "asynchronous beside": ASYNCHRONOUS_BESIDE,
    "strategy-switch": STALE["strategy-switch"][0],
}


@pytest.mark.parametrize(("ranks", "samples"), by_turns([2, 3, 4, 5], [1, 2, 41, 43]))
@pytest.mark.parametrize("strategy", some(ANY_SIZE.values()), ids=ANY_SIZE)
def test_uneven_last_batches_never_hang(
    strategy: Any, ranks: int, samples: int, tmp_path: Path
) -> None:
    result = train_threads(strategy, ranks, tmp_path, f"images(samples={samples})", batch_size=4)
    assert sum(report.samples for report in result.reports) == samples


@table(EVERY)
def test_a_loss_that_is_not_a_number_ends_the_run(
    strategy: Any, ranks: int, tmp_path: Path
) -> None:
    order = GlobalOrder(96, 0).indices(0, 96).tolist()
    step = order.index(40) // (WORKERS * BATCH) + 1
    with pytest.raises(
        RunFailed, match=r"the loss became nan at step \d; lower the learning rate"
    ) as caught:
        train_threads(strategy, ranks, tmp_path / "ends", "nan_at()")
    if (strategy, ranks) in SYNCHRONOUS.values():
        assert re.findall(r"step (\d)", str(caught.value)) == [str(step)]
    result = train_threads(strategy, ranks, tmp_path / "on", "nan_at()", stop_on_nonfinite=False)
    assert sum(report.samples for report in result.reports) == 96
    assert result.final["weight"].isnan().all()


@pytest.mark.parametrize(
    "strategy",
    some([AllReduce(), BESIDE, SYNCHRONOUS["switch to server"][0]]),
    ids=["ring", "server", "switch"],
)
def test_dropout_repeats_with_its_seed(strategy: Any, tmp_path: Path) -> None:
    def trained(seed: int, name: str) -> str | None:
        run = settings(strategy, 2, images(6, "dropping", "float32"), seed=seed)
        return train_processes(run, tmp_path / name).learned.parameters_sha256

    assert trained(3, "one") == trained(3, "two") != trained(4, "other")


@pytest.mark.parametrize("seed", [0, 1])
def test_ranks_draw_from_streams_of_their_own(seed: int, tmp_path: Path) -> None:
    """The losses of an asynchronous worker are its own: here what it drew."""
    drawn = []
    for name in ("one", "two"):
        run = settings(ASYNCHRONOUS_BESIDE, 3, "drawing()", seed=seed, work="equal")
        train_processes(run, tmp_path / name)
        drawn.append([[line["loss"] for line in step_lines(tmp_path / name, r)] for r in range(3)])
    assert drawn[0] == drawn[1]
    flat = [value for rank in drawn[0] for value in rank]
    assert len(set(flat)) == len(flat)


@pytest.mark.parametrize(("allowed", "threads"), [("1", 1), ("3", 3), ("", os.cpu_count())])
def test_an_evaluation_has_all_cores_or_as_many_as_are_allowed(
    allowed: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", allowed)
    torch.set_num_threads(1)
    try:
        with all_cores():
            assert torch.get_num_threads() == threads
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
