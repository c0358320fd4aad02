"""Runs that lose a rank, and are restarted from their newest checkpoint by `--max-restarts`."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.support.commands import Ended, Started, rank_pids, run
from tests.support.failures import HOST, RING, Gate, entry_of, train
from tests.support.fork_servers import fork_server
from tests.support.training import settings, step_lines
from tests.support.waiting import is_running, wait_until

import orchestra
from orchestra.cli.main import main
from orchestra.engines.live import LiveFile, SlowRanks
from orchestra.engines.restarts import Restarts
from orchestra.errors import InputError, RankLost, RunFailed
from orchestra.records.live import read_live
from orchestra.records.store import RunFolder
from orchestra.strategies.all_reduce import AllReduce

KILLED = f"on {HOST} was killed by SIGKILL"


def dying(folder: Path, deaths: str, restarts: int, **changes: Any) -> list[str]:
    """The command of a training whose ranks are killed as `failing_tasks.dying` says."""
    words = train(f"dying('{folder}', '{deaths}')", RING, **changes)
    return [*words, "--max-restarts", str(restarts)]


def without_deaths(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    """The summary of the same training in which nobody dies."""
    folder = tmp_path / "undisturbed"
    folder.mkdir()
    ended = run(dying(tmp_path, "", 0, **changes), folder)
    assert ended.status == 0, ended.err
    return entry_of(folder)


def told(ended: Ended) -> list[str]:
    return [line.removeprefix("orchestra: ") for line in ended.err.splitlines()]


def figures(entry: dict[str, Any]) -> list[dict[str, Any]]:
    """The restarts in a summary, without their times."""
    assert all(restart["at"] > 1.6e9 for restart in entry["restarts"])
    return [{**restart, "at": 0} for restart in entry["restarts"]]


def test_a_run_that_loses_two_ranks_ends_as_an_undisturbed_one(tmp_path: Path) -> None:
    undisturbed = without_deaths(tmp_path, checkpoint_every=8)
    ended = run(dying(tmp_path, "2@20,0@6", 3, checkpoint_every=8), tmp_path)
    assert ended.status == 0, ended.err
    first = f"rank 2 {KILLED}; restart 1 of 3 in 1 s, from checkpoint 2, step 16"
    second = f"rank 0 {KILLED}; restart 2 of 3 in 2 s, from checkpoint 2, step 16"
    resumed = "resumed from checkpoint 2, step 16"
    assert told(ended) == [first, resumed, second, resumed]
    assert "restarts" in ended.out
    entry = entry_of(tmp_path)
    assert (entry["status"], entry["failure"]) == ("completed", None)
    assert figures(entry) == [
        {"cause": f"rank 2 {KILLED}", "at": 0, "checkpoint": 2, "step": 16, "steps_again": 3},
        {"cause": f"rank 0 {KILLED}", "at": 0, "checkpoint": 2, "step": 16, "steps_again": 5},
    ]
    assert entry["notices"] == [first, second, resumed]
    for name in ("parameters_sha256", "steps", "samples", "bytes_sent", "metrics"):
        assert entry[name] == undisturbed[name], name
    for rank in range(3):
        lines = step_lines(tmp_path / "out", rank)
        assert [line["step"] for line in lines] == list(range(1, 41))
    record = RunFolder(tmp_path / "out").record
    assert len(record.ending.restarts) == 2


def test_a_loss_before_the_first_checkpoint_begins_anew(tmp_path: Path) -> None:
    undisturbed = without_deaths(tmp_path, checkpoint_every=8)
    ended = run(dying(tmp_path, "1@5", 1, checkpoint_every=8), tmp_path)
    assert ended.status == 0, ended.err
    cause = f"rank 1 {KILLED}"
    assert told(ended) == [f"{cause}; restart 1 of 1 in 1 s, from the beginning: no checkpoint yet"]
    entry = entry_of(tmp_path)
    assert figures(entry) == [
        {"cause": cause, "at": 0, "checkpoint": None, "step": 0, "steps_again": 4}
    ]
    assert entry["parameters_sha256"] == undisturbed["parameters_sha256"]


@pytest.mark.lab
def test_without_checkpoints_it_begins_anew_and_says_what_would_lose_less(tmp_path: Path) -> None:
    ended = run(dying(tmp_path, "1@5", 1), tmp_path)
    assert ended.status == 0, ended.err
    hint, restart = told(ended)
    assert hint.endswith("set checkpoint_every to lose less")
    assert restart == f"rank 1 {KILLED}; restart 1 of 1 in 1 s, from the beginning"


def test_a_run_with_no_restart_left_fails_with_the_last_cause(tmp_path: Path) -> None:
    ended = run(dying(tmp_path, "2@10,0@3,1@2", 2, checkpoint_every=8), tmp_path)
    assert ended.status == 1
    assert told(ended)[-1] == f"rank 1 {KILLED}; no restart is left of 2"
    entry = entry_of(tmp_path)
    assert (entry["status"], entry["failure"]) == ("failed", told(ended)[-1])
    causes = [restart["cause"] for restart in entry["restarts"]]
    assert causes == [f"rank 2 {KILLED}", f"rank 0 {KILLED}"]
    assert [restart["steps_again"] for restart in entry["restarts"]] == [1, 2]
    # The same command goes on by hand.
    again = run(dying(tmp_path, "2@10,0@3,1@2", 2, checkpoint_every=8), tmp_path)
    assert again.status == 0, again.err
    assert entry_of(tmp_path)["restarts"] == []


def test_an_exception_is_not_restarted(tmp_path: Path) -> None:
    ended = run([*train("broken", RING, checkpoint_every=1), "--max-restarts", "3"], tmp_path)
    assert ended.status == 1
    assert "restart" not in ended.err
    entry = entry_of(tmp_path)
    assert "ValueError: sample 70 cannot be decoded" in entry["failure"]
    assert entry["restarts"] == []


def test_a_rank_that_hangs_is_named_and_not_restarted(tmp_path: Path) -> None:
    words = train("hanging", RING, patience=3, checkpoint_every=40)
    ended = run([*words, "--max-restarts", "3"], tmp_path)
    assert ended.status == 1
    (line,) = ended.err.splitlines()
    assert f" on {HOST} hangs: no progress for " in line
    assert "waiting for it" in line
    entry = entry_of(tmp_path)
    assert (entry["status"], entry["restarts"]) == ("failed", [])


WITH_LONG_PAUSES = """\
from orchestra.cli.main import main
from orchestra.engines import restarts

if __name__ == "__main__":
    restarts.PAUSE_SECONDS = restarts.MOST_PAUSE_SECONDS = 1000.0
    raise SystemExit(main())
"""


def test_ctrl_c_in_the_pause_ends_at_once(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(WITH_LONG_PAUSES)
    words = dying(tmp_path, "1@5", 1, checkpoint_every=8)
    with Started([sys.executable, str(script), *words], tmp_path) as command:
        command.wait_until(lambda: "restart 1 of 1" in command.err(), "the pause has begun")
        command.process.send_signal(signal.SIGINT)
        ended = command.end()
    assert ended.status == 1
    assert told(ended)[1:] == ["stopped"]
    entry = entry_of(tmp_path)
    assert (entry["status"], entry["failure"]) == ("failed", f"rank 1 {KILLED}")
    assert entry["restarts"] == []


def test_a_loss_after_ctrl_c_is_not_restarted(tmp_path: Path) -> None:
    with Gate(tmp_path, RING, 3, more=("--max-restarts", "3")) as gate:
        gate.command.process.send_signal(signal.SIGINT)
        gate.told("stopping in good order")
        gate.signal(1, signal.SIGKILL)
        ended = gate.end()
    assert ended.status == 1
    assert told(ended)[-1] == f"rank 1 {KILLED}"
    assert gate.entry()["restarts"] == []


@pytest.mark.lab
def test_python_restarts_too(tmp_path: Path) -> None:
    record = orchestra.train(
        f"tests.support.failing_tasks:dying('{tmp_path}', '0@10')", RING, 2,
        steps=16, batch_size=8, snapshots=0, checkpoint_every=4, out=tmp_path / "out",
        quiet=True, max_restarts=1,
    )  # fmt: skip
    assert (record.ending.status, record.learned.steps) == ("completed", 16)
    assert [restart.step for restart in record.ending.restarts] == [8]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max-restarts", "-1"], "max_restarts: -1 is below 0"),
        (
            ["--engine", "simulation", "--cluster", "lan_1gbit(nodes=3)", "--max-restarts", "1"],
            "max_restarts: a simulation repeats its faults exactly",
        ),
    ],
)
def test_restarts_that_cannot_be_are_refused(
    words: Sequence[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*train("broken", RING), *words]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def restarts(folder: Path, most: int = 2) -> Restarts:
    chosen = settings(AllReduce("ring"), 2, "mlp_task", checkpoint_every=4)
    return Restarts(chosen, folder, most, lambda _: None)


def test_bad_input_of_a_restart_leaves_the_folder(tmp_path: Path) -> None:
    """A tracker, say, that no longer takes the run."""
    from orchestra.experiments.experiment import only_run
    from orchestra.experiments.file import load
    from orchestra.experiments.run import make_run
    from orchestra.settings.reading import Entry

    given = {"task": "digits", "strategies": {"ring": RING}, "ranks": 2, "seeds": [0]}
    experiment = load(None, (), {key: Entry(value, key) for key, value in given.items()})
    outcomes = iter([RankLost("rank 1 is gone"), InputError("no longer")])

    def attempt(*_: Any) -> Any:
        raise next(outcomes)

    folder = tmp_path / "out"
    with pytest.raises(RunFailed, match="no longer"):
        make_run(
            only_run(experiment, "test"), experiment, folder, attempt,
            max_restarts=1, notify=lambda _: None,
        )  # fmt: skip
    (entry,) = json.loads((folder / "summary.json").read_text())["runs"]
    assert (entry["status"], entry["failure"]) == ("failed", "no longer")
    assert [restart["cause"] for restart in entry["restarts"]] == ["rank 1 is gone"]


def test_only_losses_are_followed(tmp_path: Path) -> None:
    assert restarts(tmp_path).follow(RankLost("rank 1 was killed"))
    assert not restarts(tmp_path).follow(RunFailed("rank 1 failed: ValueError"))
    assert not restarts(tmp_path, most=0).follow(RankLost("rank 1 was killed"))


def prepared(folder: Path, monkeypatch: pytest.MonkeyPatch, losses: int) -> list[float]:
    """The pauses before the restarts that follow as many losses."""
    pauses: list[float] = []
    monkeypatch.setattr("orchestra.engines.restarts.time.sleep", pauses.append)
    made = restarts(folder, most=losses)
    for _ in range(losses):
        made.prepare(RankLost("rank 1 is gone"))
    return pauses


def test_pauses_double_up_to_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert prepared(tmp_path, monkeypatch, 7) == [1, 2, 4, 8, 16, 30, 30]


def test_steps_count_as_done_again_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is lost in its set-up has done no step since the last restart."""
    monkeypatch.setattr("orchestra.engines.restarts.time.sleep", lambda _: None)
    made = restarts(tmp_path)
    made.begin()
    path = tmp_path / "steps-rank-0.jsonl"
    path.write_text(json.dumps({"step": 1}) + "\n" + json.dumps({"step": 2}) + "\n{half")
    made.prepare(RankLost("rank 1 is gone"))
    made.prepare(RankLost("rank 1 is gone"))
    assert [restart.steps_again for restart in made.made] == [2, 0]


def test_watchers_see_why_a_run_was_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    LiveFile(tmp_path, SlowRanks((), lambda _: None)).write()
    prepared(tmp_path, monkeypatch, 1)
    expected = "rank 1 is gone; restart 1 of 1 in 1 s, from the beginning: no checkpoint yet"
    for _ in range(2):  # in the pause, and in the next attempt
        live = read_live(tmp_path)
        assert live is not None
        assert live.notices == (expected,)
        LiveFile(tmp_path, SlowRanks((), lambda _: None)).write()


@pytest.mark.lab
def test_a_lost_fork_server_is_replaced(tmp_path: Path) -> None:
    words = dying(tmp_path, "", 1)
    command = [sys.executable, "-m", "orchestra", *words]
    with Started(command, tmp_path, fresh=True) as launcher:
        pid = launcher.process.pid
        launcher.wait_until(lambda: fork_server(pid) is not None, "the fork server starts")
        server = fork_server(pid)
        assert server is not None
        os.kill(server, signal.SIGKILL)
        ended = launcher.end()
    assert ended.status == 0, ended.err
    (restart,) = entry_of(tmp_path)["restarts"]
    assert restart["cause"].endswith("was killed by SIGKILL")


def test_torchrun_restarts_the_same_command_which_resumes(tmp_path: Path) -> None:
    words = ["-m", "torch.distributed.run", "--standalone", f"--log-dir={tmp_path / 'logs'}"]
    words += [
        "--max-restarts=1",
        "--nproc-per-node=2",
        "-m",
        "orchestra",
        *words_for_torchrun(tmp_path),
    ]
    with Started([sys.executable, *words], tmp_path) as command:
        ended = command.end()
    assert ended.status == 0, ended.err
    entry = entry_of(tmp_path)
    assert entry["status"] == "completed"
    assert entry["notices"] == ["resumed from checkpoint 2, step 8"]


def words_for_torchrun(folder: Path) -> list[str]:
    words = train(f"dying('{folder}', '1@10')", RING, checkpoint_every=4, ranks=2)
    place = words.index("--ranks")
    return [*words[:place], *words[place + 2 :]]


def test_torchrun_has_restarts_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    assert main([*train("broken", RING), "--max-restarts", "1"]) == 2
    assert "only it can start them again" in capsys.readouterr().err


def test_no_rank_of_this_module_is_left() -> None:
    wait_until(lambda: not any(map(is_running, rank_pids())), "no rank is left")
