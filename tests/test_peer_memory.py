"""Large messages that a rank copies from the memory of another one of its host."""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import signal
import threading
from random import Random

import pytest
import torch
from tests.meshes import exchange_randomly, mesh, until, vanish
from tests.test_host_memory import COUNTED, sockets_of

from orchestra.engines.processes import launch
from orchestra.errors import PeerLost, RunAborted, RunFailed
from orchestra.transports import framing, large_messages
from orchestra.transports.large_messages import (
    KEPT_BYTES,
    LEAST_BYTES,
    KeptMemory,
    OfferedMemory,
    PeerMemory,
)
from orchestra.worker.runtime import Runtime

LARGE = 8 << 20


def counted(runtime: Runtime, _: None) -> tuple[list[int], bool]:
    """What this rank has counted after messages of all sizes; whether some were in memory."""
    sockets = sockets_of(runtime.transport)
    for seed in range(4):
        exchange_randomly(sockets, seed)  # which compares what arrives
    sockets.send(torch.zeros(1), (runtime.rank + 1) % runtime.ranks, 9).wait()
    sockets.receive(None, 9).wait()
    taken = sum(stream.taken_bytes for stream in sockets._engine._streams.values())
    return [getattr(sockets.traffic, name) for name in COUNTED], taken > 0


def test_messages_and_counts_are_those_of_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    in_memory = launch(counted, None, 3).results
    monkeypatch.setenv("ORCHESTRA_SHARED_MEMORY", "0")
    over_sockets = launch(counted, None, 3).results
    assert [counts for counts, _ in in_memory] == [counts for counts, _ in over_sockets]
    assert any(taken for _, taken in in_memory)
    assert not any(taken for _, taken in over_sockets)


def test_where_the_kernel_refuses_messages_go_over_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        ctypes.set_errno(errno.EPERM)
        return -1

    monkeypatch.setattr(large_messages, "_read", refuse)
    with mesh(2, memory=False) as (zero, one):
        for transport in (zero, one):
            transport.share_memory(range(2))
        for sender, receiver in ((zero, one), (one, zero)) * 2:  # keys come before messages
            values = torch.randn(LARGE)
            send, receive = sender.send(values, receiver.rank, 0), receiver.receive(sender.rank, 0)
            until(lambda: all([send.done(), receive.done()]))  # noqa: B023
            assert torch.equal(receive.wait(), values)
            assert not send.offers


@pytest.mark.parametrize("begun", [False, True])
def test_what_a_rank_takes_back_is_not_delivered(
    begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may change the tensor once its send has failed."""
    monkeypatch.setattr(framing, "COPIED_BYTES", 1 << 20)
    with mesh(2, memory=True) as (zero, one):
        values = torch.ones(LARGE)
        send, receive = zero.send(values, 1, 0), one.receive(0, 0)
        assert send.offers
        if begun:
            until(lambda: receive.done() or receive.frame_bytes > 0)
        assert not receive.done()
        zero.abort(RunAborted("the watcher ended it"))
        with pytest.raises(RunAborted):
            send.wait()
        values.zero_()
        with pytest.raises(PeerLost, match="rank 0 is gone: its connection closed"):
            receive.wait()


def test_a_receiver_that_goes_ends_the_send() -> None:
    with mesh(2, memory=True) as (zero, one):
        send = zero.send(torch.ones(LARGE), 1, 0)
        vanish(one)
        with pytest.raises(PeerLost, match="rank 1"):
            send.wait()


def test_only_the_memory_that_shows_the_key_is_open() -> None:
    own, other = OfferedMemory(), OfferedMemory()
    assert PeerMemory(own.pid, own.address, own.key).is_open()
    assert not PeerMemory(own.pid, own.address, other.key).is_open()
    assert not PeerMemory(own.pid, 0, own.key).is_open()
    own.close()
    assert not PeerMemory(own.pid, own.address, own.key).is_open()


def killed(runtime: Runtime, seed: int) -> None:
    """One rank is killed at a random moment of large messages around a ring without end."""
    random = Random(seed)
    victim, delay = random.randrange(runtime.ranks), random.uniform(0, 0.1)
    if runtime.rank == victim:
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
    transport, ranks = runtime.transport, runtime.ranks
    after, before = (runtime.rank + 1) % ranks, (runtime.rank - 1) % ranks
    into = torch.empty(LARGE)
    for step in itertools.count():
        values = torch.full((LARGE,), float(step))
        receive = transport.receive(before, step % 3, into)
        send = transport.send(values, after, step % 3)
        assert bool((receive.wait() == step).all())
        send.wait()


@pytest.mark.parametrize("runs", [3, pytest.param(200, marks=pytest.mark.matrix)])
@pytest.mark.timeout(1800)
def test_a_rank_that_is_killed_in_the_middle_is_named(runs: int) -> None:
    for seed in range(runs):
        victim = Random(seed).randrange(3)
        with pytest.raises(RunFailed, match=rf"^rank {victim} on \S+ was killed by SIGKILL$"):
            launch(killed, seed, 3)


def test_memory_of_large_messages_is_used_again_when_nobody_has_it() -> None:
    memory = KeptMemory()
    first = memory.empty((3, LEAST_BYTES // 4), torch.float32, 3 * LEAST_BYTES)
    place, view = first.data_ptr(), first[1]
    del first
    other = memory.empty((3 * LEAST_BYTES,), torch.int8, 3 * LEAST_BYTES)
    assert other.data_ptr() != place  # somebody has a view of it
    del view
    again = memory.empty((3, LEAST_BYTES), torch.bool, 3 * LEAST_BYTES)
    assert (again.data_ptr(), again.dtype, again.shape) == (place, torch.bool, (3, LEAST_BYTES))
    del again, other
    memory.empty((3 * LEAST_BYTES + 4,), torch.int8, 3 * LEAST_BYTES + 4)
    assert sum(map(len, memory._free)) <= KEPT_BYTES
