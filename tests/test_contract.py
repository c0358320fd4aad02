"""What every strategy keeps to, on real processes: one table, one row a strategy."""

from __future__ import annotations

import functools
import hashlib
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tests.simulated import simulated
from tests.tasks_for_tests import FirstDecides, Unequal
from tests.training import settings, step_lines, train_processes

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


@dataclass(frozen=True)
class Row:
    """A strategy, by its notation or as an object; `smallest` ranks leave it one worker.

    `sizes` are the numbers of ranks, of those that are tried, that it can run on. Where it is a
    `variant` of another row, with its own bits shown elsewhere, it trains to the end in the matrix.
    """

    label: str
    strategy: Any
    smallest: int = 1
    exact: bool = True  # with one worker it equals Single bit for bit
    damped: bool = False  # needs a learning rate divided by the workers, against staleness
    fresh: bool = False  # no update can be stale, though it is not synchronous
    notices: tuple[str, ...] = ()  # that it gives, each once or by several ranks
    sizes: tuple[int, ...] = (2, 3, 4, 5)
    variant: bool = False

    def build(self) -> Any:
        if isinstance(self.strategy, str):
            return parse(self.strategy, STRATEGIES, where=self.label)
        return self.strategy


SERVER = "ParameterServer"
ASYNCHRONOUS = 'consistency="asynchronous"'
TABLE = [
    Row("single", "Single()"),
    Row("ring", 'AllReduce("ring")'),
    Row("ring_gather", 'AllReduce("ring_gather")', variant=True),
    Row("parallel", 'AllReduce("parallel")', variant=True),
    Row("reduce_to_one", 'AllReduce("reduce_to_one")', variant=True),
    Row("native", 'AllReduce("native")'),
    Row("halving_doubling", 'AllReduce("halving_doubling")', variant=True),
    Row("butterfly", 'AllReduce("butterfly")', variant=True),
    Row("tree", 'AllReduce("tree")', variant=True),
    Row("hierarchical", 'AllReduce("hierarchical", ranks_per_node=2)', variant=True),
    Row("sharded optimizer", 'AllReduce(shard="optimizer")', variant=True),
    Row("sharded gradients", 'AllReduce(shard="gradients")', variant=True),
    Row("sharded parameters", 'AllReduce(shard="parameters")'),
    Row("partial all-reduce", "AllReduce(backup=1)", 2, exact=False),
    Row("server", f"{SERVER}()", 2),
    Row("server beside", f'{SERVER}(placement="beside")'),
    Row("server returns gradients", f'{SERVER}(returns="gradients")', 2, variant=True),
    Row("gradients beside", f'{SERVER}(placement="beside", returns="gradients")', variant=True),
    Row("servers", f"{SERVER}(servers=2)", 3, variant=True),
    Row("servers beside", f'{SERVER}(servers=2, placement="beside")', 2, exact=False, variant=True),
    Row("asynchronous", f"{SERVER}({ASYNCHRONOUS})", 2, damped=True),
    Row("asynchronous beside", f'{SERVER}({ASYNCHRONOUS}, placement="beside")', damped=True),
    Row("asynchronous servers", f"{SERVER}(servers=2, {ASYNCHRONOUS})", 3, damped=True,
        variant=True),
    Row("bounded", f'{SERVER}(consistency="bounded", staleness=1)', 2, damped=True),
    Row("delay compensation", f'{SERVER}({ASYNCHRONOUS}, delay_compensation="constant")', 2,
        damped=True, variant=True),
    Row("adaptive compensation", f'{SERVER}({ASYNCHRONOUS}, placement="beside", '
        'delay_compensation="adaptive")', damped=True, variant=True),
    Row("rate divided", f'{SERVER}({ASYNCHRONOUS}, learning_rate="divided")', 2, variant=True),
    Row("rate by staleness", f'{SERVER}({ASYNCHRONOUS}, learning_rate="by_staleness")', 2,
        variant=True),
    Row("buffered", f"{SERVER}(consistency=Buffered(2), learning_rate=PolynomialStaleness(0.5))", 2,
        damped=True, exact=False),
    Row("own server rule", f"{SERVER}(consistency=examples.own_server_rule:Majority(), "
        "learning_rate=examples.own_server_rule:Limited(9))", 2, damped=True, variant=True),
    Row("replicas", f"{SERVER}(servers=2, replicas=1)", 3, variant=True),
    Row("backup workers", f'{SERVER}(placement="beside", backup=1)', 2, exact=False),
    Row("switch to bounded", f'Switch(AllReduce(), {SERVER}(consistency="bounded", staleness=2, '
        'learning_rate="divided"), when=AfterSteps(10))', 2, exact=False, variant=True),
    Row("gossip", "Gossip()", fresh=True),
    Row("hop", "Hop(Complete(), backup=1)", fresh=True, sizes=(3, 4, 5)),
    Row("hop, skipping", "Hop(staleness=4, skip=4)", fresh=True, variant=True),
    Row("push", "StochasticGradientPush()", fresh=True),
    Row("overlapped push", 'StochasticGradientPush(overlap=1, weights="random")', fresh=True),
    Row("pairwise", "PairwiseAveraging()"),
    Row("groups", "Prague(2)", fresh=True),
    Row("local", "LocalSGD(4)", fresh=True),
    Row("DiLoCo", "LocalSGD(4, outer=Nesterov(1.0, 0.0))", fresh=True, variant=True),
    Row("streaming", "LocalSGD(6, outer=SlowMo(0.2), fragments=2, overlap=2)", fresh=True,
        exact=False),
    Row("elastic", "LocalSGD(2, outer=Elastic())", fresh=True, exact=False),
    Row("elastic server", "ElasticAveraging(4)", 2, exact=False),
    Row("elastic, momentum", 'ElasticAveraging(4, momentum=0.5, servers=2, placement="beside")', 2,
        exact=False, variant=True),
    Row("elastic first", 'Switch(ElasticAveraging(4), AllReduce(), when=AfterSteps(10), '
        'moments="reset")', 2, exact=False),
    Row("post-local", "Switch(AllReduce(), LocalSGD(4), when=AfterSteps(10))", fresh=True,
        variant=True),
    # of four layers
    Row("pipeline", "Pipeline(microbatches=1)", sizes=(2, 3, 4), variant=True),
    Row("pipeline, 1F1B", 'Pipeline(microbatches=4)', exact=False, sizes=(2, 3, 4)),
    Row("pipelines, GPipe", 'Pipeline(2, schedule="gpipe")', exact=False, sizes=(2, 4),
        variant=True),
    Row("strategy-switch", f'Switch(AllReduce("ring"), {SERVER}({ASYNCHRONOUS}), '
        'when=AfterSteps(10), learning_rate="divided")', 2, exact=False),
    Row("switch beside", f'Switch(AllReduce("ring"), {SERVER}({ASYNCHRONOUS}, '
        'placement="beside"), when=AfterSteps(10), learning_rate="divided")', variant=True),
    Row("switch back", f'Switch({SERVER}(), AllReduce(), when=AfterSteps(10), moments="reset")', 2,
        exact=False),
    Row("asynchronous first", 'Switch(PairwiseAveraging(), AllReduce(), when=AfterFraction(0.5), '
        'moments="averaged")'),
    Row("gossip, judged", 'Switch(Gossip(), AllReduce(), when=LossStable(threshold=0.5) & '
        'AfterSteps(9), moments="averaged")', fresh=True),
    Row("auto", 'Auto([AllReduce("ring"), LocalSGD(4)], samples=[9, 1])', fresh=True,
        variant=True),
    Row("own strategy", "examples.own_strategy:DynamicAveraging(0.1)", fresh=True),
    Row("unequal shares", Unequal()),
    Row("first decides", FirstDecides()),
]  # fmt: skip
SIZES = [3, *(pytest.param(n, marks=pytest.mark.matrix) for n in (2, 4, 5))]


ON_ONE_HOST = Row("Hogwild", "Hogwild()", sizes=(3,))
"""The ranks of most virtual clusters are on hosts of their own."""


def with_sizes(rows: Sequence[Row]) -> list[Any]:
    """Each row with each number of ranks that it runs on; all but one, mostly 3, in the matrix, as
    all of a variant."""
    found = []
    for row in rows:
        sizes = [size for size in row.sizes if size >= row.smallest]
        for size in sizes:
            usual = size == (3 if 3 in sizes else sizes[0]) and not row.variant
            marks = () if usual else (pytest.mark.matrix,)
            found.append(pytest.param(row, size, id=f"{row.label}-{size}", marks=marks))
    return found


def with_engines(rows: Sequence[Row]) -> list[Any]:
    """Each row on real processes with one number of ranks. The matrix has all numbers, and 2 or 3
    in virtual time: `test_simulation` shows that both train alike.
    """
    found = with_sizes(rows)
    for case in found[:]:
        row, size = case.values
        if case.marks and size in (2, 3):
            virtual = pytest.param(
                row, size, True, id=f"{case.id}-simulated", marks=pytest.mark.matrix
            )
            found.append(virtual)
    return [pytest.param(*(*c.values, False)[:3], id=c.id, marks=c.marks) for c in found]


def digits_run(strategy: Any, ranks: int, **training: Any) -> Run:
    training = {"epochs": EPOCHS, "batch_size": 8, **training}
    return settings(strategy, ranks, training.pop("task", DIGITS), **training)


@pytest.mark.parametrize(("row", "ranks", "virtual"), with_engines([*TABLE, ON_ONE_HOST]))
def test_it_reaches_the_target_and_its_record_is_complete(
    row: Row, ranks: int, virtual: bool, tmp_path: Path
) -> None:
    strategy = row.build()
    target = Target("accuracy", at_least=0.5)
    rate = 0.15 / (len(strategy.roles(ranks).workers) if row.damped else 1)
    # To 0, lest the last few gradients of eight samples decide where the order of arrivals does.
    falling: dict[str, Any] = {"optimizer": f"SGD(lr={rate})", "schedule": Cosine()}
    # With five ranks smaller batches, so that there are as many steps as with four.
    size = min(8, 32 // ranks)
    run = digits_run(strategy, ranks, batch_size=size, snapshots=3, target=target, **falling)
    record = (simulated if virtual else train_processes)(run, tmp_path)
    assert record.metrics["accuracy"] >= TARGET
    assert record.engine == ("simulation" if virtual else "processes")
    check_counts(record, run, ranks)
    assert set(record.notices) == set(row.notices)
    if not virtual:
        check_times(record)
    check_files(record, tmp_path)
    roles = strategy.roles(ranks)
    fresh = strategy.traits().lockstep or row.fresh
    assert (record.staleness is None) == fresh
    if not fresh and record.workers > 1:
        assert record.staleness is not None
        assert record.staleness["max"] >= record.staleness["mean"] >= 0
    assert (record.switched_at_step is not None) == bool(strategy.traits().phases)
    assert (record.bytes_sent > 0) == (len(roles.shares) > 1)
    assert record.bytes_estimated == ("native" in record.strategy)


def check_counts(record: RunRecord, run: Run, ranks: int) -> None:
    roles = run.strategy.roles(ranks)
    assert (record.name, record.strategy) == ("test", repr(run.strategy))
    assert (record.ranks, record.workers) == (ranks, len(roles.workers))
    assert record.servers == len(roles.servers)
    assert (record.seed, record.status, record.failure) == (0, "completed", None)
    assert record.left_out == {}
    if "backup" in record.strategy:  # a late worker passes over the batches of what it missed
        assert 0 < record.samples <= TRAIN_SAMPLES * EPOCHS
    else:
        assert record.samples == TRAIN_SAMPLES * EPOCHS
    lines = [step_lines(record.folder, rank) for rank in range(len(roles.shares))]
    assert sum(line["samples"] for rank in lines for line in rank) == record.samples
    assert record.steps == max(map(len, lines)) > 0


def check_times(record: RunRecord) -> None:
    assert record.setup_seconds is not None
    assert record.train_seconds is not None
    assert record.samples_per_second is not None
    assert record.setup_seconds > 0
    assert record.samples_per_second == pytest.approx(record.samples / record.train_seconds)
    assert set(record.seconds) == {"compute", "communicate", "wait"}
    assert record.seconds["compute"] > 0
    assert min(record.seconds.values()) >= 0
    assert sum(record.seconds.values()) <= record.train_seconds * 1.02


def check_files(record: RunRecord, folder: Path) -> None:
    """The curve ends at the end, the target lies on it; the hash is that of the file."""
    curve = [json.loads(line) for line in (folder / "curve.jsonl").read_text().splitlines()]
    assert len(curve) == 3
    assert curve[-1]["samples"] == TRAIN_SAMPLES * EPOCHS
    model = curve[-1]["average"] or curve[-1]["metrics"]
    assert model == {"loss": record.final_loss, **record.metrics}
    assert [point["samples"] for point in curve] == sorted(point["samples"] for point in curve)
    reached = [p["seconds"] for p in curve if p["metrics"]["accuracy"] >= 0.5]
    assert record.time_to_target_seconds == reached[0]
    assert 0 < reached[0] <= record.train_seconds
    sha = hashlib.sha256()
    for name, tensor in sorted(load_file(folder / "parameters.safetensors").items()):
        sha.update(name.encode() + tensor.numpy().tobytes())
    assert record.parameters_sha256 == sha.hexdigest()
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
        return train_processes(digits_run(single, 1, **ONE_WORKER), Path(folder)).parameters_sha256


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=row.label, marks=pytest.mark.matrix if row.variant else ())
        for row in TABLE
        if row.exact
    ],
)
def test_with_one_worker_it_equals_single_bit_for_bit(row: Row, tmp_path: Path) -> None:
    """In virtual time where `test_simulation` shows that it trains as on processes, to the bit."""
    strategy = row.build()
    run = digits_run(strategy, row.smallest, **ONE_WORKER)
    record = (simulated if strategy.traits().lockstep else train_processes)(run, tmp_path)
    assert record.workers == 1
    assert record.parameters_sha256 == single_hash()


def test_the_table_holds_every_strategy() -> None:
    known = {name: STRATEGIES.resolve(name, where="here") for name in STRATEGIES.names()}
    named = {name for name, cls in known.items() if issubclass(cls, Strategy)}
    assert named <= {type(row.build()).__name__ for row in [*TABLE, ON_ONE_HOST]}
