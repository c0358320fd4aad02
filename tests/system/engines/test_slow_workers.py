"""What a slow worker means to the others: real processes, and steps that wait for leave."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.gated import let_run, train_noted
from tests.support.rank_programs import Running, pids
from tests.support.training import step_lines
from tests.support.waiting import wait_until

from orchestra.engines.events import Event, Heartbeat, Notice
from orchestra.records.report import RankReport
from orchestra.strategies.parameter_server import ParameterServer
from orchestra.trainer.settings import Run, Training

WORKERS = 3
SLOW = 1
HELD_AT = 5  # steps that the slow worker completes while the others are ahead
STEPS = 30  # of each worker
BATCH = 2
BEATS = 3  # in a row, half a second apart, that show a worker where it was


class Beats:
    """The steps that each rank has completed, and how many beats have said so."""

    def __init__(self) -> None:
        self.steps = dict.fromkeys(range(WORKERS + 1), 0)
        self.in_a_row = dict.fromkeys(range(WORKERS + 1), 0)

    def on_event(self, event: Event | Notice) -> None:
        if not isinstance(event, Heartbeat):
            return
        same = self.steps[event.rank] == event.step
        self.in_a_row[event.rank] = self.in_a_row[event.rank] + 1 if same else 1
        self.steps[event.rank] = event.step

    def all_at(self, ranks: set[int], steps: int, beats: int = 1) -> Callable[[], bool]:
        return lambda: all(
            self.steps[rank] == steps and self.in_a_row[rank] >= beats for rank in ranks
        )


def train_with_a_slow_worker(
    strategy: ParameterServer, others_reach: int, then_at: int, folder: Path
) -> list[RankReport]:
    """Hold one worker before its step 6 until the others stand at step `others_reach`.

    With one more gradient it is at step `then_at`.
    """
    ranks = len(strategy.roles(WORKERS + 1).shares)
    task = f"tests.support.gated:gated({str(folder)!r}, {WORKERS * STEPS * BATCH})"
    training = Training(
        ranks=ranks, batch_size=BATCH, equal="worker_batch", epochs=1, snapshots=0, work="equal"
    )
    run, beats = Run("test", task, strategy, 0, training), Beats()
    let_run(folder, 0)
    running = Running(train_noted, (run, folder), ranks, on_event=beats.on_event)
    everybody = set(range(WORKERS))
    try:
        slow = pids(folder, ranks)[SLOW]
        let_run(folder, HELD_AT)
        wait_until(beats.all_at(everybody, HELD_AT), "all are at one step")
        let_run(folder, HELD_AT, slow)
        let_run(folder, STEPS if strategy.consistency == "bounded" else others_reach)
        there = beats.all_at(everybody - {SLOW}, others_reach, BEATS)
        wait_until(there, f"the others stand at step {others_reach}")
        let_run(folder, HELD_AT + 1, slow)
        wait_until(beats.all_at({SLOW}, then_at), f"the slow one stands at step {then_at}")
        let_run(folder, STEPS, slow)
    finally:
        let_run(folder, STEPS)
        outcome = running.outcome()
    assert outcome.left_out == {}
    return list(outcome.results)


@pytest.mark.parametrize("bound", [pytest.param(1, marks=pytest.mark.lab), 3])
def test_bounded_workers_stop_at_the_bound_and_go_on(bound: int, tmp_path: Path) -> None:
    """From the lines of the ranks: what had been applied when each answer left."""
    strategy = ParameterServer(consistency="bounded", staleness=bound)
    train_with_a_slow_worker(strategy, HELD_AT + bound, HELD_AT + 1, tmp_path)
    lines = {rank: step_lines(tmp_path, rank) for rank in range(WORKERS)}
    answered = {rank: [line["consumed"] // BATCH for line in lines[rank]] for rank in lines}
    applied = {
        rank: [
            read + line["staleness"][0] + 1
            for read, line in zip([0, *answered[rank]], lines[rank], strict=False)
        ]
        for rank in lines
    }
    every_version = sorted(version for own in applied.values() for version in own)
    assert every_version == list(range(1, WORKERS * STEPS + 1)), "each push is one update"
    for rank, versions in answered.items():
        for step, version in enumerate(versions, start=1):
            for other in lines:
                seen = sum(place <= version for place in applied[other])
                assert seen >= step - bound, f"rank {rank} read too stale values at step {step}"
    waited_for = lines[SLOW][HELD_AT]["staleness"][0]
    assert (WORKERS - 1) * bound <= waited_for <= (WORKERS - 1) * (2 * bound + 1)


def test_late_gradients_are_dropped_and_the_late_worker_catches_up(tmp_path: Path) -> None:
    reached = 20
    reports = train_with_a_slow_worker(ParameterServer(backup=1), reached, reached, tmp_path)
    lines = {rank: step_lines(tmp_path, rank) for rank in range(WORKERS)}
    # It is held at a gradient, and may have missed a step before: on a busy machine it is slow, too
    computed = [place for place, line in enumerate(lines[SLOW]) if line["samples"]]
    late, *missed = lines[SLOW][computed[HELD_AT] : reached]
    assert late["samples"] == BATCH
    assert "staleness" not in late
    assert {line["samples"] for line in missed} == {0}
    assert {line["consumed"] for line in missed} == {reached * WORKERS * BATCH}
    for own in lines.values():
        assert len(own) == STEPS
        assert own[-1]["consumed"] == STEPS * WORKERS * BATCH
        assert {tuple(line["staleness"]) for line in own if "staleness" in line} <= {(0,)}
    dropped = [
        sum("staleness" not in line and line["samples"] > 0 for line in lines[r]) for r in lines
    ]
    assert [report.dropped for report in reports[:WORKERS]] == dropped
    averaged = sum("staleness" in line for own in lines.values() for line in own)
    # Two in each step; where a worker has no more steps to take, those that are left.
    assert 2 * STEPS - 1 <= averaged <= 2 * STEPS
