"""The guide to writing a strategy: it shows the example as it is, and the example is right."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from examples.own_strategy import DynamicAveraging
from tests.support.decentralized import (
    Matrix,
    distance_between,
    gradients,
    replicas_of,
    train_quadratic,
)
from tests.support.paths import ROOT

EXAMPLE = (ROOT / "examples" / "own_strategy.py").read_text()
DOCS = ROOT / "docs"
TUTORIAL = (DOCS / "tutorials" / "own-strategy.md").read_text()
RANKS, STEPS = 3, 21


def test_the_guide_shows_a_row_of_the_contract_test() -> None:
    guide = (DOCS / "how-to" / "write-a-strategy.md").read_text()
    (row,) = re.findall(r"^Row\(.*\)$", guide, re.MULTILINE)
    assert row in (ROOT / "tests" / "support" / "strategy_table.py").read_text()


def test_the_example_is_as_short_as_the_tutorial_and_the_readme_say() -> None:
    (told,) = re.findall(r"It needs (\d+) lines", TUTORIAL)
    (promised,) = re.findall(
        r"\[in (\d+) lines\]\(docs/tutorials/own-strategy.md\)", (ROOT / "README.md").read_text()
    )
    assert len(EXAMPLE.splitlines()) == int(told) == int(promised) < 65


def dynamic_averaging(drift: float, every: int) -> tuple[Matrix, int]:
    """Kamp et al. 2018, every average being one of all; the replicas, and the averages made."""
    gradient = gradients(RANKS, STEPS)
    x, reference, averages = np.zeros((RANKS, 5)), np.zeros(5), 0
    for k in range(STEPS):
        x = x - 0.1 * np.stack([gradient(i, k, x[i]) for i in range(RANKS)])
        if (k + 1) % every == 0 and (((x - reference) ** 2).sum(1) > drift).any():
            reference, averages = x.mean(0), averages + 1
            x = np.tile(reference, (RANKS, 1))
    return x, averages


@pytest.mark.parametrize(
    ("drift", "every", "averages"), [(1e-9, 1, 21), (0.1, 1, 9), (0.2, 2, 4), (9.0, 1, 0)]
)
def test_it_averages_where_a_replica_has_moved_far(
    drift: float, every: int, averages: int, tmp_path: Path
) -> None:
    expected, made = dynamic_averaging(drift, every)
    assert made == averages
    result = train_quadratic(DynamicAveraging(drift, every), RANKS, STEPS, tmp_path)
    assert distance_between(replicas_of(result), expected) < 1e-12
    assert distance_between(result.final["x"].numpy(), expected.mean(0)) < 1e-12
    assert [state.steps for state in result.states] == [STEPS] * RANKS
