"""Large messages in memory that both ends have mapped."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import socket
import tempfile
import threading
from random import Random

import numpy as np
import pytest
import torch
from tests.support.meshes import SEGMENT_BYTES, exchange_randomly, mesh, until, vanish
from tests.support.socket_counts import COUNTED, sockets_of

from orchestra.engines.processes import launch
from orchestra.errors import PeerLost, RunAborted, RunFailed
from orchestra.transports import large_messages
from orchestra.transports.framing import MalformedFrame, Stream, pack_shared
from orchestra.transports.large_messages import (
    KEPT_BYTES,
    LEAST_BYTES,
    KeptMemory,
    Outbox,
    PeerSegments,
    Segment,
)
from orchestra.transports.matching import Mailbox
from orchestra.worker.runtime import Runtime

LARGE = SEGMENT_BYTES // 4


def is_free(segment: Segment) -> bool:
    return segment.is_free  # what it says changes, which mypy does not expect of a property


def counted(runtime: Runtime, _: None) -> tuple[list[int], bool]:
    """What this rank has counted after messages of all sizes; whether some were in memory.

    A message for which there is no segment goes over the socket, and tells of a new one if no other
    is waited for; the receiver says that it has mapped that before it answers.
    """
    sockets = sockets_of(runtime.transport)
    for seed in range(4):
        exchange_randomly(sockets, seed)  # which compares what arrives
    sockets.send(torch.zeros(1), (runtime.rank + 1) % runtime.ranks, 9).wait()
    sockets.receive(None, 9).wait()
    counts = [getattr(sockets.traffic, name) for name in COUNTED]
    following, before = ((runtime.rank + step) % runtime.ranks for step in (1, -1))
    for _round in range(3):
        large = sockets.send(torch.zeros(1 << 18), following, 9)
        sockets.receive(before, 9).wait()
        sockets.send(torch.zeros(1), before, 10).wait()
        sockets.receive(following, 10).wait()
        large.wait()
    shared = sum(stream.shared_bytes for stream in sockets._engine._streams.values())
    for other in (following, before):  # a rank that leaves takes its stream with it
        sockets.send(torch.zeros(1), other, 11).wait()
    for other in (following, before):
        sockets.receive(other, 11).wait()
    return counts, shared > 0


def test_messages_and_counts_are_those_of_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    in_memory = launch(counted, None, 3).results
    monkeypatch.setenv("ORCHESTRA_SHARED_MEMORY", "0")
    over_sockets = launch(counted, None, 3).results
    assert [counts for counts, _ in in_memory] == [counts for counts, _ in over_sockets]
    assert all(shared for _, shared in in_memory)
    assert not any(shared for _, shared in over_sockets)


def test_where_none_can_be_mapped_messages_go_over_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(large_messages, "_opened", lambda *told: asked.append(told))
    with mesh(2) as (zero, one):
        for transport in (zero, one):
            transport.share_memory(range(2))
        for sender, receiver in ((zero, one), (one, zero)) * 3:
            values = torch.randn(LARGE)
            send, receive = sender.send(values, receiver.rank, 0), receiver.receive(sender.rank, 0)
            until(lambda: all([send.done(), receive.done()]))  # noqa: B023
            assert torch.equal(receive.wait(), values)
            assert not send.is_shared
    assert len(asked) == 2  # one segment a way: who cannot map it is not told of more


def test_a_message_in_a_segment_takes_the_one_before_it_along(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with mesh(2, memory=True) as (zero, one):
        stream, calls = zero._engine._streams[1], []
        gathered = stream._gathered

        def counted() -> list[bytes | memoryview]:
            calls.append(len(stream.backlog))
            return gathered()

        monkeypatch.setattr(stream, "_gathered", counted)
        head = zero.send(torch.tensor(1), 1, 0, more=True)
        rest = zero.send(torch.ones(LARGE), 1, 1)
        assert rest.is_shared
        assert all([head.done(), rest.done()])
        assert calls == [2]
        assert int(one.receive(0, 0).wait()) == 1
        assert bool((one.receive(0, 1).wait() == 1.0).all())


def test_a_message_is_delivered_without_a_copy_and_its_segment_used_again() -> None:
    with mesh(2, memory=True) as (zero, one):
        values = torch.randn(LARGE)
        expected = values.clone()
        send = zero.send(values, 1, 0)
        assert send.is_shared
        assert send.done()
        values.zero_()
        received = one.receive(0, 0).wait()
        assert torch.equal(received, expected)
        outbox = zero._engine._streams[1].outbox
        assert outbox is not None
        (segment,) = outbox._segments
        received[3] = 7.0  # it is the receiver's own
        assert segment._place[12:16].view(np.float32) == 7.0
        view = received[10:20]
        del received
        gc.collect()
        assert not is_free(segment)
        elsewhere, receive = zero.send(values, 1, 0), one.receive(0, 0)
        assert not elsewhere.is_shared  # over the socket meanwhile
        del view
        gc.collect()
        assert is_free(segment)
        until(lambda: all([elsewhere.done(), receive.done()]))
        assert zero.send(expected, 1, 1).is_shared
        into = torch.empty(LARGE)
        assert one.receive(0, 1, into).wait() is into
        assert torch.equal(into, expected)
        assert is_free(segment)


def test_a_rank_may_go_when_its_message_is_in_a_segment() -> None:
    with mesh(2, memory=True) as (zero, one):
        zero.send(torch.ones(LARGE), 1, 0)
        zero.abort(RunAborted("the watcher ended it"))
        vanish(zero)
        received = one.receive(0, 0).wait()
        assert bool((received == 1.0).all())
        with pytest.raises(PeerLost, match="rank 0"):
            one.receive(0, 0).wait()


def test_a_forked_process_does_not_free_what_it_inherits() -> None:
    with mesh(2, memory=True) as (zero, one):
        zero.send(torch.ones(LARGE), 1, 0)
        received = one.receive(0, 0).wait()
        outbox = zero._engine._streams[1].outbox
        assert outbox is not None
        child = os.fork()
        if child == 0:
            del received
            gc.collect()
            os._exit(0)
        os.waitpid(child, 0)
        assert not outbox._segments[0].is_free
        assert float(received.sum()) == LARGE


def test_only_the_memory_that_shows_the_key_is_mapped() -> None:
    segment, other = Segment(0, 4096), Segment(1, 4096)
    mine = os.getpid()
    peer = PeerSegments()
    assert not peer.map(0, mine, segment.descriptor, other.key)
    assert not peer.map(0, mine, 10_000, segment.key)
    with tempfile.TemporaryFile() as elsewhere:
        elsewhere.write(segment.key + b"0")
        elsewhere.flush()
        assert not peer.map(0, mine, elsewhere.fileno(), segment.key)
    assert not peer.holds(0, 1)
    assert peer.map(0, mine, segment.descriptor, segment.key)
    assert peer.holds(0, 4096)
    assert not peer.holds(0, 4097)
    assert not peer.holds(1, 1)


def test_a_message_in_no_segment_ends_the_stream() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        stream = Stream(ours, 1, Mailbox(0))
        theirs.sendall(pack_shared(torch.zeros(4), 0, Segment(3, 4096)))
        with pytest.raises(MalformedFrame, match="not mapped"):
            stream.read()


def test_segments_are_limited_and_chosen_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_messages, "SEGMENT_BYTES", 1 << 20)
    outbox = Outbox()
    assert outbox.take(1000) is None
    small = outbox.grow(300_000)
    assert small is not None
    assert outbox.grow(1000) is None  # the first one is not mapped yet
    assert outbox.take(1000) is None
    outbox.mapped(0)
    large = outbox.grow(500_000)
    assert large is not None
    outbox.mapped(1)
    outbox.mapped(7)  # which there is not
    assert (small.descriptor, large.descriptor) == (-1, -1)
    assert outbox.grow(500_000) is None  # too much together
    assert outbox.take(600_000) is None
    assert outbox.take(200_000) is small
    assert outbox.take(200_000) is large
    assert outbox.take(200_000) is None


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


@pytest.mark.parametrize("runs", [3, pytest.param(200, marks=pytest.mark.lab)])
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


def test_memory_that_comes_back_while_memory_is_sought() -> None:
    """Tensors go at any moment, as garbage is collected; here as lengths are compared."""
    memory = KeptMemory()
    place = memory.empty((LEAST_BYTES,), torch.int8, LEAST_BYTES).data_ptr()
    large = KEPT_BYTES // 2 + 1
    others = [memory.empty((large,), torch.int8, large) for _ in range(2)]

    class Length(int):
        __hash__ = int.__hash__

        def __eq__(self, other: object) -> bool:
            others.clear()
            return int(self) == other

    again = memory.empty((LEAST_BYTES,), torch.int8, Length(LEAST_BYTES))
    assert again.data_ptr() == place
    assert not others
