"""One strategy first, another later: when it switches, and what goes over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tasks_for_tests import Weight
from tests.threads import run_ranks
from tests.training import Case, Trained, distance, equal, single_process, train_threads

from orchestra.errors import InputError
from orchestra.exchange import hand_over_moments
from orchestra.optimizers.spec import OptimizerSpec
from orchestra.strategies.all_reduce import AllReduce
from orchestra.strategies.parameter_server import ParameterServer
from orchestra.strategies.single import Single
from orchestra.strategies.switch import Switch
from orchestra.strategies.switch_rules import AfterSteps, LossStable
from orchestra.worker.runtime import Runtime
from orchestra.worker.worker import Worker

MOMENTUM = "SGD(lr=0.05, momentum=0.9, weight_decay=0.01)"
ADAM = "Adam(lr=0.01)"
ASYNCHRONOUS = ParameterServer(consistency="asynchronous")
BESIDE = ParameterServer(placement="beside")


def switched_at(result: Trained) -> set[int | None]:
    return {report.switched_at_step for report in result.reports}


def test_a_steadily_falling_loss_never_switches(tmp_path: Path) -> None:
    strategy = Switch(AllReduce(), ASYNCHRONOUS, when=LossStable())
    result = train_threads(strategy, 2, tmp_path, "scripted(ratio=0.98)")
    assert switched_at(result) == {None}
    assert [len(module.seen) for module in result.modules] == [25, 25]
    assert all(not report.staleness for report in result.reports)


@pytest.mark.parametrize(
    ("rule", "plateau", "step"),
    [
        (LossStable(), 12, 17),  # six equal losses: those of the steps 12 to 17
        (LossStable(source="max"), 12, 17),
        (LossStable(threshold=0.021), 12, 16),  # one of five changes may be 0.1
        (LossStable(threshold=0.021, floor=10.0), 12, 6),  # changes are relative to the floor
        (LossStable(window=2), 7, 8),
        (LossStable(window=3, every=3), 9, 18),  # three equal means: steps 10 to 18
        (LossStable(window=2, every="epoch"), 9, 24),  # epochs of 6 steps: 13 to 18, 19 to 24
    ],
)
def test_a_plateau_switches_at_the_step_that_the_rule_gives(
    rule: LossStable, plateau: int, step: int, tmp_path: Path
) -> None:
    strategy = Switch(AllReduce(), ASYNCHRONOUS, when=rule)
    task = f"scripted(plateau={plateau}, samples=144)"
    result = train_threads(strategy, 3, tmp_path, task, epochs=6)
    assert switched_at(result) == {step}
    staleness = [int(value) for report in result.reports for value in report.staleness]
    assert max(staleness) > 0
    before = [line for line in result.lines(0) if "staleness" not in line]
    assert len(before) == step
    assert len(result.lines(2)) == step  # from there on it serves


@pytest.mark.parametrize("then", [ASYNCHRONOUS, BESIDE, ParameterServer(servers=2)])
@pytest.mark.parametrize("steps", [1, 9])
def test_parameters_are_continuous(then: Any, steps: int, tmp_path: Path) -> None:
    """Switching at the very end leaves the bits of the first phase alone."""
    task = f"images(samples={steps * 4 * 8})"
    alone = train_threads(AllReduce(), 4, tmp_path / "alone", task, optimizer=MOMENTUM)
    strategy = Switch(AllReduce(), then, when=AfterSteps(steps))
    result = train_threads(strategy, 4, tmp_path / "switch", task, optimizer=MOMENTUM)
    assert switched_at(result) == {steps}
    for state in (result.final, *result.replicas):
        assert equal(state, alone.final)


@pytest.mark.parametrize("optimizer", [MOMENTUM, ADAM])
@pytest.mark.parametrize("moments", ["kept", "averaged"])
@pytest.mark.parametrize(
    "phases",
    [
        (AllReduce(), BESIDE),
        (AllReduce(), ParameterServer(placement="beside", servers=2)),
        (AllReduce("parallel"), AllReduce("ring")),
        (ParameterServer(placement="beside", returns="gradients"), AllReduce()),
    ],
    ids=["server", "servers", "all-reduce", "from gradients"],
)
def test_with_its_moments_a_synchronous_run_goes_on_as_if_nothing_was(
    phases: tuple[Any, Any], moments: Any, optimizer: str, tmp_path: Path
) -> None:
    task = "images(samples=240)"
    options: dict[str, Any] = {"optimizer": optimizer, "snapshots": 5}
    alone = train_threads(AllReduce(), 2, tmp_path / "alone", task, **options)
    strategy = Switch(*phases, when=AfterSteps(7), moments=moments)
    result = train_threads(strategy, 2, tmp_path / "switch", task, **options)
    assert equal(result.final, alone.final)
    assert curve(result) == curve(alone)


def curve(result: Trained) -> list[tuple[int, dict[str, float]]]:
    chief = next(report.chief for report in result.reports if report.chief is not None)
    return [(point.samples, point.metrics) for point in chief.curve]


@pytest.mark.parametrize("first", [ParameterServer(), ParameterServer(returns="gradients")])
@pytest.mark.parametrize("then", [AllReduce(), ASYNCHRONOUS])
def test_a_former_server_has_no_moments_to_keep(first: Any, then: Any, tmp_path: Path) -> None:
    for moments in ("kept", "averaged"):
        with pytest.raises(InputError, match=f"cannot be {moments}: set moments='reset'"):
            Switch(first, then, moments=moments).roles(3)
    strategy = Switch(first, then, when=AfterSteps(7), moments="reset")
    result = train_threads(strategy, 3, tmp_path, "images(samples=240)", optimizer=MOMENTUM)
    assert all(equal(replica, result.final) for replica in result.replicas)


@pytest.mark.parametrize("optimizer", [MOMENTUM, ADAM])
def test_moments_can_be_reset(optimizer: str, tmp_path: Path) -> None:
    task = "images(samples=240, dtype='float64')"
    strategy = Switch(AllReduce(), BESIDE, when=AfterSteps(7), moments="reset")
    result = train_threads(strategy, 2, tmp_path, task, optimizer=optimizer)
    assert distance(result.final, single_process(Case(task, optimizer, 16, reset_after=7))) < 1e-9
    assert distance(result.final, single_process(Case(task, optimizer, 16))) > 1e-6


def test_the_learning_rate_can_be_divided(tmp_path: Path) -> None:
    """By the number of workers of the second phase: here two of three ranks."""
    task = "images(samples=240, dtype='float64')"
    strategy = Switch(AllReduce(), ASYNCHRONOUS, when=AfterSteps(7), learning_rate="divided")
    result = train_threads(strategy, 3, tmp_path / "roles", task, optimizer=MOMENTUM)
    rates = [line["rates"] for line in result.lines(0)]
    assert rates[:7] == [[0.05]] * 7
    assert rates[7:]
    assert all(rate == [0.025] for rate in rates[7:])
    strategy = Switch(AllReduce(), BESIDE, when=AfterSteps(7), learning_rate="divided")
    result = train_threads(strategy, 2, tmp_path / "beside", task, optimizer=MOMENTUM)
    assert distance(result.final, single_process(Case(task, MOMENTUM, 16, divide_after=7))) < 1e-9


def test_averaged_moments_are_the_mean_over_the_workers() -> None:
    def program(runtime: Runtime) -> tuple[float, float]:
        spec = OptimizerSpec(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})
        spec = OptimizerSpec(spec.cls, spec.arguments, ((frozenset({"weight"}), {}),))
        worker = Worker(runtime, Weight(), spec)
        optimizer = worker.local_optimizer()
        state = optimizer.state[worker.gradients.parameters[0]]
        state["momentum_buffer"] = torch.full((130,), float(runtime.rank), dtype=torch.float64)
        hand_over_moments(worker, optimizer, averaged=True)
        averaged = worker.inherited["weight"]["momentum_buffer"]
        hand_over_moments(worker, optimizer, averaged=False)
        return float(averaged.mean()), float(worker.inherited["weight"]["momentum_buffer"].mean())

    assert run_ranks(4, program) == [(1.5, 0.0), (1.5, 1.0), (1.5, 2.0), (1.5, 3.0)]


@pytest.mark.parametrize(
    ("first", "then", "ranks", "serving"),
    [
        (AllReduce(), ASYNCHRONOUS, 4, (set(), {3})),
        (AllReduce(), ParameterServer(servers=2), 5, (set(), {3, 4})),
        (ParameterServer(servers=2), AllReduce(), 4, ({2, 3}, set())),
        (ParameterServer(), ASYNCHRONOUS, 4, ({3}, {3})),
        (Switch(AllReduce(), BESIDE, when=AfterSteps(2)), ASYNCHRONOUS, 3, (set(), {2})),
    ],
    ids=["worker to server", "two servers", "server to worker", "server stays", "three phases"],
)
def test_roles_change_and_every_sample_is_used_once(
    first: Any, then: Any, ranks: int, serving: tuple[set[int], set[int]], tmp_path: Path
) -> None:
    strategy = Switch(first, then, when=AfterSteps(5), moments="reset")
    result = train_threads(strategy, ranks, tmp_path, "scripted(samples=403)")
    seen = [sample for module in result.modules for batch in module.seen for sample in batch]
    assert sorted(seen) == list(range(403))
    assert sum(report.samples for report in result.reports) == 403
    workers_before = {rank for rank in range(ranks) if result.modules[rank].seen} - serving[0]
    assert workers_before >= set(range(ranks)) - serving[0]
    for rank in range(ranks):
        steps = 5 * (rank not in serving[0])
        assert (len(result.modules[rank].seen) == steps) == (rank in serving[1])


@pytest.mark.parametrize("left", [1, 2, 11])
@pytest.mark.parametrize("when", [2, 3, 99])
@pytest.mark.parametrize("first", [AllReduce(), ParameterServer()], ids=["ring", "server"])
def test_the_last_batch_may_be_smaller_in_either_phase(
    first: Any, when: int, left: int, tmp_path: Path
) -> None:
    strategy = Switch(first, ASYNCHRONOUS, when=AfterSteps(when), moments="reset")
    task = f"images(samples={3 * 8 * 3 + left}, model='normalised')"
    result = train_threads(strategy, 4, tmp_path, task)
    assert sum(report.samples for report in result.reports) == 3 * 8 * 3 + left
    assert (switched_at(result) == {None}) == (when == 99)


@pytest.mark.parametrize("first", [ASYNCHRONOUS, Switch(AllReduce(), ASYNCHRONOUS)])
def test_an_asynchronous_first_phase_is_refused(first: Any) -> None:
    with pytest.raises(InputError, match="not synchronous, so its workers have no common step"):
        Switch(first, AllReduce())


def test_phases_have_to_agree_on_the_processes() -> None:
    with pytest.raises(InputError, match="different numbers of processes"):
        Switch(AllReduce(), Single()).roles(3)
    with pytest.raises(InputError, match="leave no worker"):
        Switch(AllReduce(), ParameterServer(servers=3)).roles(3)
