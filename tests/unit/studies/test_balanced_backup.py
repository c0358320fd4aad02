"""The study of dynamic batches with a backup worker: how its figures are made from runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
from studies.balanced_backup import (
    BOTH,
    CLUSTERS,
    FOLDER,
    RANKS,
    ROWS,
    SEEDS,
    TRIAL_SEEDS,
    Made,
    Runs,
    better_part,
    interval,
    ratios,
    table,
)

from orchestra.cluster import load_cluster


def made(seconds: Sequence[float]) -> list[Made]:
    return [Made(each, missed=False, train_seconds=160.0, accuracy=0.9) for each in seconds]


def runs() -> Runs:
    """All alike but for the part that is twice as slow as both, by turns with seed."""
    found = {(cluster, row): made([10.0] * len(SEEDS)) for cluster in CLUSTERS for row in ROWS}
    found["one_slow", BOTH] = made([4.0 + seed % 2 for seed in SEEDS])
    found["one_slow", "dynamic batches"] = made([8.0 + 2 * (seed % 2) for seed in SEEDS])
    return found


def test_differences_are_of_runs_with_the_same_seed() -> None:
    mean, low, high = interval(ratios(runs(), "one_slow", "dynamic batches"))
    assert mean == pytest.approx(0.5)
    assert (low, high) == pytest.approx((0.5, 0.5)), "the seeds differ, and the ratios do not"
    mean, low, high = interval(ratios(runs(), "one_slow", "backup worker"))
    assert 0.4 <= low < mean < high <= 0.5
    assert mean == pytest.approx(math.sqrt(0.4 * 0.5))


def test_both_are_compared_with_the_better_part() -> None:
    assert better_part(runs(), "one_slow") == "dynamic batches"
    text = "\n".join(table(runs(), dict.fromkeys(ROWS, 0.1)))
    assert "| one_slow | dynamic batches | -4.00 | -5.00 |" in text


def test_the_seeds_of_the_trials_are_none_of_the_ten() -> None:
    assert len(SEEDS) == 10
    assert not {*SEEDS} & {*TRIAL_SEEDS}


@pytest.mark.parametrize("name", CLUSTERS)
def test_its_clusters_have_a_node_for_each_rank(name: str) -> None:
    cluster = load_cluster(str(FOLDER / f"{name}.yaml"), where="test", folder=Path())
    assert len(cluster.nodes) == RANKS
