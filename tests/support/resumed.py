"""Trainings that are killed and go on, beside the same ones that are not."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

from tests.support.commands import Training, started
from tests.support.training import step_lines
from tests.support.waiting import wait_until

from orchestra.records.record import RunRecord

TASK = "digits(dropout=0.3, augment=True, channels=4, hidden=16)"
EPOCHS = 4
SETTINGS: dict[str, Any] = {
    "epochs": EPOCHS,
    "batch_size": 16,
    "optimizer": "SGD(lr=0.05, momentum=0.9)",
    "checkpoint_every": 7,
    "snapshots": 2,
}
RANKS = 3


def command(strategy: str, out: Path, **changes: Any) -> list[str]:
    """The command line that says what `SETTINGS` and `changes` say in Python."""
    words = ["train", "--task", TASK, "--strategy", strategy, "--ranks", str(RANKS)]
    for key, value in {**SETTINGS, **changes}.items():
        words += ["--set", f"{key}={value}"]
    return [*words, "--out", str(out)]


def training(strategy: str, out: Path, **changes: Any) -> Training:
    return Training(TASK, strategy, RANKS, out=out, **{**SETTINGS, **changes})


def newest(out: Path) -> int:
    """The number of the newest checkpoint, 0 if there is none."""
    folder = out / "checkpoints"
    return max((int(path.name) for path in folder.glob("[0-9]*")), default=0)


def kill_launcher(strategy: str, out: Path, at: int, **changes: Any) -> None:
    """SIGKILL for the command itself once checkpoint `at` is there; its ranks go with it."""
    with started(command(strategy, out, **changes), out.parent) as launched:
        wait_until(lambda: newest(out) >= at or launched.process.poll() is not None, "checkpoints")
        launched.process.kill()
        assert launched.end().status == -signal.SIGKILL
    assert not (out / "summary.json").exists()


def columns(out: Path) -> list[list[tuple[Any, ...]]]:
    """What the records of steps say that does not depend on time, for each rank."""
    wanted = ("step", "samples", "consumed", "loss", "rates")
    return [
        [tuple(map(str, (line[key] for key in wanted))) for line in step_lines(out, rank)]
        for rank in range(RANKS)
    ]


def assert_same(out: Path, record: RunRecord, whole: Path, expected: RunRecord) -> None:
    ours, theirs = record.summary(), expected.summary()
    for name in ("status", "parameters_sha256", "steps", "samples", "bytes_sent", "metrics"):
        assert ours[name] == theirs[name], name
    assert columns(out) == columns(whole)
    assert (out / "curve.jsonl").read_text().count("\n") == SETTINGS["snapshots"]
    for ours, theirs in zip(curve(out), curve(whole), strict=True):
        assert {**ours, "seconds": 0} == {**theirs, "seconds": 0}


def curve(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "curve.jsonl").read_text().splitlines()]
