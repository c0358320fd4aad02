"""Calibration: what is measured is complete and above 0, kept whole, and used by the simulation."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.calibrations import CALIBRATION, COSTS, PARAMETERS, SGD, TASK, flat, kept, run_of
from tests.support.simulated import run_ranks, simulated

from orchestra import calibration as bench
from orchestra.calibration import Workload, calibrate, contention, thread_counts
from orchestra.calibration.machines import calibrate_links
from orchestra.calibration.messages import CALL, REDUCED, MessageFigures, messages_of, transfers_of
from orchestra.calibration.timing import Profile, curve_of, spread, trimmed_mean
from orchestra.cli.main import main
from orchestra.cluster.calibration import (
    Calibration,
    Curve,
    MessageTimes,
    Parameter,
    Timing,
    at_threads,
    read_calibration,
)
from orchestra.cluster.nodes import Line, MemoryCosts, Overhead, Sharing
from orchestra.collectives import Group, all_reduce
from orchestra.engines.simulation.costs import CalibratedCosts, cost_source_of, key_of
from orchestra.errors import InputError
from orchestra.optimizers.settings import Optimizer
from orchestra.strategies.all_reduce import AllReduce
from orchestra.strategies.base import Strategy
from orchestra.strategies.parameter_server import ParameterServer
from orchestra.strategies.pipeline import Pipeline
from orchestra.strategies.single import Single
from orchestra.tasks.task import load_task
from orchestra.worker.layout import Layout
from orchestra.worker.runtime import Runtime, Work


def test_of_five_measurements_the_middle_one_counts() -> None:
    """The first has all figures; where the machine was slow just then, all of them are scaled."""
    own = COSTS.one.gradient.at(COSTS.batch_size)
    steps = bench.Attempt([COSTS], 0.1)
    speeds = bench.Attempt([(0.8, 0.01)], 0.0)
    times = [[0.5, 0.7], [0.8] * 3, [0.9], [2.0]]
    others = bench.Attempt([[own * each for each in one] for one in times], 0.2)
    found = bench._costs(steps, others, speeds, 0.004)
    for now, before in zip(found.timings, COSTS.timings, strict=True):
        assert now.threads == before.threads
        for part in ("gradient", "update", "step"):
            amount = getattr(before, part).points[0][0]
            seconds = getattr(before, part).at(amount)
            assert getattr(now, part).at(amount) == pytest.approx(0.9 * seconds)
    assert found.quality is not None
    assert found.quality.waited == 0.2
    assert found.quality.spread == pytest.approx(spread([1.0, 0.6, 0.8, 0.9, 2.0]), abs=1e-3)
    late = bench.Attempt(None, 0.0, ("cores at once",))
    alone = bench._costs(steps, bench.Attempt(None, 0.0, ("other processes",)), late, 0.004)
    assert alone.timings == COSTS.timings
    assert "no time for other processes, cores at once" in str(alone.quality)


# Curves


def test_between_measurements_a_curve_is_straight_and_beyond_it_goes_on() -> None:
    curve = Curve(((2.0, 3.0), (4.0, 5.0), (8.0, 6.0)))
    assert [curve.at(amount) for amount in (2, 3, 4, 6, 8, 12)] == [3, 4, 5, 5.5, 6, 7]


def test_less_than_was_measured_takes_at_least_its_proportion() -> None:
    steep = Curve(((10.0, 2.0), (20.0, 10.0)))
    assert steep.at(5) == 1.0
    assert Curve(((10.0, 2.0), (20.0, 3.0))).at(5) == 1.5
    assert steep.at(0) > 0


def test_more_than_was_measured_never_takes_less() -> None:
    assert Curve(((10.0, 2.0), (20.0, 1.5))).at(1000) == 1.5


@pytest.mark.parametrize(
    "points", [(), ((2.0, 1.0), (1.0, 1.0)), ((1.0, 0.0),), ((0.0, 1.0),), ((1.0, float("nan")),)]
)
def test_a_curve_that_cannot_have_been_measured_is_refused(
    points: tuple[tuple[float, float], ...],
) -> None:
    with pytest.raises(ValueError, match="curve"):
        Curve(points)


def test_a_curve_goes_through_the_medians() -> None:
    curve = curve_of({8: [5.0, 4.0, 90.0], 2: [1.0, 1.0, 1.0]})
    assert curve.points == ((2.0, 1.0), (8.0, 5.0))
    assert curve.spread[0] == 0
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]) == 0.5


def test_steps_with_cold_caches_count_and_single_outliers_do_not() -> None:
    cold = [2.0] * 10
    assert trimmed_mean([1.0] * 28 + [0.1] * 2 + cold + [900.0] * 2) == pytest.approx(
        (28 + 2 * 10) / 38
    )
    assert trimmed_mean([1.0, 4.0]) == 2.5


def test_the_sizes_lie_around_those_asked_for() -> None:
    assert Workload(TASK, SGD).sizes == (8, 16, 32, 64, 128)
    assert Workload(TASK, SGD, batch_sizes=(1, 3)).sizes == (1, 3, 6, 12)
    assert Workload(TASK, SGD, batch_sizes=(8, 1), around=False).sizes == (1, 8)


# The file


def test_a_calibration_comes_back_whole(tmp_path: Path) -> None:
    assert read_calibration(kept(CALIBRATION, tmp_path)) == CALIBRATION


def test_a_task_takes_the_place_of_its_older_figures() -> None:
    again = dataclasses.replace(COSTS, cold=0.7)
    other = dataclasses.replace(COSTS, task="digits28()")
    both = CALIBRATION.with_task(other).with_task(again)
    assert both.tasks == (other, again)
    assert both.task(*COSTS.key) == again
    assert both.task("mnist()", "SGD()", "float32") is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "Expecting"),
        ("[]", "no mapping"),
        ("[" * 100_000, "recursion"),
        ('{"schema": 7}', "its schema is 7, not 2"),
        ('{"schema": 2}', "lacks "),
        (CALIBRATION.to_json().replace("0.4", '"long"'), "expected number, got 'long'"),
        (CALIBRATION.to_json().replace("0.4", "0.0"), "above 0"),
        (CALIBRATION.to_json().replace('"task"', '"tusk"'), "tasks: lacks task"),
    ],
    ids=[
        "cut off",
        "a list",
        "nested",
        "another version",
        "empty",
        "no number",
        "zero",
        "another key",
    ],
)
def test_a_damaged_file_is_one_line(text: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(text)
    with pytest.raises(InputError) as refused:
        read_calibration(path)
    message = str(refused.value)
    assert str(path) in message
    assert reason in message
    assert "run orchestra calibrate again" in message
    assert "\n" not in message


# Costs


KINDS = (
    Work("gradient", 3),
    Work("update", 40),
    Work("step", 3),
    Work("step", 0),
    Work("mix", 7),
    Work("encode", 7),
    Work("of a strategy of one's own", 7),
    Work("forward", 2, ("first",)),
    Work("backward", 2, ("second",)),
)


def test_every_kind_of_work_takes_time() -> None:
    costs = CalibratedCosts(CALIBRATION, COSTS)
    assert all(costs.seconds(work) > 0 for work in KINDS)
    assert costs.seconds(Work("gradient", 3)) == 3.0
    assert costs.flops == 1e6


def test_more_threads_are_as_fast_as_they_were_measured() -> None:
    """0.6 of the time with two threads: a fifth is serial (Amdahl), so four take 0.4 of it."""
    costs, work = CalibratedCosts(CALIBRATION, COSTS), Work("gradient", 10)
    assert costs.seconds(work, 2) == pytest.approx(6.0)
    assert costs.seconds(work, 4) == pytest.approx(4.0)
    assert costs.seconds(Work("update", 40), 4) == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("measured", "threads", "seconds"),
    [
        ([(1, 8.0), (2, 5.0), (4, 4.0)], 1, 8.0),
        ([(1, 8.0), (2, 5.0), (4, 4.0)], 2, 5.0),
        ([(1, 8.0), (2, 5.0), (4, 4.0)], 4, 4.0),
        ([(1, 8.0), (2, 5.0), (4, 4.0)], 3, 5 - 2 / 3),  # straight over 1 / threads
        # (4 / 8 - 1 / 4) / (3 / 4) = a third is serial
        ([(1, 8.0), (2, 5.0), (4, 4.0)], 8, 8 * (1 / 3 + 2 / 3 / 8)),
        ([(1, 8.0), (2, 3.0)], 4, 1.5),  # caches helped: from there on in proportion, not better
        ([(1, 8.0), (2, 9.0)], 2, 9.0),  # a model too small for threads
        ([(1, 8.0), (2, 9.0)], 4, 9.5),
        ([(1, 8.0)], 4, 8.0),  # nothing is known of more
    ],
)
def test_seconds_between_and_beyond_the_threads_that_were_measured(
    measured: list[tuple[int, float]], threads: int, seconds: float
) -> None:
    assert at_threads(measured, threads) == pytest.approx(seconds)


def test_threads_are_measured_from_one_to_all_cores() -> None:
    assert [thread_counts(cores) for cores in (1, 2, 6, 8)] == [
        (1,), (1, 2), (1, 2, 4, 6), (1, 2, 4, 8),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="have to rise, from 1 on"):
        dataclasses.replace(COSTS, timings=COSTS.timings[1:])


def test_micro_batches_are_looked_up_by_their_own_size() -> None:
    curve = Curve(((1.0, 3.0), (2.0, 4.0)))
    costs = dataclasses.replace(COSTS, timings=(Timing(1, curve, flat(1.0), flat(1.0)),))
    split = CalibratedCosts(CALIBRATION, costs, accumulation=2)
    assert split.seconds(Work("gradient", 2)) == 6.0
    assert [split.ready(slot) for slot in (0, 1)] == [1.0, 0.75]  # in the second micro-batch


def test_the_passes_of_all_stages_together_are_a_gradient() -> None:
    costs = CalibratedCosts(CALIBRATION, COSTS)
    whole = sum(
        costs.seconds(Work(kind, 2, (name,)))
        for kind in ("forward", "backward")
        for name in ("first", "second")
    )
    assert whole == pytest.approx(costs.seconds(Work("gradient", 2)))
    assert costs.seconds(Work("backward", 1, ("first",))) == pytest.approx(0.5)


def test_a_stage_without_a_share_of_its_own_takes_an_equal_one() -> None:
    silent = tuple(dataclasses.replace(parameter, forward=0.0) for parameter in PARAMETERS)
    loss_only = (*silent[:1], dataclasses.replace(silent[1], forward=0.3))
    costs = CalibratedCosts(CALIBRATION, dataclasses.replace(COSTS, parameters=loss_only))
    assert costs.seconds(Work("forward", 1, ("first",))) == pytest.approx(0.15)


def test_a_message_takes_what_was_measured_and_what_surrounds_it() -> None:
    overhead = CALIBRATION.overhead(COSTS)
    assert overhead.send.at(1) == pytest.approx(0.1)
    assert overhead.receive.at(1) == pytest.approx(0.2)
    assert overhead.add == pytest.approx(2.0 / 4)
    assert (overhead.cold, overhead.collective, overhead.buffer) == (0.5, 0.03, 100)
    assert overhead.handling == 0.02


def test_handling_is_what_a_server_takes_beside_its_work_and_its_messages() -> None:
    """Of a round with a request and a gradient, an answer and the values."""
    times = MessageTimes(*(Curve(((31.0, cost), (REDUCED, cost))) for cost in (0.1, 0.2, 0.4)))
    worker = MessageFigures(
        times, times, flat(0.05), {"add": flat(1.0)}, 2.0, 1.5, served=0.0, buffer_bytes=100
    )
    server = dataclasses.replace(worker, served=2 * 0.1 + 2 * 0.2 + 4 * 0.07)
    found = messages_of(worker, server, times, cores=2)
    assert found.handling == pytest.approx(0.07)
    quick = dataclasses.replace(worker, served=0.5)  # less than its messages alone
    assert messages_of(worker, quick, times, cores=2).handling == 0.0


def test_a_transfer_costs_what_a_broadcast_takes_beside_a_collective(tmp_path: Path) -> None:
    times = MessageTimes(*(Curve(((31.0, cost), (REDUCED, cost))) for cost in (0.1, 0.2, 0.4)))
    found = MessageFigures(
        times, times, flat(0.05), {"add": flat(1.0)}, 2.0, 1.5, served=0.0, buffer_bytes=100
    )
    transfers = transfers_of(found, found, 0.15)
    assert [curve.at(31) for curve in (transfers.send, transfers.receive)] == [CALL, 0.2 - 0.15]
    (tmp_path / "new.json").write_text(dataclasses.replace(CALIBRATION, transfers=times).to_json())
    overhead = read_calibration(tmp_path / "new.json").overhead(COSTS)
    assert overhead.transfer(100).receiving == pytest.approx(0.2)
    assert overhead.message(100).receiving == CALIBRATION.overhead(COSTS).message(100).receiving


def test_a_node_of_double_speed_takes_half_the_time() -> None:
    def program(runtime: Runtime) -> float:
        runtime.compute.run(Work("gradient", 4), lambda: None)
        return runtime.transport.now()

    costs = CalibratedCosts(CALIBRATION, COSTS)
    for speed, seconds in (("1", 4.0), ("2", 2.0), ("0.5", 8.0)):
        on = f"lan_1gbit(nodes=2, cores=1, speed={speed})"
        assert run_ranks(2, program, on=on, costs=costs).results == pytest.approx([seconds] * 2)


def test_a_message_to_oneself_and_the_first_after_a_step_cost_more() -> None:
    def program(runtime: Runtime) -> list[float]:
        transport, times = runtime.transport, []
        import torch

        for _ in range(2):
            transport.send(torch.zeros(1), 1 - runtime.rank, tag=1)
            times.append(transport.now())
        runtime.compute.run(Work("step", 1), lambda: None)
        times.append(transport.now())
        transport.send(torch.zeros(1), 1 - runtime.rank, tag=1)
        times.append(transport.now())
        transport.send(torch.zeros(1), runtime.rank, tag=1)
        times.append(transport.now())
        return times

    overhead = Overhead(Line(1.0, 0.0), Line(1.0, 0.0), 0.0, 1000, 1.0, Line(0.25, 0.0), cold=0.5)
    outcome = run_ranks(2, program, costs=CalibratedCosts(CALIBRATION, COSTS), overhead=overhead)
    assert outcome.results[0] == pytest.approx([1.0, 2.0, 2.1, 3.6, 3.85])


def test_a_strategy_takes_time_around_its_messages_and_a_collective_does_not() -> None:
    def program(runtime: Runtime) -> list[float]:
        import torch

        transport, times = runtime.transport, []
        if runtime.rank == 0:
            transport.send(torch.zeros(1), 1, tag=1)
        else:
            transport.receive(0, tag=1).wait()
        times.append(transport.now())
        all_reduce(transport, torch.zeros(2), "ring", Group((0, 1)), tag=2)
        return [*times, transport.now()]

    def ends(handling: float) -> list[list[float]]:
        overhead = Overhead(Line(1.0, 0.0), Line(1.0, 0.0), 0.0, 1000, 1.0, handling=handling)
        costs = CalibratedCosts(CALIBRATION, COSTS)
        return [*run_ranks(2, program, costs=costs, overhead=overhead).results]

    (_, plain), (sent, received) = ends(0.0), (times[0] for times in ends(0.25))
    assert sent == pytest.approx(1.25)
    assert received == pytest.approx(plain[0] + 0.5)  # the sender's and its own
    assert ends(0.25)[1][1] == pytest.approx(plain[1] + 0.5)


# What a simulated run goes by


def test_a_file_without_shared_memory_says_that_it_is_assumed(tmp_path: Path) -> None:
    document = json.loads(CALIBRATION.to_json())
    del document["in_memory"]
    (tmp_path / "old.json").write_text(json.dumps(document))
    source = cost_source_of(run_of(AllReduce(), 2, calibration=str(tmp_path / "old.json")))
    assert source.text.endswith("; shared memory assumed: the file does not hold it")
    assert source.calibration is not None
    assert source.calibration.overhead(COSTS).in_memory == MemoryCosts()


def test_costs_of_shared_memory_follow_from_what_was_measured() -> None:
    """Of barriers with one other rank and with three, and of chunks of 2 MiB."""
    costs = MemoryCosts(collective=5.0, barrier=2.0, copy=1e-6, wake=0.5)
    times = {(2, contention.SMALL): (5 + 2.0, 0.5), (4, contention.SMALL): (5 + 3 * 2.0, 99.0)}
    for size in contention.LARGE:
        barriers = 2 + (size - 1) // (2 << 20)  # of each chunk, and one
        times[4, size] = 5 + 3 * 1e-6 * size + barriers * 3 * 2.0, 99.0
    found = contention.memory_costs([times] * 4)
    for field in dataclasses.fields(costs):
        assert getattr(found, field.name) == pytest.approx(getattr(costs, field.name))


def test_a_barrier_takes_no_longer_than_the_collective_of_two() -> None:
    """More ranks were disturbed: what they take more is no barrier, and copies keep their time."""
    small, large = contention.SMALL, 1 << 20
    times = {(2, small): (1e-5, 0.0), (4, small): (1e-3, 0.0), (2, large): (1e-3, 0.0)}
    found = contention.memory_costs([times] * 4)
    assert (found.barrier, found.collective) == (1e-5, 0.0)
    assert found.copy == pytest.approx((1e-3 - 2 * 1e-5) / (contention.PASSES * large))


def test_a_run_is_simulated_by_the_figures_that_it_names(tmp_path: Path) -> None:
    path = kept(CALIBRATION, tmp_path)
    run = run_of(AllReduce(), 2, steps=3, batch_size=4, calibration=str(path))
    record = simulated(run, tmp_path / "run", on="lan_1gbit(nodes=2, jitter=None)")
    date = "2026-11-21T10:00:00+00:00"
    assert record.machine.costs == f"calibrated: abacus, 2 cores, {date}; waited 0%, spread ±0%"
    assert record.time.training is not None
    assert record.time.training > 3 * 1.6  # of 4 threads, 0.4 s a sample
    elements = Layout.of_module(load_task(TASK).model()).size
    assert record.time.worker["compute"] == pytest.approx(3 * (1.6 + 0.01 * elements), rel=1e-6)


@pytest.mark.parametrize("strategy", [ParameterServer(), Pipeline(microbatches=2), Single()])
def test_every_family_is_simulated_by_them(strategy: Strategy, tmp_path: Path) -> None:
    path = kept(with_parameters_of(TASK), tmp_path)
    run = run_of(strategy, 2, steps=2, batch_size=4, calibration=str(path))
    record = simulated(run, tmp_path / "run")
    assert record.machine.costs == cost_source_of(run).text
    assert record.time.training is not None
    assert record.time.training > 1.0


def with_parameters_of(task: str) -> Calibration:
    """The calibration with the names of the parameters of the task's model."""
    names = [name for name, _ in load_task(task).model().named_parameters()]
    parameters = tuple(
        Parameter(name, 1, 0.3 / len(names), 1 - 0.7 * place / len(names))
        for place, name in enumerate(names)
    )
    return CALIBRATION.with_task(dataclasses.replace(COSTS, parameters=parameters))


def test_without_a_calibration_the_record_says_what_is_assumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORCHESTRA_CACHE", str(tmp_path))
    run = run_of(AllReduce(), 2, steps=1)
    assumed = "assumed: 20 GFLOP/s a core, 5% of a gradient on one thread"
    assert cost_source_of(run).text == f"{assumed}; this machine is not calibrated"
    (tmp_path / "calibration.json").write_text(CALIBRATION.to_json())
    assert cost_source_of(run).calibration == CALIBRATION
    other = run_of(AllReduce(), 2, "digits28()", steps=1)
    assert cost_source_of(other).text.endswith("calibration does not hold the task")
    none = run_of(AllReduce(), 2, steps=1, calibration="none")
    assert cost_source_of(none).text == assumed


def test_a_file_without_the_task_is_refused_with_the_command_that_adds_it(tmp_path: Path) -> None:
    path = kept(CALIBRATION, tmp_path)
    run = run_of(AllReduce(), 2, steps=1, optimizer="Adam(lr=0.1)", calibration=str(path))
    with pytest.raises(InputError, match="orchestra calibrate --task") as refused:
        simulated(run, tmp_path / "run")
    assert f"--out {path}" in str(refused.value)
    missing = run_of(AllReduce(), 2, steps=1, calibration=str(tmp_path / "no.json"))
    with pytest.raises(InputError, match="there is no file"):
        simulated(missing, tmp_path / "run")


def test_the_learning_rate_does_not_change_how_long_a_step_takes() -> None:
    one, other = (Optimizer.parse(f"Adam(lr={rate})", where="test") for rate in (0.1, 0.2))
    amsgrad = Optimizer.parse("Adam(lr=0.1, amsgrad=True)", where="test")
    assert key_of(TASK, one, "float32") == key_of(TASK, other, "float32")
    assert key_of(TASK, one, "float32") != key_of(TASK, amsgrad, "float32")


# Measuring


def test_a_profile_takes_steps_apart() -> None:
    clock = iter(float(second) for second in range(1000))
    profile = Profile(lambda: next(clock))
    for _ in range(5):
        profile.run(Work("step", 1), lambda: None)
        profile.run(Work("gradient", 1), lambda: [next(clock) for _ in range(3)])
        profile.run(Work("update", 1), lambda: None)
    # A look at the clock takes a second: two for each work, and three inside a gradient.
    assert profile.steps() == {
        "gradient": [4.0] * 2,
        "update": [1.0] * 2,
        "step": [4.0] * 2,
        "whole": [9.0] * 2,
    }


@pytest.fixture(scope="module")
def measured() -> Calibration:
    """Of real measurements, each of which the orchestration takes for disturbed by a fifth."""
    told: list[str] = []
    subject = Workload(TASK, SGD, batch_sizes=(2, 4), around=False)
    with pytest.MonkeyPatch.context() as patch:  # a busy machine would be measured for two minutes
        patch.setattr("orchestra.calibration._most_in_need", lambda *_: None)
        patch.setattr(bench, "waited", lambda ranks: 0.2)
        patch.setattr(bench, "OTHERS", 1)
        calibration = calibrate([subject], 0.01, lambda what, _: told.append(what))
    assert set(told) <= {
        "messages",
        "messages in memory",
        "shared memory",
        "cores at once",
        "other processes",
        "one thread more",
        TASK,
    }
    return calibration


def test_everything_is_measured(measured: Calibration, tmp_path: Path) -> None:
    assert read_calibration(kept(measured, tmp_path)) == measured
    assert measured.in_memory is not None
    # 0 where other programs hold up barriers, which are subtracted: such a measurement is repeated.
    assert measured.in_memory.copy >= 0
    assert measured.in_memory.collective + measured.in_memory.barrier > 0
    (task,) = measured.tasks
    assert task.key == key_of(TASK, SGD, "float32")
    sizes = [2, 4]
    assert [timing.threads for timing in task.timings] == list(thread_counts(measured.cores))
    for timing in task.timings:
        assert [amount for amount, _ in timing.gradient.points] == sizes
        assert [amount for amount, _ in timing.step.points] == sizes
    elements = sum(parameter.elements for parameter in task.parameters)
    assert task.one.update.points[-1][0] == elements
    assert set(measured.work) == {"add", "mix", "encode"}
    assert 0 < task.shared_speed <= 1
    assert measured.time_slice > 0
    assert task.refill >= 0
    assert measured.sharing(task) == Sharing(task.shared_speed, measured.time_slice, task.refill)
    assert "command" not in measured.machine


def test_a_calibration_knows_its_quality(measured: Calibration) -> None:
    (costs,) = measured.tasks
    assert measured.quality is not None
    assert costs.quality is not None
    assert (measured.quality.waited, costs.quality.waited) == (0.2, 0.2)
    assert measured.busy_with_others == 0.2
    assert costs.quality.spread > 0
    assert measured.quality_of(costs).doubts


def test_gradients_become_ready_from_the_last_layer_to_the_first(measured: Calibration) -> None:
    (task,) = measured.tasks
    weights = [p for p in task.parameters if p.name.endswith("weight")]
    assert [p.ready for p in weights] == sorted((p.ready for p in weights), reverse=True)
    turn = sum(parameter.forward for parameter in task.parameters)
    assert 0 < turn < min(parameter.ready for parameter in task.parameters)
    assert max(parameter.ready for parameter in task.parameters) <= 1
    assert task.sample_flops > 0


def test_the_machine_is_a_cluster_that_can_be_simulated(
    measured: Calibration, tmp_path: Path
) -> None:
    path = str(kept(measured, tmp_path))
    run = run_of(AllReduce(), 3, steps=2, batch_size=4, calibration=path)
    record = simulated(run, tmp_path / "run", on=measured.cluster)
    assert record.ending.status == "completed"
    assert record.machine.costs is not None
    assert record.machine.costs.startswith("calibrated: ")


def test_links_between_ranks_make_a_matrix() -> None:
    matrix = calibrate_links(3, 1000)
    assert matrix is not None
    for one in range(3):
        assert matrix[one][one] == 0
        for other in range(3):
            assert (matrix[one][other] > 0) == (one != other)
            assert matrix[one][other] == matrix[other][one]


# The command


@pytest.mark.lab  # two calibrations more
def test_a_second_task_is_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr("orchestra.calibration._most_in_need", lambda *_: None)
    path = tmp_path / "new" / "machine.json"
    for task in ("digits(channels=1, hidden=2)", "digits(channels=2, hidden=2)"):
        options = ["--task", task, "--batch-size", "4", "--seconds", "0.001", "--keep-anyway"]
        assert main(["calibrate", *options, "--out", str(path)]) == 0
    printed = capsys.readouterr().out
    assert f"kept in {path}, with 2 tasks" in printed
    assert "This machine as a cluster: one_host(" in printed
    assert len(read_calibration(path).tasks) == 2


def test_links_and_their_order_are_printed_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "links.json"
    assert main(["calibrate", "--links", "--ranks", "3", "--out", str(path)]) == 0
    kept_links = json.loads(path.read_text())
    order = tuple(kept_links["order"])
    assert sorted(order) == [0, 1, 2]
    assert f'AllReduce("ring", order={order})' in capsys.readouterr().out
    assert AllReduce("ring", order=order).roles(3).workers == (0, 1, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--task", "digit()"], "--task: unknown task 'digit'"),
        (["--batch-size", "4,x"], "--batch-size: '4,x' is not a list"),
        (["--batch-size", "0"], "--batch-size: 0 is below 1"),
        (["--seconds", "0"], "--seconds: 0.0 is not above 0"),
        (["--limit", "-1"], "--limit: -1.0 is not above 0"),
        (["--links", "--ranks", "1"], "--ranks: 1 is below 2"),
        (["--optimiser", "SGD(lr=1)"], "did you mean '--optimizer'?"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("ORCHESTRA_CACHE", str(tmp_path))
    assert main(["calibrate", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_help_and_what_is_pure_need_no_torch() -> None:
    code = (
        "import sys; import orchestra.cluster.calibration; "
        "import orchestra.engines.simulation.costs; from orchestra.cli.main import main; "
        "main(['calibrate', '--help']); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: orchestra calibrate")
