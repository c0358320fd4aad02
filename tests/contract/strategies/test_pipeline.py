"""Pipelines on threads: their gradients are those of the unsplit model."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from tests.support.lab import some
from tests.support.pipeline_tasks import MADE, Awkward, layered
from tests.support.tasks_for_tests import Tied, initialised
from tests.support.threads import FreeCompute, run_ranks
from tests.support.training import State, Trained, settings, train_threads

from orchestra.data import Contiguous
from orchestra.errors import InputError
from orchestra.exchange import stage_of
from orchestra.optimizers.settings import Optimizer, ParameterGroup
from orchestra.settings import parse
from orchestra.strategies.all_reduce import AllReduce
from orchestra.strategies.base import ModelPart
from orchestra.strategies.pipeline import Pipeline
from orchestra.strategies.registry import STRATEGIES
from orchestra.strategies.single import Single
from orchestra.trainer.own_loop import OwnLoop
from orchestra.trainer.session import Session
from orchestra.worker.runtime import Runtime, Work

T = TypeVar("T")
SETTINGS: dict[str, Any] = {"optimizer": "SGD(lr=0.05, momentum=0.9)", "batch_size": 8}
AWKWARD = "tests.support.pipeline_tasks:awkward"


def pipeline(strategy: Pipeline, ranks: int, folder: Path, task: str, **training: Any) -> Trained:
    return train_threads(strategy, ranks, folder / "pipeline", task, **{**SETTINGS, **training})


def single(ranks: int, folder: Path, task: str, **training: Any) -> Trained:
    return train_threads(Single(), ranks, folder / "single", task, **{**SETTINGS, **training})


def assert_equal(a: State, b: State) -> None:
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert torch.equal(tensor, b[name]), name


def assert_close(a: State, b: State, tolerance: float = 1e-12) -> None:
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        torch.testing.assert_close(tensor, b[name], rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(
    ("ranks", "task"),
    some(
        [(2, "images(model='cnn')"), (3, "images(model='normalised')"), (3, "pairs"), (3, AWKWARD)]
    ),
)
def test_it_is_the_unsplit_model_on_the_same_micro_batches(
    ranks: int, task: str, schedule: Any, tmp_path: Path
) -> None:
    """Bit for bit: forward and backward add up the same numbers in the same order."""
    split = pipeline(Pipeline(None, 4, schedule), ranks, tmp_path, task)
    whole = single(ranks, tmp_path, task, accumulation=4)
    assert_equal(split.final, whole.final)
    losses = [line["loss"] for line in whole.lines(0)]
    for rank in range(ranks):
        assert [line["loss"] for line in split.lines(rank)] == pytest.approx(losses, rel=1e-6)


def test_micro_batches_change_nothing_but_the_last_bits(tmp_path: Path) -> None:
    task = "images(model='cnn', dtype='float64', samples=100)"
    split = pipeline(Pipeline(2, 5), 2, tmp_path, task)
    assert_close(split.final, single(2, tmp_path, task).final)


def test_activations_travel_in_bf16(tmp_path: Path) -> None:
    task = "images(model='mlp')"
    split = pipeline(Pipeline(2, 2), 2, tmp_path, task, precision="bf16")
    assert_equal(split.final, single(2, tmp_path, task, precision="bf16", accumulation=2).final)
    full = pipeline(Pipeline(2, 2), 2, tmp_path / "full", task)
    assert split.reports[0].bytes_sent < full.reports[0].bytes_sent


def test_micro_batches_come_on_top_of_accumulation(tmp_path: Path) -> None:
    task = "images(model='mlp')"
    split = pipeline(Pipeline(2, 2), 2, tmp_path, task, accumulation=2)
    assert_equal(split.final, single(2, tmp_path, task, accumulation=4).final)


@pytest.mark.parametrize("samples", [96, 100, 97])
def test_replicas_average_by_their_samples(samples: int, tmp_path: Path) -> None:
    """97: in the last step one of the two pipelines has no sample."""
    task = f"images(model='cnn', dtype='float64', samples={samples})"
    split = pipeline(Pipeline(2, 3), 4, tmp_path, task, bucket_megabytes=0.0001)
    assert_close(split.final, single(4, tmp_path, task).final)
    assert split.reports[0].samples + split.reports[2].samples == samples
    assert split.reports[1].samples == split.reports[3].samples == 0
    for stage in range(2):
        assert_equal(split.replicas[stage], split.replicas[stage + 2])


def test_a_pipeline_has_the_shard_of_one_worker(tmp_path: Path) -> None:
    task = "images(model='cnn', dtype='float64')"
    split = pipeline(Pipeline(2, 3), 4, tmp_path, task, sharding=Contiguous(), epochs=2)
    workers = {**SETTINGS, "batch_size": 16, "sharding": Contiguous(), "epochs": 2}
    alone = train_threads(AllReduce(), 2, tmp_path / "alone", task, **workers)
    assert_close(split.final, alone.final)


@pytest.mark.parametrize(("ranks", "cuts"), [(2, None), (3, ("again", "out")), (4, None)])
def test_tied_weights_stay_equal_and_get_both_gradients(
    ranks: int, cuts: tuple[str, ...] | None, tmp_path: Path
) -> None:
    task = "images(model='tied', dtype='float64')"
    optimizer = Optimizer(
        "SGD",
        {"lr": 0.05, "momentum": 0.9},
        (ParameterGroup("into.weight", arguments={"weight_decay": 0.5}),),
    )
    strategy = Pipeline(cuts=cuts) if cuts else Pipeline(2)
    split = pipeline(strategy, ranks, tmp_path, task, optimizer=optimizer)
    whole = single(ranks, tmp_path, task, optimizer=optimizer)
    assert_close(split.final, whole.final)
    tied = [dict(module.named_parameters())["into.weight"] for module in split.modules[:2]]
    assert torch.equal(*tied)


@pytest.mark.parametrize("task", ["images(model='tied', dtype='float64')", AWKWARD])
def test_clipping_is_by_the_norm_of_all_stages(task: str, tmp_path: Path) -> None:
    split = pipeline(Pipeline(3), 3, tmp_path, task, clip_norm=0.3)
    whole = single(3, tmp_path, task, clip_norm=0.3, accumulation=4)
    assert_close(split.final, whole.final, 1e-11)


def test_a_rank_holds_its_stage_and_nothing_else(tmp_path: Path) -> None:
    split = pipeline(Pipeline(), 3, tmp_path, AWKWARD, optimizer="Adam(lr=0.01)")
    sizes = [sum(p.numel() for p in module.parameters()) for module in split.modules]
    whole = single(1, tmp_path, AWKWARD, steps=1, epochs=None)
    assert sum(sizes) == sum(p.numel() for p in whole.modules[0].parameters())
    assert max(sizes) < sum(sizes)


def test_snapshots_are_of_the_whole_model(tmp_path: Path) -> None:
    split = pipeline(Pipeline(), 3, tmp_path, AWKWARD, snapshots=3, trace_steps=0)
    whole = single(3, tmp_path, AWKWARD, snapshots=3, accumulation=4)
    ours, theirs = split.reports[0].leader, whole.reports[0].leader
    assert ours is not None
    assert theirs is not None
    assert ours.parameters_sha256 == theirs.parameters_sha256
    assert [point.metrics for point in ours.curve] == [point.metrics for point in theirs.curve]
    assert [point.samples for point in ours.curve] == [point.samples for point in theirs.curve]
    assert len(ours.curve) == 3


def test_what_others_hold_is_freed(tmp_path: Path) -> None:
    MADE.clear()
    run = settings(Pipeline(), 2, "tests.support.pipeline_tasks:remembered", **SETTINGS)

    def program(runtime: Runtime) -> None:
        session = Session(runtime, run, Pipeline(), tmp_path)
        session.begin()
        session.train()
        session.finish()

    run_ranks(2, program)
    whole = sum(p.numel() for p in layered().parameters())
    assert sum(p.numel() for module in MADE[:2] for p in module.parameters()) == whole


@dataclass
class Meeting(FreeCompute):
    """Waits in the forward pass number `number` until somebody else is in one, too."""

    barrier: threading.Barrier | None = None
    number: int = 0

    def run(self, work: Work, function: Callable[[], T]) -> T:
        if work.kind == "forward":
            self.number -= 1
            if self.number == -1 and self.barrier is not None:
                self.barrier.wait(timeout=120)
        return function()


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_stages_compute_at_the_same_time(schedule: Any, tmp_path: Path) -> None:
    """Stage 0 is in micro-batch 1 while stage 1 is in micro-batch 0, or neither goes on."""
    barrier = threading.Barrier(2)
    strategy = Pipeline(2, 4, schedule)
    run = settings(strategy, 2, "images", steps=1, **SETTINGS)

    def program(runtime: Runtime) -> None:
        meeting = Meeting(barrier=barrier, number=1 - runtime.rank)
        session = Session(replace(runtime, compute=meeting), run, strategy, tmp_path)
        session.begin()
        session.train()
        session.finish()

    run_ranks(2, program)
    assert not barrier.broken


@pytest.mark.parametrize(
    ("strategy", "ranks", "task", "message"),
    [
        (Pipeline(4), 4, "images(model='tied')", "cannot be cut into 4 stages"),
        (Pipeline(2), 3, "images", "3 ranks are no whole number of pipelines of 2 stages"),
        (Pipeline(2), 2, "images(model='partial')", "torch.fx cannot trace the forward of Partial"),
        (Pipeline(cuts=("9",)), 2, "images", "no layer '9'; it has 0, 1, 2, 3"),
        (Pipeline(cuts=("3", "1")), 3, "images", "leave a stage without parameters to train"),
        (Pipeline(cuts=("0",)), 2, "images", "cannot be cut before '0'"),
        (Pipeline(2), 2, "tests.support.pipeline_tasks:lossy('twice')", "calls the model 2 times"),
        (Pipeline(2), 2, "tests.support.pipeline_tasks:lossy('never')", "calls the model 0 times"),
        (Pipeline(2), 2, "tests.support.pipeline_tasks:lossy('penalised')", "reads the parameters"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(
    strategy: Pipeline, ranks: int, task: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message) as caught:
        pipeline(strategy, ranks, tmp_path, task)
    assert "\n" not in str(caught.value)


def test_it_is_no_phase_of_a_switch() -> None:
    with pytest.raises(InputError, match="gives each rank a part of the model"):
        parse("Switch(AllReduce, Pipeline, when=AfterSteps(3))", STRATEGIES, where="here")


def test_cuts_count_the_stages() -> None:
    with pytest.raises(InputError, match="2 cuts make 3 stages, not 2"):
        Pipeline(2, cuts=("3", "5"))
    assert len(Pipeline(cuts=("3", "5")).roles(6).workers) == 6


def test_a_stage_has_the_names_of_the_whole() -> None:
    whole = initialised(Tied(), torch.float32)
    images = torch.randn(3, 1, 8, 8)
    stage = stage_of(whole, lambda model: model(images), 2, 1, ("again",))
    names = [name for name, _ in stage.named_parameters()]
    assert names == ["into.weight", "again.bias", "out.weight", "out.bias"]
    assert stage.holders["into.weight"] == (0, 1)


def test_one_rank_answers_for_each_tensor() -> None:
    images = torch.randn(3, 1, 8, 8)
    strategy = Pipeline(cuts=("again",))
    owned = []
    for rank in range(4):
        whole = initialised(Tied(), torch.float32)
        part = strategy.place(whole, lambda model: model(images), rank, 4)
        assert isinstance(part, ModelPart)
        owned.append(part.owned)
    assert owned[0] == {"into.weight", "into.bias"}
    assert owned[1] == {"again.bias", "out.weight", "out.bias"}
    assert owned[2] == owned[3] == set()


def test_constants_of_a_stage_are_not_saved() -> None:
    whole = initialised(Awkward(), torch.float64)
    images = torch.randn(3, 1, 8, 8, dtype=torch.float64)
    stages = [stage_of(whole, lambda model: model(images), 2, rank, None) for rank in range(2)]
    saved = {name for stage in stages for name in stage.state_dict()}
    assert {"scale", "middle.2.running_mean"} <= saved
    assert "shift" not in saved


def test_no_cut_before_a_change_in_place() -> None:
    whole = torch.nn.Sequential(
        torch.nn.Linear(4, 4), torch.nn.ReLU(inplace=True), torch.nn.Linear(4, 4)
    )
    inputs = torch.randn(2, 4)
    with pytest.raises(InputError, match="cannot be cut before '1'"):
        stage_of(whole, lambda model: model(inputs), 2, 0, ("1",))
    assert stage_of(whole, lambda model: model(inputs), 2, 1, ("2",)) is not None


def test_own_loops_are_refused() -> None:
    def program(runtime: Runtime) -> None:
        model = initialised(Tied(), torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(8, 64)))
        OwnLoop(runtime, model, optimizer, loader, Pipeline())

    with pytest.raises(InputError, match="needs orchestra's own loop"):
        run_ranks(2, program)
