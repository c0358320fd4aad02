"""Numbers that a strategy logs with `worker.log`: in records, curves of TensorBoard and reports."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.drawn import BATCH, STEPS, drawn, keep, record
from tests.support.event_files import approximately, read
from tests.support.own_loops import alone, close, distributed, in_order, mean_square
from tests.support.pages import Page
from tests.support.simulated import simulated
from tests.support.tasks_for_tests import REFUSED, Logs, LogsWrongly
from tests.support.training import settings, step_lines, train_processes
from torch import nn

from orchestra.errors import InputError
from orchestra.records.files import run_folder
from orchestra.records.record import RunRecord
from orchestra.report.page import write_report
from orchestra.strategies.all_reduce import AllReduce
from orchestra.trainer.settings import Run

Train = Callable[[Run, Path], RunRecord]


def logged(folder: Path, rank: int) -> list[dict[str, float]]:
    return [line["logged"] for line in step_lines(folder, rank)]


@pytest.mark.parametrize("train", [train_processes, simulated])
def test_logged_numbers_reach_the_records_and_tensorboard(train: Train, tmp_path: Path) -> None:
    train(settings(Logs(), 2, "images()", steps=3, tensorboard=True), tmp_path)
    norms = [numbers["norm"] for numbers in logged(tmp_path, 0)]
    for rank in range(2):
        assert logged(tmp_path, rank) == [
            {**({"begun": 1.0} if step == 1 else {}), "rank": float(rank), "norm": norm}
            for step, norm in enumerate(norms, start=1)
        ]
        curves = read(tmp_path / "tensorboard" / f"rank-{rank}")
        assert curves["logged/norm"] == approximately([*enumerate(norms, start=1)])
        assert curves["logged/begun"] == [(1, 1.0)]
    assert len({*norms}) == 3


def test_a_step_without_logged_numbers_has_no_field_for_them(tmp_path: Path) -> None:
    simulated(settings(AllReduce(), 2, "images()", steps=2), tmp_path)
    assert all("logged" not in line for line in step_lines(tmp_path, 0))


def test_a_run_of_shapes_passes_over_tensors_without_a_value(tmp_path: Path) -> None:
    run = settings(Logs(), 2, "images()", steps=2, engine="simulation", tensors="shapes")
    assert simulated(run, tmp_path).ending.status == "completed"


def test_a_loop_of_the_users_own_ignores_logged_numbers() -> None:
    def loop(model: nn.Module, optimizer: Any, batches: Any) -> None:
        for batch in batches:
            optimizer.zero_grad()
            mean_square(model, batch).backward()
            optimizer.step()

    (one,) = distributed(loop, "tests.support.tasks_for_tests:Logs()", lambda: in_order(8), ranks=1)
    close(one, alone(loop, in_order(8)))


@pytest.mark.parametrize("which", range(len(REFUSED)))
def test_what_is_no_finite_number_by_a_plain_name_is_refused(which: int, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="log finite numbers") as caught:
        simulated(settings(LogsWrongly(which=which), 1, "images()", steps=1), tmp_path)
    assert "\n" not in str(caught.value)


def add(folder: Path, **to_line: Callable[[int], Any]) -> None:
    """Add fields to the lines of rank 0 by the number of their step; None adds nothing."""
    path = folder / "steps-rank-0.jsonl"
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    for line in lines:
        found = {name: of(line["step"]) for name, of in to_line.items()}
        line |= {name: value for name, value in found.items() if value is not None}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_report_shows_logged_numbers_against_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestra.report.page.library", lambda: "")
    monkeypatch.setattr("orchestra.report.page.save", lambda *_: None)
    keep(tmp_path, [record("ring"), record("server")], trace=False)
    add(
        run_folder(tmp_path, "ring", 4, 0),
        logged=lambda step: {"drift": 10.0 * step} if step % 2 else None,
    )
    values = [
        (value["strategy"], value["samples"], value["value"])
        for value in drawn(tmp_path).values("logged-drift", "low")
    ]
    # A part has four steps, of which the first and the third have the number
    parts = [(10 * (first + 1), BATCH * (first + 1)) for first in range(1, STEPS, 4)]
    assert {*values} == {("ring", samples, mean) for mean, samples in parts}
    page = Page(write_report([tmp_path], tmp_path))
    assert "logged-drift" in page.of("figure", "data-figure")
    assert "Logged by the strategies" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    "damaged", [[1.0], {"a b": 1.0}, {"x": "1"}, {"x": None}, {"x": float("nan")}, 10**400]
)
def test_the_report_names_the_line_whose_logged_numbers_are_damaged(
    damaged: Any, tmp_path: Path
) -> None:
    keep(tmp_path, [record("ring")], trace=False)
    add(run_folder(tmp_path, "ring", 4, 0), logged=lambda step: damaged if step == 3 else None)
    with pytest.raises(InputError, match=r"steps-rank-0\.jsonl:3: is damaged"):
        drawn(tmp_path)
