"""Loops of the user's own that go on where ranks are lost, and take ranks in."""

from __future__ import annotations

import itertools
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support import elastic_loop, own_loops
from tests.support.commands import run
from tests.support.elastic_ranks import join, ranks, written
from tests.support.lab import some
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from orchestra.data.feed import GlobalOrder
from orchestra.data.loaders import DealtLoader, WorkerBatch
from orchestra.errors import InputError
from orchestra.worker.runtime import Runtime


def reference(positions: list[tuple[int, int]]) -> dict[str, Tensor]:
    """Train in one process on these parts of the global order, one after the other."""
    module = elastic_loop.model()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.9)
    inputs, wanted = elastic_loop.data().tensors
    order = GlobalOrder(elastic_loop.SAMPLES, 0, shuffled=True)
    for start, stop in positions:
        chosen = order.indices(start, stop)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(module(inputs[chosen]), wanted[chosen]).backward()
        optimizer.step()
        scheduler.step()
    return module.state_dict()


def test_it_equals_one_process_on_the_same_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the void step, whose samples come again."""
    monkeypatch.setenv("WITHOUT_BUFFERS", "1")
    fault = 'Inject("kill", rank=2, at="gradient", number=9)'  # the third one of the second epoch
    with ranks(tmp_path, 3, epochs=2, ORCHESTRA_INJECT=fault) as started:
        assert [each.end().status for each in started] == [0, 0, -signal.SIGKILL]
    positions = [(at, at + 12) for at in range(0, 96, 12)]
    positions += [(at, at + 8) for at in range(96, 144, 8)]
    steps, _ = written(tmp_path, 0)
    assert len(steps) == len(positions) + 1
    found = torch.load(tmp_path / "model-0.pt", weights_only=True)
    for name, values in reference(positions).items():
        torch.testing.assert_close(found[name], values, atol=1e-5, rtol=1e-4)


def test_the_script_joins_as_one_rank_more(tmp_path: Path) -> None:
    (tmp_path / "hold").touch()
    with ranks(tmp_path, 2) as started:
        first = started[0]
        first.wait_until((tmp_path / "join.json").exists, "it can be joined")
        with join(tmp_path) as newcomer:
            taken_in = "joins; going on with 3 ranks"
            first.wait_until(lambda: taken_in in first.err(), "it is taken in")
            (tmp_path / "hold").unlink()
            assert [each.end().status for each in (*started, newcomer)] == [0, 0, 0]
    ends = [written(tmp_path, rank)[1] for rank in range(3)]
    assert ends[0] == ends[1] == ends[2]
    assert [each[3] for each in ends[0]] == [3, 3, 3, 3]
    steps, its = written(tmp_path, 0)[0], written(tmp_path, 2)[0]
    assert [(epoch, rate) for epoch, _, rate in its] == [
        (epoch, rate) for epoch, _, rate in steps[-len(its) :]
    ]
    assert not (tmp_path / "join.json").exists()


@pytest.mark.parametrize(
    ("at", "number", "of", "shared"),
    some(
        [
            ("gradient", 9, 3, "1"),
            ("collective", 20, 3, "1"),
            ("collective", 20, 3, "0"),
            ("send", 35, 4, "0"),  # as the others agree at the end of an epoch
        ]
    ),
)
def test_the_others_go_on(at: str, number: int, of: int, shared: str, tmp_path: Path) -> None:
    fault = f'Inject("kill", rank={of - 1}, at="{at}", number={number})'
    variables = {"ORCHESTRA_INJECT": fault, "ORCHESTRA_SHARED_MEMORY": shared}
    if at == "send":
        variables["ORCHESTRA_COMPILED"] = "0"  # else a collective sends nothing
    with ranks(tmp_path, of, 4, **variables) as started:
        ended = [each.end() for each in started]
    assert [each.status for each in ended[:-1]] == [0] * (of - 1), ended
    (one, ends), *others = [written(tmp_path, rank) for rank in range(of - 1)]
    assert [each[0] for each in ends] == list(range(4))
    assert ends[-1][3] == of - 1
    for steps, other_ends in others:
        assert other_ends == ends
        assert [each[0] for each in steps] == [each[0] for each in one]


@pytest.mark.parametrize(
    "how", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.lab)]
)
def test_who_has_joined_may_leave(how: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "hold").touch()
    with ranks(tmp_path, 2) as started:
        first = started[0]
        first.wait_until((tmp_path / "join.json").exists, "it can be joined")
        with join(tmp_path) as newcomer:
            first.wait_until(lambda: "going on with 3 ranks" in first.err(), "it is taken in")
            newcomer.process.send_signal(how)
            ended = newcomer.end()
            first.wait_until(lambda: "has left; going on with 2" in first.err(), "it has left")
            (tmp_path / "hold").unlink()
            assert [each.end().status for each in started] == [0, 0]
    assert ended.status == 0
    assert written(tmp_path, 0)[1] == written(tmp_path, 1)[1]


def test_too_few_end_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEAST", "3")
    with ranks(
        tmp_path, 3, ORCHESTRA_INJECT='Inject("kill", rank=2, at="gradient", number=9)'
    ) as started:
        ended = [each.end() for each in started]
    assert [each.status for each in ended[:2]] == [1, 1]
    assert "rank 2 on" in ended[0].err
    assert "2 ranks are left, of 3 at least" in ended[0].err


def test_who_does_not_fit_is_refused(tmp_path: Path) -> None:
    """A script with another model; and the command, which has no script."""
    (tmp_path / "hold").touch()
    secret = tmp_path / "join.json"
    with ranks(tmp_path, 2) as started:
        started[0].wait_until(secret.exists, "it can be joined")
        with join(tmp_path, WITHOUT_BUFFERS="1", WIDTH="9") as newcomer:
            ended = newcomer.end()
        told = json.loads(secret.read_text())
        address = f"{told['host']}:{told['port']}"
        command = run(["join", address, "--secret", str(secret)], tmp_path)
        (tmp_path / "hold").unlink()
        assert [each.end().status for each in started] == [0, 0]
    assert ended.status == 1
    assert "its model, data or version of Orchestra is not that of the run" in ended.err
    assert command.status == 2
    assert "start that script with ORCHESTRA_JOIN=FILE" in command.err


# What needs no other process


def gone(error: object) -> Runtime:
    raise AssertionError("no group changes here")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "ParameterServer"}, "a loop of your own ends when it loses a rank"),
        ({"strategy": "AllReduce('ring', shard='optimizer')"}, "ends when it loses a rank"),
        ({"accumulation": 2}, "accumulation would be another one with fewer ranks"),
        ({"loader": lambda: list(own_loops.in_order(8))}, "only from a DataLoader of a map-style"),
    ],
)
def test_what_could_not_go_on_is_refused(options: dict[str, Any], message: str) -> None:
    given = {"strategy": "AllReduce('ring')", "loader": lambda: own_loops.in_order(8), **options}
    with pytest.raises(InputError, match=message):
        own_loops.distributed(lambda *_: None, ranks=2, regroup=gone, **given)


def test_a_scheduler_that_others_would_not_learn_of_is_refused() -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any) -> None:
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
        for _ in batches:
            pass

    with pytest.raises(InputError, match=r"batches.register\(scheduler=scheduler\)"):
        own_loops.distributed(
            loop, "AllReduce('ring')", lambda: own_loops.in_order(8), ranks=2, regroup=gone
        )


def test_what_has_no_state_cannot_be_registered() -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any) -> None:
        batches.register(best=0.5)

    with pytest.raises(InputError, match="best has no state_dict"):
        own_loops.distributed(
            loop, "AllReduce('ring')", lambda: own_loops.in_order(8), ranks=2, regroup=gone
        )


def test_epochs_are_those_that_are_left() -> None:
    seen: list[list[int]] = []

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any) -> None:
        numbers = []
        for epoch in batches.epochs(2):
            numbers.append(epoch)
            for _ in batches:
                pass
        for epoch in batches.epochs(4):
            numbers.append(epoch)
            for _ in batches:
                break
            batches.end_epoch()
        seen.append(numbers)
        for _ in batches.epochs(5):
            pass  # and the epoch is not ended

    with pytest.raises(InputError, match="epoch 4 was not ended"):
        own_loops.distributed(loop, "AllReduce('ring')", lambda: own_loops.in_order(8), ranks=2)
    assert seen
    assert all(each == [0, 1, 2, 3] for each in seen)


@given(
    st.integers(1, 40), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4),
    st.integers(0, 12), st.booleans(),
)  # fmt: skip
def test_the_rest_of_an_epoch_is_dealt_out_once(
    count: int, batch: int, before: int, after: int, steps: int, drop_last: bool
) -> None:
    """Whatever the numbers of workers are: each sample is in one batch, but those that are dropped
    as they fill no step."""
    loader = DataLoader(TensorDataset(torch.arange(count)), batch, drop_last=drop_last)
    seen: list[int] = []
    loaders = [DealtLoader(loader, before, index, 0, None) for index in range(before)]
    steps = min(steps, len(loaders[0]))
    for each in loaders:
        seen += samples_in(itertools.islice(each.begin(0), steps))
    done = loaders[0].position(steps)
    for index in range(after):
        rest = DealtLoader(loader, after, index, 0, None)
        seen += samples_in(rest.begin_rest(done))
        assert rest.epoch == 1
    dropped = (count - done) % (batch * after) if drop_last else 0
    assert sorted(seen) == list(range(count - dropped))


def samples_in(parts: Iterator[WorkerBatch]) -> list[int]:
    return [int(sample) for part in parts if part.samples for sample in part.batch[0]]
