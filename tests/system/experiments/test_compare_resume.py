"""Comparisons that are killed or stopped: the same command goes on, and what is done stays."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.commands import Started, rank_pids, run, started
from tests.support.comparisons import compared, experiment, files, rows, summary
from tests.support.lab import some

from orchestra.experiments.comparison import Comparison
from orchestra.experiments.file import to_yaml
from orchestra.records.record import RunRecord

ASYNCHRONOUS = "ParameterServer(consistency='asynchronous')"
CHANGES: dict[str, Any] = {
    "ranks": 3,
    "steps": 24,
    "checkpoint_every": 5,
    "seeds": [0, 1],
    "strategies": {"one": "Single", "async": ASYNCHRONOUS, "ring": "AllReduce"},
}
TUNED = {
    **CHANGES,
    "seeds": [0],
    "strategies": {"one": "Single", "async": ASYNCHRONOUS},
    "tune": {"settings": {"optimizer.lr": [0.01, 0.1]}},
}
SAMPLES = 24 * 3 * 8


def command(folder: Path, **changes: Any) -> list[str]:
    path = folder / "exp.yaml"
    path.write_text(to_yaml(experiment(**{**CHANGES, **changes})))
    return ["compare", "exp.yaml", "--out", "out", "--no-report"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted comparison."""
    out = tmp_path_factory.mktemp("whole") / "out"
    assert compared(out, **CHANGES).well
    return out


@pytest.fixture(scope="module")
def whole_tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "tuned"
    assert compared(out, **TUNED).well
    return out


def of_interest(entry: dict[str, Any]) -> dict[str, Any]:
    """What a synchronous run says that does not depend on time."""
    names = ("name", "ranks", "seed", "status", "samples", "tuned", "parameters_sha256", "metrics")
    return {name: entry[name] for name in names}


def assert_as_if_uninterrupted(out: Path, whole: Path) -> None:
    ours, theirs = summary(out)["runs"], summary(whole)["runs"]
    assert rows(out) == rows(whole)
    for mine, other in zip(ours, theirs, strict=True):
        if mine["name"] == "async":
            assert (mine["status"], mine["samples"]) == ("completed", SAMPLES)
        else:
            assert of_interest(mine) == of_interest(other)
        assert mine == own_row(out, mine)


def own_row(out: Path, row: dict[str, Any]) -> dict[str, Any]:
    """What stands in the run's own folder."""
    place = out / "runs" / row["name"] / f"{row['ranks']}-ranks" / f"seed-{row['seed']}"
    (entry,) = json.loads((place / "summary.json").read_text())["runs"]
    return dict(entry)


def done(out: Path) -> dict[str, tuple[int, bytes]]:
    """The files of the runs and trials that were completed."""
    found = {}
    for path in out.glob("*/*/*/*/summary.json"):
        for name, file in files(path.parent).items():
            found[f"{path.parent.relative_to(out)}/{name}"] = file
    return found


def assert_untouched(out: Path, before: dict[str, tuple[int, bytes]]) -> None:
    after = files(out)
    assert {name: after[name] for name in before} == before


def rows_at_least(number: int) -> Callable[[Path], bool]:
    return lambda out: (out / "summary.json").exists() and len(summary(out)["runs"]) >= number


def exists(pattern: str) -> Callable[[Path], bool]:
    return lambda out: any(out.glob(pattern))


KILLS = {
    "its first run begins": (exists("runs/one/*/seed-0"), CHANGES),
    "one run is done": (rows_at_least(1), CHANGES),
    "an asynchronous run has a checkpoint": (exists("runs/async/*/*/checkpoints/0002"), CHANGES),
    "the second seed is under way": (exists("runs/one/*/seed-1/environment.json"), CHANGES),
    "a trial is done": (exists("tuning/one/*/trial-0/summary.json"), TUNED),
    "its trials are done": (exists("tuning.json"), TUNED),
}


USUAL = ("one run is done", "its trials are done")


@pytest.mark.parametrize(
    "moment",
    [pytest.param(moment, marks=() if moment in USUAL else pytest.mark.lab) for moment in KILLS],
)
def test_killed_it_goes_on(moment: str, whole: Path, whole_tuned: Path, tmp_path: Path) -> None:
    condition, changes = KILLS[moment]
    out = tmp_path / "out"
    with started(command(tmp_path, **changes), tmp_path) as process:
        process.wait_until(lambda: condition(out), moment)
        process.process.kill()
        assert process.end().status == -signal.SIGKILL
    assert not rows_at_least(len(rows(whole_tuned if changes is TUNED else whole)))(out)
    before = done(out)
    assert compared(out, **changes).well
    assert_untouched(out, before)
    assert_as_if_uninterrupted(out, whole_tuned if changes is TUNED else whole)


def keep_rows(number: int) -> Callable[[Path], None]:
    def cut(out: Path) -> None:
        told = summary(out)
        told["runs"] = told["runs"][:number]
        (out / "summary.json").write_text(json.dumps(told))

    return cut


def emptied(out: Path) -> None:
    shutil.rmtree(out / LAST)
    (out / LAST).mkdir()


def half_claimed(out: Path) -> None:
    emptied(out)
    (out / LAST / ".experiment.yaml.partial").write_text("task: dig")


def without_a_summary(out: Path) -> None:
    (out / LAST / "summary.json").unlink()
    keep_rows(5)(out)


def begun_at_last(out: Path) -> None:
    shutil.rmtree(out)
    out.mkdir()
    (out / ".experiment.yaml.partial").write_text("")


def half_a_summary(out: Path) -> None:
    keep_rows(3)(out)
    (out / ".summary.json.partial").write_text("{")


LAST = "runs/ring/3-ranks/seed-1"
CUTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "before its experiment was written": (begun_at_last, "runs"),
    "before its first summary": (lambda out: (out / "summary.json").unlink(), "none"),
    "between a run's summary and its own": (keep_rows(3), "none"),
    "while its summary was written": (half_a_summary, "none"),
    "when a run's folder was made": (emptied, LAST),
    "while a run's experiment was written": (half_claimed, LAST),
    "before a run's summary": (without_a_summary, LAST),
}


@pytest.mark.parametrize(
    "moment",
    some(
        [
            pytest.param(moment, marks=pytest.mark.lab if cut is begun_at_last else ())
            for moment, (cut, _) in CUTS.items()
        ]
    ),
)
def test_cut_off_at_any_point_it_goes_on(moment: str, whole: Path, tmp_path: Path) -> None:
    cut, made_again = CUTS[moment]
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    before = {name: file for name, file in done(out).items() if not name.startswith(made_again)}
    cut(out)
    assert compared(out, **CHANGES).well
    assert_untouched(out, before)
    assert_as_if_uninterrupted(out, whole)
    assert not [*out.rglob(".*.partial")]


def gate(folder: Path) -> dict[str, Any]:
    """A comparison whose runs wait until `go` is in `folder`; it writes no checkpoints."""
    return {
        **CHANGES,
        "task": f"tests.support.failing_tasks:gated('{folder}', 40)",
        "strategies": {"ring": "AllReduce", "one": "Single"},
        "steps": 12,
        "checkpoint_every": None,
        "ranks": 2,
        "seeds": [0],
    }


def at_the_gate(folder: Path) -> Started:
    """Its first run waits."""
    process = started(command(folder, **gate(folder)), folder)
    process.wait_until(lambda: len(list(folder.glob("at-*"))) == 2, "two ranks at the gate")
    return process


def gone_on(folder: Path) -> Comparison:
    (folder / "go").touch()
    return compared(folder / "out", **gate(folder))


def test_ctrl_c_stops_in_good_order_and_the_same_command_goes_on(tmp_path: Path) -> None:
    with at_the_gate(tmp_path) as process:
        process.process.send_signal(signal.SIGINT)
        process.wait_until(lambda: "stopping in good order" in process.err(), "the order")
        (tmp_path / "go").touch()
        ended = process.end()
    assert ended.status == 1, ended
    assert "stopped after 0 of 2 runs; the same command with --out out goes on" in ended.out
    place = tmp_path / "out/runs/ring/2-ranks/seed-0"
    (stopped,) = json.loads((place / "summary.json").read_text())["runs"]
    assert stopped["status"] == "stopped"
    assert 0 < stopped["steps"] < 12
    assert rows(tmp_path / "out") == []
    again = run(command(tmp_path, **gate(tmp_path)), tmp_path)
    assert again.status == 0, again
    assert "ring, 2 ranks, seed 0: resumed from checkpoint" in again.err
    first = summary(tmp_path / "out")["runs"][0]
    assert (first["status"], first["steps"]) == ("completed", 12)
    assert [status for *_, status in rows(tmp_path / "out")] == ["completed"] * 2


def test_ctrl_c_twice_ends_it_at_once(tmp_path: Path) -> None:
    with at_the_gate(tmp_path) as process:
        process.process.send_signal(signal.SIGINT)
        process.wait_until(lambda: "stopping in good order" in process.err(), "the order")
        process.process.send_signal(signal.SIGINT)
        ended = process.end()
    assert ended.status == 1, ended
    assert "stopped after 0 of 2 runs" in ended.out
    assert rows(tmp_path / "out") == []
    assert gone_on(tmp_path).well


def test_killed_in_a_run_without_checkpoints(tmp_path: Path) -> None:
    with at_the_gate(tmp_path) as process:
        process.process.kill()
        assert process.end().status == -signal.SIGKILL
    records: list[RunRecord] = gone_on(tmp_path).records
    assert [record.learned.steps for record in records] == [12] * 2
    expected = compared(tmp_path / "expected", **gate(tmp_path)).records
    assert [r.learned.parameters_sha256 for r in records] == [
        r.learned.parameters_sha256 for r in expected
    ]


def test_a_retry_that_is_cut_off_goes_on(whole: Path, tmp_path: Path) -> None:
    """A failed run that is under way again is no failed run any more."""
    mended = tmp_path / "mended"
    strategies = {
        "one": "Single",
        "f": f"tests.support.comparison_tasks:Failing(mended='{mended}')",
    }
    changes = {**CHANGES, "strategies": strategies, "seeds": [0]}
    out = tmp_path / "out"
    assert [r.ending.status for r in compared(out, **changes).records] == ["completed", "failed"]
    mended.touch()
    with started([*command(tmp_path, **changes), "--retry"], tmp_path) as process:
        place = out / "runs/f/3-ranks/seed-0"
        process.wait_until(lambda: not (place / "summary.json").exists(), "the retry")
        process.process.kill()
        process.end()
    shutil.rmtree(place / "checkpoints", ignore_errors=True)
    assert compared(out, **changes).well


def test_nothing_is_left_of_the_comparisons() -> None:
    assert rank_pids() == []
