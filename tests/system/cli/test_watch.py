"""`orchestra watch`: what it reads of a run, and what it shows."""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.support.commands import started
from tests.support.comparisons import experiment
from tests.support.recorded import recorded
from tests.support.simulated import simulated
from tests.support.training import settings
from tests.support.waiting import wait_until

from orchestra.cli import watch
from orchestra.cli.main import main
from orchestra.engines.events import Heartbeat
from orchestra.engines.live import LiveFile, SlowRanks
from orchestra.errors import RunFailed
from orchestra.experiments.experiment import alone, runs
from orchestra.experiments.run import claim, held, make_run
from orchestra.records.files import run_folder
from orchestra.records.following import RankTrack, Tail
from orchestra.records.live import Live, RankNow, Waiting, holder, mean_rates, read_live, write_live
from orchestra.records.report import Counters
from orchestra.records.store import RunFolder, write_planned, write_summary
from orchestra.report.watch_page import run_page, sparkline
from orchestra.report.watching import RunWatch, switch_text
from orchestra.strategies.all_reduce import AllReduce
from orchestra.worker.runtime import RankActivity


def step(number: int, **changes: Any) -> dict[str, Any]:
    """A line of a rank that makes ten steps a second."""
    line = {
        "step": number, "seconds": number / 10, "samples": 8, "consumed": 16 * number,
        "loss": 1 / number, "rates": [0.1], "compute": 0.05, "communicate": 0.01, "wait": 0.02,
        "input": 0.005, "bytes_sent": 1000,
    }  # fmt: skip
    return line | changes


def text_of(*lines: dict[str, Any]) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)


# Files that grow -------------------------------------------------------------------------------


def test_a_tail_reads_each_line_once_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    tail = Tail(path)
    assert tail.read() == []
    path.write_text('{"a": 1}\n{"a"')
    assert tail.read() == [{"a": 1}]
    with path.open("a") as file:
        file.write(': 2}\nno json\n[3]\n{"a": 4')
    assert tail.read() == [{"a": 2}]
    assert tail.read() == []
    with path.open("a") as file:
        file.write("}\n")
    assert tail.read() == [{"a": 4}]
    path.write_text('{"b": 1}\n')  # a resumed run keeps the lines before its checkpoint only
    assert tail.read() == [{"b": 1}]
    assert tail.began_anew


def test_a_long_file_is_read_in_part(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text("".join(f'{{"step": {k}, "pad": "{"x" * 50}"}}\n' for k in range(10_000)))
    tail = Tail(path, most_bytes=10_000)
    steps = [line["step"] for line in tail.read()]
    assert steps == sorted(set(steps))
    assert steps[0] == 0
    assert len(steps) < 200
    assert steps[-50:] == [*range(9_950, 10_000)]
    assert max(b - a for a, b in itertools.pairwise(steps)) < 200
    with path.open("a") as file:
        file.write('{"step": 10000}\n')
    assert tail.read() == [{"step": 10_000}]


def test_a_row_is_the_mean_of_the_last_steps(tmp_path: Path) -> None:
    path = tmp_path / "steps-rank-0.jsonl"
    slow = [step(k, seconds=float(k), loss=2.0) for k in range(1, 101)]
    fast = [step(k, seconds=100 + (k - 100) / 10, staleness=[k % 3, 0]) for k in range(101, 301)]
    path.write_text(text_of(*slow, *fast))
    track = RankTrack(path)
    track.poll()
    row = track.view(0, newest=120.0)
    assert (row.step, row.loss, row.batch) == (300, 1 / 300, 8)
    assert row.samples_per_second == pytest.approx(80)
    assert row.bytes_per_second == pytest.approx(10_000)
    assert row.parts == pytest.approx(
        {"compute": 0.5, "communicate": 0.1, "wait": 0.2, "input": 0.05}
    )
    assert row.staleness is not None
    assert row.staleness[1] == 2
    assert row.silent_seconds == 0
    assert track.view(0, newest=130.0).silent_seconds == 10
    assert track.history[0][1] == 2.0


def test_a_sparkline_falls_with_the_loss() -> None:
    assert sparkline([(float(k), 8.0 - k) for k in range(8)], 8) == "█▇▆▅▄▃▂▁"
    assert sparkline([(0.0, 100.0), (1.0, 10.0), (2.0, 1.0)], 3) == "█▅▁"
    assert sparkline([(1.0, 3.0)], 8) == ""
    assert sparkline([(1.0, 3.0), (2.0, 3.0)], 2) == "▁▁"


# What a run writes about itself ------------------------------------------------------------------


def test_beats_become_what_others_can_read(tmp_path: Path) -> None:
    now = [1000.0]
    live = LiveFile(tmp_path, SlowRanks((), lambda _: None), clock=lambda: now[0])
    for number in range(1, 21):
        now[0] += 0.5
        waits = (1,) if number % 4 else ()
        counters = Counters(number / 2, arrived=((1, 3e6 * number, 0.1),))
        live.on_beat(
            Heartbeat(
                0,
                number,
                8 * number,
                fraction=number / 100,
                activity=RankActivity.TRAINING,
                waits_for=waits,
                counters=counters,
            )
        )
    live.on_notice("left out")
    assert live.due()
    live.write()
    assert not live.due()
    found = read_live(tmp_path)
    assert found is not None
    (rank,) = found.ranks
    assert (rank.step, rank.samples, rank.waits_for) == (20, 160, (Waiting((1,), 0.75),))
    assert found.seconds_left == pytest.approx(0.8 * 9.5 / 0.19)
    assert found.notices == ("left out",)
    assert mean_rates((), found.ranks) == {(1, 0): pytest.approx(6e6)}
    assert mean_rates([RankNow(0, "", seconds=8.0, arrived=((1, 54e6, 0.1),))], found.ranks) == {
        (1, 0): pytest.approx(3e6)
    }
    live.remove()
    assert read_live(tmp_path) is None


def test_a_switch_is_told_with_its_rule() -> None:
    one = "Switch(AllReduce('ring'), LocalSGD(8), when=AfterFraction(0.5))"
    assert switch_text(one, 12) == "after step 12 to LocalSGD(8), by AfterFraction(0.5)"
    nested = f"Switch({one}, Single(), when=AfterSteps(3))"
    assert switch_text(nested, 12) == "after step 12"


# Runs --------------------------------------------------------------------------------------------


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = main(["watch", *arguments])
    return status, capsys.readouterr().out


def test_a_finished_run_is_shown_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    switch = (
        "Switch(AllReduce('ring'), ParameterServer(consistency='asynchronous'), "
        "when=AfterFraction(0.5))"
    )
    whole = experiment(strategies={"switch": switch}, ranks=3, steps=20, engine="simulation")
    folder = tmp_path / "out"
    make_run(runs(whole)[0], whole, folder, simulated)
    record = json.loads((folder / "summary.json").read_text())["runs"][0]
    assert not (folder / "live.json").exists()
    status, text = shown(capsys, str(folder))
    assert status == 0
    lines = text.splitlines()
    assert any(line.startswith("completed") and "virtual" in line for line in lines)
    at = record["switched_at_step"]
    by = "to ParameterServer(consistency='asynchronous'), by AfterFraction(0.5)"
    assert f"switched after step {at} {by}" in lines
    assert any(line.startswith("busiest links: ") for line in lines)
    heading = next(place for place, line in enumerate(lines) if line.startswith("rank "))
    for rank, line in zip(record["by_rank"], lines[heading + 1 : heading + 4], strict=True):
        assert line.split()[:3] == [str(rank["rank"]), rank["role"], str(rank["steps"])]
        assert f"{rank['seconds']['compute'] / record['train_seconds']:.0%}" in line
        if rank["role"] == "server":  # its steps were those of the first phase
            assert " - " in line
            assert line.rstrip().endswith("any rank")
    assert "waits for" in lines[heading]


def test_a_run_is_watched_while_it_goes_on_and_after_it_was_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "out"
    arguments = ["train", "--task", "digits", "--strategy", "ParameterServer()", "--ranks", "2"]
    with started([*arguments, "--set", "epochs=100000", "--out", "out"], tmp_path) as training:

        def trains() -> bool:
            live = read_live(folder)
            steps = folder / "steps-rank-0.jsonl"
            return live is not None and live.seconds_left is not None and steps.exists()

        training.wait_until(trains, "the first steps are written down")
        wait_until(lambda: (folder / "steps-rank-0.jsonl").stat().st_size > 0, "a step")
        status, text = shown(capsys, str(folder), "--once")
        assert status == 0
        assert "\nrunning" in text
        assert " left" in text
        assert "server" in text
        os.kill(training.process.pid, signal.SIGKILL)
        wait_until(lambda: not training.alive(), "all of it has ended")
        status, text = shown(capsys, str(folder))
    assert status == 1
    assert "\ncut off" in text
    assert "it was killed" in text


def test_a_simulation_says_how_far_its_ranks_are(tmp_path: Path) -> None:
    run = settings(AllReduce("ring"), 2, "nan_at(sample=40)", epochs=3, engine="simulation")
    with pytest.raises(RunFailed):
        simulated(run, tmp_path)
    live = read_live(tmp_path)
    assert live is not None
    assert [(each.rank, each.phase) for each in live.ranks] == [(0, "training"), (1, "training")]
    assert live.ranks[0].step > 0
    assert live.fraction is not None
    assert 0 < live.fraction < 1


def test_a_lock_on_another_file_of_the_same_number_is_none_on_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locks = f"1: FLOCK  ADVISORY  WRITE {os.getpid()} 00:2a:{tmp_path.stat().st_ino} 0 EOF\n"
    monkeypatch.setattr(Path, "read_text", lambda _: locks)
    assert holder(tmp_path) is None
    descriptor = os.open(tmp_path, os.O_RDONLY)
    try:
        assert holder(tmp_path) == f"process {os.getpid()}"
    finally:
        os.close(descriptor)


def test_a_run_on_another_machine_counts_as_under_way_while_it_writes(tmp_path: Path) -> None:
    (one, *_), *_ = [runs(experiment())]
    claim(tmp_path, alone(experiment(), one))
    write_live(tmp_path, Live(1000.0, "another", 1, (RankNow(0, "training", 3),), 990.0, 0.5))
    followed = RunWatch(RunFolder(tmp_path))
    assert followed.look(1005.0).status == "running"
    assert followed.look(1100.0).status == "cut off"


def test_ranks_of_before_are_not_shown_where_a_run_goes_on_on_fewer(tmp_path: Path) -> None:
    (one, *_), *_ = [runs(experiment())]
    claim(tmp_path, alone(experiment(), one))
    for rank in range(4):
        (tmp_path / f"steps-rank-{rank}.jsonl").write_text(text_of(step(1), step(2)))
    said = tuple(RankNow(rank, "training", 2) for rank in range(2))
    write_live(tmp_path, Live(1000.0, "another", 1, said, 990.0, 0.5))
    assert [row.rank for row in RunWatch(RunFolder(tmp_path)).look(1001.0).rows] == [0, 1]


def test_a_narrow_terminal_has_fewer_columns(tmp_path: Path) -> None:
    (one, *_), *_ = [runs(experiment())]
    claim(tmp_path, alone(experiment(), one))
    for rank in range(20):
        (tmp_path / f"steps-rank-{rank}.jsonl").write_text(
            text_of(*(step(k, staleness=[1]) for k in range(1, 30)))
        )
    said = tuple(RankNow(rank, "training", 30, 240, (Waiting((3,), 0.5),)) for rank in range(20))
    write_live(tmp_path, Live(1000.0, "another", 1, said, 990.0, 0.5))
    view = RunWatch(RunFolder(tmp_path)).look(1001.0)
    headings = []
    for width in (140, 80, 50):
        console = Console(width=width, height=20, force_terminal=True, color_system=None)
        with console.capture() as captured:
            console.print(run_page(view, console, console.height))
        lines = captured.get().splitlines()
        assert max(map(len, lines)) <= width
        assert len(lines) <= 20
        heading = next(line for line in lines if line.startswith("rank "))
        assert "…" not in heading
        headings.append(heading.split())
        assert "more ranks" in captured.get()
    assert {"wait", "input", "staleness", "sent", "waits"} <= set(headings[0])
    assert len(headings[0]) >= len(headings[1]) > len(headings[2])


@pytest.fixture
def comparison(tmp_path: Path) -> Iterator[Path]:
    """The first run failed, the second is done, the third is under way."""
    whole = experiment(seeds=[0, 1])
    folder = tmp_path / "runs" / "small-1"
    with held(folder, whole):
        planned = first, second, third, _ = runs(whole)
        places = [run_folder(folder, run.name, 2, run.seed) for run in planned]
        names = [f"{run.name}, 2 ranks, seed {run.seed}" for run in planned]
        write_planned(folder, dict(zip(places, names, strict=True)))
        for number, run in enumerate((first, second)):
            inner = folder / "runs" / run.name / "2-ranks" / f"seed-{run.seed}"
            claim(inner, alone(whole, run))
            record = recorded(
                run.name, repr(run.strategy), "processes", 2, 2, 0, run.seed,
                "completed" if number else "failed", train_seconds=2.5, final_loss=0.25,
                failure=None if number else "rank 1 is gone\nmore",
            )  # fmt: skip
            write_summary(inner, "small", [record])
        inner = folder / "runs" / third.name / "2-ranks" / f"seed-{third.seed}"
        with held(inner, alone(whole, third)):
            (inner / "steps-rank-0.jsonl").write_text(text_of(step(1), step(2)))
            yield folder


def test_a_comparison_shows_what_is_done_and_the_run_under_way(
    comparison: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    status, text = shown(capsys)  # the newest of runs/
    assert status == 1
    lines = text.splitlines()
    assert lines[:2] == ["runs/small-1", "running  2 of 4 runs are done, 1 failed"]
    assert any("one, 2 ranks, seed 0" in line and "rank 1 is gone" in line for line in lines)
    assert any("ring, 2 ranks, seed 0" in line and "loss 0.25" in line for line in lines)
    place = next(k for k, line in enumerate(lines) if line.endswith("one/2-ranks/seed-1"))
    assert any(line.startswith("running") for line in lines[place:])


def test_a_comparison_is_watched_without_its_experiment(
    comparison: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (comparison / "experiment.yaml").unlink()
    _, text = shown(capsys, str(comparison))
    assert "running  2 of 4 runs are done, 1 failed" in text


def test_ctrl_c_ends_the_watching_silently(
    comparison: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def moments(_: float) -> Iterator[float]:
        yield 1000.0
        raise KeyboardInterrupt

    monkeypatch.setattr(watch, "moments", moments)
    monkeypatch.setattr(Console, "is_terminal", True)
    assert main(["watch", str(comparison)]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("make", "message"),
    [
        ((), "there is no such folder"),
        (("here",), "it has no experiment.yaml"),
        (
            ("here", "here/run-1", "here/run-1/experiment.yaml"),
            "name one in it, such as here/run-1",
        ),
    ],
)
def test_other_folders_are_refused_in_a_line(
    make: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in make:
        path = Path(name)
        path.write_text("name: x\n") if path.suffix else path.mkdir()
    assert main(["watch", "here"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
