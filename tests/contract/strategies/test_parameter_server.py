"""Parameter servers as a whole: what a setting means in a training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.lab import some
from tests.support.threads import run_ranks
from tests.support.training import equal, member_of, settings, train_threads
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from orchestra.errors import InputError
from orchestra.strategies.parameter_server import ParameterServer
from orchestra.strategies.switch import Switch
from orchestra.strategies.switch_rules import AfterSteps
from orchestra.trainer.checkpoint_files import complete
from orchestra.trainer.checkpoints import read_rank
from orchestra.trainer.own_loop import OwnLoop
from orchestra.trainer.session import Session
from orchestra.worker.runtime import Runtime

ASYNCHRONOUS = ParameterServer(consistency="asynchronous", delay_compensation="adaptive")
BOUNDED = ParameterServer(consistency="bounded", staleness=2, servers=2)


@pytest.mark.parametrize("optimizer", ["SGD(lr=0.1, momentum=0.9)", "Adam(lr=0.01)"])
@pytest.mark.parametrize("servers", some([1, 2]))
def test_a_bound_of_0_is_synchronous_bit_for_bit(
    servers: int, optimizer: str, tmp_path: Path
) -> None:
    trained = [
        train_threads(
            strategy, 3, tmp_path / name, "images(model='normalised')",
            optimizer=optimizer, clip_norm=0.5,
        )
        for name, strategy in (
            ("synchronous", ParameterServer(servers=servers, placement="beside")),
            ("bounded", ParameterServer(
                servers=servers, placement="beside", consistency="bounded", staleness=0)),
        )
    ]  # fmt: skip
    assert equal(trained[0].final, trained[1].final)
    assert [line["loss"] for line in trained[0].lines(0)] == [
        line["loss"] for line in trained[1].lines(0)
    ]
    assert not any(report.staleness for report in trained[1].reports)


def test_a_switch_may_begin_with_a_bound_of_0(tmp_path: Path) -> None:
    first = ParameterServer(consistency="bounded", staleness=0)
    strategy = Switch(first, BOUNDED, when=AfterSteps(4), moments="reset")
    result = train_threads(strategy, 4, tmp_path, "images()")
    assert {report.switched_at_step for report in result.reports[:3]} == {4}


@pytest.mark.parametrize("strategy", [ASYNCHRONOUS, BOUNDED], ids=["asynchronous", "bounded"])
def test_each_worker_resumes_with_the_parameters_that_it_had_read(
    strategy: ParameterServer, tmp_path: Path
) -> None:
    """Its next gradient is computed there, and that is where the server thinks it is."""
    ranks = 2 + strategy.servers
    training: dict[str, Any] = {"checkpoint_every": 5, "optimizer": "SGD(lr=0.1)"}
    train_threads(strategy, ranks, tmp_path, "images()", **training)
    run = settings(strategy, ranks, "images()", **training)

    def program(runtime: Runtime) -> tuple[Tensor, Any]:
        session = Session(runtime, run, strategy, tmp_path)
        server = member_of(session).connection.server
        return session.worker.parameters.clone(), server and server.state_dict()

    resumed = run_ranks(ranks, program)
    newest = max(complete(tmp_path / "checkpoints"))
    saved = [read_rank(tmp_path / "checkpoints", newest, rank) for rank in range(ranks)]
    for rank in range(2):
        assert torch.equal(resumed[rank][0], saved[rank]["parameters"])
    assert not torch.equal(resumed[0][0], resumed[1][0]), "they had read different versions"
    for rank in range(2, ranks):
        server = resumed[rank][1]
        assert server["read"] == saved[rank]["strategy"]["member"]["connection"]["server"]["read"]
        if strategy is ASYNCHRONOUS:
            for worker in range(2):
                given = server["memory"][str(worker)]["given"]
                assert torch.equal(given, saved[worker]["parameters"])


def test_backup_workers_have_no_place_in_a_loop_of_the_users_own() -> None:
    def program(runtime: Runtime) -> None:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(TensorDataset(torch.zeros(8, 2)), batch_size=2)
        OwnLoop(runtime, model, optimizer, loader, ParameterServer(placement="beside", backup=1))

    with pytest.raises(InputError, match="backup needs orchestra's own loop"):
        run_ranks(2, program)
