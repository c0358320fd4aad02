"""AD-PSGD: the equations of the paper along the order of events, replay, and quiet points."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from tests.support.decentralized import (
    Gradient,
    Matrix,
    distance_between,
    each_batch_once,
    gradients,
    gradients_taken,
    momentum_sgd,
    train_quadratic,
)
from tests.support.lab import in_lab, some
from tests.support.threads import ask_to_stop
from tests.support.training import equal, train_threads
from torch import Tensor

from orchestra.errors import InputError
from orchestra.strategies.pairwise_averaging import (
    PairwiseAverage,
    PairwiseAveraging,
    PairwiseMember,
)
from orchestra.strategies.single import Single
from orchestra.topologies import Exponential, Ring, Star
from orchestra.transports.protocol import Transport
from orchestra.worker.worker import Worker

STEPS = 12
Events = dict[int, list[tuple[str, int]]]


def logging(monkeypatch: pytest.MonkeyPatch) -> Events:
    """What each rank's two flows did to its x, in order."""
    events: Events = defaultdict(list)
    for name in ("_ask", "_answer"):
        original = getattr(PairwiseAverage, name)

        def noted(
            self: PairwiseAverage,
            transport: Transport,
            other: int,
            *,
            name: str = name,
            original: Callable[..., None] = original,
        ) -> None:
            events[transport.rank].append((name, other))
            original(self, transport, other)

        monkeypatch.setattr(PairwiseAverage, name, noted)
    take = PairwiseAverage.take

    def taken(self: PairwiseAverage) -> int:
        held, averages = self._held, take(self)
        if not held:
            events[self._worker.rank].append(("take", averages))
        return averages

    monkeypatch.setattr(PairwiseAverage, "take", taken)
    return events


def ad_psgd(
    events: Events, gradient: Gradient, steps: list[int], momentum: float
) -> tuple[Matrix, list[int]]:
    """Lian et al. 2018, Algorithm 1, along `events`; and the averages between read and write."""
    ranks = len(steps)
    descent = momentum_sgd(0.1, momentum, ranks)
    x, read, step = np.zeros((ranks, 5)), np.zeros((ranks, 5)), [0] * ranks
    todo = {rank: deque(own) for rank, own in events.items()}
    staleness = []
    while any(todo.values()):
        before = sum(map(len, todo.values()))
        for rank, own in todo.items():
            if own and own[0][0] == "take":
                averages = own.popleft()[1]
                if step[rank] < steps[rank]:  # the last one only settles
                    staleness.append(averages)
                    x[rank] -= descent(rank, gradient(rank, step[rank], read[rank]))
                    read[rank] = x[rank]
                    step[rank] += 1
            elif own and own[0][0] == "_ask":
                other = own[0][1]
                if todo[other] and todo[other][0] == ("_answer", rank):
                    x[rank] = x[other] = (x[rank] + x[other]) / 2
                    own.popleft()
                    todo[other].popleft()
        assert sum(map(len, todo.values())) < before, "the events contradict each other"
    return x, staleness


@pytest.mark.parametrize("work", ["shared", "equal"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("ranks", some([2, 3, 5]))
def test_it_follows_the_equations_of_the_paper(
    ranks: int, momentum: float, work: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = logging(monkeypatch)
    options = {"optimizer": f"SGD(lr=0.1, momentum={momentum})", "work": work}
    result = train_quadratic(PairwiseAveraging(), ranks, STEPS, tmp_path, **options)
    taken = gradients_taken if work == "shared" else lambda _, *sizes: gradients(*sizes)
    steps = [len(result.lines(rank)) for rank in range(ranks)]
    replicas, staleness = ad_psgd(events, taken(result, ranks, STEPS), steps, momentum)
    assert sum(staleness) > 0
    assert len(staleness) == ranks * STEPS == sum(steps)
    final = result.final["x"].numpy()
    assert distance_between(final, replicas.mean(0)) < 1e-12
    recorded: list[int] = [
        value for rank in range(ranks) for line in result.lines(rank) for value in line["staleness"]
    ]
    assert sorted(recorded) == sorted(staleness)


def test_one_worker_equals_single_bit_for_bit(tmp_path: Path) -> None:
    options: dict[str, Any] = {"optimizer": "SGD(lr=0.05, momentum=0.9, weight_decay=0.01)"}
    alone = train_threads(Single(), 1, tmp_path / "single", "images()", **options)
    pairwise = train_threads(PairwiseAveraging(), 1, tmp_path / "pair", "images()", **options)
    assert equal(pairwise.final, alone.final)


# Replay: what happened is given by the order in which messages from any source arrived


Log = dict[tuple[int, int], list[int]]


@dataclass
class Recorded:
    """A transport that writes down, or repeats, which source each receive from any took."""

    transport: Any
    log: Log
    repeats: bool = False
    _next: dict[int, int] = field(default_factory=lambda: defaultdict(int))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.transport, name)

    def receive(self, source: int | None, tag: int, into: Tensor | None = None) -> Any:
        own = self.log.setdefault((self.transport.rank, tag), [])
        if source is None and self.repeats:
            source = own[self._next[tag]]
            self._next[tag] += 1
        handle = self.transport.receive(source, tag, into)
        return Noted(handle, own) if source is None else handle

    def spawn(self, function: Callable[[Any], Any]) -> Any:
        return self.transport.spawn(lambda t: function(replace(self, transport=t)))


@dataclass
class Noted:
    handle: Any
    log: list[int]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.handle, name)

    def wait(self) -> Tensor:
        result: Tensor = self.handle.wait()
        self.log.append(self.handle.source)
        return result


LOGS: dict[str, Log] = {}


@dataclass(frozen=True, repr=False)
class Repeatable(PairwiseAveraging):
    log: str = ""
    repeats: bool = False

    def member(self, worker: Worker) -> PairwiseMember:
        transport = Recorded(worker.transport, LOGS[self.log], self.repeats)
        worker.transport = cast(Transport, transport)
        return super().member(worker)


def test_the_order_of_arrivals_gives_the_parameters_bit_for_bit(tmp_path: Path) -> None:
    LOGS["log"] = {}
    recorded = train_quadratic(Repeatable(log="log"), 5, 30, tmp_path / "recorded")
    replayed = train_quadratic(Repeatable(log="log", repeats=True), 5, 30, tmp_path / "replayed")
    assert equal(replayed.final, recorded.final)
    assert [line["staleness"] for line in replayed.lines(1)] == [
        line["staleness"] for line in recorded.lines(1)
    ]
    assert any(len(set(own)) > 2 for own in LOGS["log"].values())


# Quiet points


@dataclass(frozen=True, repr=False)
class Stopped(PairwiseAveraging):
    """The user stops the run before step `at`."""

    at: int = 1_000_000

    def member(self, worker: Worker) -> StoppedMember:
        return StoppedMember(self, worker, worker.local_optimizer())


@dataclass(eq=False)
class StoppedMember(PairwiseMember):
    def begin(self) -> None:
        super().begin()
        assert isinstance(self.strategy, Stopped)
        if self.step + 2 >= self.strategy.at:
            ask_to_stop(self.worker)


MANY_STEPS = 1000
"""So many that nobody is through with them before all have heard of the wish to stop."""


@pytest.mark.parametrize("ranks", [2, *in_lab([1, 5])])
def test_all_leave_after_one_step_and_resume(ranks: int, tmp_path: Path) -> None:
    stopped = train_quadratic(Stopped(at=6), ranks, MANY_STEPS, tmp_path, work="equal")
    assert all(report.stopped for report in stopped.reports)
    steps = {len(stopped.lines(rank)) for rank in range(ranks)}
    assert len(steps) == 1
    assert 6 <= steps.pop() < MANY_STEPS
    resumed = train_quadratic(Stopped(), ranks, MANY_STEPS, tmp_path, work="equal")
    assert {len(resumed.lines(rank)) for rank in range(ranks)} == {MANY_STEPS}


@pytest.mark.parametrize("ranks", [2, *in_lab([5])])
def test_a_stopped_queue_is_resumed_where_it_was(ranks: int, tmp_path: Path) -> None:
    stopped = train_quadratic(Stopped(at=6), ranks, MANY_STEPS, tmp_path)
    assert all(report.stopped for report in stopped.reports)
    taken = sum(len(stopped.lines(rank)) for rank in range(ranks))
    assert 6 <= taken < MANY_STEPS * ranks
    assert each_batch_once(
        train_quadratic(Stopped(), ranks, MANY_STEPS, tmp_path), ranks, MANY_STEPS
    )


def test_checkpoints_are_taken_in_the_run(tmp_path: Path) -> None:
    result = train_quadratic(PairwiseAveraging(), 3, 40, tmp_path, checkpoint_every=5)
    assert (tmp_path / "checkpoints" / "0007" / "manifest.json").exists()
    assert each_batch_once(result, 3, 40)


def test_links_between_even_and_odd_have_to_connect() -> None:
    for ranks in range(1, 9):
        for topology in (Ring(), Exponential(), Exponential(peers=1)):
            PairwiseAveraging(topology).roles(ranks)
    with pytest.raises(InputError, match="even and odd ranks do not connect 4 ranks"):
        PairwiseAveraging(Star()).roles(4)
