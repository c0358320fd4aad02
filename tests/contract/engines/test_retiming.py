"""A run that was simulated on one cluster, re-timed for another: what it would have been there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from studies.retiming import retimed
from tests.support.lab import in_lab, some
from tests.support.recorded import changed
from tests.support.simulated import simulated
from tests.support.strategy_table import TABLE
from tests.support.training import settings

from orchestra.errors import InputError
from orchestra.records.record import KEYS, RunRecord
from orchestra.records.store import RunFolder
from orchestra.settings import parse
from orchestra.strategies.registry import STRATEGIES
from orchestra.trainer.settings import Run, Target

SLOW = "stragglers(4)"
TO_TARGET = tuple(key for key, path in KEYS.items() if path.startswith("to_target."))
TIMES = ("train_seconds", "samples_per_second", "heterogeneous_efficiency", *TO_TARGET)
UNLIKE = ("setup", "setup_seconds", "wall_seconds", "seconds", "by_rank", *TIMES)
BY_SPEED = {
    "partial all-reduce", "asynchronous", "asynchronous beside", "asynchronous servers", "bounded",
    "delay compensation", "adaptive compensation", "rate divided", "rate by staleness", "buffered",
    "backup workers", "switch to bounded", "overlapped push", "pairwise", "strategy-switch",
    "switch beside", "asynchronous first", "gossip, judged", "elastic server", "elastic, momentum",
    "elastic first", "hop", "hop, skipping", "groups", "auto",
}  # fmt: skip


def run_of(strategy: str, **training: Any) -> Run:
    optimizer = "SGD(lr=0.05, momentum=0.9)"
    training = {"target": Target("accuracy", at_least=0.15), "snapshots": 4, **training}
    run = settings(
        parse(strategy, STRATEGIES, where="test"), 4, "digits_in_one_thread(dropout=0.2)",
        steps=12, batch_size=7, optimizer=optimizer, trace_steps=0, **training,
    )  # fmt: skip
    return replace(run, training=replace(run.training, calibration="none"))


def untimed(record: RunRecord) -> dict[str, Any]:
    return {key: value for key, value in record.summary().items() if key not in UNLIKE}


def timed(record: RunRecord) -> dict[str, float]:
    found = record.summary()
    return {key: found[key] for key in TIMES if found[key] is not None}


@pytest.mark.parametrize(
    "strategy",
    some(
        [
            "AllReduce('ring')",
            "ParameterServer(servers=2)",
            *in_lab(
                [
                    "StochasticGradientPush()",
                    "LocalSGD(6, outer=SlowMo(0.2), fragments=2, overlap=2)",
                ]
            ),
            "Switch(AllReduce('tree'), LocalSGD(4), when=AfterFraction(0.5))",
        ]
    ),
)
def test_it_is_the_run_on_the_other_cluster(strategy: str, tmp_path: Path) -> None:
    run = run_of(strategy)
    lan = simulated(run, tmp_path / "lan")
    slow = simulated(run, tmp_path / "slow", SLOW)
    again = retimed(run, changed(lan, tuned={"optimizer.lr": 0.05}), SLOW, tmp_path / "again")
    assert again.asked.tuned == {"optimizer.lr": 0.05}
    assert untimed(changed(again, tuned={})) == untimed(slow)
    assert timed(again) == pytest.approx(timed(slow), rel=1e-12)
    assert again.time.worker == pytest.approx(slow.time.worker, rel=0.01)
    assert again.time.training != pytest.approx(lan.time.training, rel=0.05)
    assert again.to_target.seconds is not None
    curves = [RunFolder(record.folder).curve for record in (slow, again)]
    for real, point in zip(*curves, strict=True):
        assert point.seconds == pytest.approx(real.seconds, rel=1e-12)
        assert replace(point, seconds=0) == replace(real, seconds=0)


def test_every_strategy_says_whether_speed_decides() -> None:
    rows = [row for row in TABLE if isinstance(row.strategy, str) and "own" not in row.label]
    assert {row.label for row in rows if row.build().traits().depends_on_speed} == BY_SPEED


def test_a_run_that_depends_on_speed_is_refused(tmp_path: Path) -> None:
    run = run_of("ParameterServer(consistency='asynchronous')")
    lan = simulated(run, tmp_path / "lan")
    with pytest.raises(InputError, match="depends on how fast ranks and links are"):
        retimed(run, lan, SLOW, tmp_path / "again")


def test_the_record_has_to_be_of_the_run(tmp_path: Path) -> None:
    run = run_of("AllReduce('ring')", snapshots=0)
    lan = simulated(run, tmp_path / "lan")
    for other in (changed(lan, samples=lan.learned.samples + 1), changed(lan, status="failed")):
        with pytest.raises(InputError, match="is the record of another run"):
            retimed(run, other, SLOW, tmp_path / "again")
    clipped = run_of("AllReduce('ring')", clip_norm=1.0)
    with pytest.raises(InputError, match="needs values"):
        retimed(clipped, lan, SLOW, tmp_path / "again")
