"""What every strategy keeps to: one table, one row a strategy."""

from __future__ import annotations

import functools
import hashlib
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tests.support.lab import some
from tests.support.simulated import simulated
from tests.support.strategy_table import TABLE, Row, with_sizes
from tests.support.training import settings, step_lines, train_processes

from orchestra.optimizers.settings import Cosine
from orchestra.records.record import RunRecord
from orchestra.settings import parse
from orchestra.strategies.base import Strategy
from orchestra.strategies.registry import STRATEGIES
from orchestra.trainer.settings import Run, Target

DIGITS = "digits_in_one_thread()"
TRAIN_SAMPLES = 1198
TARGET = 0.85
EPOCHS = 4


ON_ONE_HOST = Row("Hogwild", "Hogwild()", sizes=(3,), damped=True)
"""The ranks of most virtual clusters are on hosts of their own."""


ON_PROCESSES = ("ring", "asynchronous", "streaming", "groups", "strategy-switch", "Hogwild")
"""Rows that train on processes in the default run: of each pace one. The others train there in
virtual time: `test_simulation` shows that both train alike."""


def with_engines(rows: Sequence[Row]) -> list[Any]:
    """Each row on one engine and one number of ranks. The lab has all rows and numbers on
    processes, and 2 or 3 ranks in virtual time.
    """
    found = []
    for case in with_sizes(rows):
        row, size = case.values
        usual = "virtual" if row.label not in ON_PROCESSES else "processes"
        for engine in ("processes", "virtual"):
            if engine == "virtual" and (size not in (2, 3) or row is ON_ONE_HOST):
                continue
            marks = case.marks or (() if engine == usual else (pytest.mark.lab,))
            label = f"{case.id}-simulated" if engine == "virtual" else case.id
            found.append(pytest.param(row, size, engine == "virtual", id=label, marks=marks))
    return found


def digits_run(strategy: Any, ranks: int, **training: Any) -> Run:
    training = {"epochs": EPOCHS, "batch_size": 8, **training}
    return settings(strategy, ranks, training.pop("task", DIGITS), **training)


@pytest.mark.parametrize(("row", "ranks", "virtual"), with_engines([*TABLE, ON_ONE_HOST]))
def test_it_reaches_the_target_and_its_record_is_complete(
    row: Row, ranks: int, virtual: bool, tmp_path: Path
) -> None:
    strategy = row.build()
    target = Target("accuracy", at_least=0.5)
    rate = 0.3 / (len(strategy.roles(ranks).workers) if row.damped else 1)
    # To 0, lest the last few gradients of eight samples decide where the order of arrivals does.
    falling: dict[str, Any] = {"optimizer": f"SGD(lr={rate})", "schedule": Cosine()}
    # With five ranks smaller batches, so that there are as many steps as with four.
    size = min(16, 64 // ranks)
    run = digits_run(strategy, ranks, batch_size=size, snapshots=3, target=target, **falling)
    record = (simulated if virtual else train_processes)(run, tmp_path)
    assert record.learned.metrics["accuracy"] >= TARGET
    assert record.asked.engine == ("simulation" if virtual else "processes")
    check_counts(record, run, ranks)
    assert set(record.ending.notices) == set(row.notices)
    if not virtual:
        check_times(record)
    check_files(record, tmp_path)
    roles = strategy.roles(ranks)
    fresh = strategy.traits().lockstep or row.fresh
    assert (record.updates.staleness is None) == fresh
    if not fresh and record.asked.workers > 1:
        assert record.updates.staleness is not None
        assert record.updates.staleness["max"] >= record.updates.staleness["mean"] >= 0
    assert (record.switching.at_step is not None) == bool(strategy.traits().phases)
    assert (record.traffic.sent > 0) == (len(roles.shares) > 1)
    assert record.traffic.estimated == ("native" in record.asked.strategy)


def check_counts(record: RunRecord, run: Run, ranks: int) -> None:
    roles = run.strategy.roles(ranks)
    assert record.asked.name == "test"
    assert parse(record.asked.strategy, STRATEGIES, where="record") == run.strategy
    assert (record.asked.ranks, record.asked.workers) == (ranks, len(roles.workers))
    assert record.asked.servers == len(roles.servers)
    assert (record.asked.seed, record.ending.status, record.ending.failure) == (
        0,
        "completed",
        None,
    )
    assert record.ending.left_out == {}
    if "backup" in record.asked.strategy:  # a late worker passes over the batches of what it missed
        assert 0 < record.learned.samples <= TRAIN_SAMPLES * EPOCHS
    else:
        assert record.learned.samples == TRAIN_SAMPLES * EPOCHS
    lines = [step_lines(record.folder, rank) for rank in range(len(roles.shares))]
    assert sum(line["samples"] for rank in lines for line in rank) == record.learned.samples
    assert record.learned.steps == max(map(len, lines)) > 0


def check_times(record: RunRecord) -> None:
    assert record.time.setup is not None
    assert record.time.training is not None
    assert record.time.samples_per_second is not None
    assert record.time.setup > 0
    assert record.time.samples_per_second == pytest.approx(
        record.learned.samples / record.time.training
    )
    assert set(record.time.worker) == {"compute", "communicate", "wait"}
    assert record.time.worker["compute"] > 0
    assert min(record.time.worker.values()) >= 0
    assert sum(record.time.worker.values()) <= record.time.training * 1.02


def check_files(record: RunRecord, folder: Path) -> None:
    """The curve ends at the end, the target lies on it; the hash is that of the file."""
    curve = [json.loads(line) for line in (folder / "curve.jsonl").read_text().splitlines()]
    assert len(curve) == 3
    assert curve[-1]["samples"] == TRAIN_SAMPLES * EPOCHS
    model = curve[-1]["average"] or curve[-1]["metrics"]
    assert model == {"loss": record.learned.loss, **record.learned.metrics}
    assert [point["samples"] for point in curve] == sorted(point["samples"] for point in curve)
    reached = [p["seconds"] for p in curve if p["metrics"]["accuracy"] >= 0.5]
    assert record.to_target.seconds == reached[0]
    assert 0 < reached[0] <= record.time.training
    sha = hashlib.sha256()
    for name, tensor in sorted(load_file(folder / "parameters.safetensors").items()):
        sha.update(name.encode() + tensor.numpy().tobytes())
    assert record.learned.parameters_sha256 == sha.hexdigest()
    assert json.loads((folder / "environment.json").read_text())["packages"]["torch"]


ONE_WORKER: dict[str, Any] = {
    "task": "digits_in_one_thread(dropout=0.3)",
    "epochs": 1,
    "batch_size": 24,
    "optimizer": "SGD(lr=0.05, momentum=0.9, weight_decay=0.001)",
}


@functools.cache
def single_hash() -> str | None:
    with tempfile.TemporaryDirectory() as folder:
        single = parse("Single()", STRATEGIES, where="here")
        return train_processes(
            digits_run(single, 1, **ONE_WORKER), Path(folder)
        ).learned.parameters_sha256


@pytest.mark.parametrize(
    "row",
    some(
        [
            pytest.param(row, id=row.label, marks=pytest.mark.lab if row.variant else ())
            for row in TABLE
            if row.exact
        ]
    ),
)
def test_with_one_worker_it_equals_single_bit_for_bit(row: Row, tmp_path: Path) -> None:
    run = digits_run(row.build(), row.smallest, **ONE_WORKER)
    record = (train_processes if row.label in ON_PROCESSES else simulated)(run, tmp_path)
    assert record.asked.workers == 1
    assert record.learned.parameters_sha256 == single_hash()


def test_the_table_holds_every_strategy() -> None:
    known = {name: STRATEGIES.resolve(name, where="here") for name in STRATEGIES.names()}
    named = {name for name, cls in known.items() if issubclass(cls, Strategy)}
    assert named <= {type(row.build()).__name__ for row in [*TABLE, ON_ONE_HOST]}
