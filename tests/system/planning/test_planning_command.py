"""`orchestra plan` from its command line: what it prints, with which status, and its command."""

from __future__ import annotations

import json
import shlex
import signal
import sys
from pathlib import Path

import pytest
from tests.support.commands import Started
from tests.support.emulated import needs_emulation, small_cluster, written
from tests.support.lab import in_lab
from tests.support.plans import experiment

from orchestra.calibration import CalibrationUnfinished
from orchestra.cli.main import main
from orchestra.cli.parsers import machines
from orchestra.cluster import load_cluster
from orchestra.cluster.calibration import Calibration
from orchestra.experiments.file import load
from orchestra.planning.api import calibrated
from orchestra.planning.race import SearchBudget
from orchestra.report.numbers import significant


@pytest.fixture
def two_candidates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An experiment of eight steps, one process and a ring for it, in an own working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("orchestra.planning.candidates.EVERYWHERE", {"ring": "AllReduce()"})
    monkeypatch.setattr("orchestra.planning.candidates.BATCHES", (1.0,))
    monkeypatch.setattr("orchestra.planning.candidates.RATES", ())
    monkeypatch.setattr("orchestra.planning.candidates.KEPT", ())
    file = tmp_path / "mine.yaml"
    file.write_text(
        "task: digits\nranks: 1\nbatch_size: 64\nsteps: 8\ncalibration: none\n"
        "optimizer: SGD(lr=0.05)\ntarget: {metric: loss, at_most: 2.4}\nseeds: [3]\n"
    )
    return file


def test_a_plan_ends_with_a_command_that_trains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], two_candidates: Path
) -> None:
    cluster = "lan_1gbit(nodes=2, bandwidth='1 kbit/s')"
    arguments = ["plan", str(two_candidates), "--cluster", cluster, "--out", "found"]
    assert main([*arguments, "--minutes", "5"]) == 0
    *_, command = capsys.readouterr().out.strip().splitlines()
    assert "One machine wins" in (tmp_path / "found" / "plan.html").read_text()
    record = json.loads((tmp_path / "found" / "plan.json").read_text())
    assert record["recommended"]["name"] == "one process"
    assert record["ending"] == "confirmed with 4 seeds: no other beats one process by more than 2%"
    (ring,) = [row for row in record["rows"] if row["name"] == "ring on 2 nodes"]
    assert ring["dropped"].startswith("learns the same as one process")
    assert ring["seconds"] > 100 * record["recommended"]["seconds"]
    program, *rest = shlex.split(command)
    assert program == "orchestra"
    assert main(rest) == 0
    trained = json.loads((tmp_path / "found" / "trained" / "summary.json").read_text())
    assert trained["runs"][0]["engine"] == "processes"
    assert load(tmp_path / "found" / "recommended.yaml").training.steps == 8
    (run,) = (tmp_path / "found" / "runs" / "one process").glob("seed-3")
    assert {each.name for each in run.iterdir()} >= {"curve.jsonl", "steps-rank-0.jsonl"}
    assert not [*(tmp_path / "found" / "runs").rglob("*.safetensors")]  # the trials' models


def test_a_plan_that_a_gpu_wins_trains_there_on_the_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], two_candidates: Path
) -> None:
    (tmp_path / "lab.yaml").write_text(
        "all_nodes:\n  cores: 4\n  loopback: {bandwidth: 3 GB/s, latency: 15 us}\n"
        "  link: {bandwidth: 1 Mbit/s, latency: 50 us}\n"
        "nodes:\n  big: {speed: 1}\n  gpu: {devices: 1, flops: 0.3 TFLOP/s}\nranks: spread\n"
    )
    arguments = ("--cluster", "lab.yaml", "--minutes", "5", "--no-report")
    status, said = plan_of(two_candidates, capsys, *arguments)
    assert status == 0
    assert "one process on gpu reaches" in said
    assert "train it, on gpu: orchestra train found/recommended.yaml" in said
    assert load(tmp_path / "found" / "recommended.yaml").training.device == "cuda"


def plan_of(file: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """The exit status of `orchestra plan`, and what it prints, with lines joined."""
    cluster = [] if "--cluster" in arguments else ["--cluster", "lan_1gbit(nodes=2)"]
    status = main(["plan", str(file), "--out", "found", *cluster, *arguments])
    return status, " ".join(capsys.readouterr().out.split())


def test_a_target_out_of_reach_is_told_with_who_came_closest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], two_candidates: Path
) -> None:
    status, said = plan_of(
        two_candidates, capsys, "--target", "accuracy>=0.9999", "--minutes", "5", "--no-report"
    )
    assert status == 1
    answer = "None of them reaches accuracy >= 0.9999 in the samples and time given; the closest is"
    assert f"{answer} one process with accuracy 0." in said
    assert "train it" not in said
    assert not (tmp_path / "found" / "recommended.yaml").exists()


def two_nodes(folder: Path, own: str) -> tuple[str, ...]:
    """The arguments of a plan on two equal nodes, which have the line `own`."""
    (folder / "two.yaml").write_text(
        f"all_nodes:\n  cores: 1\n  speed: 1\n  {own}\n"
        "  loopback: {bandwidth: 3 GB/s, latency: 15 us}\n"
        "  link: {bandwidth: 1 Gbit/s, latency: 50 us}\n"
        "nodes: {n: {count: 2}}\nranks: spread\n"
    )
    return "--cluster", "two.yaml", "--minutes", "5", "--no-report"


def test_a_model_larger_than_every_node_is_told_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], two_candidates: Path
) -> None:
    arguments = two_nodes(tmp_path, "memory: 10 kB")
    status, said = plan_of(two_candidates, capsys, *arguments)
    assert status == 1
    answer = "None of the candidates can run here; the first: memory: n-0 has 10 kB, but rank 0"
    assert said.startswith(answer)
    assert said.endswith(
        "choose another strategy, or nodes with more memory. the search: nothing was left to "
        "simulate record: found"
    )
    record = json.loads((tmp_path / "found" / "plan.json").read_text())
    assert all(row["dropped"].startswith("memory: ") for row in record["rows"])


def test_a_plan_on_nodes_with_prices_has_the_cost_to_the_target(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], two_candidates: Path
) -> None:
    arguments = two_nodes(tmp_path, "price: 3.60 EUR/h")
    status, said = plan_of(two_candidates, capsys, *arguments)
    assert status == 0
    assert "s to target EUR" in said
    record = json.loads((tmp_path / "found" / "plan.json").read_text())
    rows = {row["name"]: row for row in record["rows"]}
    for name, nodes in (("one process", 1), ("ring on 2 nodes", 2)):
        row = rows[name]
        assert row["currency"] == "EUR"
        assert row["cost"] == pytest.approx(nodes * 0.001 * row["seconds"])
        assert significant(row["cost"]) in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["own_task:spam", "--cluster", "lan_1gbit"],
            "orchestra: own_task:spam: is no file; for a task write --task own_task:spam",
        ),
        (
            ["a.yaml", "--cluster", "lan_1gbit", "--minutes", "2m"],
            "orchestra: argument --minutes: '2m' is no number of minutes; write 3, or 0.5; "
            "see orchestra plan --help",
        ),
        (["a.yaml", "--cluster", "lan_1gbit"], "orchestra: a.yaml: cannot be read: No such file"),
    ],
)
def test_what_a_plan_is_given_in_error_is_told_with_the_remedy(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments]) == 2
    assert capsys.readouterr().err.startswith(message)


@pytest.mark.parametrize("minutes", [*in_lab(["0.1"]), "0.001"])
def test_a_short_time_gives_an_answer_and_says_what_was_left_out(
    minutes: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """How far it comes in 0.1 minutes depends on the machine; in 0.001 nowhere."""
    file = tmp_path / "mine.yaml"
    file.write_text("task: digits\nranks: 1\nbatch_size: 64\nsteps: 20\n")
    out = ("--out", str(tmp_path / "found"))
    status, said = plan_of(file, capsys, *out, "--minutes", minutes, "--target", "accuracy>=0.5")
    record = json.loads((tmp_path / "found" / "plan.json").read_text())
    assert status == (0 if record["recommended"] else 1)
    assert record["headline"] in said
    assert "note: no calibration: the time is too short for one; give more --minutes, or" in said
    assert "note: durations are assumed: seconds can be off by several times" in said
    assert len(record["rows"]) > 30
    assert (tmp_path / "found" / "plan.html").exists()
    if minutes == "0.001":
        assert "There was no time to simulate anything; give more minutes." in said
        assert f"note: no time for the speed of {len(record['rows'])} candidates" in said


def test_an_unfinished_calibration_is_told_with_what_a_plan_can_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def calibrate(*_: object) -> Calibration:
        raise CalibrationUnfinished("the calibration was not done within 41 s: digits took longer")

    monkeypatch.setattr("orchestra.calibration.calibrate", calibrate)
    monkeypatch.setenv("ORCHESTRA_CACHE", str(tmp_path))
    given = experiment(calibration="auto", optimizer="SGD(lr=0.1)")
    budget = SearchBudget(0.0, 205.0)
    _, _, notes = calibrated(given, tmp_path, budget, lambda what, part: None)
    assert notes[0] == (
        "no calibration: the calibration was not done within 41 s: digits took longer; give more "
        "--minutes, or first: orchestra calibrate --task 'digits()' --optimizer 'SGD(lr=0.1)' "
        "--batch-size 64 --limit 123"
    )
    assert machines.calibrate().read(shlex.split(notes[0].partition("calibrate ")[2]))
    emulated = load_cluster("lan_1gbit(nodes=2)", where="cluster", folder=Path())
    _, _, notes = calibrated(given, tmp_path, budget, lambda what, part: None, emulated)
    assert notes[0].endswith("digits took longer; give more --minutes")


@pytest.mark.parametrize("times", [*in_lab([1]), 2])
def test_ctrl_c_ends_a_plan_with_the_answer_so_far(times: int, tmp_path: Path) -> None:
    """Once or twice: the processes end, in good order or at once, and the page is written."""
    command = (
        *(sys.executable, "-m", "orchestra", "plan", "--task", "digits", "--minutes", "30"),
        *("--cluster", "lan_1gbit(nodes=2)", "--target", "accuracy>=0.9999", "--out", "found"),
        *("--set", "steps=20000", "--set", "batch_size=64", "--set", "calibration=none"),
    )
    with Started(command, tmp_path) as process:
        runs = tmp_path / "found" / "runs"
        process.wait_until(lambda: any(runs.glob("one process/seed-*")), "a run that learns")
        for _ in range(times):
            process.process.send_signal(signal.SIGINT)
        ended = process.end()
    assert ended.status == 1, ended
    assert "the search was stopped before its end" in " ".join(ended.out.split())
    record = json.loads((tmp_path / "found" / "plan.json").read_text())
    assert record["stopped"] is True
    assert (tmp_path / "found" / "plan.html").exists()


@needs_emulation
@pytest.mark.lab
def test_a_plan_is_verified_on_emulated_nodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], two_candidates: Path
) -> None:
    cluster = written(small_cluster(2), tmp_path)
    arguments = ("--cluster", cluster, "--minutes", "5", "--no-report", "--verify")
    status, said = plan_of(two_candidates, capsys, *arguments)
    assert status == 0
    found = json.loads((tmp_path / "found" / "plan.json").read_text())["verified"]
    assert {each["name"] for each in found} >= {"one process", "ring on 2 nodes"}
    for each in found:
        assert (each["engine"], each["failure"]) == ("emulation", None)
        assert each["predicted"].keys() == each["measured"].keys() >= {"3"}
        assert each["measured"]["3"] > 0  # it has reached the target
        assert each["computing"] > 0
        predicted = significant(each["predicted"]["3"])
        assert f"{each['name']}: predicted {predicted} s, measured " in said


@needs_emulation
@pytest.mark.lab
def test_points_of_a_map_are_verified_on_emulated_nodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], two_candidates: Path
) -> None:
    cluster = written(small_cluster(2), tmp_path)
    status = main([
        "map", str(two_candidates), "--cluster", cluster, "--x", "bandwidth=50 Mbit/s..200 Mbit/s",
        "--y", "slowest_node=0.5,1", "--points", "2", "--minutes", "5", "--verify", "2", "--out",
        "found",
    ])  # fmt: skip
    assert status == 0
    record = json.loads((tmp_path / "found" / "map.json").read_text())
    assert len(record["points"]) == 4
    assert len(record["checks"]) == 2
    said = " ".join(capsys.readouterr().out.split())
    for check in record["checks"]:
        assert check["failure"] is None
        assert check["predicted"].keys() == check["measured"].keys()
        assert len(check["measured"]) == 2  # of one process, ring, and ring with shares by speed
        assert all(seconds > 0 for seconds in check["measured"].values())
        assert check["agrees"] in (True, False)
    assert said.count(" s, measured ") == 4
