"""The socket transport: framing, messages and flows; ranks are threads of this process."""

from __future__ import annotations

import fcntl
import select
import signal
import socket
import struct
import termios
import threading

import pytest
import torch
from tests.support import meshes
from tests.support.lab import some
from tests.support.meshes import (
    connect,
    exchange,
    exchange_randomly,
    in_threads,
    mesh,
    on_ranks,
    until,
)
from torch import Tensor

from orchestra.transports.framing import (
    DTYPES,
    FAREWELL,
    LOW_WATER,
    MalformedFrame,
    Stream,
    header_bytes,
    pack_header,
    pack_signal,
    unpack_header,
)
from orchestra.transports.matching import Mailbox
from orchestra.transports.protocol import Transport
from orchestra.transports.sockets import SocketTransport


@pytest.fixture(autouse=True, params=[False, True], ids=["sockets", "memory"])
def both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether large messages are in shared memory changes nothing."""
    monkeypatch.setattr(meshes, "SHARES_MEMORY", request.param)


# --- framing ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_header_tells_dtype_shape_tag_and_bytes(dtype: torch.dtype) -> None:
    packed = pack_header(torch.empty(2, 0, 5, dtype=dtype), tag=-7)
    header = unpack_header(memoryview(packed))
    assert header is not None
    assert (header.dtype, header.shape, header.tag, header.payload_bytes) == (
        dtype,
        (2, 0, 5),
        -7,
        0,
    )
    assert len(packed) == header_bytes(3) == header.frame_bytes
    assert all(unpack_header(memoryview(packed[:n])) is None for n in range(len(packed)))


def test_malformed_frames_are_refused() -> None:
    packed = bytearray(pack_header(torch.zeros(3), tag=0))
    with pytest.raises(MalformedFrame, match="kind 9"):
        unpack_header(memoryview(b"\x09" + packed[1:]))
    packed[11] += 1  # one payload byte more than the shape has
    with pytest.raises(MalformedFrame, match="13 bytes"):
        unpack_header(memoryview(packed))
    farewell = unpack_header(memoryview(pack_signal(FAREWELL)))
    assert farewell is not None
    assert farewell.frame_bytes == len(pack_signal(FAREWELL))


def test_a_rank_is_woken_for_a_good_part_of_a_message_and_not_for_each_segment() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    theirs = socket.create_connection(listener.getsockname())
    theirs.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    ours, _ = listener.accept()
    ours.setblocking(False)
    mailbox = Mailbox(0)
    stream = Stream(ours, 1, mailbox)

    def readable() -> bool:
        return bool(select.select([ours], [], [], 0.0)[0])

    values = torch.arange(500_000, dtype=torch.float32)
    header, payload = pack_header(values, tag=1), values.numpy().tobytes()
    assert len(payload) > 3 * LOW_WATER
    try:
        theirs.sendall(header + payload[:1000])
        until(readable)
        stream.read()
        read = 1000
        while read < len(payload):
            needed = min(len(payload) - read, LOW_WATER)
            theirs.sendall(payload[read : read + needed - 1])
            until(lambda needed=needed: arrived(ours) == needed - 1)  # type: ignore[misc]
            assert not readable()
            theirs.sendall(payload[read + needed - 1 : read + needed])
            until(readable)
            stream.read()
            read += needed
        assert stream.incoming is None
        theirs.sendall(pack_signal(FAREWELL))  # however short what follows is, it is heard
        until(readable)
        stream.read()
        assert stream.farewell
    finally:
        for each in (listener, ours, theirs):
            each.close()


def arrived(connection: socket.socket) -> int:
    """Bytes that wait to be read."""
    found = fcntl.ioctl(connection, termios.FIONREAD, struct.pack("i", 0))
    return int(struct.unpack("i", found)[0])


# --- messages --------------------------------------------------------------------------------


@pytest.mark.parametrize("size", some([2, 3, 5]))
def test_random_messages_arrive_whole_and_in_order(size: int) -> None:
    with mesh(size) as transports:
        for seed in range(4):
            on_ranks(transports, lambda t, seed=seed: exchange_randomly(t, seed))  # type: ignore[misc]
        flows = [transport.traffic for transport in transports]
        assert sum(t.bytes_sent for t in flows) == sum(t.bytes_received for t in flows) > 0
        assert sum(t.messages_sent for t in flows) == 4 * 60
        assert sum(t.messages_received for t in flows) == 4 * 60


def test_a_receive_from_any_source_takes_messages_as_they_come() -> None:
    with mesh(4) as transports:

        def worker(transport: SocketTransport) -> list[tuple[int, float]]:
            if transport.rank:
                for value in range(5):
                    transport.send(torch.tensor(10.0 * transport.rank + value), 0, 3).wait()
                return []
            received = []
            for _ in range(15):
                handle = transport.receive(None, 3)
                number = float(handle.wait())
                received.append((handle.source, number))
            return received

        received = on_ranks(transports, worker)[0]
        for rank in (1, 2, 3):  # from each rank all, in the order of sending
            assert [v for r, v in received if r == rank] == [10.0 * rank + v for v in range(5)]


def test_named_and_open_receives_take_messages_in_the_order_of_posting() -> None:
    with mesh(2) as (zero, one):
        first_open = zero.receive(None, 1)
        named = zero.receive(1, 1)
        second_open = zero.receive(None, 1)
        for value in range(3):
            one.send(torch.tensor(value), 0, 1).wait()
        assert [int(h.wait()) for h in (first_open, named, second_open)] == [0, 1, 2]


def test_a_message_to_oneself_is_copied_at_once_and_costs_no_bytes() -> None:
    with mesh(2) as (zero, _):
        posted = zero.receive(None, 5)
        tensor = torch.arange(4.0)
        assert zero.send(tensor, 0, 5).done()
        zero.send(tensor, 0, 5)
        tensor.zero_()
        into = torch.empty(2, 2)
        assert posted.wait().tolist() == [0.0, 1.0, 2.0, 3.0]
        assert posted.source == 0
        assert zero.receive(0, 5, into).wait() is into
        assert into.tolist() == [[0.0, 1.0], [2.0, 3.0]]
        assert (zero.traffic.bytes_sent, zero.traffic.bytes_received) == (0, 0)
        assert (zero.traffic.messages_sent, zero.traffic.messages_received) == (2, 2)


@pytest.mark.parametrize("posted_first", [True, False])
def test_a_message_that_does_not_fit_names_both_ends(posted_first: bool) -> None:
    with mesh(2) as (zero, one):
        into = torch.zeros(3)
        if posted_first:
            handle = zero.receive(1, 8, into)
        one.send(torch.ones(3, dtype=torch.int32), 0, 8).wait()
        one.send(torch.ones(2), 0, 9).wait()
        if not posted_first:
            zero.receive(1, 9).wait()
            one.send(torch.ones(2), 0, 9).wait()
            handle = zero.receive(1, 8, into)
        with pytest.raises(AssertionError, match=r"rank 1 sent torch.int32 .* rank 0 receives"):
            handle.wait()
        assert zero.receive(1, 9).wait().tolist() == [1.0, 1.0]  # the stream is still in step
        assert into.tolist() == [0.0, 0.0, 0.0]


def test_large_messages_pass_each_other() -> None:
    with mesh(2) as transports:

        def one_way_each(transport: SocketTransport) -> None:
            mine = torch.full((16 << 20,), float(transport.rank))
            theirs = torch.empty_like(mine)
            send = transport.send(mine, 1 - transport.rank, 0)
            send.wait()  # before anything is posted
            transport.receive(1 - transport.rank, 0, theirs).wait()
            assert bool((theirs == 1.0 - transport.rank).all())

        on_ranks(transports, one_way_each)


@pytest.mark.parametrize("elements", [10, 8 << 20])
def test_a_buffered_send_takes_the_values_of_its_call(elements: int) -> None:
    with mesh(2) as (zero, one):
        values, buffer = torch.ones(elements), torch.empty(elements)
        send = zero.send(values, 1, 0, buffer=buffer)
        values.zero_()
        receive = one.receive(0, 0)
        until(lambda: all([send.done(), receive.done()]))
        assert bool((receive.wait() == 1.0).all())
        send.wait()
        to_itself = zero.send(values, 0, 1, buffer=buffer)
        values.fill_(3.0)
        to_itself.wait()
        assert float(zero.receive(0, 1).wait().sum()) == 0.0


def test_a_message_with_more_to_come_leaves_with_the_next_one() -> None:
    with mesh(2) as (zero, one):
        head = zero.send(torch.tensor(1), 1, 0, more=True)
        first, second = one.receive(0, 0), one.receive(0, 1)
        for _ in range(100):
            assert not first.done()
        rest = zero.send(torch.arange(300_000), 1, 1)  # larger than what leaves in one call
        until(lambda: all([head.done(), rest.done(), first.done(), second.done()]))
        assert int(first.wait()) == 1
        assert torch.equal(second.wait(), torch.arange(300_000))
        lonely = zero.send(torch.tensor(2), 1, 2, more=True)  # whoever waits next sends it
        lonely.wait()
        assert int(one.receive(0, 2).wait()) == 2


def test_done_sees_what_lies_in_the_kernel_without_a_wait() -> None:
    with mesh(2) as (zero, one):
        handle = zero.receive(1, 0)
        assert not handle.done()
        one.send(torch.tensor(1), 0, 0).wait()
        until(handle.done)
        assert int(handle.wait()) == 1


def test_bytes_counted_are_the_bytes_that_the_kernel_sent() -> None:
    with mesh(3) as transports:

        def talk(transport: SocketTransport) -> None:
            peers = [rank for rank in range(3) if rank != transport.rank]
            for _ in range(200):
                exchange(transport, peers, torch.zeros(100))
            exchange(transport, peers, torch.zeros(1 << 20))
            exchange(transport, peers, torch.zeros(()))

        on_ranks(transports, talk)
        for transport in transports:
            message = header_bytes(1) + 400
            large = header_bytes(1) + (4 << 20)
            expected = 2 * (200 * message + large + header_bytes(0) + 4)
            assert transport.traffic.bytes_sent == transport.traffic.bytes_received == expected
            assert transport.acknowledged_bytes() == pytest.approx(expected, rel=0.01)


# --- flows -----------------------------------------------------------------------------------


def test_background_and_main_flow_wait_at_the_same_time() -> None:
    started = []
    transports = connect(2, on_flow_start=lambda: started.append(threading.get_ident()))

    def both(transport: SocketTransport) -> int:
        peer = 1 - transport.rank

        def background(child: Transport) -> int:
            for step in range(20):
                (received,) = exchange(child, [peer], torch.full((300_000,), step))
                assert bool((received == step).all())
            return child.traffic.messages_received

        task = transport.spawn(background)
        for step in range(300):
            transport.send(torch.tensor(step), peer, 1)
            assert int(transport.receive(peer, 1).wait()) == step
        count = task.wait()
        assert task.done()
        assert transport.traffic.messages_received == 300  # the child's are its own
        return count

    assert on_ranks(transports, both) == [20, 20]
    assert len(started) == 2
    for transport in transports:
        transport.close()


def test_a_flow_that_waits_is_woken_by_another_flow_of_its_rank() -> None:
    """The waiting flow blocks in the selector, where no byte arrives."""
    with mesh(2) as (zero, _):

        def echo(child: Transport) -> None:
            for _ in range(50):
                child.send(child.receive(0, 1).wait(), 0, 2).wait()

        task = zero.spawn(echo)
        for value in range(50):
            zero.send(torch.tensor(value), 0, 1)
            assert int(zero.receive(0, 2).wait()) == value
        task.wait()


def test_an_interrupted_leader_hands_over() -> None:
    class Interrupted(Exception):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGUSR1, interrupt)
    main = threading.get_ident()
    with mesh(2) as (zero, one):

        def follow() -> Tensor:
            until(lambda: zero._engine._leading)
            task = zero.spawn(lambda child: child.receive(1, 1).wait())
            until(lambda: zero._engine._followers == 1)
            signal.pthread_kill(main, signal.SIGUSR1)
            return task.wait()

        following = one.spawn(lambda _: follow())
        with pytest.raises(Interrupted):
            zero.receive(1, 0).wait()
        one.send(torch.tensor(3), 0, 1).wait()
        assert int(following.wait()) == 3
    signal.signal(signal.SIGUSR1, before)


def test_many_flows_share_the_lead() -> None:
    with mesh(2) as transports:

        def run(transport: SocketTransport) -> None:
            peer = 1 - transport.rank

            def flow(child: Transport, tag: int) -> None:
                for step in range(30):
                    send = child.send(torch.full((1 + 5_000 * (step % 3),), step), peer, tag)
                    assert int(child.receive(peer, tag).wait()[0]) == step
                    send.wait()

            tasks = [transport.spawn(lambda c, tag=tag: flow(c, tag)) for tag in range(8)]  # type: ignore[misc]
            for task in tasks:
                task.wait()

        on_ranks(transports, run)


def test_a_task_raises_what_its_flow_raised() -> None:
    with mesh(1) as (alone,):

        def fail(_: Transport) -> None:
            raise ZeroDivisionError("in the flow")

        task = alone.spawn(fail)
        for _ in range(2):
            with pytest.raises(ZeroDivisionError, match="in the flow"):
                task.wait()


def test_a_flow_that_fails_ends_the_others_of_its_rank() -> None:
    """They may wait for what it would have sent, long before anybody waits for its end."""
    with mesh(2) as (zero, _):

        def fail(_: Transport) -> None:
            raise ZeroDivisionError("in the flow")

        pending = zero.receive(1, 0)
        zero.spawn(fail)
        with pytest.raises(ZeroDivisionError, match="in the flow"):
            pending.wait()


def test_time_is_split_into_waiting_and_moving() -> None:
    with mesh(2) as (zero, one):

        def late(child: Transport) -> None:
            until(lambda: zero._engine._leading)  # until rank 0 blocks
            child.send(torch.zeros(4 << 20), 0, 0).wait()

        task = one.spawn(late)
        started = zero.now()
        zero.receive(1, 0).wait()
        elapsed = zero.now() - started
        assert zero.traffic.seconds_communicating > 0
        assert zero.traffic.seconds_waiting > 0
        assert zero.traffic.seconds_communicating + zero.traffic.seconds_waiting <= elapsed
        waited = one.traffic.seconds_waiting
        task.wait()
        assert one.traffic.seconds_waiting > waited


def test_the_rest_of_a_message_that_has_begun_is_not_waited_for() -> None:
    """A link that is slow keeps its ends busy; nobody is late."""
    with mesh(2, memory=False) as (zero, one):
        sending = one.send(torch.zeros(16 << 20), 0, 0)  # more than the kernels' buffers hold
        receive = zero.receive(1, 0)
        until(lambda: not receive.done() and receive.frame_bytes > 0)

        def go_on() -> int:
            until(lambda: zero._engine._leading)  # until rank 0 blocks
            return sending.wait().numel()

        in_threads([lambda: receive.wait().numel(), go_on])
        assert zero.traffic.seconds_waiting == 0.0
        assert zero.traffic.seconds_communicating > 0


# --- CUDA ------------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize("elements", [1000, 100_000])  # the larger one goes in a segment
def test_cuda_tensors_are_staged_through_the_host(elements: int) -> None:
    with mesh(2) as (zero, one):
        sent = torch.arange(elements, dtype=torch.bfloat16, device="cuda")
        into = torch.zeros_like(sent)
        posted = one.receive(0, 0, into)
        assert zero.send(sent, 1, 0).wait() is sent
        assert torch.equal(posted.wait(), sent)
        zero.send(sent, 1, 1).wait()
        on_host = one.receive(0, 1).wait()
        assert on_host.device.type == "cpu"
        assert torch.equal(on_host, sent.cpu())
        late = torch.zeros_like(sent)
        zero.send(sent, 1, 2).wait()
        zero.send(sent, 1, 3).wait()
        one.receive(0, 3).wait()
        assert torch.equal(one.receive(0, 2, late).wait(), sent)
