"""What servers make of stale gradients, against the papers' equations in NumPy, in float64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.support.arrivals import RATE, Served
from torch import Tensor, nn

from orchestra.errors import InputError
from orchestra.optimizers.state import capture
from orchestra.parameter_server.how import PolynomialStaleness
from orchestra.parameter_server.messages import Kind
from orchestra.parameter_server.when import (
    Asynchronous,
    FirstArrivals,
    ServerSettings,
    Synchronous,
)
from orchestra.records.report import Membership
from orchestra.strategies.parameter_server import ParameterServer
from orchestra.trainer.checkpoint_files import Manifest, rank_file
from orchestra.trainer.checkpoints import RunAttempt, commit, read_rank, write_rank

Vector = NDArray[np.float64]

WORKERS = 3
SIZE = 200  # elements of one parameter, so that two servers share it, and nothing is padded
ASYNCHRONOUS: dict[str, Any] = {"consistency": "asynchronous"}
CURVATURE = np.linspace(0.1, 0.3, SIZE)
CENTRES = np.random.default_rng(5).normal(size=(WORKERS, SIZE))
ORDERS = st.lists(st.integers(0, WORKERS - 1), min_size=1, max_size=30)
ORDER = [0, 1, 0, 2, 2, 1, 0, 0, 0, 1, 2, 1, 1, 0, 2, 0, 1, 1, 1, 2]


class Point(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.from_numpy(start()))


def start() -> Vector:
    return np.linspace(-2.0, 2.0, SIZE)


def gradient(worker: int, w: Vector, first: int = 0) -> Vector:
    """That of a quadratic; each worker pulls towards a centre of its own."""
    part = slice(first, first + len(w))
    value: Vector = CURVATURE[part] * (w - CENTRES[worker, part])
    return value


def arriving(worker: int, values: Tensor, first: int) -> Tensor:
    return torch.from_numpy(gradient(worker, values.numpy(), first))


def served(**settings: Any) -> Served:
    return Served(ParameterServer(**settings), WORKERS, Point, arriving)


def followed(order: Sequence[int], lambda0: float = 0.0, m: float | None = None) -> Vector:
    """DC-ASGD-c (m None) and DC-ASGD-a as the paper has them, eps and MS as its authors' code."""
    w = start()
    bak = [start() for _ in range(WORKERS)]
    mean_square = [np.zeros(SIZE) for _ in range(WORKERS)]
    for k in order:
        g = gradient(k, bak[k])
        strength: Any = lambda0
        if m is not None:
            mean_square[k] = m * mean_square[k] + (1 - m) * g * g
            strength = lambda0 / np.sqrt(mean_square[k] + 1e-7)
        w = w - RATE * (g + strength * g * g * (w - bak[k]))
        bak[k] = w
    return w


def assert_close(values: Tensor, expected: Vector) -> None:
    np.testing.assert_allclose(values.numpy(), expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, followed(ORDER)),
        ({"delay_compensation": "constant"}, followed(ORDER, 0.04)),
        ({"delay_compensation": "constant", "lambda0": 0.5}, followed(ORDER, 0.5)),
        ({"delay_compensation": "adaptive"}, followed(ORDER, 2.0, 0.95)),
        (
            {"delay_compensation": "adaptive", "lambda0": 1.5, "mean_square": 0.3},
            followed(ORDER, 1.5, 0.3),
        ),
        (
            {"delay_compensation": "adaptive", "lambda0": 0.1, "mean_square": 0.0},
            followed(ORDER, 0.1, 0.0),
        ),
    ],
)
def test_delay_compensation_equals_the_paper(
    settings: dict[str, Any], expected: Vector, servers: int
) -> None:
    assert_close(served(servers=servers, **ASYNCHRONOUS, **settings).serve(ORDER), expected)
    if settings:
        assert np.abs(expected - followed(ORDER)).max() > 1e-3


@given(ORDERS, st.floats(0, 1), st.floats(0, 0.99))
@settings(max_examples=25)
def test_delay_compensation_in_any_order_of_arrivals(
    order: list[int], lambda0: float, m: float
) -> None:
    options: dict[str, Any] = {"delay_compensation": "adaptive", "lambda0": lambda0}
    result = served(**ASYNCHRONOUS, **options, mean_square=m).serve(order)
    assert_close(result, followed(order, lambda0, m))


@pytest.mark.parametrize("kind", ["constant", "adaptive"])
@pytest.mark.parametrize("optimizer", ["SGD(lr=0.1)", "SGD(lr=0.1, momentum=0.9)", "Adam(lr=0.1)"])
def test_with_lambda_0_it_is_plain_asynchronous_sgd_bit_for_bit(kind: Any, optimizer: str) -> None:
    plain, without = (
        Served(ParameterServer(**ASYNCHRONOUS, **settings), WORKERS, Point, overflowing, optimizer)
        for settings in ({}, {"delay_compensation": kind, "lambda0": 0.0})
    )
    assert torch.equal(plain.serve(ORDER), without.serve(ORDER))


def overflowing(worker: int, values: Tensor, first: int) -> Tensor:
    """A gradient whose square is no number any more, where it is the last element's."""
    gradient = arriving(worker, values, first)
    gradient[-1] = 1e200
    return gradient


def test_the_optimizer_is_given_the_compensated_gradient() -> None:
    strategy = ParameterServer(**ASYNCHRONOUS, delay_compensation="constant", lambda0=0.3)
    result = Served(strategy, WORKERS, Point, arriving, "SGD(lr=0.1, momentum=0.9)").serve(ORDER)
    w, velocity = start(), np.zeros(SIZE)
    bak = [start() for _ in range(WORKERS)]
    for k in ORDER:
        g = gradient(k, bak[k])
        velocity = 0.9 * velocity + g + 0.3 * g * g * (w - bak[k])
        w = w - RATE * velocity
        bak[k] = w
    assert_close(result, w)


@pytest.mark.parametrize(
    ("bound", "order"), [(1, [0, 0, 2, 1, 0, 2, 2, 1, 1]), (2, [0, 0, 0, 1, 2, 0, 1, 1, 1, 2, 2])]
)
def test_under_a_bound_the_backup_is_what_the_late_answer_holds(
    bound: int, order: list[int]
) -> None:
    """A held answer leaves with the values of later; the next gradient is computed there."""
    strategy = ParameterServer(
        consistency="bounded", staleness=bound, delay_compensation="constant", lambda0=0.5
    )
    result = Served(strategy, WORKERS, Point, arriving).serve(order)
    w, clocks = start(), [0] * WORKERS
    bak, waiting = [start() for _ in range(WORKERS)], set()
    for k in order:
        assert k not in waiting, "nobody pushes before it was answered"
        g = gradient(k, bak[k])
        w = w - RATE * (g + 0.5 * g * g * (w - bak[k]))
        clocks[k] += 1
        waiting.add(k)
        for other in sorted(waiting):
            if clocks[other] - min(clocks) <= bound:
                waiting.remove(other)
                bak[other] = w
    assert_close(result, w)


@given(ORDERS)
@settings(max_examples=25)
def test_learning_rate_by_staleness(order: list[int]) -> None:
    """alpha / tau, and alpha where tau is 0 (Zhang et al.)."""
    w, read = start(), [(start(), 0)] * WORKERS
    for time, k in enumerate(order):
        at, since = read[k]
        tau = time - since
        w = w - (RATE / tau if tau else RATE) * gradient(k, at)
        read[k] = (w, time + 1)
    assert_close(served(**ASYNCHRONOUS, learning_rate="by_staleness").serve(order), w)


def test_learning_rate_divided_by_the_workers() -> None:
    w, bak = start(), [start() for _ in range(WORKERS)]
    for k in ORDER:
        w = w - RATE / WORKERS * gradient(k, bak[k])
        bak[k] = w
    assert_close(served(**ASYNCHRONOUS, learning_rate="divided").serve(ORDER), w)


def test_a_bound_out_of_reach_is_asynchronous_bit_for_bit() -> None:
    settings: dict[str, Any] = {"delay_compensation": "adaptive", "learning_rate": "by_staleness"}
    one = served(**ASYNCHRONOUS, **settings)
    other = served(consistency="bounded", staleness=10**6, **settings)
    assert torch.equal(one.serve(ORDER), other.serve(ORDER))
    assert one.transports[0].answers == other.transports[0].answers


@pytest.mark.parametrize("servers", [1, 2])
def test_backups_and_mean_squares_survive_a_checkpoint(servers: int, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"servers": servers, "delay_compensation": "adaptive"}
    whole = served(**ASYNCHRONOUS, **settings, learning_rate="by_staleness")
    expected = whole.serve(ORDER)

    first = served(**ASYNCHRONOUS, **settings, learning_rate="by_staleness")
    first.serve(ORDER[:9], Kind.PAUSE)
    attempt, history = RunAttempt.begin(tmp_path), (Membership(servers, WORKERS, 0),)
    files = {
        rank_file(rank): write_rank(attempt, 1, rank, capture(server))
        for rank, server in enumerate(first.servers)
    }
    commit(attempt, 1, Manifest(0, history=history, files=files))
    second = served(**ASYNCHRONOUS, **settings, learning_rate="by_staleness")
    second.resume([read_rank(tmp_path, 1, rank) for rank in range(servers)], first)
    assert torch.equal(second.serve(ORDER[9:]), expected)


def test_who_is_given_the_values_at_a_quiet_point_computes_there() -> None:
    """As at the end of an epoch of a user's own loop."""
    strategy = ParameterServer(**ASYNCHRONOUS, delay_compensation="constant", lambda0=0.5)
    servers = Served(strategy, WORKERS, Point, arriving)
    servers.serve(ORDER[:9], Kind.PAUSE)
    member = servers.members[0]
    member.connection.take_model()
    (transport,), (server,) = servers.transports, servers.servers
    transport.given = {worker: server.own.values.clone() for worker in range(WORKERS)}
    w = server.own.values.numpy().copy()
    bak = [w] * WORKERS
    for k in ORDER[9:]:
        g = gradient(k, bak[k])
        w = w - RATE * (g + 0.5 * g * g * (w - bak[k]))
        bak[k] = w
    assert_close(servers.serve(ORDER[9:]), w)
    assert [answer.staleness for answer in transport.answers[9:12]] == [0, 1, 1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"staleness": 2}, "staleness=2 needs consistency='bounded', not 'synchronous'"),
        ({"consistency": "asynchronous", "staleness": 0}, "needs consistency='bounded'"),
        ({"consistency": "bounded"}, "needs its bound: give both, as in ParameterServer("),
        ({"learning_rate": "divided"}, "learning_rate='divided' needs consistency='asynchronous'"),
        (
            {"consistency": "bounded", "staleness": 0, "delay_compensation": "adaptive"},
            "'bounded' with a staleness above 0",
        ),
        ({"consistency": "bounded", "staleness": 1, "returns": "gradients"}, "has no average"),
        ({"consistency": "asynchronous", "lambda0": 1.0}, "lambda0 needs delay_compensation"),
        (
            {
                "consistency": "asynchronous",
                "delay_compensation": "constant",
                "mean_square": 0.5,
            },
            "mean_square needs delay_compensation='adaptive'",
        ),
        ({"consistency": "asynchronous", "backup": 1}, "no gradient comes too late"),
        ({"backup": 1, "servers": 2}, "backup needs servers=1"),
        ({"backup": 1, "returns": "gradients"}, "backup needs servers=1"),
        ({"consistency": "bounded", "staleness": -1}, "-1 is below 0"),
    ],
)
def test_settings_that_make_no_sense_together(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        ParameterServer(**settings)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@dataclass(frozen=True, repr=False)
class OnOneServer(Asynchronous):
    """A rule that sees all of a push, so that it goes with one server alone."""

    def contradictions(self, given: ServerSettings, *, own_loop: bool = False) -> Iterator[str]:
        if given.servers > 1:
            yield "OnOneServer needs servers=1"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"consistency": OnOneServer(), "servers": 2}, "ParameterServer: OnOneServer needs"),
        ({"consistency": FirstArrivals(2), "servers": 2}, "backup needs servers=1"),
        (
            {"consistency": Synchronous(), "learning_rate": PolynomialStaleness(0.5)},
            "learning_rate=PolynomialStaleness(0.5) needs consistency='asynchronous'",
        ),
    ],
)
def test_a_rule_refuses_what_does_not_go_with_it(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        ParameterServer(**settings)
    assert message in str(caught.value)
    ParameterServer(consistency=OnOneServer())


def test_backup_workers_leave_one_to_wait_for() -> None:
    with pytest.raises(InputError, match="3 backup workers of 3 leave none to wait for"):
        ParameterServer(backup=3).roles(4)
    assert ParameterServer(backup=2).roles(4).workers == (0, 1, 2)
