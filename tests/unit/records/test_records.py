"""What a run leaves behind: sums over its ranks, and `summary.json` as others rely on it."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.paths import ROOT
from tests.support.recorded import recorded

from orchestra.records.combine import combine
from orchestra.records.files import PACKAGES, environment, write_atomically
from orchestra.records.record import KEYS, Asked, Batching, Durations, Pacing, ToTarget
from orchestra.records.report import (
    Instant,
    LeaderReport,
    MessageKey,
    Point,
    RankReport,
    Timeline,
    TimelineSlice,
    Usage,
)
from orchestra.records.store import RunFolder, write_curve, write_summary
from orchestra.settings.base import from_plain, to_plain

CONTRACT = {
    "name": str,
    "strategy": str,
    "engine": str,
    "ranks": int,
    "workers": int,
    "servers": int,
    "seed": int,
    "status": str,
    "setup_seconds": float,
    "train_seconds": float,
    "steps": int,
    "samples": int,
    "samples_per_second": float,
    "final_loss": float,
    "metrics": dict,
    "time_to_target_seconds": float,
    "bytes_sent": int,
    "bytes_estimated": bool,
    "seconds": dict,
    "staleness": dict,
    "switched_at_step": int,
    "switched_at_sample": int,
    "parameters_sha256": str,
}
"""The fields of a run in `summary.json`: more may stand there, none may be missing."""

ABOUT = Asked("ring", "AllReduce('ring')", "processes", 3, 2, 1, 7), Pacing(), Batching()


def report(rank: int, **changes: Any) -> RankReport:
    values: dict[str, Any] = {
        "rank": rank,
        "role": "worker",
        "steps": 10 + rank,
        "samples": 100 * (rank + 1),
        "setup": {"task": 0.5, "group": 0.25, "first_step": 0.25},
        "train_seconds": 2.0 + rank,
        "seconds": {"compute": 1.0 + rank, "communicate": 0.5, "wait": 0.25 * rank},
        "bytes_sent": 1000 + rank,
        "bytes_estimated": False,
        "staleness": {},
        "peak_buffer_bytes": 64 * (rank + 1),
        "switched_at_step": None,
        "switched_at_sample": None,
        "stopped": False,
        "threads": 1,
    }
    return RankReport(**{**values, **changes})


def test_a_report_is_plain_data_on_its_way() -> None:
    """Under another launcher nothing that arrives is unpickled."""
    sent = MessageKey(0, 1, 7, 3)
    slices = [
        TimelineSlice(0, "send", "x", 1.0, 2.0, {"bytes": 8}, sent),
        TimelineSlice(0, "step", "1", 0, 3, {}),
    ]
    told = report(
        1,
        staleness={"0": 4},
        leader=LeaderReport(0.5, {"loss": math.inf}, None, [Point(1, 0.5, {"loss": 1.0})]),
        timeline=Timeline("clock", 1.5, ("main",), slices, [Instant("switch", 1.25, True)]),
        shares=(0.5, 0.5),
        usage=Usage("machine", 2, 1.0, 0.5, None),
    )
    there = json.loads(json.dumps(to_plain(told)))
    assert from_plain(RankReport, there) == told
    assert from_plain(RankReport | None, None) is None


def server(**changes: Any) -> RankReport:
    leader = LeaderReport(0.5, {"accuracy": 0.9}, "ab12")
    seconds = {"compute": 100.0, "communicate": 100.0, "wait": 100.0}
    values = {"role": "server", "steps": 0, "samples": 0, "seconds": seconds, "leader": leader}
    return report(2, **{**values, **changes})


def test_a_record_sums_up_its_ranks() -> None:
    record = combine([report(0), report(1), server()], *ABOUT)
    assert record.ending.status == "completed"
    assert record.learned.steps == 11
    assert record.learned.samples == 300
    assert record.time.training == 4.0
    assert record.time.samples_per_second == 75.0
    assert record.traffic.sent == 1000 + 1001 + 1002
    assert record.traffic.peak_buffer == 192
    assert record.time.worker == {"compute": 1.5, "communicate": 0.5, "wait": 0.125}
    assert (record.learned.loss, record.learned.metrics) == (0.5, {"accuracy": 0.9})
    assert record.learned.parameters_sha256 == "ab12"
    assert record.updates.staleness is None
    assert record.switching.at_step is None
    assert (record.asked.name, record.asked.seed) == ("ring", 7)


def test_dropped_gradients_are_counted_over_all_ranks() -> None:
    record = combine([report(0, dropped=2), report(1, dropped=3), server()], *ABOUT)
    assert record.updates.dropped == 5
    assert [part.dropped for part in record.machine.by_rank] == [2, 3, 0]


def test_staleness_is_counted_over_all_ranks() -> None:
    record = combine([report(0, staleness={"0": 3}), server(staleness={"0": 1, "4": 2})], *ABOUT)
    assert record.updates.staleness == {"mean": 8 / 6, "max": 4}


def test_a_server_that_worked_in_a_phase_counts_as_a_worker() -> None:
    seconds = {"compute": 4.0, "communicate": 0.0, "wait": 0.0}
    record = combine([report(0), server(samples=50, steps=40, seconds=seconds)], *ABOUT)
    assert record.learned.samples == 150
    assert record.learned.steps == 40
    assert record.time.worker["compute"] == 2.5


def test_what_one_rank_says_holds_for_the_run() -> None:
    record = combine(
        [
            report(0),
            report(
                1, stopped=True, switched_at_step=9, switched_at_sample=144, bytes_estimated=True
            ),
            server(),
        ],
        *ABOUT,
    )
    assert record.ending.status == "stopped"
    assert (record.switching.at_step, record.switching.at_sample) == (9, 144)
    assert record.traffic.estimated


def test_a_run_without_time_has_no_pace() -> None:
    record = combine([server(samples=1, train_seconds=0.0)], *ABOUT)
    assert record.time.samples_per_second is None


def test_summary_has_the_fields_that_others_rely_on(tmp_path: Path) -> None:
    seconds = {"compute": 1.5, "communicate": 0.5, "wait": 0.125}
    reports = [
        report(0, staleness={"1": 1}, switched_at_step=5, switched_at_sample=80),
        report(1),
        server(),
    ]
    record = replace(
        combine(reports, *ABOUT),
        time=Durations(3.0, 2.0, samples_per_second=75.0, worker=seconds),
        to_target=ToTarget(1.5),
        folder=tmp_path,
    )
    path = write_summary(tmp_path, "quickstart", [record])
    assert path == tmp_path / "summary.json"
    summary = json.loads(path.read_text())
    assert {key: summary[key] for key in ("schema", "experiment")} == {
        "schema": 1,
        "experiment": "quickstart",
    }
    (run,) = summary["runs"]
    assert {field: type(run[field]) for field in CONTRACT} == CONTRACT
    assert set(run["seconds"]) == {"compute", "communicate", "wait"}
    assert set(run["staleness"]) == {"mean", "max"}
    assert "folder" not in run
    assert str(tmp_path) not in path.read_text()


def test_what_cannot_be_known_is_null(tmp_path: Path) -> None:
    record = recorded("a", "Single()", "processes", 1, 1, 0, 0, "failed", failure="rank 0 is gone")
    (run,) = json.loads(write_summary(tmp_path, "x", [record]).read_text())["runs"]
    for field in (
        "setup_seconds",
        "train_seconds",
        "samples_per_second",
        "final_loss",
        "time_to_target_seconds",
        "staleness",
        "switched_at_step",
        "switched_at_sample",
        "parameters_sha256",
    ):
        assert run[field] is None, field
    assert run["failure"] == "rank 0 is gone"


@pytest.mark.parametrize(
    ("notation", "distributed", "switches"),
    [
        ("Single()", False, False),
        ("AllReduce('ring')", True, False),
        ("Switch(A(), B())", True, True),
    ],
)
def test_a_record_from_before_is_known_by_its_notation(
    tmp_path: Path, notation: str, distributed: bool, switches: bool
) -> None:
    record = recorded("a", notation, "processes", 1, 1, 0, 0, "completed")
    path = write_summary(tmp_path, "x", [record])
    document = json.loads(path.read_text())
    del document["runs"][0]["distributed"], document["runs"][0]["switches"]
    path.write_text(json.dumps(document))
    read = RunFolder(tmp_path).record
    assert (read.pacing.distributed, read.pacing.switches) == (distributed, switches)


def test_keys_of_a_later_version_are_ignored(tmp_path: Path) -> None:
    part = {"rank": 0, "role": "worker", "seconds": {"compute": 1.0}, "threads": 2}
    record = recorded(metrics={"accuracy": 0.5}, by_rank=[part])
    path = write_summary(tmp_path, "x", [record])
    document = json.loads(path.read_text())
    document["runs"][0]["colour"] = document["runs"][0]["by_rank"][0]["colour"] = "green"
    path.write_text(json.dumps(document))
    read = RunFolder(tmp_path).record
    assert read.summary() == record.summary()
    assert "colour" not in read.summary()


def test_threads_of_an_old_record_are_those_of_all_ranks(tmp_path: Path) -> None:
    path = write_summary(tmp_path, "x", [recorded(threads=3)])
    document = json.loads(path.read_text())
    document["runs"][0]["by_rank"] = [{"rank": 0, "role": "worker", "seconds": {}}]
    path.write_text(json.dumps(document))
    assert RunFolder(tmp_path).record.threads_by_rank == [3]


def test_every_key_of_the_summary_is_documented() -> None:
    documented = (ROOT / "docs" / "reference" / "records.md").read_text()
    assert list(recorded().summary()) == list(KEYS)
    assert {key for key in KEYS if f"`{key}`" not in documented} <= {"judged_on", "tuned"}


def strict(text: str) -> Any:
    """JSON as the standard has it."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_does_not_know_are_null(tmp_path: Path, bad: float) -> None:
    leader = LeaderReport(bad, {"accuracy": bad, "r2": 0.5}, "ab12")
    write_summary(tmp_path, "x", [combine([report(0, leader=leader)], *ABOUT)])
    (run,) = strict((tmp_path / "summary.json").read_text())["runs"]
    assert run["final_loss"] is None
    assert run["metrics"] == {"accuracy": None, "r2": 0.5}


ONE_MODEL: dict[str, Any] = {
    "consensus_distance": None,
    "relative_distance": None,
    "average": None,
    "nodes": {},
    "replicas": 1,
}


def test_curve(tmp_path: Path) -> None:
    write_curve(tmp_path, [Point(10, 1.5, {"loss": 0.5}), Point(20, 2.5, {"loss": math.nan})])
    lines = [strict(line) for line in (tmp_path / "curve.jsonl").read_text().splitlines()]
    assert lines == [
        {"samples": 10, "seconds": 1.5, "metrics": {"loss": 0.5}, **ONE_MODEL},
        {"samples": 20, "seconds": 2.5, "metrics": {"loss": None}, **ONE_MODEL},
    ]


def failing(*_: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("call", [(os, "fsync"), (Path, "replace")])
def test_a_file_is_there_whole_or_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: tuple[Any, str]
) -> None:
    path = tmp_path / "summary.json"
    write_atomically(path, "before")
    with monkeypatch.context() as patched:
        patched.setattr(*call, failing)
        with pytest.raises(OSError, match="No space left"):
            write_atomically(path, "after")
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path], "nothing half-written stays behind"
    write_atomically(path, "after")
    assert path.read_text() == "after"
    assert list(tmp_path.iterdir()) == [path]


def test_environment_is_plain_data() -> None:
    found = environment()
    assert json.loads(json.dumps(found)) == found
    assert set(found["packages"]) == set(PACKAGES)
    assert found["packages"]["torch"]
