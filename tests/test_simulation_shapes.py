"""A run of shapes tells the times, bytes, messages and steps of one with values, in no memory."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from examples.own_strategy import DynamicAveraging
from tests.simulated import cluster
from tests.tasks_for_tests import ReadsValues, Signs
from tests.test_contract import TABLE, Row
from tests.training import settings

from orchestra.cli.main import main
from orchestra.cluster.nodes import Line, Overhead
from orchestra.engines.simulation.costs import OVERHEAD, assumed_costs
from orchestra.engines.simulation.simulate import Simulation, SimulationOutcome
from orchestra.engines.simulation.transport import SimulatedTransport
from orchestra.engines.simulation.world import World
from orchestra.errors import InputError
from orchestra.records.report import RankReport
from orchestra.settings import parse
from orchestra.strategies.registry import STRATEGIES
from orchestra.strategies.traits import Partition
from orchestra.trainer.program import train
from orchestra.trainer.recorder import Recorder
from orchestra.trainer.settings import Run, Training
from orchestra.trainer.setup import ShapesRun
from orchestra.worker.runtime import SilentReporter

COSTLY = Overhead(
    send=Line(20e-6, 2e-10),
    receive=Line(15e-6, 1e-10),
    add=2e-10,
    buffer=1 << 12,
    wire=1.06,
    local=Line(8e-6, 1e-10),
    cold=30e-6,
    collective=7e-6,
    handling=5e-6,
)
"""As calibrations are: every figure counts."""


@dataclass(frozen=True)
class Told:
    """What a run told: of each rank, and of its messages while it trained.

    `messages`: of all flows of each rank, sent and received, those to itself included.
    `sent`: by rank, the bytes to each other rank.
    """

    reports: tuple[RankReport, ...]
    messages: dict[int, tuple[int, ...]]
    sent: tuple[Mapping[int, int], ...]


@contextmanager
def counted_messages() -> Iterator[dict[int, list[tuple[int, int]]]]:
    """Of each rank, sent and received, whenever its stopwatch is started or stopped."""
    seen: dict[int, list[tuple[int, int]]] = defaultdict(list)
    transports: dict[int, list[SimulatedTransport]] = defaultdict(list)
    make: Callable[..., None] = SimulatedTransport.__init__

    def made(transport: SimulatedTransport, *arguments: Any) -> None:
        make(transport, *arguments)
        transports[transport.rank].append(transport)

    def noting(name: str) -> Any:
        original: Callable[[Recorder], None] = getattr(Recorder, name)

        def note(recorder: Recorder) -> None:
            original(recorder)
            rank = recorder._worker.rank
            all_of_it = [transport.traffic for transport in transports[rank]]
            sent = sum(traffic.messages_sent for traffic in all_of_it)
            seen[rank].append((sent, sum(traffic.messages_received for traffic in all_of_it)))

        return mock.patch.object(Recorder, name, note)

    with (
        noting("resume"),
        noting("pause"),
        mock.patch.object(SimulatedTransport, "__init__", made),
    ):
        yield seen


def told(run: Run, folder: Path, on: str, overhead: Overhead) -> Told:
    training = run.training
    with counted_messages() as seen:
        outcome = Simulation(
            cluster(on),
            len(run.strategy.roles(training.ranks).shares),
            assumed_costs(run),
            overhead,
            SilentReporter(),
            seed_number=run.seed,
            values=training.tensors == "real",
        ).run(lambda runtime: train(runtime, (run, folder)))
    assert (outcome.failure, outcome.bad_input) == (None, None)
    messages = {
        rank: tuple(after - before for before, after in zip(*marks, strict=True))
        for rank, marks in seen.items()
    }
    return Told(outcome.results, messages, outcome.sent)


def in_shapes(run: Run) -> Run:
    training = replace(run.training, engine="simulation", tensors="shapes")
    return replace(run, training=training)


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
    """Each row on each cluster; by default on one, in turn, and the rest in the matrix."""
    cases, usual = [], itertools.cycle(clusters)
    for row in filter(tells_of_time, TABLE):
        first = None if row.variant else next(usual)
        for on in clusters:
            marks = () if on == first else (pytest.mark.matrix,)
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
    *(("AllReduce()", on, COSTLY) for on in CLUSTERS),
    ("AllReduce()", CLUSTERS[0], OVERHEAD),
    *(
        pytest.param("AllReduce()", on, OVERHEAD, marks=pytest.mark.matrix)
        for on in CLUSTERS[1:]
    ),
    *(
        (strategy, CLUSTERS[-2], COSTLY)
        for strategy in (
            "AllReduce('tree')", "AllReduce('native')", "AllReduce(shard='optimizer')",
            "AllReduce(shard='gradients')",
            "AllReduce(backup=1)", "LocalSGD(3, fragments=2, overlap=1)",
            "Switch(AllReduce(), LocalSGD(2), when=Straggler())",
            "Switch(AllReduce(), ParameterServer(consistency='asynchronous'), when=AfterSteps(4))",
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("strategy", "on", "overhead"), IN_BUCKETS)
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
        ("'halving_doubling'", 8, "lan_1gbit(nodes=8)"),
        ("'butterfly'", 8, "lan_1gbit(nodes=8)"),
        ("'hierarchical', ranks_per_node=2", 8, "lan_1gbit(nodes=8)"),
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
from tests.step_times import Figures, Timed

def peak(elements):
    figures = Figures(gradient=1.0, tensors=150)
    for strategy in ("AllReduce()", "ParameterServer()", "Gossip()", "LocalSGD(2)"):
        Timed(strategy, 8, elements, figures, "lan_1gbit(nodes=9)").reports(4)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

before = peak(3000)
print(peak(100_000_000) - before)
"""


def test_a_large_model_takes_no_memory() -> None:
    """100 million parameters are 400 MB, and eight workers have one each."""
    done = subprocess.run(
        [sys.executable, "-c", GROWTH], capture_output=True, text=True, check=True,
        cwd=Path(__file__).parents[1],
    )  # fmt: skip
    assert float(done.stdout) < 40


def test_no_tensor_of_the_model_has_memory() -> None:
    training = Training(engine="simulation", tensors="shapes", steps=1)
    built = parse("AllReduce()", STRATEGIES, where="test")
    shared = ShapesRun(Run("test", "synthetic(100_000_000)", built, 0, training)).shapes
    tensors = [shared.parameters, shared.storage, *shared.module.parameters(), *shared.views]
    assert sum(tensor.nbytes for tensor in tensors) >= 1.2e9
    assert all(tensor.is_meta for tensor in tensors)
