"""What chance decided in a run on processes, repeated in virtual time: the same parameters."""

from __future__ import annotations

import gzip
import json
import shutil
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support.lab import some
from tests.support.strategy_table import TABLE, Row, with_sizes

import orchestra
from orchestra import InputError
from orchestra.cli.main import main
from orchestra.records.record import RunRecord
from orchestra.settings.base import from_plain, to_plain
from orchestra.trainer.recorder import FlowOrder, Order

SERVER = "ParameterServer"
BY_CHANCE = [
    row
    for row in TABLE
    if isinstance(row.strategy, str)
    and (not row.build().traits().lockstep or row.label in ("partial all-reduce", "backup workers"))
]

ALWAYS = ("hop", "groups", "overlapped push")
VARIANTS = (
    "asynchronous beside", "delay compensation", "rate divided", "backup workers",
    "elastic first", "asynchronous first",
)  # fmt: skip


def recorded(strategy: Any, folder: Path, ranks: int = 3, steps: int = 12) -> RunRecord:
    return orchestra.train(
        "tests.support.tasks_for_tests:digits_in_one_thread()", strategy, ranks,
        out=folder, quiet=True, record_order=True, steps=steps, batch_size=8, snapshots=2,
        optimizer="SGD(lr=0.05)",
    )  # fmt: skip


def cases() -> list[Any]:
    """Each strategy once. The lab has those that exchange the messages of another one, and those
    in which the order of arrivals decides nothing, but for `ALWAYS`."""
    rows = [
        replace(row, variant=row.variant or row.fresh or row.label in VARIANTS)
        for row in BY_CHANCE
        if row.label not in ALWAYS
    ]
    return with_sizes([*(row for row in BY_CHANCE if row.label in ALWAYS), *rows])


@pytest.mark.parametrize(("row", "ranks"), some(cases()))
def test_every_strategy_repeats_to_the_bit(row: Row, ranks: int, tmp_path: Path) -> None:
    recorded(row.build(), tmp_path / "run", ranks)
    assert orchestra.replay(tmp_path / "run", out=tmp_path / "replay", quiet=True).equal


def test_in_parts_with_momentum_dropout_and_a_checkpoint(tmp_path: Path) -> None:
    orchestra.train(
        "tests.support.tasks_for_tests:digits_in_one_thread(dropout=0.3)",
        f"{SERVER}(servers=2, consistency='asynchronous', placement='beside')",
        3, out=tmp_path / "run", quiet=True, record_order=True, steps=10, batch_size=7,
        optimizer="SGD(lr=0.02, momentum=0.9)", checkpoint_every=4, bucket_megabytes=0.01,
    )  # fmt: skip
    assert orchestra.replay(tmp_path / "run", out=tmp_path / "replay", quiet=True).equal


def test_two_arrivals_in_another_order_give_other_parameters(tmp_path: Path) -> None:
    """So it is the order that makes them equal, and nothing else."""
    recorded(f"{SERVER}(consistency='asynchronous')", tmp_path / "run", ranks=3)
    path = tmp_path / "run" / "order-rank-2.json.gz"
    order = json.loads(gzip.decompress(path.read_bytes()))
    sources = order["flows"]["main"]["sources"]
    at = next(i for i, (one, two) in enumerate(pairwise(sources)) if one != two)
    sources[at], sources[at + 1] = sources[at + 1], sources[at]
    path.write_bytes(gzip.compress(json.dumps(order).encode()))
    assert orchestra.replay(tmp_path / "run", out=tmp_path / "replay", quiet=True).equal is False


def test_a_state_has_the_gradient_of_a_worker_that_exchanges_none(tmp_path: Path) -> None:
    recorded("LocalSGD(4)", tmp_path / "run", ranks=2)
    stopped = orchestra.replay(tmp_path / "run", until=3, out=tmp_path / "at-3", quiet=True)
    for rank in (0, 1):
        assert float(stopped.states[rank]["gradients"].abs().sum()) > 0


def test_it_stops_where_asked_and_hands_over_all_states(tmp_path: Path) -> None:
    strategy = f"{SERVER}(consistency='asynchronous')"
    recorded(strategy, tmp_path / "run", ranks=3)
    stopped = orchestra.replay(tmp_path / "run", until=5, out=tmp_path / "at-5", quiet=True)
    assert stopped.equal is None
    assert stopped.steps == {0: 5, 1: 5}
    assert sorted(stopped.states) == [0, 1, 2]
    assert {rank: state["position"]["steps"] for rank, state in stopped.states.items()} == {
        0: 5, 1: 5, 2: 0,
    }  # fmt: skip
    for rank in (0, 1):
        assert float(stopped.states[rank]["gradients"].abs().sum()) > 0
    # what was handed over is what the run had then: one that ended there has the same parameters
    recorded("Single()", tmp_path / "alone", ranks=1, steps=9)
    alone = orchestra.replay(tmp_path / "alone", until=9, out=tmp_path / "at-9", quiet=True)
    final = load_file(tmp_path / "alone" / "parameters.safetensors")
    flat = torch.cat([tensor.reshape(-1) for tensor in final.values()])
    kept = alone.states[0]["parameters"]
    assert sorted(kept[kept != 0].tolist()) == sorted(flat[flat != 0].tolist())


def test_the_command_says_whether_they_are_equal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded("PairwiseAveraging()", tmp_path / "run")
    assert main(["replay", str(tmp_path / "run"), "--out", str(tmp_path / "replay")]) == 0
    assert "bit for bit" in capsys.readouterr().out
    assert (
        main(["replay", str(tmp_path / "run"), "--until", "3", "--out", str(tmp_path / "3")]) == 0
    )
    assert "the state of every rank" in capsys.readouterr().out


def test_a_task_beside_its_experiment_is_found_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "task_beside.py").write_text(
        "from orchestra.tasks import Task, load_task\n"
        "def small() -> Task:\n"
        "    return load_task('digits(channels=1, hidden=2)')\n"
    )
    (tmp_path / "experiment.yaml").write_text(
        "task: task_beside:small()\nstrategies: {alone: Single()}\nranks: 1\nsteps: 2\n"
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    arguments = ["train", str(tmp_path / "experiment.yaml"), "--record-order"]
    assert main([*arguments, "--out", str(tmp_path / "run")]) == 0
    assert str(tmp_path) not in sys.path
    sys.modules.pop("task_beside", None)
    assert orchestra.replay(tmp_path / "run", out=tmp_path / "replay", quiet=True).equal


def test_what_cannot_be_replayed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="give the folder of one run"):
        orchestra.replay(tmp_path)
    recorded("Single()", tmp_path / "run", ranks=1)
    inside = tmp_path / "comparison" / "runs" / "one process" / "1-ranks" / "seed-0"
    for folder in (tmp_path / "comparison", inside):
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(tmp_path / "run" / "experiment.yaml", folder)
    with pytest.raises(InputError, match=f"is a comparison; give one of its runs.*{inside}"):
        orchestra.replay(tmp_path / "comparison")
    with pytest.raises(InputError, match="is no step"):
        orchestra.replay(tmp_path / "run", until=0)
    with pytest.raises(InputError, match="holds files"):
        orchestra.replay(tmp_path / "run", out=tmp_path / "run")
    (tmp_path / "run" / "order-rank-0.json.gz").write_bytes(b"nothing")
    with pytest.raises(InputError, match="damaged"):
        orchestra.replay(tmp_path / "run", out=tmp_path / "one", quiet=True)
    (tmp_path / "run" / "order-rank-0.json.gz").unlink()
    with pytest.raises(InputError, match="is missing"):
        orchestra.replay(tmp_path / "run", out=tmp_path / "other", quiet=True)
    recorded("AllReduce('native')", tmp_path / "native", ranks=2)
    with pytest.raises(InputError, match="an order of their own"):
        orchestra.replay(tmp_path / "native", out=tmp_path / "third")
    orchestra.train("digits", "Single", 1, out=tmp_path / "plain", quiet=True, steps=1)
    with pytest.raises(InputError, match="--record-order"):
        orchestra.replay(tmp_path / "plain")


def test_an_order_survives_being_written() -> None:
    order = Order({"main.0": FlowOrder([1, -1], [True], [0.25], [[2]])}, [1.5], [False], 3)
    assert from_plain(Order, json.loads(json.dumps(to_plain(order)))) == order
