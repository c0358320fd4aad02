"""Hop: its equations along the order of events, its bound, and workers that are slow."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.support import papers
from tests.support.decentralized import (
    SIZE,
    Place,
    distance_between,
    each_batch_once,
    gradients,
    gradients_taken,
    replicas_of,
    train_quadratic,
)
from tests.support.lab import some
from tests.support.mixing import Given, matrix_of
from tests.support.simulated import simulated
from tests.support.threads import FreeCompute, Notes, ask_to_stop
from tests.support.training import equal, settings
from torch import Tensor

from orchestra.errors import InputError
from orchestra.optimizers.settings import Optimizer
from orchestra.optimizers.spec import OptimizerSpec
from orchestra.settings import parse
from orchestra.strategies.base import Strategy
from orchestra.strategies.gossip import Gossip
from orchestra.strategies.hop import CLOSED, Hop, HopMember, IterationQueues
from orchestra.strategies.registry import STRATEGIES
from orchestra.topologies import Complete, Exponential, Ring, Star, Topology
from orchestra.transports.tags import Tag
from orchestra.worker.runtime import Runtime
from orchestra.worker.worker import Worker

STEPS = 20
RATE = 0.1
Events = dict[int, list[tuple[str, int, dict[int, int]]]]


class Log:
    """What each rank did in order, and the largest gap between neighbours when one entered."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: Events = defaultdict(list)
        self.entered: dict[int, int] = defaultdict(int)
        self.gap = 0
        self.changed = threading.Condition()
        tell, average = IterationQueues._tell, IterationQueues._average

        def telling(queues: IterationQueues, iteration: int) -> None:
            with self.changed:
                self._enter(queues, iteration)
            tell(queues, iteration)

        def averaging(queues: IterationQueues, iteration: int) -> None:
            word = "reduce" if queues._entered else "jump"
            own = self.events[queues._worker.rank]
            own.append((word, iteration, queues._usable(iteration)))
            average(queues, iteration)

        monkeypatch.setattr(IterationQueues, "_tell", telling)
        monkeypatch.setattr(IterationQueues, "_average", averaging)

    def _enter(self, queues: IterationQueues, iteration: int) -> None:
        rank = queues._worker.rank
        self.entered[rank] = iteration
        if iteration < CLOSED:
            self.events[rank].append(("enter", iteration, {}))
            gaps = [iteration - self.entered[target] for target in queues._targets]
            self.gap = max(self.gap, *gaps)
        self.changed.notify_all()

    def jumps(self) -> int:
        return sum(word == "jump" for own in self.events.values() for word, _, _ in own)


@pytest.mark.parametrize(
    ("topology", "ranks"),
    some([(Ring(), 5), (Ring(), 1), (Star(), 4), (Complete(), 3), (Exponential(), 5)]),
)
def test_without_settings_it_is_d_psgd(topology: Topology, ranks: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"optimizer": "SGD(lr=0.1, momentum=0.9)"}
    hop = train_quadratic(Hop(topology), ranks, STEPS, tmp_path / "hop", **options)
    gossip = train_quadratic(Gossip(topology), ranks, STEPS, tmp_path / "gossip", **options)
    assert all(map(equal, hop.replicas, gossip.replicas))
    assert equal(hop.final, gossip.final)


@dataclass(frozen=True, repr=False)
class Late(Hop):
    """Rank 0 waits before every third iteration until another one is in the next."""

    log: Any = None

    def member(self, worker: Worker) -> LateMember:
        return LateMember(self, worker, worker.local_optimizer())


@dataclass(eq=False)
class LateMember(HopMember):
    def begin(self) -> None:
        assert isinstance(self.strategy, Late)
        own, log = self.queues.iteration, self.strategy.log
        if self.worker.rank == 0 and own % 3 == 1:
            with log.changed:
                assert log.changed.wait_for(lambda: max(log.entered.values()) > own, timeout=60)
        super().begin()


@pytest.mark.parametrize(
    "settings_",
    [
        {"backup": 1},
        {"staleness": 2},
        {"backup": 1, "staleness": 1, "max_gap": 2},
        {"staleness": 4, "skip": 3},
        {"topology": Complete(), "backup": 2, "skip": 3, "behind": 1},
    ],
)
def test_it_follows_the_equations_along_the_order_of_events(
    settings_: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Log(monkeypatch)
    hop = Late(log=log, **settings_)
    result = train_quadratic(hop, 5, STEPS, tmp_path)
    taken = gradients_taken(result, 5, STEPS) if hop.skip else gradients(5, STEPS)
    events = [log.events[rank] for rank in range(5)]
    w = matrix_of(hop.topology.graph(5, 0))
    x = np.stack(papers.hop(taken, events, w, hop.staleness, np.zeros(SIZE), RATE))
    assert distance_between(replicas_of(result), x) < 1e-12
    assert distance_between(result.final["x"].numpy(), x.mean(0)) < 1e-12
    assert each_batch_once(result, 5, STEPS) if hop.skip else len(result.lines(0)) == STEPS
    assert 2 <= log.gap <= hop.max_gap
    sources = len(hop.topology.graph(5, 0)[0])
    reduced = [(k, u) for own in events for word, k, u in own if word == "reduce"]
    ages = [k - of for k, updates in reduced for of in updates.values()]
    assert max(ages) <= hop.staleness
    if not hop.staleness:
        assert min(ages) == 0
    if not hop.skip:  # otherwise some are skipped, and at the end some have closed
        assert min(len(updates) for _, updates in reduced) >= sources - hop.backup


# A fixed order of arrivals


@dataclass
class Scripted:
    """The transport of rank 0: what it is told comes from `coming`, in this order.

    Each is (rank, iteration, its parameters, whether it is here before it is waited for).
    """

    size: int
    coming: deque[tuple[int, int, float, bool]]
    rank: int = 0

    def __post_init__(self) -> None:
        self.sent: list[tuple[int, int, Tensor]] = []
        self.update = 0.0
        self.source = -1

    def receive(self, source: int | None, tag: int, into: Tensor | None = None) -> Any:
        if source is None:
            return self
        assert (source, tag) == (self.source, Tag.UPDATE)
        assert into is not None
        into.fill_(self.update)
        return Here(into)

    def send(self, tensor: Tensor, to: int, tag: int, **options: Any) -> Any:
        self.sent.append((to, tag, tensor))
        return Here(tensor)

    def now(self) -> float:
        return 0.0

    # the handle of what comes next

    def done(self) -> bool:
        return bool(self.coming) and self.coming[0][3]

    def wait(self) -> Tensor:
        assert self.coming, "it waits for what never comes"
        self.source, iteration, self.update, _ = self.coming.popleft()
        return torch.tensor([iteration])


@dataclass
class Here:
    tensor: Tensor

    def wait(self) -> Tensor:
        return self.tensor

    def done(self) -> bool:
        return True


NOW, LATER = True, False


def queues_of(
    coming: Sequence[tuple[int, int, float, bool]], topology: Topology, ranks: int, **bounds: int
) -> tuple[IterationQueues, Tensor, Scripted]:
    """The queues of rank 0 and its parameters, which are zero."""
    transport: Any = Scripted(ranks, deque(coming))
    spec = OptimizerSpec.from_settings(Optimizer.parse("SGD(lr=0.1)", where="test"), ["x"])
    runtime = Runtime(0, ranks, transport, FreeCompute(), Notes(), lambda _: None)
    worker = Worker(runtime, Place(), spec)
    given = {"max_gap": 9, "backup": 0, "staleness": 0, "skip": 0, "behind": 1, **bounds}
    hop: Any = SimpleNamespace(topology=topology, **given)  # Hop refuses a skip without effect
    return IterationQueues(worker, hop), worker.parameters, transport


def test_stale_updates_are_weighted_by_their_age() -> None:
    """s = 2, on a ring of 3: W is 1/3 everywhere."""
    coming = [(1, 0, 1.0, LATER), (2, 0, 2.0, LATER)]
    queues, x, transport = queues_of(coming, Ring(), 3, staleness=2)
    queues.mix()  # waits for both, which are as new as its own
    assert x[0].item() == pytest.approx((3 * 0 + 3 * 1 + 3 * 2) / 9)
    x.zero_()
    transport.coming.extend([(1, 1, 10.0, NOW), (1, 2, 20.0, NOW)])
    queues.mix()  # iteration 1: the newest, of iterations 2 and 0
    assert x[0].item() == pytest.approx((3 * 0 + 4 * 20 + 2 * 2) / 9)
    x.zero_()
    queues.mix()  # iteration 2: the same are just new enough
    assert x[0].item() == pytest.approx((3 * 0 + 3 * 20 + 1 * 2) / 7)
    x.zero_()
    transport.coming.extend([(1, 3, 30.0, LATER), (2, 1, 40.0, LATER)])
    queues.mix()  # iteration 3: that of 0 is too old, and the next one is waited for
    assert x[0].item() == pytest.approx((3 * 0 + 3 * 30 + 1 * 40) / 7)


def test_with_a_backup_one_is_not_waited_for_and_dropped_when_late() -> None:
    coming = [(1, 0, 1.0, LATER), (2, 0, 2.0, LATER), (3, 0, 9.0, LATER), (2, 1, 4.0, NOW),
              (1, 1, 5.0, NOW), (1, 2, 6.0, NOW), (3, 1, 7.0, NOW)]  # fmt: skip
    queues, x, _ = queues_of(coming, Complete(), 4, backup=1)
    queues.mix()
    assert x[0].item() == pytest.approx((0 + 1 + 2) / 3)
    x.zero_()
    queues.mix()  # the one that came late is not mixed, what else is here is
    assert x[0].item() == pytest.approx((0 + 4 + 5 + 7) / 4)
    kept = {source: list(updates) for source, updates in queues._updates.items()}
    assert kept == {1: [2], 2: [], 3: []}


def test_nobody_waits_for_what_was_skipped_or_for_who_has_closed() -> None:
    coming = [(rank, 0, 1.0, LATER) for rank in (1, 2, 3)]
    queues, x, transport = queues_of(coming, Complete(), 4, backup=1)
    queues.mix()
    transport.coming.extend([(1, 2, 5.0, NOW), (2, 2, 7.0, NOW), (3, 1, 3.0, LATER)])
    x.zero_()
    queues.mix()  # iteration 1, which two have skipped: two are too few, and all that come
    assert x[0].item() == pytest.approx((0 + 3) / 2)
    x.zero_()
    queues.mix()
    assert x[0].item() == pytest.approx((0 + 5 + 7) / 3)
    transport.coming.extend([(1, CLOSED, 0.0, NOW), (2, CLOSED, 0.0, NOW), (3, CLOSED, 0.0, NOW)])
    x.fill_(6.0)
    for _ in range(20):  # with as many tokens as it likes
        queues.mix()
    assert x[0].item() == 6.0


def test_tokens_stop_who_is_ahead_and_who_is_behind_jumps() -> None:
    coming = [(1, 0, 1.0, LATER), (2, 0, 1.0, LATER)]
    bounds = {"max_gap": 2, "staleness": 8, "skip": 9, "behind": 2}
    queues, x, transport = queues_of(coming, Ring(), 3, **bounds)
    for _ in range(3):
        queues.mix()
    transport.coming.extend([(1, 1, 1.0, LATER), (2, 5, 1.0, LATER)])
    queues.mix()  # iteration 3, with a token that 1 gives as it enters 1, and 2 later than that
    assert not transport.coming
    transport.coming.extend([(1, 4, 1.0, NOW)])
    queues.enter()  # 2 is in iteration 5, two ahead: that is not behind
    assert queues.iteration == 4
    queues.mix()
    x.fill_(1.0)
    transport.coming.extend([(1, 6, 3.0, NOW), (2, 9, 8.0, NOW)])
    queues.enter()  # five behind: no further than 9, and than 6 + 2, after the average of 7
    assert queues.iteration == 8
    assert x[0].item() == pytest.approx((9 * 1 + 8 * 3 + 11 * 8) / 28)
    words = [int(word) for to, tag, word in transport.sent if (to, tag) == (1, Tag.ITERATION)]
    assert words == [0, 1, 2, 3, 4, 8]


def test_what_is_sent_stays_as_it_was() -> None:
    queues, x, transport = queues_of([(1, 0, 4.0, LATER)], Ring(), 2)
    queues.mix()
    assert x[0].item() == 2.0
    assert [values[0].item() for _, tag, values in transport.sent if tag == Tag.UPDATE] == [0.0]


# Ranks that are held or slow


@dataclass(frozen=True, repr=False)
class Held(Hop):
    """Rank 0 is held before iteration `at` until the others can go no further."""

    at: int = 5
    log: Any = None

    def member(self, worker: Worker) -> HeldMember:
        return HeldMember(self, worker, worker.local_optimizer())


@dataclass(eq=False)
class HeldMember(HopMember):
    def begin(self) -> None:
        held = self.strategy
        assert isinstance(held, Held)
        if self.worker.rank == 0 and self.queues.iteration == held.at:
            last, log = held.at - 1 + held.max_gap, held.log
            with log.changed:
                assert log.changed.wait_for(
                    lambda: all(log.entered[rank] == last for rank in (1, 2, 3)), timeout=60
                )
        super().begin()


@pytest.mark.parametrize("settings_", [{"backup": 1}, {"staleness": 9}])
def test_the_others_pass_one_that_is_held_as_far_as_the_bound_lets_them(
    settings_: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Log(monkeypatch)
    hop = Held(Complete(), max_gap=4, log=log, **settings_)
    result = train_quadratic(hop, 4, STEPS, tmp_path)
    assert log.gap == 4
    assert [len(result.lines(rank)) for rank in range(4)] == [STEPS] * 4


FOUR = """
all_nodes:
  cores: 1
  jitter: null
  loopback: {bandwidth: 30 GB/s, latency: 1 us}
  link: {bandwidth: 100 Gbit/s, latency: 1 us}
nodes:
  first: {count: 3, flops: 10 GFLOP/s}
  last: {flops: %s}
ranks: spread
"""
BY_TURNS = """
faults:
  - SlowDown: {node: first-0, factor: 10, at: 1 s, until: 6 s}
  - SlowDown: {node: first-2, factor: 10, at: 6 s, until: 11 s}
"""


def parsed(*texts: str) -> list[Strategy]:
    return [parse(text, STRATEGIES, where="here") for text in texts]


def on_four(strategy: Strategy, folder: Path, cluster: str, **training: Any) -> Any:
    """One gradient takes a fast node 0.8 s."""
    folder.mkdir(parents=True)
    file = folder / "four.yaml"
    file.write_text(cluster)
    training = {"steps": STEPS, "tensors": "shapes", "engine": "simulation", **training}
    run = settings(strategy, 4, "images(sample_flops=1e9)", threads=1, **training)
    return simulated(run, folder / "run", on=str(file))


@pytest.mark.parametrize("settings_", [{"backup": 1}, {"staleness": 2}, {"skip": 2, "backup": 1}])
def test_beside_a_very_slow_node_the_gap_is_the_bound_and_never_more(
    settings_: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Log(monkeypatch)
    hop = Hop(Complete(), max_gap=3, **settings_)
    on_four(hop, tmp_path / "hop", FOUR % "0.01 GFLOP/s")
    assert log.gap == 3
    assert bool(log.jumps()) == bool(hop.skip)


def test_backup_is_faster_where_nodes_are_slow_by_turns(tmp_path: Path) -> None:
    cluster = FOUR % "10 GFLOP/s" + BY_TURNS
    gossip, hop, backup = (
        on_four(strategy, tmp_path / str(number), cluster).time.training
        for number, strategy in enumerate(parsed("Gossip()", "Hop()", "Hop(backup=1)"))
    )
    assert backup < 0.95 * min(gossip, hop)


def test_skipping_is_faster_where_one_node_is_always_slow(tmp_path: Path) -> None:
    cluster = FOUR % "2.5 GFLOP/s"
    gossip, backup, skip = (
        on_four(strategy, tmp_path / str(number), cluster).time.training
        for number, strategy in enumerate(
            parsed("Gossip()", "Hop(backup=1)", "Hop(backup=1, skip=4)")
        )
    )
    assert skip < 0.5 * min(gossip, backup)
    assert backup == pytest.approx(gossip, rel=0.01)  # the gap ties it to the slow one


def test_a_simulation_repeats_bit_for_bit(tmp_path: Path) -> None:
    hop = Hop(staleness=4, skip=4)
    cluster = (FOUR % "2.5 GFLOP/s").replace("jitter: null", "jitter: LogNormal(0.1)")
    one, other = (
        on_four(hop, tmp_path / name, cluster, tensors="real", snapshots=2)
        for name in ("one", "other")
    )
    assert one.learned.parameters_sha256 == other.learned.parameters_sha256
    assert one.learned.samples == STEPS * 4 * 8


# Quiet points


@dataclass(frozen=True, repr=False)
class Stopped(Hop):
    """The user stops the run in step `at`."""

    at: int = 1000

    def member(self, worker: Worker) -> StoppedMember:
        return StoppedMember(self, worker, worker.local_optimizer())


@dataclass(eq=False)
class StoppedMember(HopMember):
    def begin(self) -> None:
        super().begin()
        assert isinstance(self.strategy, Stopped)
        if self.queues.iteration + 2 >= self.strategy.at:
            ask_to_stop(self.worker)


def test_a_resumed_run_ends_as_one_that_was_not_stopped(tmp_path: Path) -> None:
    options: dict[str, Any] = {"optimizer": "SGD(lr=0.1, momentum=0.9)"}
    whole = train_quadratic(Hop(), 4, 40, tmp_path / "whole", **options)
    stopped = train_quadratic(Stopped(at=7), 4, 40, tmp_path / "other", **options)
    assert all(report.stopped for report in stopped.reports)
    assert len({len(stopped.lines(rank)) for rank in range(4)}) == 1
    assert len(stopped.lines(0)) < 40
    resumed = train_quadratic(Hop(), 4, 40, tmp_path / "other", **options)
    assert equal(resumed.final, whole.final)


@pytest.mark.parametrize("settings_", [{"staleness": 4, "skip": 3}, {"backup": 1, "skip": 3}])
def test_a_stopped_queue_is_resumed_where_it_was(settings_: dict[str, Any], tmp_path: Path) -> None:
    stopped = train_quadratic(Stopped(at=6, **settings_), 5, 100, tmp_path)
    assert all(report.stopped for report in stopped.reports)
    assert sum(len(stopped.lines(rank)) for rank in range(5)) < 500
    resumed = train_quadratic(Hop(**settings_), 5, 100, tmp_path, checkpoint_every=30)
    assert each_batch_once(resumed, 5, 100)


@pytest.mark.parametrize(
    ("text", "ranks", "message"),
    [
        ("Hop(backup=2)", 4, r"one hears of 2 only; set backup below that"),
        ("Hop(backup=1)", 2, r"one hears of 1 only"),
        ("Hop(Star(), backup=1)", 4, r"one hears of 1 only"),
        ("Hop(Exponential(peers=1))", 4, r"changes from step to step"),
        ("Hop(skip=3)", 4, r"neighbours get at most 1 ahead, and behind is 2"),
        ("Hop(backup=1, skip=3, max_gap=2)", 4, r"neighbours get at most 2 ahead"),
        ("Hop(backup=-1)", 4, r"backup"),
        ("Hop(staleness=-1)", 4, r"staleness"),
        ("Hop(max_gap=0)", 4, r"max_gap"),
    ],
)
def test_settings_that_cannot_be_are_refused(text: str, ranks: int, message: str) -> None:
    with pytest.raises(InputError, match=message) as refused:
        parse(text, STRATEGIES, where="here").roles(ranks)
    assert "\n" not in str(refused.value)


def test_a_graph_that_falls_apart_is_refused() -> None:
    with pytest.raises(InputError, match="does not connect 4 ranks"):
        Hop(Given(((1,), (0,), (3,), (2,)))).roles(4)
