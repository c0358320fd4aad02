"""What a user sees while runs are made: bars on a terminal, lines elsewhere."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable

import pytest
from tests.support.waiting import wait_until

from orchestra.engines.events import Heartbeat, Interrupted, Notice
from orchestra.engines.live import RUN_LINE_SECONDS, Display, Lines, Progress
from orchestra.strategies.single import Single
from orchestra.trainer.settings import Run, Training
from orchestra.worker.runtime import RankActivity


class Terminal(io.StringIO):
    """A file that says it is one."""

    def isatty(self) -> bool:
        return True


def on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """In place of standard error, until the end of the test."""
    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys, "stderr", terminal)
    return terminal


def make_two_of_three(progress: Progress, drawn: Callable[[], bool] = lambda: True) -> None:
    """One was made before, one is completed once its line is `drawn`, one fails."""
    run = Run("ring", "digits", Single(), 0, Training(ranks=1))
    with progress:
        progress.skip()
        progress.begin("ring, 1 rank, seed 0")
        with Display(run, Single().roles(1), progress=progress) as display:
            beat = Heartbeat(
                0, step=3, samples=96, loss=0.25, fraction=0.5, activity=RankActivity.TRAINING
            )
            display.on_event(beat)
            display.on_event(Notice("resumed"))
            wait_until(drawn, "the line of the run")
        progress.finish("accuracy 0.9, 1.0 s")
        progress.begin("ring, 1 rank, seed 1")
        progress.finish("failed: rank 0 is gone", failed=True)


def test_elsewhere_each_finished_run_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    make_two_of_three(Progress(3))
    assert capsys.readouterr().err.splitlines() == [
        "orchestra: ring, 1 rank, seed 0: resumed",
        "2/3 ring, 1 rank, seed 0: accuracy 0.9, 1.0 s",
        "3/3 ring, 1 rank, seed 1: failed: rank 0 is gone",
    ]


def test_elsewhere_a_long_run_is_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestra.engines.live.RUN_LINE_SECONDS", 0.0)
    run = Run("ring", "digits", Single(), 0, Training(ranks=1))
    beat = Heartbeat(0, step=3, samples=96, loss=0.25, fraction=0.5, activity=RankActivity.TRAINING)
    with Display(run, Single().roles(1)) as display:
        display.on_event(Heartbeat(0))
        display.on_event(beat)
    first, second = capsys.readouterr().err.splitlines()
    assert first == "orchestra: ring: set-up, 0%"
    assert re.fullmatch(r"orchestra: ring: 96 samples, .*/s, 0 s left, loss 0.2500, 50%", second)
    with Display(run, Single().roles(1), quiet=True) as display:
        display.on_event(beat)
    assert capsys.readouterr().err == ""
    make_two_of_three(Progress(3))
    line = capsys.readouterr().err.splitlines()[0]
    assert re.fullmatch(r"orchestra: ring, 1 rank, seed 0: 96 samples, .*, 50%", line)


def test_lines_of_a_run_are_half_a_minute_apart(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    lines = Lines(lambda: now, RUN_LINE_SECONDS, at_once=False)
    told = []
    for now in range(0, 100, 10):
        lines("ring", now / 100)
        told += capsys.readouterr().err.splitlines()
    assert told == ["orchestra: ring, 30%", "orchestra: ring, 60%", "orchestra: ring, 90%"]


def test_quiet_says_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_two_of_three(Progress(3, quiet=True))
    assert capsys.readouterr().err == ""
    terminal = on_a_terminal(monkeypatch)
    make_two_of_three(Progress(3, quiet=True))
    assert terminal.getvalue() == ""


def test_a_terminal_has_a_bar_over_all_and_one_of_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = on_a_terminal(monkeypatch)
    make_two_of_three(Progress(3), lambda: "96 samples" in terminal.getvalue())
    text = terminal.getvalue()
    for words in ("run 1 of 3", "run 2 of 3", "run 3 of 3", "loss 0.2500"):
        assert words in text, words
    assert re.search(r"\d:\d\d elapsed, about \d:\d\d left", text)
    assert "ring, 1 rank, seed 0: resumed" in text
    assert "3/3 ring, 1 rank, seed 1: failed: rank 0 is gone" in text
    assert "accuracy 0.9" not in text, "a run that went well needs no line there"


def test_what_is_left_follows_from_the_mean_of_the_runs_so_far(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = on_a_terminal(monkeypatch)
    now = 0.0
    with Progress(3, clock=lambda: now) as progress:
        progress.begin("ring")
        now = 10.0
        progress.finish("accuracy 0.9")
        progress.begin("server")
        now = 14.0
        text = "0:14 elapsed, about 0:16 left"
        wait_until(lambda: text in terminal.getvalue(), "the line of all runs")


def test_on_80_columns_nothing_of_a_runs_line_is_cut_but_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = on_a_terminal(monkeypatch)
    monkeypatch.setenv("COLUMNS", "80")
    run = Run("StochasticGradientPush", "digits", Single(), 0, Training(ranks=1))
    with Display(run, Single().roles(1)) as display:
        beat = Heartbeat(
            0, step=3, samples=1_234_567, loss=0.25, fraction=0.01, activity=RankActivity.TRAINING
        )
        display.on_event(beat)
        wait_until(lambda: "s left, loss 0.2500" in terminal.getvalue(), "the line of the run")
    assert "StochasticGra…" in terminal.getvalue()


def test_an_interrupt_is_remembered() -> None:
    progress = Progress(1, quiet=True)
    run = Run("ring", "digits", Single(), 0, Training(ranks=1))
    with Display(run, Single().roles(1), progress=progress) as display:
        assert not progress.interrupted
        display.on_event(Interrupted())
    assert progress.interrupted
