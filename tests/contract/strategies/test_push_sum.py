"""Stochastic gradient push: the equations of the paper, mass, de-biasing, and overlap."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.decentralized import (
    Matrix,
    distance_between,
    each_batch_once,
    gradients,
    momentum_sgd,
    replicas_of,
    train_quadratic,
)
from tests.support.mixing import Given
from tests.support.patient_push import CIRCLE, Patient, PatientHandle, PatientPush
from tests.support.threads import ask_to_stop, run_ranks
from tests.support.training import equal, train_threads
from tests.support.waiting import wait_until
from torch import Tensor, nn

from orchestra.coordinator.rest import Reason, Rest
from orchestra.errors import InputError
from orchestra.exchange import take_consensus
from orchestra.optimizers import capture
from orchestra.optimizers.spec import OptimizerSpec
from orchestra.strategies.base import restore_state, state_of
from orchestra.strategies.single import Single
from orchestra.strategies.stochastic_gradient_push import (
    OneAtATimePush,
    PushMember,
    StochasticGradientPush,
)
from orchestra.topologies import (
    Exponential,
    RandomRegular,
    Star,
    Topology,
    random_shares,
    uniform_shares,
)
from orchestra.transports.protocol import Transport
from orchestra.worker.runtime import Runtime
from orchestra.worker.worker import Worker

STEPS = 7
IRREGULAR = Given(((1, 2), (2,), (0, 3), (0,)))


def matrix_of(topology: Topology, ranks: int, step: int, shares: Any) -> Matrix:
    """P: column i is what rank i sends."""
    matrix = np.zeros((ranks, ranks))
    for rank, targets in enumerate(topology.graph(ranks, step)):
        for target, share in shares(targets, rank, step).items():
            matrix[target, rank] = share
    return matrix


def sgp(
    topology: Topology, ranks: int, shares: Any, overlap: int, momentum: float, exchanges: str
) -> tuple[Matrix, Matrix]:
    """Algorithms 1 and 2, what is sent in step k arriving in step k + overlap; z at the end, and w.

    Each row of `mass` is x_i and behind it w_i.
    """
    gradient, step = gradients(ranks, STEPS), momentum_sgd(0.1, momentum, ranks)
    mass = np.hstack([np.zeros((ranks, 5)), np.ones((ranks, 1))])
    on_the_way: dict[int, Matrix] = {}
    begun = 0
    period = 1 if exchanges == "every_step" else max(overlap, 1)

    def send(k: int) -> None:
        nonlocal mass, begun
        if k % period == 0:
            matrix = matrix_of(topology, ranks, begun, shares)
            kept = np.diag(matrix.diagonal())
            on_the_way[k] = (matrix - kept) @ mass
            mass = kept @ mass
            begun += 1

    def receive(k: int) -> None:
        nonlocal mass
        mass = mass + on_the_way.pop(k - overlap, 0.0)

    for k in range(STEPS):
        if exchanges == "one_at_a_time":
            receive(k)
            send(k)
        z = mass[:, :5] / mass[:, 5:]
        mass[:, :5] -= np.stack([step(i, gradient(i, k, z[i])) for i in range(ranks)])
        if exchanges != "one_at_a_time":
            send(k)
            receive(k)
    return mass[:, :5] / mass[:, 5:], mass[:, 5:]


EXCHANGES = [
    ("every_tau_steps", 0), ("every_tau_steps", 1), ("every_tau_steps", 3),
    ("one_at_a_time", 1), ("one_at_a_time", 2), ("every_step", 3),
]  # fmt: skip
NETWORKS = [(Exponential(peers=1), 5), (Exponential(peers=2), 4), (Star(), 4), (IRREGULAR, 4)]


@pytest.mark.parametrize(
    ("weights", "momentum"),
    [
        ("uniform", 0.0),
        ("random", 0.9),
        pytest.param("uniform", 0.9, marks=pytest.mark.lab),
        pytest.param("random", 0.0, marks=pytest.mark.lab),
    ],
)
@pytest.mark.parametrize(
    ("exchanges", "overlap", "topology", "ranks"),
    [
        pytest.param(*how, *network, marks=pytest.mark.lab if (row + column) % 2 else ())
        for row, how in enumerate(EXCHANGES)
        for column, network in enumerate(NETWORKS)
    ],
)
def test_it_follows_the_equations_of_the_paper(
    topology: Topology, ranks: int, weights: Any, overlap: int, exchanges: Any, momentum: float,
    tmp_path: Path,
) -> None:  # fmt: skip
    strategy = PatientPush(topology, overlap=overlap, weights=weights, seed=3, exchanges=exchanges)
    optimizer = f"SGD(lr=0.1, momentum={momentum})"
    result = train_quadratic(strategy, ranks, STEPS, tmp_path, optimizer=optimizer, work="equal")
    shares = uniform_shares if weights == "uniform" else partial(random_shares, seed=3)
    z, w = sgp(topology, ranks, shares, overlap, momentum, exchanges)
    assert distance_between(replicas_of(result), z) < 1e-12
    if topology == IRREGULAR or overlap:
        assert np.abs(w - 1).max() > 0.01


@pytest.mark.parametrize("overlap", [0, 2])
def test_one_worker_equals_single_bit_for_bit(overlap: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"optimizer": "SGD(lr=0.05, momentum=0.9, weight_decay=0.01)"}
    alone = train_threads(Single(), 1, tmp_path / "single", "images()", **options)
    push = StochasticGradientPush(overlap=overlap)
    assert equal(
        train_threads(push, 1, tmp_path / "push", "images()", **options).final, alone.final
    )


SGD = OptimizerSpec(torch.optim.SGD, {"lr": 0.1}, ((frozenset({"weight"}), {}),))


class Values(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2.0, 8, dtype=torch.float64) * (rank + 1))


Masses = list[tuple[Tensor, float, Tensor]]


@dataclass(frozen=True, repr=False)
class Divided(StochasticGradientPush):
    """Each worker divides its mass as `division` says."""

    division: Any = uniform_shares

    def shares(self, targets: tuple[int, ...], rank: int, number: int) -> Mapping[int, float]:
        shares: Mapping[int, float] = self.division(targets, rank, number)
        return shares


def pushed(
    topology: Topology,
    ranks: int,
    steps: int,
    *,
    overlap: int = 0,
    shares: Any = uniform_shares,
    exchanges: Any = "every_tau_steps",
    then: Callable[[PushMember], None] | None = None,
) -> Masses:
    """Push-sum alone, from values that differ: x, w and z of each rank."""

    exchanges = exchanges if overlap else "every_tau_steps"
    strategy = Divided(topology, overlap=overlap, exchanges=exchanges, division=shares)

    def program(runtime: Runtime) -> tuple[Tensor, float, Tensor]:
        worker = Worker(runtime, Values(runtime.rank), SGD)
        push = strategy.member(worker)
        for _ in range(steps):
            push.mix()
        (then or settled)(push)
        return push.x.clone(), push.w, push.z()

    return run_ranks(ranks, program)


def settled(push: PushMember) -> None:
    push.settle(Rest(Reason.CHECKPOINT))


def mean_of(ranks: int) -> Tensor:
    return torch.stack([Values(rank).weight.detach() for rank in range(ranks)]).mean(0)


@pytest.mark.parametrize("overlap", [0, 2])
def test_without_the_weight_the_average_is_wrong(overlap: int) -> None:
    """On an irregular one-way graph, with each rank's own random weights."""
    result = pushed(IRREGULAR, 4, 300, overlap=overlap, shares=partial(random_shares, seed=1))
    mean = mean_of(4)
    assert max(abs(w - 1) for _, w, _ in result) > 0.05
    assert max(float(((x - mean) / mean).abs().min()) for x, _, _ in result) > 0.05
    assert max(float((z - mean).abs().max()) for _, _, z in result) < 1e-12
    assert sum(w for _, w, _ in result) == pytest.approx(4, abs=1e-12)


@settings(max_examples=20)
@given(
    st.integers(1, 5), st.integers(0, 9), st.integers(0, 3), st.integers(0, 99),
    st.sampled_from(["every_tau_steps", "one_at_a_time", "every_step"]),
)  # fmt: skip
def test_mass_is_conserved(ranks: int, steps: int, overlap: int, seed: int, exchanges: str) -> None:
    """Whatever was on its way; drained, and after agreeing too."""
    topology = RandomRegular(2, seed=seed) if seed % 2 else Exponential(peers=1 + seed % 3)
    shares = partial(random_shares, seed=seed)
    mean = mean_of(ranks)
    for then in (settled, saved_and_restored, agreed):
        result = pushed(
            topology, ranks, steps, overlap=overlap, shares=shares, exchanges=exchanges, then=then
        )
        total = torch.stack([x for x, _, _ in result]).sum(0)
        assert float((total - ranks * mean).abs().max()) < 1e-12
        assert sum(w for _, w, _ in result) == pytest.approx(ranks, abs=1e-13)
        if then is agreed:
            assert all(float((z - mean).abs().max()) < 1e-13 for _, _, z in result)


def agreed(push: PushMember) -> None:
    push.drain()
    take_consensus(push.worker, push.kept().learnt, tolerant=False)
    push.open(fresh=True)


def saved_and_restored(push: PushMember) -> None:
    """As across a checkpoint; then two steps more."""
    push.drain()
    saved: Mapping[str, Any] = {
        name: value.clone() if isinstance(value, Tensor) else value
        for name, value in capture(state_of(push)).items()
    }
    push.mass.zero_()
    restore_state(push.worker, push, saved)
    push.mix()
    push.mix()
    push.drain()


def test_mass_on_its_way_is_missing_until_it_is_drained() -> None:
    """What a checkpoint would lose that did not drain."""

    def late(push: PushMember) -> None:
        push.worker.transport = cast(Transport, Patient(push.worker.transport))
        for _ in range(3):
            push.mix()
        before[push.worker.rank] = push.w
        push.drain()

    before: dict[int, float] = {}
    result = pushed(CIRCLE, 3, 0, overlap=2, then=late)
    assert sum(before.values()) < 3 - 0.1
    assert sum(w for _, w, _ in result) == pytest.approx(3, abs=1e-15)


class Eager(Patient):
    """A transport on which a message has always arrived when it is asked for."""

    def handle(self, source: int | None, handle: Any) -> PatientHandle:
        return EagerHandle(self, source, handle)


@dataclass
class EagerHandle(PatientHandle):
    def done(self) -> bool:
        self.handle.wait()
        return True


def test_a_rank_that_has_begun_more_exchanges_than_one_that_drains_does_not_wait_for_it() -> None:
    """Rank 0 begins an exchange in each step, rank 1, which sees messages late, in each third."""

    def program(runtime: Runtime) -> tuple[float, int]:
        kind = Eager if runtime.rank == 0 else Patient
        runtime = replace(runtime, transport=cast(Transport, kind(runtime.transport)))
        worker = Worker(runtime, Values(runtime.rank), SGD)
        push = StochasticGradientPush(overlap=3, exchanges="one_at_a_time").member(worker)
        assert isinstance(push, OneAtATimePush)
        for _ in range(8):
            push.mix()
        push.drain()
        return push.w, push.exchanges

    first, second = run_ranks(2, program)
    assert first[0] + second[0] == pytest.approx(2, abs=1e-15)
    assert first[1] == second[1] > 3


# Overlap: one peer is suspended


@dataclass
class Gate:
    """Rank 0 is not let into step `at` (from 0); what the others have done, and wait for."""

    at: int
    open: threading.Event = field(default_factory=threading.Event)
    done: dict[int, int] = field(default_factory=dict)
    waiting: dict[int, int | None] = field(default_factory=dict)


GATES: dict[int, Gate] = {}


class Watched(Patient):
    def __init__(self, transport: Any, gate: Gate) -> None:
        super().__init__(transport)
        self._gate = gate

    def waits(self, source: int | None) -> None:
        self._gate.waiting[self._transport.rank] = source

    def waited(self) -> None:
        self._gate.waiting.pop(self._transport.rank)


@dataclass(frozen=True, repr=False)
class Gated(StochasticGradientPush):
    """Rank 0 waits before a step until the gate of the test is opened."""

    gate: int = 0

    def member(self, worker: Worker) -> PushMember:
        gate = GATES[self.gate]
        worker.transport = cast(Transport, Watched(worker.transport, gate))
        member = super().member(worker)

        def begin() -> None:
            gate.done[worker.rank] = member.step
            if worker.rank == 0 and member.step == gate.at:
                assert gate.open.wait(60)

        member.begin = begin  # type: ignore[method-assign]
        return member


@pytest.mark.parametrize(
    ("overlap", "exchanges"),
    [(0, "every_tau_steps"), (1, "every_tau_steps"), (4, "every_step")],
)
def test_receivers_of_a_suspended_peer_advance_by_the_overlap_and_resume(
    overlap: int, exchanges: Any, tmp_path: Path
) -> None:
    gate = GATES[overlap] = Gate(at=5)
    strategy = Gated(CIRCLE, overlap=overlap, gate=overlap, exchanges=exchanges)
    results: list[Any] = []
    run = threading.Thread(
        target=lambda: results.append(train_quadratic(strategy, 3, 20, tmp_path, work="equal")),
        daemon=True,
    )
    run.start()
    try:
        # Rank 1 has sent the mass of the step that it is blocked in.
        expected = {1: gate.at + overlap, 2: gate.at + overlap + 1 + overlap}
        wait_until(
            lambda: (
                gate.done.get(0) == gate.at
                and all(
                    gate.done.get(rank) == steps and gate.waiting.get(rank) == rank - 1
                    for rank, steps in expected.items()
                )
            ),
            f"ranks 1 and 2 to be blocked after {expected} steps",
        )
        assert gate.done[0] == gate.at
    finally:
        gate.open.set()
        run.join(60)
    (result,) = results
    assert [len(result.lines(rank)) for rank in range(3)] == [20, 20, 20]
    assert sum(state.w for state in result.states) == pytest.approx(3, abs=1e-12)


# Whole trainings


@dataclass(frozen=True, repr=False)
class Stopped(PatientPush):
    """The user stops the run before step `at`."""

    at: int = 1000

    def member(self, worker: Worker) -> PushMember:
        member = super().member(worker)

        def begin() -> None:
            if member.step + 2 >= self.at:
                ask_to_stop(worker)

        member.begin = begin  # type: ignore[method-assign]
        return member


def stopped_at(step: int, overlap: int = 0) -> Stopped:
    return Stopped(Exponential(peers=1), weights="random", overlap=overlap, at=step)


def test_a_resumed_run_has_all_its_mass(tmp_path: Path) -> None:
    """The drain takes mass in early, so that the run after it differs; its sum does not."""
    options: dict[str, Any] = {"snapshots": 4, "work": "equal"}
    stopped = train_quadratic(stopped_at(5, overlap=3), 4, 40, tmp_path, **options)
    steps = {len(stopped.lines(rank)) for rank in range(4)}
    assert len(steps) == 1
    assert 5 <= steps.pop() < 16
    resumed = train_quadratic(stopped_at(1000, overlap=3), 4, 40, tmp_path, **options)
    assert {len(resumed.lines(rank)) for rank in range(4)} == {40}
    assert resumed.states[0].step == 40
    assert sum(state.w for state in resumed.states) == pytest.approx(4, abs=1e-12)
    (leader,) = (report.leader for report in resumed.reports if report.leader is not None)
    assert [point.samples for point in leader.curve] == [80, 160, 240, 320]


def test_a_resumed_run_without_overlap_ends_as_one_that_was_not_stopped(tmp_path: Path) -> None:
    whole = train_quadratic(stopped_at(1000), 4, 40, tmp_path / "whole")
    train_quadratic(stopped_at(5), 4, 40, tmp_path / "other")
    resumed = train_quadratic(stopped_at(1000), 4, 40, tmp_path / "other")
    assert equal(resumed.final, whole.final)


def test_who_is_free_takes_the_next_batch_and_no_mass_is_lost(tmp_path: Path) -> None:
    """Rank 0 is held until the others have taken all that is left but the batch that it holds."""
    gate = GATES[99] = Gate(at=5)
    strategy = Gated(CIRCLE, overlap=1, gate=99)
    results: list[Any] = []

    def train() -> None:
        results.append(train_quadratic(strategy, 3, 20, tmp_path))

    run = threading.Thread(target=train, daemon=True)
    run.start()
    try:
        # The batch that it computes, and the next one, which it has asked for, are its own.
        left = 60 - (gate.at + 2)
        wait_until(lambda: gate.done.get(1, 0) + gate.done.get(2, 0) >= left - 2, "all to be taken")
        assert gate.done[0] == gate.at
    finally:
        gate.open.set()
        run.join(60)
    (result,) = results
    assert each_batch_once(result, 3, 20)
    assert len(result.lines(0)) == gate.at + 2
    assert sum(state.w for state in result.states) == pytest.approx(3, abs=1e-12)


def test_a_stopped_queue_is_resumed_where_it_was_with_all_mass(tmp_path: Path) -> None:
    stopped = train_quadratic(stopped_at(5, overlap=3), 4, 40, tmp_path)
    assert 5 <= sum(len(stopped.lines(rank)) for rank in range(4)) < 160
    resumed = train_quadratic(stopped_at(1000, overlap=3), 4, 40, tmp_path)
    assert each_batch_once(resumed, 4, 40)
    assert sum(state.w for state in resumed.states) == pytest.approx(4, abs=1e-12)


def test_when_to_send_is_a_question_of_overlap() -> None:
    with pytest.raises(InputError, match=r"'one_at_a_time' needs .* set overlap to 1"):
        StochasticGradientPush(exchanges="one_at_a_time")


def test_a_graph_that_falls_apart_is_refused() -> None:
    with pytest.raises(InputError, match="does not connect 3 ranks"):
        StochasticGradientPush(Given(((1,), (2,), ()))).roles(3)
