"""Simulated runs on clusters in which something goes wrong, and real ones with the same faults."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.support.simulated import cluster
from tests.support.training import settings, step_lines

from orchestra.cluster.faults import Fault
from orchestra.cluster.file import cluster_text
from orchestra.records.record import RunRecord
from orchestra.settings import parse
from orchestra.strategies.registry import STRATEGIES
from orchestra.trainer.settings import Run

RING = "AllReduce('ring')"
ASYNCHRONOUS = "ParameterServer(consistency='asynchronous')"
CHANGED = "lost", "joined", "ranks", "step"


def run_of(strategy: str, **training: Any) -> Run:
    given = {
        "min_ranks": 2, "steps": 20, "equal": "global_batch", "threads": 1,
        "optimizer": "Adam(lr=0.01)", **training,
    }  # fmt: skip
    parsed = parse(strategy, STRATEGIES, where="test")
    ranks = given.pop("ranks", 4)
    return settings(
        parsed, ranks, "tests.support.failing_tasks:lost('', model='normalised')", **given
    )


def lan(folder: Path, *faults: Fault, on: str = "lan_1gbit(nodes=4)") -> str:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "cluster.yaml"
    file.write_text(cluster_text(replace(cluster(on), faults=faults)))
    return str(file)


def kill(rank: int, number: int, at: str = "gradient") -> str:
    return f'Inject("kill", rank={rank}, at="{at}", number={number})'


def kill_after_all(rank: int, number: int) -> str:
    """Kill `rank` in a gradient, a while after the steps before it: so the others have completed
    these. That they can, as all is sent, does not say when."""
    late = [f'Inject("delay", rank={rank}, at="step", number={number - n}, seconds=0.3)'
            for n in (1, 2)]  # fmt: skip
    return "; ".join([*late, kill(rank, number)])


def steps(record: RunRecord, rank: int) -> list[Any]:
    lines = step_lines(record.folder, rank)
    return [(line["step"], line["consumed"], line["loss"]) for line in lines]
