"""The callback of `orchestra.train`: what it is told, and that it can stop the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import orchestra
from orchestra.errors import InputError
from orchestra.records.record import RunRecord

ENDLESS = 1_000_000


def trained(callback: Any, folder: Path, **settings: Any) -> RunRecord:
    given = {"steps": ENDLESS, "snapshots": 1, "quiet": True, **settings}
    return orchestra.train("digits", "AllReduce", 2, out=folder, callback=callback, **given)


def test_a_callback_stops_the_run_in_good_order(tmp_path: Path) -> None:
    told: list[orchestra.RunProgress] = []

    def callback(progress: orchestra.RunProgress) -> bool:
        told.append(progress)
        return len(told) == 2

    record = trained(callback, tmp_path)
    assert (record.ending.status, record.ending.stopped_by) == ("stopped", "callback")
    first, second = told
    assert 0 < first.step <= second.step <= record.learned.steps
    assert 0 < second.fraction < 1
    assert second.loss > 0
    (written,) = json.loads((tmp_path / "summary.json").read_text())["runs"]
    assert written["stopped_by"] == "callback"


def test_an_error_of_a_callback_ends_the_run_and_is_raised(tmp_path: Path) -> None:
    def callback(progress: orchestra.RunProgress) -> None:
        raise LookupError(f"step {progress.step}")

    with pytest.raises(LookupError, match="step"):
        trained(callback, tmp_path)


def test_a_simulation_refuses_a_callback(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="callback: the engine simulation"):
        trained(print, tmp_path, engine="simulation", steps=1)
