"""Collectives over connections of their own: loss, abort, messages meanwhile, and who may not."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tests.support.meshes import in_threads, make_tls, mesh, on_ranks, until, vanish
from torch import Tensor

from orchestra.collectives import Group, all_reduce, broadcast
from orchestra.errors import PeerLost, RunAborted
from orchestra.transports import executor
from orchestra.transports.protocol import Transport
from orchestra.transports.sockets import SocketTransport

pytestmark = pytest.mark.skipif(not executor.is_there(), reason="the executor is not compiled")
TAG = 70


def everyone(transport: Transport) -> Group:
    return Group(tuple(range(transport.size)))


def sum_up(transport: Transport, length: int = 10, name: str = "ring", tag: int = TAG) -> Tensor:
    vector = torch.full((length,), float(transport.rank + 1))
    all_reduce(transport, vector, name, everyone(transport), tag)
    return vector


def meet(transports: Sequence[SocketTransport], name: str = "ring") -> None:
    """Carry out a first collective, which makes the connections."""
    total = sum(range(1, len(transports) + 1))
    for result in on_ranks(transports, lambda t: sum_up(t, name=name)):
        assert result.eq(total).all()


def is_blocked(transport: SocketTransport) -> bool:
    return transport.in_collective is not None and transport.in_collective.awaited is not None


def wires(transport: SocketTransport) -> list[socket.socket]:
    assert transport.lanes is not None
    return [wire.connection for wire in transport.lanes._wires.values()]


def test_connections_are_made_once_and_carry_the_bytes() -> None:
    with mesh(3) as transports:
        meet(transports)
        before = [wires(transport) for transport in transports]
        acknowledged = [transport.acknowledged_bytes() for transport in transports]
        sent = [transport.traffic.bytes_sent for transport in transports]
        for result in on_ranks(transports, lambda t: sum_up(t, 300_000)):
            assert result.eq(6).all()
        for rank, transport in enumerate(transports):
            assert wires(transport) == before[rank]
            assert len(wires(transport)) == 2
            carried = transport.traffic.bytes_sent - sent[rank]
            while transport.acknowledged_bytes() - acknowledged[rank] < 0.99 * carried:
                pass
            assert sum(size for size, _ in transport.arrived().values()) >= 4 * 300_000


def test_those_who_do_not_neighbour_a_dead_rank_name_it_too() -> None:
    """Rank 3 of a tree is a leaf under 1; what ends for rank 0 is its connection to 1."""
    with mesh(5) as transports:
        meet(transports, "tree")
        vanish(transports[3])
        lost: dict[int, int] = {}

        def learn(transport: SocketTransport) -> None:
            with pytest.raises(PeerLost, match="rank 3 is gone") as caught:
                sum_up(transport, name="tree")
            lost[transport.rank] = caught.value.rank

        on_ranks([each for each in transports if each.rank != 3], learn)
        assert lost == {0: 3, 1: 3, 2: 3, 4: 3}


def test_a_rank_that_dies_in_the_middle_is_named() -> None:
    with mesh(3) as transports:
        meet(transports)

        def take_part(transport: SocketTransport) -> None:
            if transport.rank == 1:
                until(lambda: is_blocked(transports[0]) and is_blocked(transports[2]))
                vanish(transport)
                return
            with pytest.raises(PeerLost) as caught:
                sum_up(transport, 1_000_000)
            assert caught.value.rank == 1

        on_ranks(transports, take_part)


def test_a_stream_that_is_reset_before_the_first_collective_is_a_loss() -> None:
    with mesh(2) as transports:
        stream = transports[1].connection(0)
        assert stream is not None
        stream.shutdown(socket.SHUT_RDWR)

        def learn(transport: SocketTransport) -> None:
            with pytest.raises(PeerLost):
                sum_up(transport)

        on_ranks(transports, learn)


def test_abort_ends_a_collective() -> None:
    with mesh(2) as transports:
        meet(transports)

        def end(zero: SocketTransport) -> None:
            until(lambda: is_blocked(zero))
            zero.abort(RunAborted("the run is over"))

        def wait(zero: SocketTransport) -> None:
            with pytest.raises(RunAborted, match="the run is over"):
                sum_up(zero)

        in_threads([lambda: wait(transports[0]), lambda: end(transports[0])])


def test_disconnect_ends_a_collective_with_a_rank_that_still_runs() -> None:
    with mesh(3) as transports:
        meet(transports)

        def end(zero: SocketTransport) -> None:
            until(lambda: is_blocked(zero))
            zero.disconnect(2, "it has been stopped for too long")

        def wait(zero: SocketTransport) -> None:
            with pytest.raises(PeerLost, match="rank 2 is gone: it has been stopped for too long"):
                sum_up(zero)

        in_threads([lambda: wait(transports[0]), lambda: end(transports[0])])


def test_a_message_that_nobody_waits_for_is_moved_meanwhile() -> None:
    """Both ranks leave a large message in their queues; each needs it before its collective."""
    with mesh(2) as transports:
        meet(transports)

        def take_part(transport: SocketTransport) -> None:
            other = 1 - transport.rank
            if transport.rank == 0:
                transport.send(torch.full((4 << 20,), 5.0), other, 1)
            else:
                assert transport.receive(other, 1).wait().eq(5).all()
            assert sum_up(transport).eq(3).all()

        on_ranks(transports, take_part)


def test_another_flow_goes_on_meanwhile() -> None:
    """Rank 1 joins once a flow behind the collective of rank 0 has answered."""
    with mesh(2) as transports:
        meet(transports)

        def answer(child: Transport) -> None:
            child.send(child.receive(1, 1).wait() + 1, 1, 2).wait()

        def take_part(transport: SocketTransport) -> None:
            if transport.rank == 0:
                flow = transport.spawn(answer)
                assert sum_up(transport).eq(3).all()
                flow.wait()
            else:
                until(lambda: is_blocked(transports[0]))
                transport.send(torch.tensor(7.0), 0, 1)
                assert transport.receive(0, 2).wait() == 8
                assert sum_up(transport).eq(3).all()

        on_ranks(transports, take_part)


def test_ranks_may_begin_two_tags_in_different_order() -> None:
    with mesh(2) as transports:

        def take_part(transport: SocketTransport) -> None:
            tags = (1, 2) if transport.rank == 0 else (2, 1)
            flow = transport.spawn(lambda child: sum_up(child, 500_000, tag=tags[0]))
            assert sum_up(transport, 500_000, tag=tags[1]).eq(3).all()
            assert flow.wait().eq(3).all()

        for _ in range(3):
            on_ranks(transports, take_part)


def test_a_rank_that_has_done_its_part_may_leave() -> None:
    with mesh(2) as (zero, one):
        meet([zero, one])
        group = everyone(zero)
        broadcast(zero, torch.full((1000,), 4.0), 0, group, TAG)
        zero.close()
        vector = torch.zeros(1000)
        broadcast(one, vector, 0, group, TAG)
        assert vector.eq(4).all()
        with pytest.raises(PeerLost, match="rank 0 is gone: it has left"):
            broadcast(one, vector, 0, group, TAG)


def test_ranks_that_do_not_agree_on_a_collective_are_told() -> None:
    with mesh(2) as transports:
        meet(transports)
        told: list[str] = []

        def take_part(transport: SocketTransport) -> None:
            try:
                sum_up(transport, 10 + transport.rank)
            except AssertionError as error:
                told.append(str(error))
                for each in transports:
                    each.abort(RunAborted("a rank has failed"))
            except RunAborted:
                pass

        on_ranks(transports, take_part)
        assert any("tag 70: rank" in words and "44 bytes" in words for words in told)


@contextmanager
def catching_ctrl_c() -> Iterator[None]:
    """Raise KeyboardInterrupt, also where a shell has started the tests without that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_signal_ends_a_collective() -> None:
    """As Ctrl-C in the main thread, whenever it comes."""
    with catching_ctrl_c(), mesh(2) as transports:
        meet(transports)
        zero, main = transports[0], threading.get_ident()

        def interrupt() -> None:
            until(lambda: is_blocked(zero))
            signal.pthread_kill(main, signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            sum_up(zero)
        thread.join()
        assert all(each.fileno() == -1 for each in wires(zero))


def test_a_forked_process_closes_its_copies_and_ends_nothing() -> None:
    with mesh(2) as transports:
        meet(transports)
        pid = os.fork()
        if pid == 0:
            os._exit(
                sum(each.fileno() >= 0 for each in (*wires(transports[0]), *wires(transports[1])))
            )
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        meet(transports)


def test_encrypted_messages_carry_collectives_themselves(tmp_path: Path) -> None:
    with mesh(2, make_tls(tmp_path)) as transports:
        assert [transport.lanes for transport in transports] == [None, None]
        meet(transports)


@pytest.mark.parametrize("name", ["ring", "parallel", "tree"])
def test_what_is_sent_leaves_later_where_links_have_latencies(name: str) -> None:
    latency, rounds = 0.02, {"ring": 4, "parallel": 1, "tree": 2}[name]
    with mesh(3) as transports:
        for transport in transports:
            transport.hold(lambda rank, now: latency)
        meet(transports, name)
        began = time.perf_counter()
        meet(transports, name)
        assert time.perf_counter() - began >= rounds * latency
        for result in on_ranks(transports, lambda t: sum_up(t, 3_000_000, name)):
            assert result.eq(6).all()
