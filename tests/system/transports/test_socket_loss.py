"""The socket transport: loss, farewell and abort, on threads, and on processes where one dies."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from tests.support import meshes
from tests.support.meshes import TOKEN, mesh, until, vanish
from tests.support.rank_programs import say_rank

from orchestra.engines.processes import launch
from orchestra.errors import PeerLost, RunAborted
from orchestra.transports.handshake import address_of, listen
from orchestra.transports.protocol import Transport
from orchestra.transports.sockets import SocketTransport, connect_mesh


@pytest.fixture(autouse=True, params=[False, True], ids=["sockets", "memory"])
def both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether large messages are in shared memory changes nothing."""
    monkeypatch.setattr(meshes, "SHARES_MEMORY", request.param)


# --- loss, farewell, abort -------------------------------------------------------------------


def test_messages_that_came_whole_are_delivered_before_the_loss_is_raised() -> None:
    with mesh(3) as (zero, one, two):
        one.send(torch.tensor(1), 0, 0).wait()
        one.send(torch.tensor(2), 0, 7).wait()
        vanish(one)
        pending = zero.receive(1, 99)
        with pytest.raises(PeerLost, match="rank 1 is gone") as caught:
            pending.wait()
        assert caught.value.rank == 1
        assert zero.lost() == {1}
        assert int(zero.receive(1, 0).wait()) == 1
        assert int(zero.receive(None, 7).wait()) == 2
        for operation in (zero.receive(1, 0), zero.send(torch.tensor(1), 1, 0)):
            with pytest.raises(PeerLost, match="rank 1"):
                operation.wait()
        two.send(torch.tensor(3), 0, 0)  # the others talk on
        assert int(zero.receive(2, 0).wait()) == 3


def test_a_broken_send_does_not_cost_the_messages_that_came_before() -> None:
    with mesh(2) as (zero, one):
        one.send(torch.tensor(1), 0, 0).wait()
        vanish(one)
        while zero.send(torch.zeros(1), 1, 0).error is None:
            pass  # a send only writes: it meets the reset before anything is read
        assert int(zero.receive(1, 0).wait()) == 1
        with pytest.raises(PeerLost, match="rank 1"):
            zero.receive(1, 0).wait()


def test_a_receive_from_any_raises_each_loss_once_for_each_flow() -> None:
    with mesh(4) as (zero, one, two, three):
        waiting = zero.receive(None, 0)
        later = zero.receive(None, 0)
        vanish(one)
        with pytest.raises(PeerLost, match="rank 1"):
            waiting.wait()
        vanish(two)
        with pytest.raises(PeerLost, match="rank 2"):
            later.wait()
        three.send(torch.tensor(5), 0, 0).wait()
        assert int(zero.receive(None, 0).wait()) == 5

        def other(child: Transport) -> list[int]:
            ranks = []
            for _ in range(2):
                with pytest.raises(PeerLost) as caught:
                    child.receive(None, 0).wait()
                ranks.append(caught.value.rank)
            three.send(torch.tensor(6), 0, 0).wait()
            assert int(child.receive(None, 0).wait()) == 6
            return ranks

        assert zero.spawn(other).wait() == [1, 2]


def test_a_send_under_way_learns_of_the_loss() -> None:
    with mesh(2) as (zero, one):
        send = zero.send(torch.zeros(16 << 20), 1, 0)
        assert not send.done()
        vanish(one)
        with pytest.raises(PeerLost, match="rank 1"):
            send.wait()


def test_disconnect_wakes_the_flow_that_waits_for_the_rank() -> None:
    with mesh(3) as (zero, one, two):
        task = zero.spawn(lambda child: child.receive(1, 0).wait())
        until(lambda: zero._engine._leading)  # until the flow blocks
        zero.disconnect(1, "it sent no sign of life for 60 s")
        with pytest.raises(PeerLost, match="no sign of life"):
            task.wait()
        assert zero.lost() == {1}
        two.send(torch.tensor(1), 0, 0).wait()
        assert int(zero.receive(2, 0).wait()) == 1
        with pytest.raises(PeerLost, match="rank 0"):
            one.receive(0, 0).wait()


def test_after_a_farewell_only_who_still_waits_hears_of_it() -> None:
    with mesh(3) as (zero, one, two):
        pending = zero.receive(1, 0)
        anybody = zero.receive(None, 1)
        one.send(torch.tensor(4), 0, 2)
        one.close()
        with pytest.raises(PeerLost, match="rank 1 is gone: it has left"):
            pending.wait()
        assert zero.lost() == frozenset()
        assert int(zero.receive(1, 2).wait()) == 4
        two.send(torch.tensor(5), 0, 1)
        assert int(anybody.wait()) == 5
        with pytest.raises(PeerLost, match="it has left"):
            zero.send(torch.tensor(1), 1, 0).wait()


def test_close_first_hands_over_what_is_queued() -> None:
    with mesh(2) as (zero, one):
        zero.send(torch.arange(8 << 20), 1, 0)
        closing = threading.Thread(target=zero.close)
        closing.start()
        assert torch.equal(one.receive(0, 0).wait(), torch.arange(8 << 20))
        closing.join(60)
        assert not closing.is_alive()
        with pytest.raises(AssertionError, match="rank 0 uses its transport after closing"):
            zero.receive(1, 0)


def test_a_close_that_could_not_flush_is_a_loss() -> None:
    with mesh(2) as (zero, one):
        zero.send(torch.arange(8 << 20), 1, 0)
        zero.close(timeout=0)
        with pytest.raises(PeerLost, match="rank 0"):
            one.receive(0, 0).wait()
        assert one.lost() == {0}


def test_abort_ends_every_operation_of_every_flow() -> None:
    with mesh(2) as (zero, _):
        error = RunAborted("rank 1 failed first")
        tasks = [zero.spawn(lambda c, tag=tag: c.receive(1, tag).wait()) for tag in range(3)]  # type: ignore[misc]
        until(lambda: zero._engine._followers == 2)  # until all of them block
        pending = zero.receive(1, 9)
        zero.abort(error)
        zero.abort(RunAborted("a later cause"))
        for task in tasks:
            with pytest.raises(RunAborted, match="failed first"):
                task.wait()
        assert pending.done()
        for operation in (
            pending.wait,
            lambda: zero.receive(1, 0),
            lambda: zero.send(torch.tensor(0), 1, 0),
            lambda: zero.send(torch.tensor(0), 0, 0),
        ):
            with pytest.raises(RunAborted, match="failed first"):
                operation()


# --- real processes --------------------------------------------------------------------------


def rank_process(rank: int, pipe: Connection, shares_memory: bool) -> None:
    """Joins the mesh, says what `pipe` orders, and stays."""
    listener = listen()
    pipe.send(address_of(listener))
    transport = connect_mesh(rank, pipe.recv(), listener, TOKEN, timeout=60)
    if shares_memory:
        meshes.share_memory([transport])
    for order in iter(pipe.recv, "leave"):
        if order == "small":
            transport.send(torch.tensor(rank), 0, 0).wait()
        elif order == "endless":  # far more than fits between two kernels
            transport.send(torch.zeros(64 << 20), 0, 1)
        elif order == "take":
            transport.receive(0, 5).wait()
        elif order == "fork":
            child = os.fork()
            while child == 0:
                signal.pause()
            pipe.send(child)
            continue
        pipe.send("done")
    transport.close()


@dataclasses.dataclass
class Peer:
    process: Any
    pipe: Connection

    def order(self, what: str) -> Any:
        self.pipe.send(what)
        assert self.pipe.poll(60), "no answer"
        return self.pipe.recv()


@functools.cache
def forked() -> Any:
    """Processes from the server of a launch, which has imported torch."""
    launch(say_rank, None, 1)
    return multiprocessing.get_context("forkserver")


@contextlib.contextmanager
def peers(count: int) -> Iterator[tuple[SocketTransport, list[Peer]]]:
    """Rank 0 in this process, the others in processes of their own."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(listen())
        others = []
        for rank in range(1, count + 1):
            ours, theirs = forked().Pipe()
            process = forked().Process(
                target=rank_process, args=(rank, theirs, meshes.SHARES_MEMORY), daemon=True
            )
            process.start()
            stack.callback(process.join, 60)
            stack.callback(process.kill)
            theirs.close()
            others.append(Peer(process, stack.enter_context(ours)))
        addresses = [address_of(listener), *(peer.pipe.recv() for peer in others)]
        for peer in others:
            peer.pipe.send(addresses)
        transport = connect_mesh(0, addresses, listener, TOKEN, timeout=60)
        stack.callback(transport.close)
        if meshes.SHARES_MEMORY:
            meshes.share_memory([transport])
        yield transport, others


def test_a_rank_killed_in_mid_message_is_named_and_the_others_talk_on() -> None:
    with peers(2) as (transport, (one, two)):
        into = torch.ones(64 << 20)
        half = transport.receive(1, 1, into)
        anybody = transport.receive(None, 0)
        one.order("small")
        one.order("endless")
        assert int(anybody.wait()) == 1
        assert not half.done()
        os.kill(one.process.pid, signal.SIGKILL)
        with pytest.raises(PeerLost, match="rank 1"):
            half.wait()
        with pytest.raises(PeerLost, match="rank 1"):
            transport.receive(None, 0).wait()
        two.order("small")
        assert int(transport.receive(None, 0).wait()) == 2
        assert transport.lost() == {1}


def test_a_stopped_rank_holds_up_nobody_else() -> None:
    with peers(2) as (transport, (one, two)):
        for rank, peer in ((1, one), (2, two)):  # until the mesh is complete everywhere
            peer.order("small")
            assert int(transport.receive(rank, 0).wait()) == rank
        os.kill(one.process.pid, signal.SIGSTOP)
        try:
            stuck = transport.send(torch.zeros(16 << 20), 1, 5)
            waiting = transport.receive(1, 0)
            for _ in range(20):
                two.order("small")
                assert int(transport.receive(2, 0).wait()) == 2
            assert not stuck.done()
            assert not waiting.done()
        finally:
            os.kill(one.process.pid, signal.SIGCONT)
        one.order("small")
        assert int(waiting.wait()) == 1
        one.pipe.send("take")
        assert stuck.wait().numel() == 16 << 20


def test_a_forked_child_does_not_keep_the_streams_of_a_dead_rank() -> None:
    with peers(1) as (transport, (one,)):
        child = one.order("fork")
        try:
            os.kill(one.process.pid, signal.SIGKILL)
            with pytest.raises(PeerLost, match="rank 1"):
                transport.receive(1, 0).wait()
            os.kill(child, 0)  # it lives
        finally:
            os.kill(child, signal.SIGKILL)
