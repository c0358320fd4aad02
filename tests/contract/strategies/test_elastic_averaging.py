"""Asynchronous EASGD and EAMSGD on real sockets, with one worker: its centre is known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.members import wrapped
from tests.support.quadratic import Vector, final, mean_samples, start
from tests.support.threads import ask_to_stop
from tests.support.training import train_threads

from orchestra.errors import InputError
from orchestra.strategies.elastic_averaging import ElasticAveraging
from orchestra.worker.worker import Worker

RATE, DECAY = 0.1, 0.05
BATCH = 4
SAMPLES = 82  # the last step has two
OPTIMIZER = f"SGD(lr={RATE}, weight_decay={DECAY})"


def centre_of(every: int, beta: float, momentum: float) -> Vector:
    """Algorithm 2; 1 where the momentum is 0. There is one worker, so alpha is beta."""
    x, centre, v = start(), start(), np.zeros_like(start())
    for clock, ((mean, _),) in enumerate(mean_samples(1, BATCH, SAMPLES)):
        force = np.zeros_like(x)
        if clock % every == 0:
            force = beta * (x - centre)
            centre = centre + force
        y = x + momentum * v
        v = momentum * v - RATE * (y - mean + DECAY * y)
        x = x + v - force
    return centre


@dataclass(frozen=True, repr=False)
class Stopped(ElasticAveraging):
    """The user stops the run in step `at`."""

    at: int = 1000

    def member(self, worker: Worker) -> Any:
        member: Any = super().member(worker)

        def begin(usual: Callable[[], None]) -> None:
            if member.clock + 1 == self.at:
                ask_to_stop(worker)
                worker.step.stop = True
            usual()

        return wrapped(member, "begin", begin)


def train(strategy: ElasticAveraging, folder: Path, **training: Any) -> Any:
    return train_threads(
        strategy, 3, folder, f"tests.support.quadratic:quadratic({SAMPLES})", batch_size=BATCH,
        optimizer=OPTIMIZER, **training,
    )  # fmt: skip


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("every", [1, 3])
def test_it_is_the_algorithm_of_the_paper(every: int, momentum: float, tmp_path: Path) -> None:
    """On two servers; the last point of the curve is the centre at the end."""
    strategy = ElasticAveraging(every, beta=0.4, momentum=momentum, servers=2)
    trained = train(strategy, tmp_path, snapshots=3)
    expected = centre_of(every, 0.4, momentum)
    np.testing.assert_allclose(final(trained.final), expected, rtol=1e-12)
    (leader,) = (report.leader for report in trained.reports if report.leader is not None)
    assert [point.samples for point in leader.curve][-1] == SAMPLES
    assert leader.curve[-1].metrics["loss"] == pytest.approx(leader.final_loss, rel=1e-14)


@pytest.mark.parametrize("at", [4, 6])  # in the middle of a round, and at its end
def test_a_resumed_run_ends_as_one_that_was_not_stopped(at: int, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"beta": 0.4, "momentum": 0.9, "servers": 2}
    train(Stopped(3, at=at, **settings), tmp_path)
    resumed = train(Stopped(3, **settings), tmp_path)
    assert resumed.states[0].clock == 21
    np.testing.assert_allclose(final(resumed.final), centre_of(3, 0.4, 0.9), rtol=1e-12)


def test_too_many_servers_are_refused() -> None:
    with pytest.raises(InputError, match="ElasticAveraging: 2 ranks with 2 dedicated servers"):
        ElasticAveraging(servers=2).roles(2)
