"""Parameter servers with replicas: a server dies, and no push that was answered is lost."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.arrivals import Here
from tests.support.lab import in_lab
from tests.support.replica_play import Play, plain
from tests.support.threads import run_ranks
from tests.support.training import equal, member_of, train_threads
from tests.support.training import settings as run_settings
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from orchestra.errors import InputError, PeerLost
from orchestra.optimizers.state import capture
from orchestra.parameter_server.messages import Kind, Push, Request
from orchestra.parameter_server.placement import Slice
from orchestra.parameter_server.replicas import (
    Addressed,
    ReplicaNotice,
    ReplicatedServer,
    encode_addressed,
    encode_notice,
)
from orchestra.parameter_server.when import Asynchronous, Bounded, Synchronous, When
from orchestra.strategies.pairwise_averaging import PairwiseAveraging
from orchestra.strategies.parameter_server import ParameterServer
from orchestra.strategies.switch import Switch
from orchestra.strategies.switch_rules import AfterFraction
from orchestra.trainer.own_loop import OwnLoop
from orchestra.trainer.session import Session
from orchestra.transports.tags import Tag
from orchestra.worker.runtime import Runtime

CONSISTENCIES: list[When] = [Synchronous(), Asynchronous(), Bounded(1)]


@pytest.mark.parametrize("number", [30, *in_lab([100])])
def test_an_answered_push_is_applied_once_whoever_dies(number: int) -> None:
    @settings(max_examples=number)
    @given(st.data())
    def applied_once(data: st.DataObject) -> None:
        consistency = data.draw(st.sampled_from(CONSISTENCIES))
        tolerant = consistency.tolerates_loss
        beside = tolerant and data.draw(st.booleans())
        servers = data.draw(st.integers(2, 3))
        workers = 4 if beside else data.draw(st.sampled_from([1, 2, 4]))
        compensated = tolerant and data.draw(st.booleans())
        play = Play(consistency, workers, servers, beside, compensated)
        moments = st.integers(0, 1000)
        deaths = [(data.draw(moments), data.draw(st.sampled_from(play.server_ranks)))]
        if tolerant and not beside and workers > 1:
            deaths.append((data.draw(moments), 1))
        results = play.run(random.Random(data.draw(st.integers(0, 2**32))), deaths)
        play.check_histories()
        if not compensated:
            play.check_reads()
            play.check_ends(results, {rank for _, rank in deaths})

    applied_once()


def test_without_a_death_replicas_are_equal_at_every_quiet_point() -> None:
    for seed in range(6):
        play = Play(Bounded(1), 2, 3, compensated=True)
        kept = play.run(random.Random(seed))[2:]
        assert [len(points) for points in kept] == [2 * play.pauses] * 3
        for place in range(3):
            own, mirror = kept[place], kept[(place + 1) % 3]
            assert [point["own"] for point in own] == [point["mirror"] for point in mirror]
        play.check_histories()
        for place in range(3):
            lengths = {len(play.histories[place, is_own]) for is_own in (True, False)}
            assert lengths == {2 * (play.steps + 2 * play.pauses + 1)}
        assert play.notices == []


class Script:
    """The transport of rank 3, the second of servers 2 and 3: `arriving` comes in this order.

    What arrives is a source and a message, or the loss of a rank.
    """

    rank, size = 3, 4

    def __init__(self, arriving: Sequence[tuple[int, Tensor] | PeerLost]) -> None:
        self._arriving = list(arriving)
        self.sent: list[tuple[int, int]] = []
        self.values: dict[int, list[float]] = {}

    def receive(self, source: int | None, tag: int, into: Tensor | None = None) -> Here:
        if source is not None:
            return Here(torch.ones(1), source)
        following = self._arriving.pop(0)
        if isinstance(following, PeerLost):
            raise following
        source, message = following
        return Here(message, source)

    def send(self, tensor: Tensor, to: int, tag: int, **options: Any) -> Here:
        self.sent.append((to, tag))
        if tag in (Tag.VALUES, Tag.BACKUP_VALUES):
            self.values[to] = tensor.tolist()
        return Here(tensor, to)

    def serve(self) -> None:
        play = Play(Asynchronous(), 2, 2)
        own, mirror = (play.make_slice(Slice(0, 1, (), rank)) for rank in (3, 2))
        server = ReplicatedServer(own, mirror, (2, 3), 1, lost=(), alone=lambda _: None)
        assert server.serve(self) is None  # type: ignore[arg-type]
        assert not self._arriving


def a_push(worker: int, place: int) -> Tensor:
    push = Push(worker, 1, 1, 1, 0.0, False, (1.0,), (True,))
    return encode_addressed(Addressed(place, Request(worker, Kind.PUSH, push)))


DONE = [(worker, encode_notice(ReplicaNotice.DONE, 1, worker)) for worker in (0, 1)]


def test_who_is_answered_is_given_what_has_been_confirmed_and_no_more() -> None:
    """The second push is applied already, and may yet be lost with this server."""
    confirmed = [(2, encode_notice(ReplicaNotice.CONFIRMED, 1, worker)) for worker in (0, 1)]
    script = Script([(0, a_push(0, 1)), (1, a_push(1, 1)), *confirmed, *DONE])
    script.serve()
    passed_on = [(2, Tag.BACKUP_GRADIENT), (2, Tag.REQUEST)]
    answers = [(worker, tag) for worker in (0, 1) for tag in (Tag.ANSWER, Tag.VALUES)]
    assert script.sent == [*passed_on, *passed_on, *answers]
    assert script.values == {0: [-1.0], 1: [-2.0]}


def test_who_asks_again_is_given_the_values_of_its_quiet_point() -> None:
    """The other worker was told by the server that was lost then, and has pushed since."""
    pauses = [
        encode_addressed(Addressed(0, Request(worker, Kind.PAUSE, step=4), values=True))
        for worker in (0, 1)
    ]
    passed_on = [(2, pause) for pause in pauses]
    script = Script([*passed_on, PeerLost(2), (0, a_push(0, 0)), (1, pauses[1]), *DONE])
    script.serve()
    told = [(worker, tag) for worker in (0, 1) for tag in (Tag.BACKUP_ANSWER, Tag.BACKUP_VALUES)]
    assert script.sent == [(2, Tag.REQUEST)] * 2 + told
    assert script.values == {0: [-1.0], 1: [0.0]}


def test_who_takes_over_knows_of_workers_that_were_lost_before() -> None:
    """The server that was lost may have heard of it, and told nobody."""
    leaves = [
        (1, encode_addressed(Addressed(home, Request(1, Kind.LEAVE), values=True)))
        for home in (0, 1)
    ]
    script = Script([PeerLost(0), PeerLost(2), *leaves, DONE[1]])
    script.serve()
    own, mirror = (1, Tag.VALUES), (1, Tag.BACKUP_VALUES)
    assert script.sent == [(2, Tag.REQUEST), mirror, own]


@pytest.mark.parametrize("consistency", CONSISTENCIES, ids=lambda c: type(c).__name__)
def test_the_death_of_both_servers_of_a_slice_is_told(consistency: When) -> None:
    """Whenever it is: an error that names one of them, and nobody waits for ever."""
    for seed in range(12):
        chance = random.Random(seed)
        play = Play(consistency, 2, 2)
        moments = chance.sample(range(200), 2)
        with pytest.raises(PeerLost) as told:
            play.run(chance, list(zip(moments, play.server_ranks, strict=True)))
        assert told.value.rank in play.server_ranks


def test_a_synchronous_run_ends_in_the_same_parameters_with_and_without_a_death() -> None:
    """Adam, bit for bit: the one that stands in has the moments, too."""
    plays = [Play(Synchronous(), 2, 2, adam=True) for _ in range(9)]
    expected = plays[0].run(random.Random(0))[0]
    assert bool((expected != 0).all())
    for seed, play in enumerate(plays[1:]):
        chance = random.Random(seed)
        death = (chance.randrange(250), chance.choice(play.server_ranks))
        assert torch.equal(play.run(chance, [death])[0], expected)


def test_replicas_know_what_a_worker_was_given(tmp_path: Path) -> None:
    """A worker alone is never stale, so that there is nothing to compensate."""
    asynchronous = ParameterServer(servers=2, consistency="asynchronous", replicas=1)
    runs = [
        train_threads(strategy, 3, tmp_path / str(number), "images()")
        for number, strategy in enumerate(
            [asynchronous, dataclasses.replace(asynchronous, delay_compensation="constant")]
        )
    ]
    assert equal(runs[0].final, runs[1].final)


@pytest.mark.parametrize(
    ("changes", "ranks", "message"),
    [
        ({"servers": 1}, 3, "replicas=1 needs servers=2 or more"),
        ({"returns": "gradients"}, 4, "replicas=1 needs returns='parameters'"),
        ({"placement": "beside"}, 4, "replicas=1 beside workers needs consistency='asynchronous'"),
        ({"consistency": "bounded", "staleness": 0, "placement": "beside"}, 4, "beside workers"),
        ({"consistency": "asynchronous", "placement": "beside"}, 2, "leave none that could"),
    ],
)
def test_what_could_not_survive_is_refused(
    changes: dict[str, Any], ranks: int, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        ParameterServer(**{"servers": 2, "replicas": 1, **changes}).roles(ranks)


def test_synchronous_replicas_do_not_clip_together(tmp_path: Path) -> None:
    strategy = ParameterServer(servers=2, replicas=1)
    with pytest.raises(InputError, match="replicas=1 with clip_norm needs consistency="):
        train_threads(strategy, 3, tmp_path, "images()", clip_norm=1.0)


def test_replicas_change_nothing_but_bytes(tmp_path: Path) -> None:
    """A server sends each push on to the next one."""
    runs = [
        train_threads(
            ParameterServer(servers=2, replicas=replicas), 4, tmp_path / str(replicas),
            "images(model='normalised')", optimizer="Adam(lr=0.01)", snapshots=3, steps=4,
        )
        for replicas in (0, 1)
    ]  # fmt: skip
    assert equal(runs[0].final, runs[1].final)
    for one, other in zip(runs[0].replicas, runs[1].replicas, strict=True):
        assert equal(one, other)
    curves = [
        [
            (point.samples, point.metrics)
            for r in run.reports
            if r.leader
            for point in r.leader.curve
        ]
        for run in runs
    ]
    assert curves[0] == curves[1]
    assert len(curves[0]) == 3
    pushes = sum(line["step"] > 0 for rank in (0, 1) for line in runs[1].lines(rank))
    for part in runs[1].states[0].connection.slices:
        one, other = (run.reports[part.rank].bytes_sent for run in runs)
        size = 4 * (part.end - part.first)
        assert (pushes - 1) * size <= other - one <= pushes * (size + 500)


def test_a_run_resumes_with_its_replicas(tmp_path: Path) -> None:
    strategy = ParameterServer(
        servers=2, replicas=1, consistency="asynchronous", delay_compensation="adaptive"
    )
    training: dict[str, Any] = {"checkpoint_every": 5, "optimizer": "Adam(lr=0.01)"}
    train_threads(strategy, 4, tmp_path, "images()", **training)
    run = run_settings(strategy, 4, "images()", **training)

    def program(runtime: Runtime) -> Any:
        session = Session(runtime, run, strategy, tmp_path)
        return session.position.steps, plain(capture(member_of(session).connection.server))

    (steps, _), _, (_, first), (_, second) = run_ranks(4, program)
    assert steps > 0
    assert first["own"]["version"] > 0
    assert first["own"] == second["mirror"]
    assert second["own"] == first["mirror"]


def test_a_replica_begins_with_the_moments_of_the_other(tmp_path: Path) -> None:
    """Pairs of workers have averaged parameters until then, and each has moments of its own."""
    replicated = ParameterServer(servers=2, replicas=1, consistency="asynchronous")
    strategy = Switch(PairwiseAveraging(), replicated, when=AfterFraction(0.5))
    result = train_threads(strategy, 4, tmp_path, "images()", optimizer="Adam(lr=0.01)")
    first, second = (plain(capture(state.connection.server)) for state in result.states[2:])
    assert first["own"] == second["mirror"]
    assert second["own"] == first["mirror"]


@pytest.mark.parametrize("consistency", ["synchronous", "asynchronous"])
def test_every_model_is_the_same_after_an_epoch_of_a_loop_of_ones_own(consistency: Any) -> None:
    strategy = ParameterServer(servers=2, replicas=1, consistency=consistency)

    def program(runtime: Runtime) -> list[Tensor]:
        model = torch.nn.Linear(3, 1)
        torch.nn.init.constant_(model.weight, float(runtime.rank))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = TensorDataset(torch.randn(24, 3, generator=torch.Generator().manual_seed(1)))
        loop = OwnLoop(runtime, model, optimizer, DataLoader(data, batch_size=2), strategy)
        after = []
        for _ in range(2):
            for (samples,) in loop.batches:
                model(samples).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            after.append(model.weight.detach().clone())
        loop.finish()
        return after

    first, *others = run_ranks(4, program)
    assert not torch.equal(first[0], first[1])
    for other in others:
        assert all(map(torch.equal, other, first))
