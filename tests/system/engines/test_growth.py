"""A long run does not grow: what a step leaves behind is bounded."""

from __future__ import annotations

import gc
import itertools
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tests.support.meshes import mesh, until
from tests.support.simulated import run_ranks
from tests.support.training import settings, train_threads

from orchestra.engines.simulation import rendezvous
from orchestra.schedules import ring
from orchestra.strategies.all_reduce import AllReduce
from orchestra.strategies.parameter_server import ParameterServer
from orchestra.trainer.program import train
from orchestra.transports.protocol import CollectiveCall, Group, Transport
from orchestra.worker.runtime import Runtime
from orchestra.worker.snapshots import Buffers, buffers_vector


def test_a_flow_that_has_ended_is_forgotten_and_its_bytes_count() -> None:
    flows: list[weakref.ref[Transport]] = []

    def say(transport: Transport) -> None:
        flows.append(weakref.ref(transport))
        transport.send(torch.ones(5), 1, 0).wait()

    with mesh(2) as (one, _):
        say(one)
        message = one.bytes_sent
        assert message > 20
        for number in range(1, 10):
            one.spawn(say).wait()
            assert one.bytes_sent == (1 + number) * message

        def forgotten() -> bool:
            gc.collect()
            return not any(flow() for flow in flows[1:])

        until(forgotten)


def test_a_checkpoint_does_not_grow_with_the_pushes(tmp_path: Path) -> None:
    """Readers refuse a header of more than 100 MB."""
    strategy = ParameterServer(consistency="asynchronous")
    run = settings(strategy, 3, "images(samples=1600)", checkpoint_every=20)
    outcome = run_ranks(3, lambda runtime: train(runtime, (run, tmp_path)))
    assert (outcome.failure, outcome.bad_input) == (None, None)
    for rank in range(3):
        sizes = []
        for folder in sorted((tmp_path / "checkpoints").iterdir()):
            with safe_open(folder / f"rank-{rank}.safetensors", framework="pt") as file:
                sizes.append(len(file.metadata()["tree"]))
        assert len(sizes) == 2
        assert abs(sizes[1] - sizes[0]) < 20  # numbers have more digits


def test_buffers_are_read_where_a_snapshot_is_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[Any] = []

    def read(named: Buffers) -> torch.Tensor | None:
        reads.append(named)
        return buffers_vector(named)

    monkeypatch.setattr("orchestra.trainer.loop.buffers_vector", read)
    task = "images(samples=640, model='normalised')"
    result = train_threads(AllReduce(), 2, tmp_path, task, snapshots=3)
    assert {report.steps for report in result.reports} == {40}
    assert 0 < len(reads) <= 4


def test_plans_of_groups_that_come_once_are_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """As random groups do. As long as one is in use, all ranks find the same."""
    monkeypatch.setattr(rendezvous, "MAX_PLANS", 4)

    def program(runtime: Runtime) -> tuple[int, bool] | None:
        if runtime.rank:
            return None
        transport: Any = runtime.transport
        meeting, net = transport._rendezvous, transport._port.net
        schedule, vector = ring(3), torch.zeros(6)
        calls = [
            CollectiveCall(schedule, vector, Group(ranks), 0)
            for ranks in itertools.combinations(range(6), 3)
        ]
        first = meeting.plan(net, calls[0])
        for number, call in enumerate(calls):
            meeting.plan(net, call)
            if number % 4 == 0:
                gc.collect()
        return len(meeting._plans), meeting.plan(net, calls[0]) is first

    assert run_ranks(6, program).results[0] in [(number, True) for number in range(1, 10)]
