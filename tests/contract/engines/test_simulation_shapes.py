"""A run of shapes tells the times, bytes, messages and steps of one with values, in no memory."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from examples.own_strategy import DynamicAveraging
from tests.support.lab import some
from tests.support.paths import ROOT
from tests.support.shapes import COSTLY, in_shapes, told
from tests.support.simulated import cluster
from tests.support.strategy_table import TABLE, Row
from tests.support.tasks_for_tests import ReadsValues, Signs
from tests.support.training import settings

from orchestra.cli.main import main
from orchestra.cluster.nodes import Overhead
from orchestra.engines.simulation.costs import OVERHEAD, assumed_costs
from orchestra.engines.simulation.simulate import Simulation, SimulationOutcome
from orchestra.engines.simulation.world import World
from orchestra.errors import InputError
from orchestra.settings import parse
from orchestra.strategies.registry import STRATEGIES
from orchestra.strategies.traits import Partition
from orchestra.trainer.program import train
from orchestra.trainer.settings import Run, Training
from orchestra.trainer.setup import ShapesRun
from orchestra.worker.runtime import SilentReporter


def check(run: Run, folder: Path, on: str, overhead: Overhead = COSTLY) -> None:
    """Times agree to 1e-9 of themselves, since clocks do not begin at the same time; the rest
    exactly. With values, nothing goes ahead of virtual time here."""
    run = replace(run, training=replace(run.training, trace_steps=0))
    with mock.patch.object(World, "_has_room", return_value=False):
        real = told(run, folder, on, overhead)
    shapes = told(in_shapes(run), folder, on, overhead)
    for one, other in zip(real.reports, shapes.reports, strict=True):
        assert other.train_seconds == pytest.approx(one.train_seconds, rel=1e-9)
        assert other.seconds == pytest.approx(one.seconds, rel=1e-9, abs=1e-12)
        for name in ("rank", "role", "steps", "samples", "bytes_sent", "bytes_estimated",
                     "staleness", "dropped", "switched_at_step", "peak_buffer_bytes"):  # fmt: skip
            assert getattr(other, name) == getattr(one, name), name
    assert (shapes.messages, shapes.sent) == (real.messages, real.sent)


def tells_of_time(row: Row) -> bool:
    traits = row.build().traits()
    return isinstance(row.strategy, str) and not (
        traits.reads_values
        or traits.partition is Partition.STAGED
        or "DynamicAveraging" in row.strategy
    )


def on_each(clusters: Sequence[str]) -> list[Any]:
    """Each row on each cluster. By default every second row is on one cluster, in turn:
    `test_buckets` has many of the others."""
    cases, usual = [], itertools.cycle([clusters[0], None, clusters[1], None])
    for row in filter(tells_of_time, TABLE):
        first = None if row.variant else next(usual)
        for on in clusters:
            marks = () if on == first else (pytest.mark.lab,)
            cases.append(pytest.param(row, on, id=f"{row.label}-{on}", marks=marks))
    return cases


def test_a_strategy_that_changes_its_own_gradient(tmp_path: Path) -> None:
    check(settings(Signs(2), 3, "images()", steps=4), tmp_path, "lan_1gbit")


@pytest.mark.parametrize(("row", "on"), on_each(["stragglers(nodes=4)", "one_host(cores=2)"]))
def test_every_strategy(row: Row, on: str, tmp_path: Path) -> None:
    """On unlike nodes whose durations vary, and where all share two cores and a loopback."""
    ranks = 4 if 4 in row.sizes else row.sizes[-1]
    check(settings(row.build(), ranks, "images()", steps=14, seed=3), tmp_path, on)


CLUSTERS = ["lan_1gbit(nodes=5)", "lan_1gbit(nodes=2)", "two_sites(nodes=5)", "wifi(nodes=5)",
            "containers_10mbit(nodes=5)", "stragglers(nodes=5)", "infiniband(nodes=5)"]  # fmt: skip
IN_BUCKETS = [
    *some([("AllReduce()", on, COSTLY) for on in CLUSTERS], every=3),
    ("AllReduce()", CLUSTERS[0], OVERHEAD),
    *(
        pytest.param("AllReduce()", on, OVERHEAD, marks=pytest.mark.lab)
        for on in CLUSTERS[1:]
    ),
    *some([
        (strategy, CLUSTERS[-2], COSTLY)
        for strategy in (
            "AllReduce('tree')", "AllReduce('native')", "AllReduce(shard='optimizer')",
            "AllReduce(shard='gradients')",
            "AllReduce(backup=1)", "LocalSGD(3, fragments=2, overlap=1)",
            "Switch(AllReduce(), LocalSGD(2), when=Straggler())",
            "Switch(AllReduce(), ParameterServer(consistency='asynchronous'), when=AfterSteps(4))",
        )
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("strategy", "on", "overhead"), some(IN_BUCKETS))
def test_buckets(strategy: str, on: str, overhead: Overhead, tmp_path: Path) -> None:
    """Gradients leave in several buckets, while backward goes on."""
    run = settings(
        parse(strategy, STRATEGIES, where="test"), 5, "images(model='cnn')",
        steps=8, bucket_megabytes=0.0005, optimizer="Adam(lr=0.01)",
    )  # fmt: skip
    check(run, tmp_path, on, overhead)


def test_units_are_gathered_in_forward_and_in_backward(tmp_path: Path) -> None:
    """Each layer of this model is a unit, but for the last two, which are one."""
    strategy = parse("AllReduce(shard='parameters')", STRATEGIES, where="test")
    run = settings(
        strategy, 3, "images(model='deep')", steps=6, bucket_megabytes=0.001,
        optimizer="Adam(lr=0.01)",
    )  # fmt: skip
    check(run, tmp_path, "stragglers(nodes=3)")


@pytest.mark.parametrize(
    ("algorithm", "ranks", "on"),
    [
        pytest.param("'halving_doubling'", 8, "lan_1gbit(nodes=8)", marks=pytest.mark.lab),
        ("'butterfly'", 8, "lan_1gbit(nodes=8)"),
        pytest.param(
            "'hierarchical', ranks_per_node=2", 8, "lan_1gbit(nodes=8)", marks=pytest.mark.lab
        ),
        ("'halving_doubling'", 6, "infiniband(nodes=8)"),  # in the first steps, messages meet
        ("'ring'", 6, "infiniband(nodes=8)"),
    ],
)
def test_large_buckets(algorithm: str, ranks: int, on: str, tmp_path: Path) -> None:
    """Where computing takes longer than what separates the ranks."""
    built = parse(f"AllReduce({algorithm})", STRATEGIES, where="test")
    run = settings(built, ranks, "images()", steps=6, seed=3, bucket_megabytes=0.3)
    task = "synthetic(400_000, tensors=8, sample_flops=1e8)"
    check(replace(run, task=task), tmp_path, on)


@pytest.mark.parametrize("strategy", ["AllReduce()", "ParameterServer()", "Gossip()"])
def test_buffers_and_a_last_batch_that_is_not_for_all(strategy: str, tmp_path: Path) -> None:
    built = parse(strategy, STRATEGIES, where="test")
    task = "images(model='normalised', samples=50)"
    run = settings(built, 3, task, epochs=2, batch_size=7)
    check(run, tmp_path, "lan_1gbit(nodes=3)")


# What needs values is refused


@pytest.mark.parametrize(
    ("strategy", "training", "message"),
    [
        ("Switch(AllReduce(), LocalSGD(), when=LossStable())", {}, "decides by losses"),
        ("Switch(AllReduce(), LocalSGD(), when=NoiseScale())", {}, "decides by losses or gradie"),
        ("Switch(AllReduce(), LocalSGD(), when=AfterSteps(5) & LossStable())", {}, "name a rule"),
        ("Pipeline()", {}, "Pipeline"),
        ("AllReduce()", {"clip_norm": 1.0}, "clip_norm: needs values"),
        ("AllReduce()", {"checkpoint_every": 5}, "checkpoint_every: needs values"),
    ],
)
def test_what_reads_values_is_refused(
    strategy: str, training: dict[str, Any], message: str
) -> None:
    built = parse(strategy, STRATEGIES, where="test")
    with pytest.raises(InputError, match=message) as caught:
        in_shapes(settings(built, 4, "images()", steps=3, **training))
    assert "\n" not in str(caught.value)
    assert "set tensors to real" in str(caught.value)


def test_a_strategy_of_the_users_that_reads_values_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="decides by losses"):
        in_shapes(settings(DynamicAveraging(0.1), 3, "images()", steps=9))
    run = in_shapes(settings(ReadsValues(0.1), 3, "images()", steps=9))
    outcome: SimulationOutcome = Simulation(
        cluster("lan_1gbit"), 3, assumed_costs(run), OVERHEAD, SilentReporter(), values=False,
    ).run(lambda runtime: train(runtime, (run, tmp_path)))  # fmt: skip
    assert outcome.bad_input is not None
    assert "reads the value of a tensor" in outcome.bad_input
    assert "\n" not in outcome.bad_input


def test_the_command_line_refuses_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment = tmp_path / "loss.yaml"
    experiment.write_text(
        "task: digits\nengine: simulation\ntensors: shapes\n"
        "strategies: {switch: 'Switch(AllReduce(), LocalSGD())'}\n"
    )
    assert main(["train", str(experiment), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "set tensors to real" in error


# Memory

GROWTH = """
import resource
from tests.support.step_times import Figures, Timed

def peak(elements):
    figures = Figures(gradient=1.0, tensors=150)
    for strategy in ("AllReduce()", "ParameterServer()"):
        Timed(strategy, 8, elements, figures, "lan_1gbit(nodes=9)").reports(4)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

before = peak(3000)
print(peak(100_000_000) - before)
"""


def test_a_large_model_takes_no_memory() -> None:
    """100 million parameters are 400 MB, and eight workers have one each."""
    done = subprocess.run(
        [sys.executable, "-c", GROWTH], capture_output=True, text=True, check=True,
        cwd=ROOT,
    )  # fmt: skip
    assert float(done.stdout) < 40


def test_no_tensor_of_the_model_has_memory() -> None:
    training = Training(engine="simulation", tensors="shapes", steps=1)
    built = parse("AllReduce()", STRATEGIES, where="test")
    shared = ShapesRun(Run("test", "synthetic(100_000_000)", built, 0, training)).shapes
    tensors = [shared.parameters, shared.storage, *shared.module.parameters(), *shared.views]
    assert sum(tensor.nbytes for tensor in tensors) >= 1.2e9
    assert all(tensor.is_meta for tensor in tensors)
