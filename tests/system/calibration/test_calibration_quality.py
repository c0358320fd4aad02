"""A calibration keeps to its time, repeats what was disturbed, and refuses what is not to be
trusted; who uses a bad one is told."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support import rank_programs
from tests.support.calibrations import CALIBRATION, COSTS, SGD, TASK, run_of
from tests.support.emulated import needs_emulation, small_cluster
from tests.support.simulated import simulated

from orchestra import calibration as bench
from orchestra.calibration import (
    FIRST,
    Attempt,
    Measurement,
    Workload,
    measure_all,
    thread_counts,
    training,
)
from orchestra.calibration.contention import measure_speeds
from orchestra.calibration.timing import LEAST, Conditions, TimeBudget, repeat, waited
from orchestra.calibration.training import measure_task
from orchestra.cli.main import main
from orchestra.cluster.calibration import Calibration, Quality, read_calibration, together
from orchestra.engines.live import LINE_SECONDS, Lines
from orchestra.engines.processes import launch
from orchestra.engines.processes.system import UsageMeter
from orchestra.engines.simulation.costs import cost_source_of
from orchestra.errors import RunFailed
from orchestra.strategies.all_reduce import AllReduce
from orchestra.worker.runtime import SilentReporter

DATE = "2026-11-21T10:00:00+00:00"
GOOD = Quality(DATE, waited=0.02, spread=0.03)
BAD = Quality(DATE, waited=0.68, spread=0.03)


class Clock:
    """It stands still but for what measurements take."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """Measurements that take so many seconds each, and are disturbed as the lists say, in turn."""

    def __init__(self, **planned: tuple[float, list[float]]) -> None:
        self.clock = Clock()
        self.made: list[str] = []
        self.untils: list[float] = []
        self.told: list[tuple[str, float]] = []
        self._planned = planned

    def measure_all(self, limit: float) -> list[tuple[Any, float, int]]:
        measurements = [Measurement(name, 1.0, self._measure(name)) for name in self._planned]
        kept = measure_all(
            measurements, limit, lambda what, part: self.told.append((what, part)), self.clock
        )
        return [(one.value, one.waited, one.repeats) for one in kept]

    def _measure(self, name: str) -> Callable[..., Attempt | None]:
        seconds, disturbed = self._planned[name]

        def measure(until: float, end: float, tell: Callable[[float], None]) -> Attempt | None:
            number = self.made.count(name)
            self.made.append(name)
            self.untils.append(until - self.clock.now)
            self.clock.now = min(self.clock.now + seconds, end)
            tell(0.5)
            if self.clock.now == end:
                return None
            return Attempt(f"{name} {number}", disturbed[min(number, len(disturbed) - 1)])

        return measure


# The time


def test_what_is_undisturbed_is_measured_once() -> None:
    quiet = Bench(messages=(10, [0.0]), steps=(20, [0.1]))
    assert quiet.measure_all(100) == [("messages 0", 0.0, 0), ("steps 0", 0.1, 0)]
    assert quiet.clock.now == 130
    assert quiet.told == [("messages", 0), ("messages", 0.25), ("steps", 0.5), ("steps", 0.75)]


def test_each_may_take_its_part_of_what_is_left() -> None:
    bench = Bench(one=(5, [0.0]), two=(40, [0.0]), three=(1, [0.0]))
    bench.measure_all(100)
    assert bench.untils == pytest.approx([FIRST * 100 / 3, (70 - 5) / 2, 70 - 45])


def test_what_was_disturbed_is_measured_again_by_turns_and_the_best_is_kept() -> None:
    noisy = Bench(messages=(10, [0.5, 0.3, 0.4, 0.05]), steps=(10, [0.2, 0.6, 0.0]))
    assert noisy.measure_all(1000) == [("messages 3", 0.05, 3), ("steps 2", 0.0, 2)]
    assert noisy.made == ["messages", "steps"] * 3 + ["messages"]
    assert ("messages again", 0.0) in noisy.told


def test_on_a_machine_that_stays_busy_it_ends_within_its_time() -> None:
    noisy = Bench(messages=(10, [0.5, 0.3, 0.4]), steps=(20, [0.6]))
    assert noisy.measure_all(75) == [("messages 1", 0.3, 2), ("steps 0", 0.6, 1)]
    assert noisy.clock.now <= 175  # 30 s were not enough for another time of both


def test_what_only_refines_may_be_left_out(tmp_path: Path) -> None:
    bench = Bench(steps=(10, [0.5]), cores=(100, [0.0]))
    needed = [
        Measurement(name, 1.0, bench._measure(name), name == "steps") for name in bench._planned
    ]
    steps, cores = measure_all(needed, 50, clock=bench.clock)
    assert (steps.value, cores.value, cores.left_out) == ("steps 0", None, ("cores",))
    needed[1] = Measurement("cores", 1.0, bench._measure("cores"))
    with pytest.raises(RunFailed, match="cores took longer"):
        measure_all(needed, 50, clock=bench.clock)


def test_a_repeat_that_was_cut_off_is_no_loss() -> None:
    bench = Bench(messages=(10, [0.5]))
    seconds = iter([10.0, 100.0])

    def measure(until: float, end: float, tell: Callable[[float], None]) -> Attempt | None:
        passed = next(seconds)
        bench.clock.now = min(bench.clock.now + passed, end)
        return None if bench.clock.now == end else Attempt("first", 0.5)

    (kept,) = measure_all([Measurement("messages", 1.0, measure)], 60, None, bench.clock)
    assert (kept.value, kept.repeats, bench.clock.now) == ("first", 1, 160)


def test_a_time_that_is_too_short_for_everything_is_said() -> None:
    with pytest.raises(RunFailed, match=r"not done within 30 s: steps took longer.*--limit"):
        Bench(messages=(10, [0.0]), steps=(25, [0.0])).measure_all(30)


def test_a_budget_is_divided_over_the_figures_to_come() -> None:
    clock = Clock()
    budget = TimeBudget(until=160, figures=3, clock=clock)
    assert budget.share() == 20
    clock.now += 40
    assert budget.share() == 10
    clock.now += 30
    assert budget.over
    assert budget.share() == 0


@pytest.mark.parametrize(
    ("each", "seconds", "most", "repeats"),
    [(0.01, 0.5, math.inf, 50), (1.0, 0.5, math.inf, LEAST), (1.0, 0.5, 4.0, 4), (1.0, 0.5, 0, 1)],
    ids=["quick", "slow", "slow, little time", "no time"],
)
def test_what_is_slow_is_repeated_less_often(
    each: float, seconds: float, most: float, repeats: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    timer = SimpleNamespace(perf_counter=clock, thread_time=clock)
    monkeypatch.setattr("orchestra.calibration.timing.time", timer)

    def call() -> None:
        clock.now += each

    assert repeat(call, seconds, Conditions(), most) == pytest.approx([each] * repeats)


def test_seconds_in_which_the_machine_is_slower_are_not_one_sizes_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[int] = []

    def steps(meter: object, threads: int, size: int) -> dict[str, list[float]]:
        made.append(size)
        slow = 3.0 if 3 <= len(made) <= 5 else 1.0  # across the end of the first turn
        return {part: [slow * size] * 4 for part in ("gradient", "step", "update")}

    monkeypatch.setattr(training._Meter, "steps", steps)
    order = Workload(TASK, SGD, batch_sizes=(4,))
    runtime: Any = SimpleNamespace(reporter=SilentReporter())
    meter = training._Meter(runtime, order)
    timing = meter.timing(1, 10, {})
    assert timing.gradient.points == tuple((float(size), float(size)) for size in order.sizes)
    assert made == [4, 1, 2, 8, 16] * training.ROUNDS


def test_steps_without_time_are_of_the_batch_that_was_asked_for() -> None:
    order = Workload(TASK, SGD, batch_sizes=(4,), seconds=0.01, threads=thread_counts(2), until=0.0)
    (measured, kept), _ = launch(measure_task, order, 2).results
    for timing in (measured.one, measured.all):
        assert [amount for amount, _ in timing.gradient.points] == [4]
    assert "a gradient of 16 samples" in kept.left_out
    assert measured.cold == 0
    speeds = launch(measure_speeds, order, 2).results
    assert speeds[0][0] == speeds[1][0]  # each knows when all have enough


def test_ranks_that_take_too_long_are_ended() -> None:
    assert launch(rank_programs.loop_for_ever, None, 2, limit=3.0).results == (None, None)


def test_files_of_ranks_that_are_killed_go_with_the_calibration(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    left: list[Path] = []

    def killed(program: Any, order: Workload, *_: Any, **__: Any) -> None:
        assert order.folder is not None
        left.append(Path(order.folder) / "training")
        left[0].mkdir()
        raise RunFailed("a rank was killed")

    steps = lambda measurements, *_: measurements[4].measure(0.0, 0.0, print)  # noqa: E731
    monkeypatch.setattr(bench, "measure_all", steps)
    monkeypatch.setattr(bench, "run_ranks", killed)
    with pytest.raises(RunFailed, match="was killed"):
        bench.calibrate([Workload(TASK, SGD)])
    assert not left[0].parent.exists()
    order = Workload(
        TASK, SGD, batch_sizes=(4,), seconds=0.01, until=0.0, folder=f"{tmp_path}/none"
    )
    with pytest.raises(RunFailed, match="none/training-"):
        launch(measure_task, order, 2)


@needs_emulation
def test_steps_are_measured_under_the_quota_of_an_emulated_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[Attempt | None] = []

    def steps(measurements: list[Measurement], *_: object) -> None:
        end = time.monotonic() + 60
        found.append(measurements[4].measure(math.inf, end, lambda part: None))
        raise RunFailed("no more is needed")

    monkeypatch.setattr(bench, "measure_all", steps)
    kept: list[Conditions] = []

    def waited(ranks: Sequence[Conditions]) -> float:
        kept.extend(ranks)
        return 0.0

    monkeypatch.setattr(bench, "waited", waited)
    order = Workload(TASK, SGD, batch_sizes=(4,))
    with pytest.raises(RunFailed, match="no more"):
        bench.calibrate([order], 0.05, emulated=small_cluster(2, speed=0.5))
    (attempt,) = found
    assert attempt is not None
    # It ran for no more than the quota allows, which is not taken for time that others took.
    (conditions,) = kept
    assert conditions.share == 0.5
    assert 0 < conditions.ran < 0.6 * conditions.passed
    (costs,) = attempt.value
    assert [timing.threads for timing in costs.timings] == [1]


# Whether it was disturbed


def meter(passed: float, own: float, busy: float | None) -> UsageMeter:
    return UsageMeter(passed, own, busy)


def kept_by(
    wanted: int, *meters: UsageMeter, ran: float = 0.0, passed: float = 0.0, share: float = 1.0
) -> list[Conditions]:
    return [Conditions(ran, passed, {wanted: one}, share=share) for one in meters]


@pytest.mark.parametrize(
    ("ranks", "part"),
    [
        (kept_by(1, meter(10, 10, 20)), 0.0),  # others had the other core
        (kept_by(1, meter(10, 4, 20)), 0.6),
        (kept_by(2, meter(10, 10, 20), meter(10, 5, 20)), 0.25),
        (kept_by(3, meter(10, 6, 20), meter(10, 6, 20), meter(10, 6, 20)), 0.1),
        (kept_by(2, meter(0.1, 0, 0.2)), 0.0),  # too short to tell
        (kept_by(2, meter(10, 0, None)), 0.0),  # not known
        (kept_by(1, meter(10, 10, 10), ran=1, passed=4), 0.75),  # its own clock tells
        (kept_by(1, meter(10, 10, 10), ran=1, passed=4, share=0.25), 0.0),  # that was its quota
        (kept_by(1, meter(10, 10, 10), ran=1, passed=4, share=0.5), 0.5),
    ],
)
def test_what_others_took_of_what_was_wanted(
    ranks: list[Conditions], part: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestra.engines.processes.system.allowed_cores", lambda: (0, 1))
    assert waited(ranks) == pytest.approx(part)


def test_a_stretch_is_watched() -> None:
    kept = Conditions()
    for _ in range(2):
        with kept.watched(1):
            sum(range(1000))
    assert kept.meters[1].passed > 0
    assert kept.meters[1].own > 0


@pytest.mark.parametrize(
    ("quality", "doubts"),
    [
        (GOOD, ()),
        (Quality(DATE, waited=0.1, spread=0.3), ()),
        (BAD, ("other programs took 68% of the processor time",)),
        (Quality(DATE, waited=0.0, spread=0.5), ("repeats differ by ±50%",)),
    ],
)
def test_what_makes_figures_doubtful(quality: Quality, doubts: tuple[str, ...]) -> None:
    assert quality.doubts == doubts


def test_figures_that_are_used_together_are_as_good_as_the_worst() -> None:
    older = Quality("2026-11-20T10:00:00+00:00", 0.0, 0.2, repeats=1, left_out=("this",))
    kept = dataclasses.replace(BAD, repeats=2, kept_anyway=True)
    worst = Quality(older.measured_at, 0.68, 0.2, 3, ("this",), kept_anyway=True)
    assert together([older, kept]) == worst


# The file, and the command


def with_quality(quality: Quality) -> Calibration:
    task = dataclasses.replace(COSTS, quality=quality)
    return dataclasses.replace(CALIBRATION, quality=GOOD, tasks=(task,))


def calibrated_as(
    quality: Quality, path: Path, monkeypatch: pytest.MonkeyPatch, *options: str
) -> int:
    """`orchestra calibrate` where the measuring gives figures of that quality."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(bench, "calibrate", lambda *_: with_quality(quality))
    return main(["calibrate", "--task", TASK, "--out", str(path), *options])


def test_a_disturbed_calibration_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "machine.json"
    assert calibrated_as(BAD, path, monkeypatch) == 1
    assert not path.exists()
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "other programs took 68% of the processor time" in error
    assert "--keep-anyway" in error


def test_one_that_is_kept_anyway_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "machine.json"
    assert calibrated_as(BAD, path, monkeypatch, "--keep-anyway") == 0
    kept = read_calibration(path)
    assert kept.quality == GOOD  # messages were not disturbed
    assert kept.quality_of(kept.tasks[0]).kept_anyway


def test_a_good_one_is_kept_and_tells_its_quality(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "machine.json"
    short = dataclasses.replace(GOOD, repeats=2, left_out=("a gradient of 128 samples",))
    assert calibrated_as(short, path, monkeypatch) == 0
    assert read_calibration(path) == with_quality(short)
    printed = capsys.readouterr().out
    assert "quality: waited 2%, spread ±3%, 2 measured again" in printed
    assert "left out, for there was no time: a gradient of 128 samples" in printed


def test_a_file_from_before_there_was_a_quality_still_loads(tmp_path: Path) -> None:
    document = json.loads(CALIBRATION.to_json())
    del document["quality"], document["tasks"][0]["quality"]
    document["busy_with_others"] = 0.68
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(document))
    before = read_calibration(path)
    assert before.quality is None
    assert before.quality_of(before.tasks[0]).doubts == BAD.doubts


# Who uses it


def test_a_run_by_a_calibration_that_is_not_to_be_trusted_says_so(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    for quality, expected in ((GOOD, ()), (BAD, BAD.doubts)):
        path.write_text(with_quality(quality).marked().to_json())
        run = run_of(AllReduce(), 2, steps=1, batch_size=4, calibration=str(path))
        record = simulated(run, tmp_path / f"{quality.waited}", on="lan_1gbit(nodes=2)")
        assert tuple(record.machine.costs_doubts) == expected
        assert record.machine.costs == cost_source_of(run).text
        assert ("kept anyway" in record.machine.costs) == bool(expected)


def test_that_of_the_machine_itself_is_no_exception(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORCHESTRA_CACHE", str(tmp_path))
    (tmp_path / "calibration.json").write_text(with_quality(BAD).to_json())
    assert cost_source_of(run_of(AllReduce(), 2, steps=1)).doubts == BAD.doubts


# Progress


def test_where_there_is_no_terminal_there_is_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = Clock()
    tell = Lines(clock)
    for part in range(5):
        tell("messages", part / 4)
        clock.now += LINE_SECONDS / 2
    lines = ["orchestra: messages, 0%", "orchestra: messages, 50%", "orchestra: messages, 100%"]
    assert capsys.readouterr().err.splitlines() == lines
