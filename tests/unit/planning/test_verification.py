"""`plan --verify`: candidates take turns, seed by seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from orchestra.errors import RunFailed
from orchestra.planning import api
from orchestra.planning.answer import Verified
from orchestra.planning.api import Measured, verify
from orchestra.trainer.settings import Target

PREDICTED = {"ring": {0: 1.0, 1: 1.5, 2: 2.0}, "tree": {0: 3.0, 2: 5.0}, "gossip": {1: 4.0}}
"""Seconds to the target, by candidate and seed."""


@dataclass(frozen=True)
class NamedRun:
    name: str
    seed: int = 0


def verified(
    monkeypatch: pytest.MonkeyPatch, carry_out: Callable[[NamedRun], Measured]
) -> tuple[dict[str, Verified], bool]:
    """What is found out if `carry_out` does the runs."""
    entries = {
        name: SimpleNamespace(
            candidate=SimpleNamespace(run=NamedRun(name)),
            record=SimpleNamespace(
                time=SimpleNamespace(worker={"compute": 2.0}),
                learned=SimpleNamespace(samples=100),
            ),
        )
        for name in PREDICTED
    }

    def times(entry: Any) -> dict[int, Any]:
        known = PREDICTED[entry.candidate.run.name]
        return {seed: SimpleNamespace(seconds=seconds) for seed, seconds in known.items()}

    search = SimpleNamespace(
        entries=entries, times=times, target=Target("accuracy", at_least=0.9),
        length=SimpleNamespace(snapshots=4),
    )  # fmt: skip
    rows = [SimpleNamespace(name=name, seconds=1.0) for name in PREDICTED]
    plan = SimpleNamespace(rows=rows, folder=Path("plan"))
    cluster = SimpleNamespace(nodes=(1, 2))
    monkeypatch.setattr(api, "carried_out_for_real", lambda run, *_: carry_out(run))
    found, stopped = verify(
        cast(Any, plan), cast(Any, search), cast(Any, cluster), lambda what, part: None
    )
    return {each.name: each for each in found}, stopped


def test_candidates_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    order = []

    def carry_out(run: NamedRun) -> Measured:
        order.append((run.name, run.seed))
        return Measured(10.0 + run.seed, 0.03)

    found, stopped = verified(monkeypatch, carry_out)
    assert not stopped
    assert order == [
        ("ring", 0), ("tree", 0), ("gossip", 1), ("ring", 1), ("tree", 2), ("ring", 2)
    ]  # fmt: skip
    assert (found["ring"].mean_predicted, found["ring"].mean_measured) == (1.5, 11.0)
    assert (found["tree"].mean_predicted, found["tree"].mean_measured) == (4.0, 11.0)
    assert found["ring"].computing == pytest.approx(1.5)


def test_one_that_cannot_be_carried_out_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def carry_out(run: NamedRun) -> Measured:
        if run.name == "tree":
            raise RunFailed("rank 2 died\nand more")
        return Measured(None if run.seed == 1 else 1.0, 0.02)

    found, _ = verified(monkeypatch, carry_out)
    assert found["tree"].outcome == "not measured: rank 2 died"
    assert found["tree"].mean_predicted == 4.0
    assert found["ring"].outcome == "target not reached with 1 of 3 seeds"
    assert found["ring"].measured == {0: 1.0, 1: None, 2: 1.0}


def test_ctrl_c_leaves_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def carry_out(run: NamedRun) -> Measured:
        if (run.name, run.seed) == ("tree", 2):
            raise KeyboardInterrupt
        return Measured(1.0, 0.02)

    found, stopped = verified(monkeypatch, carry_out)
    assert stopped
    # Means over the same seeds on both sides.
    assert (found["ring"].predicted, found["tree"].predicted) == ({0: 1.0, 1: 1.5}, {0: 3.0})
    assert found["tree"].mean_measured == 1.0

    def stopped_at_once(run: NamedRun) -> Measured:
        raise KeyboardInterrupt

    assert verified(monkeypatch, stopped_at_once) == ({}, True)
