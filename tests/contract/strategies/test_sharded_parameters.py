"""ZeRO-2 and 3: gradients and parameters that are whole only while they are used."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from tests.support.lab import in_lab, some
from tests.support.simulated import simulated
from tests.support.threads import run_ranks
from tests.support.training import State, equal, member_of, settings, step_lines, train_processes
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from orchestra import AllReduce, ParameterServer
from orchestra.errors import InputError
from orchestra.strategies.base import Strategy
from orchestra.strategies.sharded_all_reduce import SHARDS
from orchestra.strategies.switch import Switch
from orchestra.strategies.switch_rules import AfterSteps
from orchestra.trainer.own_loop import OwnLoop
from orchestra.trainer.session import Session
from orchestra.trainer.settings import MEASURED
from orchestra.trainer.setup import kept_bytes, sizes_of
from orchestra.worker.layout import ShardUnit, UnitMemory
from orchestra.worker.runtime import Runtime

LEVELS = ["gradients", "parameters"]
ADAM = "Adam(lr=0.01)"
MOMENTUM = "SGD(lr=0.05, momentum=0.9, weight_decay=0.01)"
SMALL_UNITS: dict[str, Any] = {"bucket_megabytes": 0.001}


def trained(shard: Any, ranks: int, folder: Path, **training: Any) -> State:
    """The final parameters of a training on threads, with real sockets between them."""
    return trained_by(AllReduce(shard=shard), ranks, folder, **training)


def trained_by(strategy: Strategy, ranks: int, folder: Path, **training: Any) -> State:
    task = training.pop("task", f"images(samples={ranks * 64}, model='deep')")
    run = settings(strategy, ranks, task, **{"optimizer": ADAM, **SMALL_UNITS, **training})
    folder.mkdir(parents=True, exist_ok=True)

    def program(runtime: Runtime) -> None:
        session = Session(runtime, run, strategy, folder)
        session.begin()
        session.train()
        session.finish()

    run_ranks(ranks, program)
    return load_file(folder / "parameters.safetensors")


def check(ranks: int, folder: Path, **training: Any) -> None:
    """Bit for bit the same as with whole gradients and parameters, sums being in one order.

    Which that of plain all-reduce is with two ranks; with more it depends on how units are cut.
    """
    whole = "nothing" if ranks == 2 else "optimizer"
    expected = trained(whole, ranks, folder / whole, **training)
    for level in LEVELS:
        assert equal(trained(level, ranks, folder / level, **training), expected), level


@pytest.mark.parametrize("ranks", some([2, 3]))
@pytest.mark.parametrize("optimizer", [ADAM, MOMENTUM])
def test_they_train_as_whole_ones_do(ranks: int, optimizer: str, tmp_path: Path) -> None:
    check(ranks, tmp_path, optimizer=optimizer)


@pytest.mark.parametrize(
    ("strategy", "told"),
    [
        (AllReduce(shard="parameters"), 1),
        *in_lab([(ParameterServer(placement="beside"), 1), (AllReduce(shard="gradients"), 0)]),
    ],
)
def test_a_compiled_model_that_runs_eagerly_is_told_once(
    strategy: Strategy, told: int, tmp_path: Path
) -> None:
    run = settings(strategy, 2, "images(model='compiled')", steps=4, **SMALL_UNITS)
    notices = train_processes(run, tmp_path).ending.notices
    assert [each.startswith("torch.compile has no effect") for each in notices] == [True] * told


@pytest.mark.parametrize("model", some(["cnn", "tied", "normalised"]))
def test_awkward_models(model: str, tmp_path: Path) -> None:
    """A weight and its bias in different units, a weight that is used twice, buffers."""
    check(2, tmp_path, task=f"images(model={model!r})")


@pytest.mark.parametrize(
    "training",
    some(
        [
            {"clip_norm": 0.05},
            {"accumulation": 3},
            {"accumulation": 8, "task": "images(samples=92, model='deep')"},
            {"optimizer": "Adafactor(lr=0.05)"},
        ]
    ),
    ids=["clipped", "accumulated", "unequal micro-batches", "whole tensors"],
)
def test_settings_of_the_training(training: dict[str, Any], tmp_path: Path) -> None:
    check(3, tmp_path, **training)


def test_a_worker_without_samples_takes_part(tmp_path: Path) -> None:
    """The last step is of one sample."""
    check(3, tmp_path, task="images(samples=73, model='deep')")


def test_a_model_whose_workers_use_other_parameters(tmp_path: Path) -> None:
    """Gradients may differ in that; gathers would wait for each other."""
    task = "images(model='partial')"
    whole = trained("nothing", 2, tmp_path / "whole", task=task)
    assert equal(trained("gradients", 2, tmp_path / "gradients", task=task), whole)
    with pytest.raises(InputError, match=r"in the same order on all workers.*shard='gradients'"):
        trained("parameters", 2, tmp_path / "parameters", task=task)


@pytest.mark.parametrize("level", LEVELS)
def test_processes_and_the_simulation_end_with_the_same_bits(level: Any, tmp_path: Path) -> None:
    def run(shard: Any) -> Any:
        return settings(
            AllReduce(shard=shard), 2, "images(model='deep')", optimizer=ADAM, snapshots=2,
            **SMALL_UNITS,
        )  # fmt: skip

    records = [
        train_processes(run(level), tmp_path / "processes"),
        simulated(run(level), tmp_path / "simulation"),
        train_processes(run("nothing"), tmp_path / "whole"),
    ]
    assert len({record.learned.parameters_sha256 for record in records}) == 1
    curves = [(record.folder / "curve.jsonl").read_text() for record in records]
    losses = [[line.split('"loss"')[1] for line in curve.splitlines()] for curve in curves]
    assert losses[0] == losses[1] == losses[2]


@pytest.mark.parametrize("level", LEVELS)
def test_they_resume_bit_for_bit(level: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"checkpoint_every": 5, "optimizer": MOMENTUM}
    first = trained(level, 3, tmp_path, **options)
    before = step_lines(tmp_path, 0)
    resumed = trained(level, 3, tmp_path, **options)
    assert step_lines(tmp_path, 0)[:5] == before[:5]
    assert step_lines(tmp_path, 0)[5:] != before[5:]
    assert equal(resumed, first)


@pytest.mark.parametrize(
    ("level", "training", "words"),
    [
        ("parameters", {"precision": "bf16"}, "precision: bf16 keeps a copy of every parameter"),
        ("parameters", {"shares": MEASURED}, "shares: measured takes gradients of the whole model"),
        ("gradients", {"overlap": False}, "set overlap to true, or shard='optimizer'"),
        ("parameters", {"overlap": False}, "set overlap to true, or shard='optimizer'"),
    ],
)
def test_settings_that_do_not_go_with_them_are_refused(
    level: Any, training: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=words):
        trained(level, 2, tmp_path, **training)


@pytest.mark.parametrize("level", LEVELS)
def test_a_loop_of_ones_own_has_whole_gradients(level: Any) -> None:
    def program(runtime: Runtime) -> None:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(TensorDataset(torch.zeros(4, 2)))
        OwnLoop(runtime, model, optimizer, loader, AllReduce(shard=level))

    with pytest.raises(InputError, match=r"needs orchestra's own loop.*set shard='optimizer'"):
        run_ranks(2, program)


@pytest.mark.parametrize("first", [AllReduce(), AllReduce(shard="gradients")])
def test_gradients_are_sharded_in_a_phase(first: AllReduce, tmp_path: Path) -> None:
    """Before it, or after it, they are whole."""
    then = AllReduce() if first.shard == "gradients" else AllReduce(shard="gradients")
    moments: Any = "kept" if first.shard == "nothing" else "reset"
    ends = [
        trained_by(Switch(a, b, when=AfterSteps(3), moments=moments), 2, tmp_path / str(number))
        for number, (a, b) in enumerate([(first, then), (AllReduce(), AllReduce())])
    ]
    assert equal(*ends)


# Memory


class Held(UnitMemory):
    """Counts the bytes that units of a thread have, and the most that they had."""

    now: ClassVar[dict[int, int]] = {}
    most: ClassVar[dict[int, int]] = {}

    def hold(self, unit: ShardUnit) -> Tensor:
        self._count(unit, +1, when=False)
        return super().hold(unit)

    def free(self, unit: ShardUnit) -> None:
        self._count(unit, -1, when=True)
        super().free(unit)

    def _count(self, unit: ShardUnit, sign: int, *, when: bool) -> None:
        thread = threading.get_ident()
        if self._held[unit.number] is when:
            self.now[thread] = self.now.get(thread, 0) + sign * self.parts[unit.number].nbytes
        self.most[thread] = max(self.most.get(thread, 0), self.now.get(thread, 0))


def kept(shard: Any, ranks: int, folder: Path) -> tuple[int, int]:
    """The most bytes of tensors that a rank kept from step to step and in one, and by formula."""
    strategy = AllReduce(shard=shard)
    run = settings(
        strategy, ranks, "images(model='large')", steps=3, optimizer=ADAM, bucket_megabytes=0.15,
        snapshots=0,
    )  # fmt: skip
    folder.mkdir()
    Held.now.clear()
    Held.most.clear()

    def program(runtime: Runtime) -> tuple[int, int]:
        session = Session(runtime, run, strategy, folder)
        session.begin()
        session.train()
        worker, state = session.worker, member_of(session)
        moments = [v for each in state.optimizer.state.values() for v in each.values()]
        shards = getattr(state, "shards", None)
        parts = [gradient for _, _, gradient in shards._parts] if shards else []
        tensors = [worker.parameters, *(parts or [worker.gradients.vector]), *moments]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
        own = sum(storage.nbytes() for storage in storages.values())
        formula = kept_bytes(
            run, worker.rank, sizes_of(worker.module, worker.optimizer), worker.layout
        )
        session.finish()
        return own + Held.most.get(threading.get_ident(), 0), formula.total()

    with (
        mock.patch("orchestra.worker.gradients.UnitMemory", Held),
        mock.patch("orchestra.worker.gathering.UnitMemory", Held),
    ):
        found = run_ranks(ranks, program)
    return max(size for size, _ in found), max(size for _, size in found)


def test_a_rank_keeps_what_the_formula_says(tmp_path: Path) -> None:
    """A model of 2 MB in 13 units; of whole ones four times that, with Adam's moments."""
    found = {
        (level, ranks): kept(level, ranks, tmp_path / f"{level} {ranks}")
        for level in SHARDS
        for ranks in (2, 4)
    }
    for case, (measured, formula) in found.items():
        assert measured == pytest.approx(formula, rel=0.02), case
    whole = found["nothing", 2][0]
    for ranks in (2, 4):
        sizes = [found[level, ranks][0] for level in SHARDS]
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[-1] < whole * (1 / ranks + 0.1)  # and buckets in use


def test_a_model_that_fits_no_node_trains_in_shards(tmp_path: Path) -> None:
    """In the simulation; the whole takes 8 MB, with gradients and moments in shards 5.3 MB."""
    node = "{cores: 1, speed: 1, memory: 5 MB, link: {bandwidth: 1 Gbit/s, latency: 50 us}}"
    cluster = tmp_path / "cluster.yaml"
    loopback = "all_nodes: {loopback: {bandwidth: 3 GB/s, latency: 15 us}}"
    cluster.write_text(f"{loopback}\nnodes:\n  n0: {node}\n  n1: {node}\nranks: spread\n")

    def train(shard: Any) -> Any:
        run = settings(
            AllReduce(shard=shard), 2, "images(model='large')", steps=2, optimizer=ADAM,
            bucket_megabytes=0.15, snapshots=0,
        )  # fmt: skip
        return simulated(run, tmp_path / shard, str(cluster))

    for level in SHARDS[:-1]:
        with pytest.raises(InputError, match=r"memory: n0 has 5 MB, but rank 0 would need"):
            train(level)
    record = train("parameters")
    assert record.ending.status == "completed"
    memory = record.machine.by_rank[0].memory
    assert set(memory) == {"parameters", "gradients", "state of Adam", "buckets in use"}
    assert sum(memory.values()) < 5e6
