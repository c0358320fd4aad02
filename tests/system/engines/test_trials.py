"""Trials on long-lived processes: each gets the next one when it is free, and may be lost."""

from __future__ import annotations

import os
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.lab import in_lab

from orchestra.engines.processes.system import now
from orchestra.engines.simulation import trials
from orchestra.engines.simulation.training import assigned
from orchestra.engines.simulation.trials import Trial, Tried, hand_out
from orchestra.errors import RunFailed
from orchestra.strategies.single import Single
from orchestra.trainer.settings import Run, Training

LIMIT = 600.0


def trial(task: str, folder: Path) -> Trial:
    """A simulated run of two steps."""
    training = Training(
        ranks=1, batch_size=8, steps=2, engine="simulation", cluster="one_host(cores=1)",
        calibration="none",
    )  # fmt: skip
    return Trial(assigned(Run("one", task, Single(), 0, training), folder))


class Notebook:
    """Trials to hand out, and what became of them."""

    def __init__(self, trials: dict[str, Trial]) -> None:
        self.waiting = list(trials.items())
        self.outcomes: dict[str, list[Tried]] = {}

    def ask(self) -> tuple[str, Trial] | None:
        return self.waiting.pop(0) if self.waiting else None

    def told(self, name: str, outcome: Tried) -> None:
        self.outcomes.setdefault(name, []).append(outcome)


def nothing() -> None:
    pass


def test_each_trial_is_carried_out_once(tmp_path: Path) -> None:
    names = [str(number) for number in range(5)]
    book = Notebook({name: trial("digits()", tmp_path / name) for name in names})
    assert hand_out(book.ask, book.told, now() + LIMIT, 2, nothing) is False
    assert Counter({name: len(found) for name, found in book.outcomes.items()}) == Counter(names)
    for (outcome,) in book.outcomes.values():
        assert outcome.failure is None
        assert outcome.record is not None
        assert outcome.record.learned.samples == 16


def test_what_is_asked_for_may_depend_on_what_was_found(tmp_path: Path) -> None:
    """A process that finds no trial waits for the outcome of another's."""
    book = Notebook({"first": trial("digits()", tmp_path / "first")})

    def told(name: str, outcome: Tried) -> None:
        book.told(name, outcome)
        if name == "first":
            book.waiting += [(n, trial("digits()", tmp_path / n)) for n in ("second", "third")]

    hand_out(book.ask, told, now() + LIMIT, 2, nothing)
    assert set(book.outcomes) == {"first", "second", "third"}


@pytest.mark.parametrize("processes", [*in_lab([1]), 2])
def test_a_trial_that_ends_its_process_fails_alone(processes: int, tmp_path: Path) -> None:
    tasks = {"one": "digits()", "fatal": "tests.support.failing_tasks:fatal()", "two": "digits()"}
    book = Notebook({name: trial(task, tmp_path / name) for name, task in tasks.items()})
    hand_out(book.ask, book.told, now() + LIMIT, processes, nothing)
    failures = {name: found.failure for name, (found,) in book.outcomes.items()}
    assert failures.keys() == tasks.keys()
    assert "was killed" in (failures["fatal"] or "")
    assert (failures["one"], failures["two"]) == (None, None)


def test_a_trial_that_is_refused_fails_alone(tmp_path: Path) -> None:
    good = trial("digits()", tmp_path / "good")
    bad = replace(good.assignment, run=replace(good.assignment.run, task="no_such_task()"))
    book = Notebook({"bad": Trial(bad), "good": good})
    hand_out(book.ask, book.told, now() + LIMIT, 1, nothing)
    assert "no_such_task" in (book.outcomes["bad"][0].failure or "")
    assert book.outcomes["good"][0].failure is None


def test_a_second_ctrl_c_ends_trials_that_do_not_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trial waits for a file that never comes; it is not carried out again."""
    launches: list[int] = []
    launch = trials.launch  # type: ignore[attr-defined]

    def counted(program: Any, argument: Any, ranks: int, **options: Any) -> Any:
        launches.append(ranks)
        return launch(program, argument, ranks, **options)

    def interrupt() -> None:
        if any(tmp_path.glob("at-*")):
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(trials, "launch", counted)
    task = f"tests.support.failing_tasks:gated({str(tmp_path)!r}, 8)"
    book = Notebook({"waits": trial(task, tmp_path / "run")})
    assert hand_out(book.ask, book.told, now() + LIMIT, 2, interrupt) is True
    assert launches == [2]
    assert not book.outcomes


def test_a_question_that_fails_is_raised(tmp_path: Path) -> None:
    def ask() -> tuple[str, Trial] | None:
        raise RunFailed("no answer")

    with pytest.raises(RunFailed, match="no answer"):
        hand_out(ask, lambda name, outcome: None, now() + LIMIT, 2, nothing)
