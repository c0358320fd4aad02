"""Callbacks that stop a run."""

from __future__ import annotations

import pytest
from tests.support.threads import ask_to_stop

from orchestra.strategies.phases import Phases


def stop_at(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """The user stops the run: it reaches rank r before step `at` + 2 r of the first phase."""
    before_update = Phases.before_update

    def asked(phases: Phases) -> None:
        before_update(phases)
        worker = phases.worker
        counted = [watch.steps + 1 for watch in phases._watching.watches.values()]
        steps = counted[0] if counted else worker.measures.switched_at_step or 0
        if steps + 1 >= at + 2 * worker.rank:
            ask_to_stop(worker)

    monkeypatch.setattr(Phases, "before_update", asked)
