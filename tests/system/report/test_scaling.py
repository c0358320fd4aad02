"""Speed against ranks: the knee by its definition, where it is marked, and runs of time alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.drawn import drawn_alone, keep, record

from orchestra.records.record import RunRecord
from orchestra.records.store import collect
from orchestra.report.answer import answer
from orchestra.report.figures.results import efficiency, knee, scaling
from orchestra.report.study import Study

RANKS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def amdahl(serial: float) -> dict[int, float]:
    return {ranks: ranks / (1 + serial * (ranks - 1)) for ranks in RANKS}


@pytest.mark.parametrize(("serial", "expected"), [(1 / 17, 16), (1 / 65, 64), (1 / 3, 2)])
def test_under_amdahls_law_about_half_of_each_rank_is_used_at_the_knee(
    serial: float, expected: int
) -> None:
    speeds = amdahl(serial)
    assert knee(speeds) == expected  # (1 - serial) / serial
    assert efficiency(speeds)[expected] == pytest.approx(1 / (2 * (1 - serial)))


def test_twice_the_ranks_are_worth_it_from_a_factor_of_the_root_of_two() -> None:
    assert knee({1: 1.0, 2: 1.42, 4: 1.9}) == 2
    assert knee({1: 1.0, 2: 1.41, 4: 1.9}) == 1
    assert knee({2: 10.0, 6: 18.0, 12: 20.0}) == 6  # of those measured, in any steps


def test_what_gains_to_the_end_has_no_knee_yet() -> None:
    assert knee({ranks: float(ranks) for ranks in RANKS}) is None
    assert knee({ranks: ranks**0.6 for ranks in RANKS}) is None
    assert knee({4: 3.0}) is None
    assert knee({1: 5.0, 2: 3.0, 4: 2.0}) == 1


def test_efficiency_is_the_speed_of_a_rank_beside_that_on_the_fewest() -> None:
    assert efficiency({2: 10.0, 4: 15.0, 8: 10.0}) == {2: 1.0, 4: 0.75, 8: 0.25}


def scaled(label: str, ranks: int, speed: float) -> RunRecord:
    return record(label, ranks, samples_per_second=speed, train_seconds=160 / speed)


def test_the_knee_of_each_strategy_is_marked(tmp_path: Path) -> None:
    runs = [
        scaled(label, ranks, speed)
        for ranks in RANKS[:5]
        for label, speed in (
            ("one process", 100.0),
            ("ring", 100 * amdahl(1 / 9)[ranks]),
            ("server", 100 * amdahl(1 / 3)[ranks]),
            ("switch", 100.0 * ranks),
        )
    ]
    found = drawn_alone(keep(tmp_path, runs, trace=False), scaling)
    name = "speed-against-ranks"
    points = {(v["line"], v["ranks"]): v for v in found.values(name, "line")}
    rings = {(unit["line"], unit["ranks"]) for unit in ringed(found.figures[name].spec)}
    assert rings == {("ring", 8), ("server", 2)}
    assert points["ring", 8]["percent"] == pytest.approx(100 / (1 + 7 / 9), rel=1e-4)
    caption = found.figures[name].caption
    assert caption.endswith("Knees: ring at 8 ranks and server at 2 ranks; none up to 16: switch.")
    assert "largest speed² / ranks" in caption


def ringed(spec: object) -> list[dict[str, object]]:
    """The data of the marks that are rings."""
    assert isinstance(spec, dict)
    return [
        value
        for layer in spec["layer"]
        if layer["mark"].get("filled") is False
        for value in spec["datasets"][layer["data"]["name"]]
    ]


def test_nothing_is_drawn_of_one_number_of_ranks(tmp_path: Path) -> None:
    assert (
        "speed-against-ranks" not in drawn_alone(keep(tmp_path, [record("ring")]), scaling).figures
    )


def test_without_a_knee_there_is_no_ring(tmp_path: Path) -> None:
    runs = [scaled("ring", ranks, 10.0 * ranks) for ranks in (2, 4)]
    found = drawn_alone(keep(tmp_path, runs, trace=False), scaling).figures["speed-against-ranks"]
    assert ringed(found.spec) == []
    assert found.caption.endswith("Knees: none up to 4: ring.")


@pytest.mark.parametrize("speeds", [(50.0, 60.0), (50.0, 5e7), (0.02, 0.03)])
def test_the_axis_has_ticks_inside_its_range(speeds: tuple[float, float], tmp_path: Path) -> None:
    runs = [scaled("ring", 2**n, speed) for n, speed in enumerate(speeds)]
    spec = (
        drawn_alone(keep(tmp_path, runs, trace=False), scaling).figures["speed-against-ranks"].spec
    )
    axes = [layer["encoding"]["y"]["axis"] for layer in spec["layer"]]
    ticks = axes[0].get("values", [])
    assert not ticks or len(ticks) >= 3
    assert all(min(speeds) <= tick <= max(speeds) * 2 for tick in ticks)


# Runs that tell of time alone


def timed(label: str, ranks: int, speed: float) -> RunRecord:
    """As a simulation of shapes leaves it."""
    return record(
        label, ranks, samples_per_second=speed, final_loss=None, metrics={},
        time_to_target_seconds=None, parameters_sha256=None,
    )  # fmt: skip


def test_runs_without_results_are_ranked_by_speed(tmp_path: Path) -> None:
    runs = [timed("one process", 4, 10.0), timed("ring", 4, 30.0), timed("server", 4, 20.0)]
    sources = collect([keep(tmp_path, runs, trace=False)])
    study = Study(sources)
    assert study.only_time
    assert [row.name for row in study.ranked] == ["ring", "server", "one process"]
    assert study.primary.key == "samples_per_second"
    keys = [measure.key for measure in study.measures]
    assert "final_loss" not in keys
    assert "time_to_target_seconds" not in keys
    said = answer(study)
    assert said.headline == (
        "These runs tell of time alone, and of no result; ring on 4 ranks was the fastest with "
        "30.0\u202fsamples/s; the next was server on 4 ranks with 20.0\u202fsamples/s."
    )
    assert "3.0 times as many as one process" in said.detail[0]


def test_runs_with_results_are_not(tmp_path: Path) -> None:
    sources = collect([keep(tmp_path, [record("ring")], trace=False)])
    assert not Study(sources).only_time
