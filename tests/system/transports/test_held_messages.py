"""Messages that leave later, as if they had been on their way meanwhile."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from tests.support.meshes import exchange_randomly, make_tls, mesh, on_ranks
from torch import Tensor

from orchestra.engines.processes.system import Delay, RankPlace
from orchestra.errors import PeerLost
from orchestra.transports.sockets import SocketTransport

TAG = 3
LATENCY = 0.05
SMALL, LARGE = torch.arange(8.0), torch.arange(1 << 20, dtype=torch.float32)


@pytest.fixture(params=[False, True], ids=["plain", "TLS"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[SocketTransport]]:
    """Two ranks, each LATENCY from the other."""
    tls = make_tls(tmp_path_factory.mktemp("tls")) if request.param else None
    with mesh(2, tls, memory=False) as transports:
        for transport in transports:
            transport.hold(lambda peer, now: LATENCY)
        yield transports


@pytest.mark.parametrize("tensor", [SMALL, LARGE], ids=["small", "large"])
def test_a_message_does_not_come_before_its_latency(
    tensor: Tensor, pair: list[SocketTransport]
) -> None:
    def program(transport: SocketTransport) -> tuple[float, Tensor]:
        if transport.rank == 0:
            began = time.perf_counter()
            transport.send(tensor, 1, TAG).wait()
            return began, tensor
        received = transport.receive(0, TAG).wait()
        return time.perf_counter(), received

    (began, _), (ended, received) = on_ranks(pair, program)
    assert ended - began >= LATENCY
    assert torch.equal(received, tensor)


def test_a_small_message_leaves_its_sender_free(pair: list[SocketTransport]) -> None:
    tensor = SMALL.clone()
    assert pair[0].send(tensor, 1, TAG).finished
    tensor.zero_()  # it was copied
    assert torch.equal(pair[1].receive(0, TAG).wait(), SMALL)


def test_it_leaves_while_its_sender_does_something_else(pair: list[SocketTransport]) -> None:
    """Nobody waits on rank 0, whose flows move bytes only while they wait."""
    sent = pair[0].send(LARGE[: 1 << 16], 1, TAG)
    assert not sent.finished
    assert torch.equal(pair[1].receive(0, TAG).wait(), LARGE[: 1 << 16])


def test_many_are_on_their_way_at_a_time(pair: list[SocketTransport]) -> None:
    """Each may leave one latency after it was sent, not after the one before it."""
    began = time.perf_counter()
    for number in range(20):
        pair[0].send(torch.full((4,), float(number)), 1, TAG)
    sent = time.perf_counter()
    held = [message.due for message in pair[0]._engine._streams[1].backlog]
    assert all(began + LATENCY <= due <= sent + LATENCY for due in held)
    assert [float(pair[1].receive(0, TAG).wait()[0]) for _ in range(20)] == list(range(20))


def test_a_message_does_not_leave_with_the_one_before_it(pair: list[SocketTransport]) -> None:
    latencies = iter([LATENCY / 10, 2 * LATENCY])
    pair[0]._engine._latency = lambda peer, now: next(latencies)
    pair[0].send(SMALL, 1, TAG)
    began = time.perf_counter()
    pair[0].send(SMALL, 1, TAG)
    for _ in range(2):
        pair[1].receive(0, TAG).wait()
    assert time.perf_counter() - began >= 2 * LATENCY


def test_closing_sees_off_what_is_held(pair: list[SocketTransport]) -> None:
    received = pair[1].receive(0, TAG)
    pair[0].send(SMALL, 1, TAG)
    began = time.perf_counter()
    pair[0].close(timeout=30.0)
    assert time.perf_counter() - began < 15.0
    assert torch.equal(received.wait(), SMALL)
    with pytest.raises(PeerLost, match="it has left"):
        pair[1].receive(0, TAG).wait()


def later_to_higher_ranks(own: int, peer: int, _: float) -> float:
    return 0.003 * (own + peer - 1)


@pytest.mark.parametrize("seed", range(3))
def test_random_messages_arrive_whole_and_in_order(seed: int) -> None:
    """To some ranks later than to others."""
    with mesh(3, memory=False) as transports:
        for transport in transports:
            transport.hold(partial(later_to_higher_ranks, transport.rank))
        on_ranks(transports, lambda transport: exchange_randomly(transport, seed))


def test_delays_count_from_the_stopwatch() -> None:
    delays = (Delay(1, 0.5, begin=10.0, end=20.0), Delay(1, 0.25, begin=15.0, end=math.inf))
    place = RankPlace("a", "10.0.0.1", "eth0", "", "", 1, 0, (0.0, 0.125, 0.125), delays)
    latencies = place.held()
    assert latencies is not None
    assert latencies.seconds(1, now=112.0) == 0.125
    latencies.begin(100.0)
    latencies.begin(105.0)  # it goes on after a pause
    waits = [latencies.seconds(1, now) for now in (109.9, 110.0, 115.0, 120.0)]
    assert waits == [0.125, 0.625, 0.875, 0.375]
    assert latencies.seconds(2, 112.0) == 0.125


def test_without_latencies_nothing_is_held() -> None:
    place = RankPlace("a", "10.0.0.1", "eth0", "", "", 1, 0, (0.0, 0.0))
    assert place.held() is None
