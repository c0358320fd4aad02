"""Hogwild: the rule along the order of events, real memory, quiet points, and who is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.support.decentralized import BATCH, SIZE, gradients
from tests.support.simulated import simulated, simulated_here
from tests.support.training import equal, settings, step_lines, train_processes

from orchestra.engines.processes import launch
from orchestra.errors import InputError
from orchestra.settings import parse
from orchestra.strategies.hogwild import Hogwild, HogwildMember
from orchestra.strategies.registry import STRATEGIES
from orchestra.trainer.settings import Run
from orchestra.transports.protocol import Group
from orchestra.worker.runtime import Runtime
from orchestra.worker.worker import Worker

HOST = "one_host(cores=3)"


def quadratic(ranks: int, steps: int, **training: Any) -> Run:
    training = {"batch_size": BATCH, "optimizer": "SGD(lr=0.1)", **training}
    run = settings(Hogwild(), ranks, "", **training)
    return replace(run, task=f"tests.support.decentralized:quadratic({ranks * steps * BATCH})")


def test_the_rule_of_the_paper_along_the_order_of_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """x <- x - gamma g_i(x as it was read), whatever others wrote in between."""
    events: list[tuple[str, int]] = []
    read_it, write_it = HogwildMember.begin, Worker.update_locally

    def reading(self: HogwildMember) -> None:
        read_it(self)
        events.append(("read", self.worker.rank))

    def writing(self: Worker, optimizer: torch.optim.Optimizer) -> None:
        events.append(("write", self.rank))
        write_it(self, optimizer)

    monkeypatch.setattr(HogwildMember, "begin", reading)
    monkeypatch.setattr(Worker, "update_locally", writing)
    ranks, steps = 3, 6
    run = quadratic(ranks, steps, work="equal")  # without messages that would keep them together
    training = replace(run.training, engine="simulation", cluster=HOST)
    simulated_here(replace(run, training=training), tmp_path)
    final = load_file(tmp_path / "parameters.safetensors")
    gradient = gradients(ranks, steps)
    x, updates = np.zeros(SIZE), 0
    read: dict[int, tuple[np.ndarray[Any, Any], int]] = {}
    taken, staleness = [0] * ranks, []
    for name, rank in events:
        if name == "read":
            read[rank] = x.copy(), updates
        else:
            x -= 0.1 * gradient(rank, taken[rank], read[rank][0])
            staleness.append(updates - read[rank][1])
            taken[rank] += 1
            updates += 1
    assert sum(taken) == ranks * steps
    assert max(staleness) > 0
    np.testing.assert_allclose(final["x"].numpy(), x, rtol=1e-12)
    lines = [line for rank in range(ranks) for line in step_lines(tmp_path, rank)]
    told = sorted(value for line in lines for value in line["staleness"])
    assert told == sorted(staleness)


def test_processes_share_the_parameters(tmp_path: Path) -> None:
    """With a checkpoint on the way, after which the run goes on; and after another strategy."""
    strategy = parse("Switch(AllReduce(), Hogwild(), when=AfterSteps(5))", STRATEGIES, where="test")
    for chosen in (Hogwild(), strategy):
        folder = tmp_path / str(chosen == strategy)
        run = settings(chosen, 3, "images(samples=480)", optimizer="SGD(lr=0.05)", epochs=2)
        training = replace(run.training, checkpoint_every=7)
        record = train_processes(replace(run, training=training), folder)
        assert record.learned.samples == 960
        assert record.updates.staleness is not None
        assert sum(record.updates.histogram.values()) > 20
        assert record.learned.loss is not None
        assert record.learned.loss < 2.0


def test_one_worker_is_sgd(tmp_path: Path) -> None:
    run = quadratic(1, 8)
    simulated(run, tmp_path / "hogwild", HOST)
    single = parse("Single()", STRATEGIES, where="test")
    simulated(replace(run, strategy=single), tmp_path / "single", HOST)
    one, other = (
        load_file(tmp_path / name / "parameters.safetensors") for name in ("hogwild", "single")
    )
    assert equal(one, other)


@pytest.mark.parametrize(
    ("training", "on", "message"),
    [
        ({"optimizer": "SGD(lr=0.1, momentum=0.9)"}, HOST, "set optimizer to SGD, without"),
        ({"optimizer": "Adam(lr=0.1)"}, HOST, "set optimizer to SGD, without"),
        ({"record_order": True}, HOST, "record_order: what a rank reads in memory"),
        ({}, "lan_1gbit(nodes=2)", "rank 1 cannot share memory with rank 0: put all ranks on one"),
    ],
)
def test_what_cannot_be_is_refused(
    training: dict[str, Any], on: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        simulated(quadratic(2, 2, **training), tmp_path, on)


def test_ranks_without_shared_memory_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORCHESTRA_SHARED_MEMORY", "0")
    with pytest.raises(InputError, match=r"rank 0 cannot share .* ORCHESTRA_SHARED_MEMORY is not"):
        train_processes(quadratic(2, 2), tmp_path)


def shared(runtime: Runtime, runs: int) -> list[float]:
    """Share memory `runs` times; each time every rank adds to it without asking anybody."""
    group = Group(tuple(range(runtime.ranks)))
    sums: list[float] = []
    for run in range(runs):
        memory = runtime.transport.share(torch.full((100,), float(runtime.rank)), group, 45)
        for _ in range(20):
            memory.values[runtime.rank].add_(1.0)  # its own element: nothing can be lost
        done = runtime.transport.share(torch.zeros(1), group, 45)
        done.catch_up()
        assert run == len(sums)
        sums.append(float(memory.values[runtime.rank]))
    return sums


@pytest.mark.parametrize("runs", [10, pytest.param(1000, marks=pytest.mark.lab)])
def test_sharing_again_and_again(runs: int) -> None:
    """Memory begins with the values of the first rank, each time anew."""
    assert launch(shared, runs, 3).results == ([20.0] * runs,) * 3


@pytest.mark.lab
@pytest.mark.timeout(600)
@pytest.mark.parametrize("piece", range(20))
def test_no_training_of_1000_hangs(piece: int, tmp_path: Path) -> None:
    """50 trainings: each ends, with all updates made and a loss as low as that of one worker."""
    steps = 40
    stale = 0
    for number in range(50 * piece, 50 * (piece + 1)):
        ranks, work = 2 + number % 2, ("shared", "equal")[number // 2 % 2]
        run = settings(
            Hogwild(), ranks, "images(samples=96)",
            seed=number, optimizer="SGD(lr=0.1)", steps=steps, work=work, patience=20.0,
        )  # fmt: skip
        record = train_processes(run, tmp_path / str(number))
        updates = record.updates.histogram
        assert sum(updates.values()) == ranks * steps, (number, updates)
        assert record.learned.loss is not None
        assert record.learned.loss < 1.0, number  # 0.5 to 0.7; 1.45 at the beginning
        stale += sum(count for staleness, count in updates.items() if int(staleness))
    assert stale > 0, "no update was made while another worker computed its gradient"
