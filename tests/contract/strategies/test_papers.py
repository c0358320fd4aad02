"""Every strategy's update rule against its paper's, as transcribed in `tests/support/papers.py`."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support import papers
from tests.support.arrivals import RATE, Served
from tests.support.lab import by_turns, some
from tests.support.members import wrapped
from tests.support.patient_push import PatientPush
from tests.support.tanh_net import INPUTS, Run, Vector, gradient_of, start
from torch import Tensor, nn

from orchestra.optimizers.settings import Optimizer, ParameterGroup, StepDecay
from orchestra.parameter_server.how import PolynomialStaleness
from orchestra.parameter_server.when import Buffered
from orchestra.strategies.elastic_averaging import ElasticAveraging
from orchestra.strategies.local_sgd import LocalSGD
from orchestra.strategies.outer import Elastic, Nesterov, SlowMo
from orchestra.strategies.parameter_server import ParameterServer
from orchestra.strategies.stochastic_gradient_push import StochasticGradientPush
from orchestra.strategies.switch_rules import LossStable
from orchestra.topologies import Exponential, Star, Topology
from orchestra.worker.worker import Step, Worker

BATCH = 4
RANKS = 4
STEPS = 24


def assert_equal(values: Vector, paper: Vector) -> None:
    np.testing.assert_allclose(values, paper, rtol=1e-12, atol=1e-12)


def trained(
    strategy: Any,
    folder: Path,
    *,
    ranks: int = RANKS,
    momentum: float = 0.0,
    **training: Any,
) -> Run:
    training = {"optimizer": f"SGD(lr={RATE}, momentum={momentum})", **training}
    return Run(strategy, ranks, STEPS * ranks * BATCH, folder, batch_size=BATCH, **training)


def test_the_gradient_by_hand_is_the_loss_s() -> None:
    random = np.random.default_rng(0)
    inputs, targets, x = random.normal(size=(5, 2)), random.normal(size=5), start()

    def loss(x: Vector) -> float:
        hidden = np.tanh(inputs @ x[:8].reshape(4, 2).T + x[8:12])
        return float(0.5 * np.mean((hidden @ x[12:] - targets) ** 2))

    steps = 1e-6 * np.eye(len(x))
    differences = [(loss(x + d) - loss(x - d)) / 2e-6 for d in steps]
    np.testing.assert_allclose(gradient_of(inputs, targets, x), differences, atol=1e-9)


@pytest.mark.parametrize("last", some([11, 2]))
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("period", [1, 5, None])
def test_local_sgd_weighs_by_samples(
    period: int | None, momentum: float, last: int, tmp_path: Path
) -> None:
    """Shares of 3 to 1; the last round is short, and so is its last batch: two workers of four have
    none of its 2 samples."""
    samples = 22 * RANKS * BATCH + last
    run = Run(
        LocalSGD(period), RANKS, samples, tmp_path, batch_size=BATCH, shares=(3.0, 1.0, 3.0, 1.0),
        optimizer=f"SGD(lr={RATE}, momentum={momentum})",
    )  # fmt: skip
    assert run.samples[0] == [6, 2, 6, 2]
    assert sum(run.samples[-1]) == last
    x = papers.local_sgd(run.gradient, run.samples, start(), RATE, period, momentum)
    assert_equal(run.final, x)


GRAPHS = [(Exponential(peers=1), papers.one_peer_exponential(5)), (Star(), papers.star(5))]


@pytest.mark.parametrize(("topology", "p"), GRAPHS, ids=["exponential", "star"])
def test_stochastic_gradient_push(
    topology: Topology, p: papers.MixingMatrices, tmp_path: Path
) -> None:
    run = trained(StochasticGradientPush(topology), tmp_path, ranks=5)
    x, w = papers.sgp(run.gradient, STEPS, start(), RATE, p)
    assert_equal(run.replicas, x / w[:, None])
    assert_equal(run.final, x.sum(0) / w.sum())


@pytest.mark.parametrize(
    ("exchanges", "tau"), by_turns(["every_tau_steps", "every_step", "one_at_a_time"], [1, 2, 3])
)
@pytest.mark.parametrize(("topology", "p"), some(GRAPHS), ids=["exponential", "star"])
def test_overlapped_push_whose_messages_are_as_late_as_can_be(
    topology: Topology, p: papers.MixingMatrices, exchanges: Any, tau: int, tmp_path: Path
) -> None:
    strategy = PatientPush(topology, overlap=tau, exchanges=exchanges)
    run = trained(strategy, tmp_path, ranks=5)
    if exchanges == "one_at_a_time":
        x, w = papers.overlap_sgp_one_exchange(run.gradient, STEPS, start(), RATE, p, tau)
    else:
        every = tau if exchanges == "every_tau_steps" else 1
        x, w = papers.overlap_sgp(run.gradient, STEPS, start(), RATE, p, tau, every)
    assert_equal(run.final, x.sum(0) / w.sum())


@pytest.mark.parametrize("alpha", [1.0, 0.7])
@pytest.mark.parametrize("tau", [1, 4])
def test_slowmo(tau: int, alpha: float, tmp_path: Path) -> None:
    run = trained(LocalSGD(tau, outer=SlowMo(0.6, rate=alpha)), tmp_path, momentum=0.9)
    x = papers.slowmo(run.gradient, RANKS, STEPS, start(), lambda t: RATE, 0.9, tau, alpha, 0.6)
    assert_equal(run.final, x)


@pytest.mark.parametrize("rates", [(0.3 * RATE, RATE), (0.0, RATE), (RATE, 0.0)])
def test_slowmo_has_the_rate_of_each_parameters_group(
    rates: tuple[float, float], tmp_path: Path
) -> None:
    """Parameters whose rate is 0 stay where they are."""
    groups = (ParameterGroup("bias", arguments={"lr": rates[1]}),)
    optimizer = Optimizer("SGD", {"lr": rates[0], "momentum": 0.9}, groups)
    strategy = LocalSGD(4, outer=SlowMo(0.6, rate=0.7))
    run = trained(strategy, tmp_path, optimizer=optimizer)
    gamma = np.full(len(start()), rates[0])
    gamma[8:12] = rates[1]
    moves = gamma > 0

    def gradient(rank: int, step: int, x: Vector) -> Vector:
        return run.gradient(rank, step, x) * moves

    safe = np.where(moves, gamma, 1.0)
    x = papers.slowmo(gradient, RANKS, STEPS, start(), lambda t: safe, 0.9, 4, 0.7, 0.6)
    assert_equal(run.final, x)


@pytest.mark.parametrize("buffers", ["maintain", "reset", "average"])
@pytest.mark.parametrize(("base", "tau"), some([(2, 6), (3, 12), (6, 6)], every=3))
def test_slowmo_with_two_periods_and_its_three_treatments_of_buffers(
    base: int, tau: int, buffers: Any, tmp_path: Path
) -> None:
    """The learning rate falls between two outer iterations."""
    strategy = LocalSGD(base, outer=SlowMo(0.6, rate=0.8, every=tau, buffers=buffers))
    schedule = StepDecay((0.5,), 0.3)
    run = trained(strategy, tmp_path, momentum=0.9, schedule=schedule)
    x = papers.slowmo(
        run.gradient, RANKS, STEPS, start(), lambda t: RATE if t * tau < STEPS / 2 else 0.3 * RATE,
        0.9, tau, 0.8, 0.6, buffers, base,
    )  # fmt: skip
    assert_equal(run.final, x)


@pytest.mark.parametrize("tau", [1, 4, 5])
def test_synchronous_easgd(tau: int, tmp_path: Path) -> None:
    beta = 0.6
    run = trained(LocalSGD(tau, outer=Elastic(beta)), tmp_path)
    x, center = papers.easgd(run.gradient, RANKS, STEPS, start(), RATE, beta / RANKS, tau)
    assert_equal(run.final, center)
    assert_equal(run.replicas, x)


@pytest.mark.parametrize("nesterov", [False, True])
def test_block_momentum_is_slowmo_and_with_nesterov_that_of_diloco(
    nesterov: bool, tmp_path: Path
) -> None:
    eta, zeta, block = 0.7, 0.9, 4
    outer = Nesterov(zeta, eta) if nesterov else SlowMo(eta, rate=zeta)
    run = trained(LocalSGD(block, outer=outer), tmp_path)
    blocks = STEPS // block
    w = papers.bmuf(run.gradient, RANKS, blocks, block, start(), RATE, eta, zeta, nesterov)
    assert_equal(run.final, w)


# Servers: the order of the pushes is given


WORKERS = 3
ORDER = [0, 1, 0, 2, 2, 1, 0, 0, 0, 1, 2, 1, 1, 0, 2, 0, 1, 1, 1, 2, 0, 0]
BOUNDED = [0, 0, 0, 1, 2, 0, 1, 1, 1, 2, 2, 0, 1, 2, 0, 0, 2, 2, 1, 2, 0, 1]
SAMPLES = np.random.default_rng(4).normal(size=(WORKERS, len(ORDER), BATCH, INPUTS + 1))


class Whole(nn.Module):
    """The parameters of the network as one vector."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.from_numpy(start()))


def fixed_gradient(worker: int, step: int, x: Vector) -> Vector:
    """Of a batch that belongs to the worker's step."""
    batch = SAMPLES[worker, step]
    return gradient_of(batch[:, :INPUTS], batch[:, INPUTS], x)


def served(order: list[int], **settings: Any) -> Vector:
    """What a server has when the pushes have arrived in `order`."""
    clock: Counter[int] = Counter()

    def gradient(worker: int, values: Tensor, first: int) -> Tensor:
        clock[worker] += 1
        return torch.from_numpy(fixed_gradient(worker, clock[worker] - 1, values.numpy()))

    values = Served(ParameterServer(**settings), WORKERS, Whole, gradient).serve(order)
    return values.numpy()


@pytest.mark.parametrize("bound", [2, np.inf])
def test_stale_synchronous_parallel(bound: float) -> None:
    order = ORDER if bound == np.inf else BOUNDED
    settings: dict[str, Any] = {"consistency": "asynchronous"}
    if bound < np.inf:
        settings = {"consistency": "bounded", "staleness": int(bound)}
    w = papers.stale_synchronous_parallel(fixed_gradient, WORKERS, order, start(), RATE, bound)
    assert_equal(served(order, **settings), w)


@pytest.mark.parametrize(("kind", "m"), [("constant", None), ("adaptive", 0.95), ("adaptive", 0.0)])
def test_delay_compensation(kind: str, m: float | None) -> None:
    settings: dict[str, Any] = {"delay_compensation": kind, "lambda0": 0.4}
    if m is not None:
        settings["mean_square"] = m
    w = papers.dc_asgd(fixed_gradient, WORKERS, ORDER, start(), RATE, 0.4, m)
    assert_equal(served(ORDER, consistency="asynchronous", **settings), w)


@pytest.mark.parametrize(("size", "exponent"), [(1, 0.0), (3, 0.0), (3, 0.5), (4, 1.0)])
def test_buffered_asynchronous_aggregation(size: int, exponent: float) -> None:
    rate = PolynomialStaleness(exponent)
    w = papers.fedbuff(fixed_gradient, WORKERS, ORDER, start(), RATE, size, exponent)
    assert_equal(served(ORDER, consistency=Buffered(size), learning_rate=rate), w)


class Turns:
    """Lets workers in one after the other, in a given order."""

    def __init__(self, order: Sequence[int]) -> None:
        self._left = list(reversed(order))
        self._changed = threading.Condition()

    @contextmanager
    def of(self, worker: int) -> Iterator[None]:
        """When it is the worker's turn, and until that is over."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._left[-1:] == [worker], timeout=60)
            yield
            self._left.pop()
            self._changed.notify_all()


TURNS: dict[int, Turns] = {}


@dataclass(frozen=True, repr=False)
class InTurns(ElasticAveraging):
    """Workers begin their steps in the order of the test, and end each exchange in their turn."""

    def member(self, worker: Worker) -> Any:
        def begin(usual: Callable[[], None]) -> None:
            with TURNS[self.every].of(worker.rank):
                usual()

        return wrapped(super().member(worker), "begin", begin)


@pytest.mark.parametrize("servers", some([1, 2]))
@pytest.mark.parametrize("delta", [0.0, 0.9])
@pytest.mark.parametrize("tau", [1, 3])
def test_asynchronous_elastic_averaging(
    tau: int, delta: float, servers: int, tmp_path: Path
) -> None:
    """EASGD, and EAMSGD with the momentum delta."""
    order = np.random.default_rng(3).permutation(np.repeat(range(WORKERS), STEPS)).tolist()
    TURNS[tau] = Turns(order)
    beta = 0.6
    strategy = InTurns(tau, beta=beta, momentum=delta, servers=servers)
    run = Run(
        strategy, WORKERS + servers, WORKERS * STEPS * BATCH, tmp_path, batch_size=BATCH,
        optimizer=f"SGD(lr={RATE})",
    )  # fmt: skip
    assert [len(batches) for batches in run.batches[:WORKERS]] == [STEPS] * WORKERS
    x, center = papers.easgd_asynchronous(
        run.gradient, WORKERS, order, start(), RATE, beta / WORKERS, tau, delta
    )
    assert_equal(run.final, center)
    assert_equal(run.replicas[:WORKERS], x)


@pytest.mark.parametrize(("window", "threshold"), [(6, 0.01), (3, 0.02)])
def test_loss_stable(window: int, threshold: float) -> None:
    noise = np.random.default_rng(1).uniform(-0.01, 0.01, size=80)
    losses = [(0.3 + 3 * np.exp(-t / 8)) * (1 + change) for t, change in enumerate(noise)]
    rule = LossStable(window, threshold)
    state = rule.begin()
    fired = [rule.observe(state, Step(loss=float(loss))) for loss in losses]
    assert fired.index(True) + 1 == papers.loss_stable(losses, window, threshold)
    assert fired.index(True) > 20
