"""An asynchronous server while a worker is suspended: real processes, SIGSTOP, and the log."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.gated import let_run, train_noted
from tests.support.rank_programs import Running, pids
from tests.support.training import step_lines
from tests.support.waiting import is_stopped, wait_until

from orchestra.engines.events import Event, Heartbeat, Notice
from orchestra.strategies.parameter_server import ParameterServer
from orchestra.trainer.settings import Run, Training

WORKERS = 4
STEPS = 65  # of each worker
BATCH = 2
ROUNDS = 2
MORE = 10

DEDICATED = ParameterServer(consistency="asynchronous")
BOUNDED = ParameterServer(consistency="bounded", staleness=STEPS)
BESIDE = ParameterServer(consistency="asynchronous", placement="beside")


class Steps:
    """The steps that each rank has completed, as its beats say."""

    def __init__(self) -> None:
        self.of = dict.fromkeys(range(WORKERS + 1), 0)

    def on_event(self, event: Event | Notice) -> None:
        if isinstance(event, Heartbeat):
            self.of[event.rank] = event.step

    def wait_for(self, ranks: set[int], steps: int) -> None:
        """Until each of `ranks` has completed `steps` steps."""
        wait_until(
            lambda: all(self.of[rank] >= steps for rank in ranks), f"step {steps} of {ranks}"
        )


@contextlib.contextmanager
def suspended(pid: int) -> Iterator[None]:
    """Inside, process `pid` does not run."""
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: is_stopped(pid), "the worker is suspended")
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def train_suspending(strategy: ParameterServer, ranks: int, victim: int, folder: Path) -> None:
    """Let the others complete `MORE` more steps, `ROUNDS` times, while `victim` is suspended."""
    samples = WORKERS * STEPS * BATCH
    task = f"tests.support.gated:gated({str(folder)!r}, {samples})"
    training = Training(
        ranks=ranks, batch_size=BATCH, equal="worker_batch", epochs=1, snapshots=0, work="equal"
    )
    run = Run("test", task, strategy, 0, training)
    steps = Steps()
    let_run(folder, 0)
    running = Running(train_noted, (run, folder), ranks, on_event=steps.on_event)
    others = set(range(WORKERS)) - {victim}
    try:
        pid = pids(folder, ranks)[victim]
        for number in range(ROUNDS):
            reached = 2 * MORE * number
            steps.wait_for(others | {victim}, reached)
            let_run(folder, reached + MORE)
            steps.wait_for({min(others)}, reached + 1)  # the signal comes amid these steps
            with suspended(pid):
                let_run(folder, reached + 2 * MORE)  # nobody was allowed more than half of them
                steps.wait_for(others, reached + 2 * MORE)
    finally:
        let_run(folder, STEPS)
        outcome = running.outcome()
    assert outcome.left_out == {}


def version(line: dict[str, Any]) -> int:
    """How many updates the server had applied when it answered the push of this step.

    Every update consumes one batch, and all batches are of one size.
    """
    updates, rest = divmod(int(line["consumed"]), BATCH)
    assert rest == 0
    return updates


@pytest.mark.parametrize(
    ("strategy", "ranks", "victim"),
    [
        (DEDICATED, WORKERS + 1, 1),
        pytest.param(BESIDE, WORKERS, 2, marks=pytest.mark.lab),
    ],
    ids=repr,
)
def test_the_others_go_on_while_a_worker_is_suspended(
    strategy: ParameterServer, ranks: int, victim: int, tmp_path: Path
) -> None:
    train_suspending(strategy, ranks, victim, tmp_path)
    lines = {rank: step_lines(tmp_path, rank) for rank in range(WORKERS)}
    versions = {rank: [version(line) for line in lines[rank]] for rank in lines}

    # Each push became one update, and no two share one.
    assert sorted(v for own in versions.values() for v in own) == list(
        range(1, WORKERS * STEPS + 1)
    )
    for rank, own in versions.items():
        foreign = {v for other in versions if other != rank for v in versions[other]}
        implied = [
            len(foreign.intersection(range(read + 1, pushed)))
            for read, pushed in zip([0, *own], own, strict=False)
        ]
        assert [line["staleness"] for line in lines[rank]] == [[count] for count in implied]

    # After each suspension: all that the others did meanwhile. One update of each may have come
    # before the last message that the victim had sent.
    longest = sorted(line["staleness"][0] for line in lines[victim])[-ROUNDS:]
    assert min(longest) >= (WORKERS - 1) * (MORE - 1)


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        pytest.param(DEDICATED, WORKERS + 1, marks=pytest.mark.lab),
        (BOUNDED, WORKERS + 1),
        pytest.param(BESIDE, WORKERS, marks=pytest.mark.lab),
    ],
    ids=repr,
)
def test_the_others_take_over_what_suspended_workers_would_have_taken(
    strategy: ParameterServer, ranks: int, tmp_path: Path
) -> None:
    """Two of the four workers are suspended by turns; each batch is taken once."""
    batches = WORKERS * STEPS
    task = f"tests.support.gated:gated({str(tmp_path)!r}, {batches * BATCH})"
    training = Training(ranks=ranks, batch_size=BATCH, equal="worker_batch", epochs=1, snapshots=0)
    run, steps = Run("test", task, strategy, 0, training), Steps()
    let_run(tmp_path, 0)
    running = Running(train_noted, (run, tmp_path), ranks, on_event=steps.on_event)
    try:
        processes = pids(tmp_path, ranks)
        let_run(tmp_path, MORE)
        steps.wait_for({0, 1, 2, 3}, MORE)
        with suspended(processes[1]):
            let_run(tmp_path, 2 * MORE)
            steps.wait_for({0, 2, 3}, 2 * MORE)
        with suspended(processes[2]):
            let_run(tmp_path, STEPS + MORE)  # the others take what it would have taken
            steps.wait_for({0, 1, 3}, STEPS + MORE)
    finally:
        let_run(tmp_path, batches)
        outcome = running.outcome()
    assert outcome.left_out == {}
    lines = {rank: step_lines(tmp_path, rank) for rank in range(WORKERS)}
    taken = sorted(line["position"] for own in lines.values() for line in own)
    assert taken == list(range(0, batches * BATCH, BATCH)), "each batch once"
    assert len(lines[2]) < STEPS
