"""The study of the plan's regret: its pairs, and its figures."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from studies.regret import markdown, row_of
from studies.regret_pairs import EMULATED_CORES, LINKS, TASKS, pairs


def test_the_pairs_are_always_the_same_and_balanced() -> None:
    drawn = pairs()
    assert drawn == pairs()
    assert [pair.small for pair in drawn] == [True] * 6 + [False] * 6
    assert {pair.task for pair in drawn} == {*TASKS}
    assert {*Counter(pair.link for pair in drawn).values()} == {12 / len(LINKS)}
    for pair in drawn[:6]:
        assert sum(node.speed or 0.0 for node in pair.cluster.nodes) <= EMULATED_CORES + 0.01


def test_regret_is_what_the_choice_takes_more_than_the_best(tmp_path: Path) -> None:
    (pair, *_) = pairs()
    times = {"gossip": 2.0, f"ring on {pair.nodes} nodes": 3.0, "one process": 2.5}
    known: dict[str, dict[str, float | None]] = {
        name: {"seconds": seconds, "after": 9.0} for name, seconds in times.items()
    }
    known["push-sum"] = {"seconds": None, "after": 4.0}
    (tmp_path / "plan").mkdir()
    plan = {"recommended": {"name": "one process", "seconds": 2.4}}
    (tmp_path / "plan" / "plan.json").write_text(json.dumps(plan))
    assert row_of(pair, tmp_path, "simulation") is None
    (tmp_path / "simulated.json").write_text(json.dumps(known))
    row = row_of(pair, tmp_path, "simulation")
    assert row is not None
    assert (row.best, row.choice, row.candidates, row.reached) == ("gossip", "one process", 4, 3)
    assert row.regret == pytest.approx(0.25)
    assert row.of_rules["DDP"] == pytest.approx(0.5)
    assert row.of_rules["DiLoCo"] is None
    assert "| always DiLoCo | target missed | target missed |" in markdown([row])
