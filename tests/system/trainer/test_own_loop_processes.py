"""Loops of the user's own: several in one script, beside a process group,
servers, evaluations that take long, and what a script may ask of its place."""

from __future__ import annotations

import json
import re
import socket
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.commands import torchrun
from tests.support.comparisons import experiment
from tests.support.paths import SCRIPTS
from tests.support.scripts import several_loops
from tests.support.threads import run_ranks
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import orchestra
from orchestra.engines.processes.distribute import Channel
from orchestra.engines.processes.launch import launch
from orchestra.errors import InputError
from orchestra.experiments.experiment import runs
from orchestra.experiments.run import idle_nodes
from orchestra.settings import parse
from orchestra.strategies.registry import STRATEGIES
from orchestra.trainer.own_loop import OwnLoop
from orchestra.worker.interception import intercepted
from orchestra.worker.runtime import Runtime

SEVERAL = SCRIPTS / "several_loops.py"


def vectors(folder: Path, rank: int) -> list[list[float]]:
    found: list[list[float]] = json.loads((folder / f"rank-{rank}.json").read_text())
    return found


@pytest.mark.parametrize(
    ("strategy", "ranks", "parts"),
    [
        ("AllReduce('ring')", 2, ["folds", "cell_run_twice", "by_turns", "get_batch"]),
        pytest.param(
            "ParameterServer(placement='beside')",
            2,
            ["folds", "by_turns", "cell_run_twice"],
            marks=pytest.mark.lab,
        ),
        pytest.param(
            "ParameterServer", 3, ["folds", "cell_run_twice", "get_batch"], marks=pytest.mark.lab
        ),
    ],
)
def test_several_loops_in_one_script(
    strategy: str, ranks: int, parts: list[str], tmp_path: Path
) -> None:
    """Two workers come to what one process with the batch of both comes to; with servers that
    come back for the next loop, and at last leave a loop that no `for` drives. Under all-reduce
    beside the script's own process group."""
    plain = several_loops.trained(strategy, parts)
    with torchrun(SEVERAL, ranks, [strategy, *parts], tmp_path) as process:
        ended = process.end()
    assert ended.status == 0, ended.err
    assert len(list(tmp_path.glob("*.json"))) == 2
    for rank in range(2):
        for ours, theirs in zip(vectors(tmp_path, rank), plain, strict=True):
            torch.testing.assert_close(
                torch.tensor(ours), torch.tensor(theirs), rtol=1e-6, atol=1e-6
            )


def test_strategy_may_lie_in_the_working_folder_of_a_script_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "occasional.py").write_text("from orchestra import LocalSGD as Mine\n")
    with torchrun(SEVERAL, 1, ["occasional:Mine(2)", "get_batch"], tmp_path) as process:
        ended = process.end()
    assert ended.status == 0, ended.err


def test_module_that_is_nowhere_is_told_without_the_error_of_its_import(tmp_path: Path) -> None:
    with torchrun(SEVERAL, 1, ["nowhere:Mine(2)", "get_batch"], tmp_path) as process:
        ended = process.end()
    assert "InputError: strategy: there is no module 'nowhere' in this folder or" in ended.err
    assert "ModuleNotFoundError" not in ended.err


def test_server_returns_from_a_function_that_an_engine_calls_on_each_rank(tmp_path: Path) -> None:
    """Spark's TorchDistributor fails where a rank ends without the value of its function."""
    with torchrun(SCRIPTS / "spark_task.py", 3, ["ParameterServer"], tmp_path) as process:
        ended = process.end()
    assert ended.status == 0, ended.err
    outputs = [json.loads((tmp_path / f"output-{rank}.json").read_text()) for rank in range(3)]
    assert [output["taken"] for output in outputs] == [12, 12, 0]
    assert outputs[0]["weight"] == outputs[1]["weight"]


@pytest.mark.parametrize(
    "strategy", ["LocalSGD(3)", pytest.param("AllReduce", marks=pytest.mark.lab)]
)
def test_a_script_that_ends_on_one_rank_alone_is_named(strategy: str, tmp_path: Path) -> None:
    """With status 0, which says of itself that all is well."""
    with torchrun(SCRIPTS / "early_exit.py", 2, [strategy, "exit"], tmp_path) as process:
        ended = process.end()
    assert ended.status != 0
    host = socket.gethostname()
    assert (
        f"orchestra: rank 1 on {host} ended its script after step 2, but rank 0 on {host} still "
        "needs it: let every rank make as many steps before its script ends\n" in ended.err
    )


@pytest.mark.parametrize(
    "strategy",
    [
        "LocalSGD(1)",
        pytest.param("Gossip", marks=pytest.mark.lab),
        pytest.param("AllReduce(shard='optimizer')", marks=pytest.mark.lab),
    ],
)
def test_a_step_that_one_rank_leaves_out_is_named(strategy: str, tmp_path: Path) -> None:
    """Where the others wait for it in their own `step()`."""
    with torchrun(SCRIPTS / "early_exit.py", 2, [strategy, "skip"], tmp_path) as process:
        ended = process.end()
    assert ended.status != 0
    assert re.search(r"the run hangs: .*; rank 0 is at step (\d), rank 1 at (\d)\n", ended.err)


def test_an_evaluation_longer_than_patience(tmp_path: Path) -> None:
    """On one rank, while the other one waits: inside `pause` all goes on; outside the run ends, and
    the message says what to do."""
    with torchrun(SCRIPTS / "long_evaluation.py", 2, [], tmp_path) as process:
        ended = process.end()
    assert ended.status != 0
    assert (tmp_path / "paused").exists()
    assert "rank 0 on " in ended.err
    assert "hangs: no progress for" in ended.err
    assert "put what takes longer, such as an evaluation" in ended.err
    assert "`with batches.pause():`" in ended.err


# On threads


def regression(samples: int = 16) -> DataLoader[Any]:
    features = torch.linspace(-1, 1, 3 * samples, dtype=torch.float64).view(samples, 3).sin()
    return DataLoader(TensorDataset(features, features.sum(1, keepdim=True)), batch_size=2)


def loop_of(
    runtime: Runtime, strategy: str, batches: Any = None, **settings: Any
) -> tuple[nn.Module, torch.optim.Optimizer, OwnLoop]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parsed = parse(strategy, STRATEGIES, where="strategy")
    loader = regression() if batches is None else batches
    return model, optimizer, OwnLoop(runtime, model, optimizer, loader, parsed, **settings)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: list[Tensor]) -> None:
    optimizer.zero_grad()
    mse_loss(model(batch[0]), batch[1]).backward()
    optimizer.step()


@pytest.mark.parametrize(
    "strategy",
    [
        "LocalSGD(100)",
        "ParameterServer(consistency='asynchronous')",
        "Gossip",
        "Switch(AllReduce, ParameterServer(consistency='asynchronous'), when=AfterSteps(1))",
    ],
)
def test_agree_in_mid_epoch_and_after_a_break(strategy: str) -> None:
    """Workers agree after their first step, go on, break off, and agree again."""

    def train(runtime: Runtime) -> list[Tensor]:
        model, optimizer, loop = loop_of(runtime, strategy, work="equal")
        found = []
        for number, batch in enumerate(loop.batches):
            step(model, optimizer, batch)
            if number == 1:
                break
            before = nn.utils.parameters_to_vector(model.parameters()).clone()
            loop.batches.agree()
            found += [before, nn.utils.parameters_to_vector(model.parameters()).clone()]
        loop.batches.agree()
        found.append(nn.utils.parameters_to_vector(model.parameters()).clone())
        loop.finish()
        return found

    (one, agreed, last), (other, agreed_too, last_too) = run_ranks(3, train)[:2]
    assert torch.equal(agreed, agreed_too)
    assert torch.equal(last, last_too)
    assert not torch.equal(agreed, last)
    assert torch.equal(one, other) == ("Switch" in strategy)


def test_agree_with_a_queue_is_refused_with_the_way_round() -> None:
    def train(runtime: Runtime) -> None:
        model, optimizer, loop = loop_of(runtime, "PairwiseAveraging")
        for batch in loop.batches:
            step(model, optimizer, batch)
            loop.batches.agree()

    with pytest.raises(InputError, match="work='equal'"):
        run_ranks(2, train)


def test_a_server_knows_the_length_of_the_workers() -> None:
    def length(runtime: Runtime) -> int:
        _, _, loop = loop_of(runtime, "ParameterServer")
        return len(loop.batches)

    assert run_ranks(3, length) == [4, 4, 4]


def test_models_by_turns_need_as_many_batches_everywhere() -> None:
    def train(runtime: Runtime) -> None:
        _, _, first = loop_of(runtime, "PairwiseAveraging")
        loop_of(intercepted(runtime, Channel(1)), "Gossip", first.batches)

    with pytest.raises(InputError, match="work='equal'"):
        run_ranks(2, train)


def test_a_server_that_is_to_work_later_is_refused() -> None:
    strategy = "Switch(ParameterServer, AllReduce, when=AfterSteps(3), moments='reset')"
    with pytest.raises(InputError, match=r"rank 2 serves first.*placement='beside'"):
        run_ranks(3, lambda runtime: loop_of(runtime, strategy))


def test_a_loop_that_ended_refuses_to_train() -> None:
    def train(runtime: Runtime) -> None:
        model, optimizer, loop = loop_of(runtime, "AllReduce")
        batch = next(iter(loop.batches))
        step(model, optimizer, batch)
        loop.finish(goes_on=True)
        loop.close(handed_over=False)
        with pytest.raises(InputError, match="ended when another model"):
            next(iter(loop.batches))
        with pytest.raises(InputError, match="ended when another model"):
            step(model, optimizer, batch)

    run_ranks(2, train)


def test_a_forward_pass_is_a_sign_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an evaluation, too: it is no exchange, but what the watcher sees has moved."""
    from orchestra.engines.processes import distribute

    runtime = distribute._alone()
    model, _, _ = loop_of(runtime, "AllReduce")
    calls = runtime.compute.calls  # type: ignore[attr-defined]
    with torch.no_grad():
        model.eval()(torch.zeros(1, 3, dtype=torch.float64))
    assert runtime.compute.calls == calls + 1  # type: ignore[attr-defined]
    runtime.transport.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, (0, 1, True)),
        ({"RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "2"}, (2, 3, False)),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, (0, 2, True)),
    ],
)
def test_a_script_can_ask_for_its_place(
    variables: dict[str, str], expected: tuple[int, int, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    common = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for name, value in {**variables, **common}.items():
        monkeypatch.setenv(name, value)
    assert (orchestra.rank(), orchestra.world_size(), orchestra.is_first()) == expected


# Where things are defined and where they run


class Own:
    """Stands for a task or a strategy of a notebook's cell."""


def test_what_a_notebooks_cell_defines_is_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There the main module is no file that a rank could import."""
    cell = types.ModuleType("__main__")
    cell.Own = Own  # type: ignore[attr-defined]
    monkeypatch.setattr(Own, "__module__", "__main__")
    monkeypatch.setitem(sys.modules, "__main__", cell)
    with pytest.raises(InputError, match=r"notebook's cell .*%%writefile own\.py"):
        launch(print, Own(), 1)


def test_idle_nodes_of_a_cluster_are_told() -> None:
    def told(**changes: Any) -> list[str]:
        return idle_nodes(runs(experiment(engine="simulation", **changes)))

    (line,) = told(ranks=[1, 2], cluster="lan_1gbit(nodes=5)")
    assert line == (
        "cluster lan_1gbit(nodes=5) has 5 nodes, but ranks is 2: 3 of them stand idle; "
        "set ranks=5 to use all"
    )
    assert told(ranks=[1, 5], cluster="lan_1gbit(nodes=5)") == []
