"""Work for whoever is free: each sample once, on unlike nodes, across deaths and pauses."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.lab import in_lab, some
from tests.support.shared_orders import EIGHT, SPEEDS, TASK, covers, positions, strategy_of
from tests.support.simulated import simulated
from tests.support.training import settings, step_lines

from orchestra.coordinator.batches import BatchQueue
from orchestra.coordinator.core import Applied, Coordinator
from orchestra.coordinator.events import Finish, Instruction, Take, Wait
from orchestra.parameter_server.messages import Push
from orchestra.parameter_server.state import Decision, ServerState
from orchestra.parameter_server.when import Bounded
from orchestra.records.record import RunRecord
from orchestra.trainer import recorder

ASYNCHRONOUS = 'ParameterServer(consistency="asynchronous")'
SELF_PACED = {
    ASYNCHRONOUS: 9,
    'ParameterServer(consistency="bounded", staleness=4)': 9,
    'ParameterServer(consistency="asynchronous", servers=2, replicas=1, placement="beside")': 8,
    "PairwiseAveraging()": 8,
    "StochasticGradientPush(overlap=1)": 8,
    "StochasticGradientPush(overlap=2, exchanges='every_step')": 8,
    "ElasticAveraging(4)": 9,
    "Hop(staleness=4, skip=4)": 8,
    "Switch(AllReduce('ring'), PairwiseAveraging(), when=AfterSteps(1))": 8,
}


def on_eight_nodes(text: str, folder: Path, **training: Any) -> RunRecord:
    file = folder / "eight.yaml"
    file.write_text(EIGHT)
    run = settings(strategy_of(text), SELF_PACED[text], TASK, threads=1, **training)
    return simulated(run, folder / "run", on=str(file))


LIKE_OTHERS = (
    'ParameterServer(consistency="asynchronous", servers=2, replicas=1, placement="beside")',
    "StochasticGradientPush(overlap=2, exchanges='every_step')",
    "Switch(AllReduce('ring'), PairwiseAveraging(), when=AfterSteps(1))",
)
"""They take their work as the others of their kind do."""


@pytest.mark.parametrize(
    "text",
    some(some([text for text in SELF_PACED if text not in LIKE_OTHERS]) + in_lab(LIKE_OTHERS)),
)
def test_unlike_nodes_are_used_as_they_are(text: str, tmp_path: Path) -> None:
    """Two of eight at a quarter of the speed: within 5 % of the sum of the speeds."""
    options: dict[str, Any] = {"tensors": "shapes", "engine": "simulation", "steps": 100}
    shared = on_eight_nodes(text, tmp_path, **options)
    assert shared.time.samples_per_second is not None
    assert 0.95 * SPEEDS < shared.time.samples_per_second < SPEEDS
    equal = on_eight_nodes(text, tmp_path / "..", work="equal", **options)
    assert equal.time.samples_per_second is not None
    assert equal.time.samples_per_second < 8 * 2.5 * 1.05


WITH_CHECKPOINTS = [text for text in SELF_PACED if "Switch" not in text]
"""The first phase of the others deals the samples out."""


@pytest.mark.parametrize(
    ("text", "every"),
    some(
        [
            *some([(text, 3) for text in WITH_CHECKPOINTS]),
            *(
                pytest.param(
                    text, None, marks=pytest.mark.lab if text in WITH_CHECKPOINTS[1:] else ()
                )
                for text in SELF_PACED
            ),
        ]
    ),
)
def test_each_sample_is_taken_once(text: str, every: int | None, tmp_path: Path) -> None:
    record = on_eight_nodes(text, tmp_path, steps=10, checkpoint_every=every)
    taken = positions(tmp_path / "run", range(SELF_PACED[text]))
    stop = 10 * 8 * SELF_PACED[text]
    assert record.learned.samples == stop
    assert covers(taken, taken[0][0], stop)
    assert taken[0][0] == (64 if "Switch" in text else 0)
    counts = [len(positions(tmp_path / "run", [rank])) for rank in range(8)]
    assert min(counts[:6]) > max(counts[6:])
    assert (tmp_path / "run" / "checkpoints").exists() == bool(every)


def test_shards_are_read_at_each_workers_own_pace(tmp_path: Path) -> None:
    from orchestra.data import Contiguous

    record = on_eight_nodes(ASYNCHRONOUS, tmp_path, steps=10, sharding=Contiguous())
    assert record.learned.samples == 10 * 8 * 9


@pytest.mark.parametrize(
    ("text", "death"),
    some(
        [
            (text, death)
            for text in SELF_PACED
            if "Server(" in text or "Elastic" in text
            for death in ((3, 0.5), (7, 0.98))
        ],
        every=3,
    ),
)
def test_the_batch_of_a_dead_worker_is_given_out_again(
    text: str, death: tuple[int, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the last one of a slow worker, when nothing is left for the others."""
    # So that what the victim has done is written when it dies.
    monkeypatch.setattr(recorder, "FLUSH_SECONDS", -1.0)
    victim, moment = death
    usual = on_eight_nodes(text, tmp_path, steps=10)
    assert usual.time.training is not None
    file = tmp_path / "dying.yaml"
    fault = f"{{of: rank {victim}, at: {moment * usual.time.training} s}}"
    file.write_text(EIGHT + f"faults:\n  - Death: {fault}\n")
    run = settings(strategy_of(text), SELF_PACED[text], TASK, steps=10, threads=1)
    record = simulated(run, tmp_path / "dying", on=str(file))
    assert list(record.ending.left_out) == [str(victim)]
    others = [rank for rank in range(8) if rank != victim]
    taken = positions(tmp_path / "dying", others)
    assert len(taken) == len(set(taken))
    everyone = {*taken, *positions(tmp_path / "dying", [victim])}
    assert covers(sorted(everyone), 0, 10 * 8 * SELF_PACED[text])
    assert everyone != set(taken), "the dead one did some"


def test_equal_work_is_what_it_was(tmp_path: Path) -> None:
    record = on_eight_nodes(ASYNCHRONOUS, tmp_path, steps=10, work="equal")
    lines = [len(step_lines(tmp_path / "run", rank)) for rank in range(8)]
    assert max(lines) - min(lines) <= 1
    assert record.learned.samples == 10 * 8 * 9


# The bound


class Books:
    """Workers and some servers, with a queue and a bound, in an order drawn by chance."""

    def __init__(self, workers: int, servers: int, bound: int, chance: random.Random) -> None:
        self.sizes = tuple((rank, 2) for rank in range(workers))
        self.bound, self.chance, self.workers = bound, chance, workers
        self.stop = 2 * workers * 12
        self.servers = [self._server(first=not number) for number in range(servers)]
        items = BatchQueue(0, self.stop, self.sizes).first(0)
        self.clocks = dict.fromkeys(range(workers), 0)
        self.items: dict[int, Instruction] = dict(items)
        self.in_flight: list[tuple[int, Push]] = []
        self.waits: dict[int, set[int]] = {}
        self.applied: list[int] = []

    def _server(self, *, first: bool) -> ServerState:
        state = ServerState(Bounded(self.bound), set(range(self.workers)))
        state.applied, state.round = Applied(0), 2 * self.workers
        if first:
            state.coordinator = Coordinator(BatchQueue(0, self.stop, self.sizes))
        return state

    def run(self, deaths: int) -> None:
        """Until all have left; every choice is by chance."""
        alive = set(range(self.workers))
        while alive:
            free = [w for w in alive if w not in self.waits]
            arriving = list(range(len(self.in_flight)))
            assert free or arriving, "everybody waits for nobody"
            choice = self.chance.randrange(len(free) + len(arriving))
            if choice < len(free):
                worker = free[choice]
                if isinstance(self.items[worker], Wait):
                    self.waits[worker] = {0}
                    self._answered(self.servers[0].wait(worker), self.servers[0])
                elif isinstance(self.items[worker], Finish):
                    alive.discard(worker)
                    for server in self.servers:
                        self._answered(server.leave(worker), server)
                elif deaths and len(alive) > 1 and self.chance.random() < 0.1:
                    deaths -= 1
                    alive.discard(worker)
                    for server in self.servers:
                        self._answered(server.leave(worker), server)
                else:
                    self._push(worker)
            else:
                self._arrive(*self.in_flight.pop(choice - len(free)))

    def _push(self, worker: int) -> None:
        item = self.items[worker]
        assert isinstance(item, Take)
        self.clocks[worker] += 1
        push = Push(worker, self.clocks[worker], 2, 2, 0.0, False, position=item.start)
        self.waits[worker] = set(range(len(self.servers)))
        self.in_flight += [(server, push) for server in range(len(self.servers))]

    def _arrive(self, number: int, push: Push) -> None:
        server = self.servers[number]
        if number == 0:
            assert push.position is not None
            self.applied.append(push.position)
        self._answered(server.push(push), server)

    def _answered(self, decision: Decision, server: ServerState) -> None:
        number = self.servers.index(server)
        assert server.applied is not None
        for worker, item in decision.work:
            self.items[worker] = item
            del self.waits[worker]
        for answer in decision.answers:
            ahead = server.positions[answer.worker] // server.round + 1
            slowest = server.applied.before // server.round
            everyone = server.live - server.paused - server.idle
            waited = everyone <= server.waiting.keys() | {a.worker for a in decision.answers}
            assert ahead - slowest <= self.bound or waited
            if answer.work is not None:
                self.items[answer.worker] = answer.work
            self.waits[answer.worker].discard(number)
            if not self.waits[answer.worker]:
                del self.waits[answer.worker]


@given(
    st.integers(2, 5), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2), st.integers(0, 999)
)
def test_nobody_is_further_ahead_than_the_bound(
    workers: int, servers: int, bound: int, deaths: int, seed: int
) -> None:
    """With deaths too, which nobody waits for for ever; every batch is applied once."""
    books = Books(workers, servers, bound, random.Random(seed))
    books.run(deaths)
    assert sorted(books.applied) == list(range(0, books.stop, 2))
    for state in books.servers:
        assert state.applied is not None
        assert state.applied.before == books.stop
