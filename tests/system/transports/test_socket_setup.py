"""The socket transport: how a mesh is set up, with tokens and with TLS."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import ssl
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography.x509.oid import ExtendedKeyUsageOID
from tests.support.meshes import (
    TOKEN,
    claim_rank,
    exchange,
    exchange_randomly,
    in_threads,
    make_certificate,
    make_tls,
    mesh,
    on_ranks,
    until_closed,
    vanish,
)
from tests.support.waiting import wait_until

from orchestra.engines.failure_detector import Limits
from orchestra.engines.processes.control import Control, RankSpec
from orchestra.engines.processes.watcher import Watcher
from orchestra.errors import GroupChanged, InputError, PeerLost, RunFailed
from orchestra.transports import framing, handshake
from orchestra.transports.framing import pack_header
from orchestra.transports.handshake import MAGIC, TLS, address_of, hello, listen
from orchestra.transports.matching import Mailbox
from orchestra.transports.sockets import STRANGERS, SocketTransport, connect_mesh

# --- set-up ----------------------------------------------------------------------------------


def test_a_stranger_never_takes_a_ranks_place() -> None:
    listeners = [listen(), listen()]
    addresses = [address_of(listener) for listener in listeners]
    silent = socket.create_connection(addresses[0])
    silent.sendall(MAGIC[:3])
    noisy = socket.create_connection(addresses[0])
    noisy.sendall(
        b"GET / HTTP/1.1\r\nHost: somebody\r\nAccept: everything, and more than that\r\n\r\n"
    )
    results: list[SocketTransport] = []
    accepting = threading.Thread(
        target=lambda: results.append(connect_mesh(0, addresses, listeners[0], TOKEN, timeout=60))
    )
    accepting.start()
    with pytest.raises(PeerLost, match="rank 0 is gone: it could not be reached"):
        connect_mesh(1, addresses, listen(), b"a wrong token", timeout=60)
    one = connect_mesh(1, addresses, listeners[1], TOKEN, timeout=60)
    accepting.join(60)
    (zero,) = results
    one.send(torch.tensor(3), 0, 0)
    assert int(zero.receive(1, 0).wait()) == 3
    silent.settimeout(30)
    for stranger in (silent, noisy):
        until_closed(stranger)  # dropped, not kept
    for closable in (silent, noisy, zero, one):
        closable.close()


def record_hellos() -> list[bytes]:
    """Connect ranks 0 and 1 through a relay; return the bytes that each of them has sent."""
    listeners = [listen(), listen()]
    addresses = [address_of(listener) for listener in listeners]
    with listen() as relay:
        relayed = [address_of(relay), addresses[1]]

        def forward() -> list[bytes]:
            with relay.accept()[0] as one, socket.create_connection(addresses[0]) as zero:
                return in_threads([lambda: pump(zero, one), lambda: pump(one, zero)])

        _, _, said = in_threads(
            [
                lambda: connect_mesh(0, addresses, listeners[0], TOKEN, timeout=60).close(),
                lambda: connect_mesh(1, relayed, listeners[1], TOKEN, timeout=60).close(),
                forward,
            ]
        )
    assert said is not None
    return said


def pump(source: socket.socket, sink: socket.socket) -> bytes:
    """Forward what `source` says until one of the ends has closed; return it."""
    said = b""
    with contextlib.suppress(OSError):
        while data := source.recv(4096):
            said += data
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
    return said


def test_replayed_hello_does_not_take_a_ranks_place() -> None:
    _, said = record_hellos()
    listeners = [listen(), listen()]
    addresses = [address_of(listener) for listener in listeners]
    results: list[SocketTransport] = []
    accepting = threading.Thread(
        target=lambda: results.append(connect_mesh(0, addresses, listeners[0], TOKEN, timeout=60))
    )
    accepting.start()
    with socket.create_connection(addresses[0], timeout=60) as impostor:
        impostor.sendall(said)
        one = connect_mesh(1, addresses, listeners[1], TOKEN, timeout=60)
        accepting.join(60)
    one.send(torch.tensor(3), 0, 0)
    assert int(results[0].receive(1, 0).wait()) == 3
    results[0].close()
    one.close()


def test_replayed_answer_does_not_prove_a_listener() -> None:
    said, _ = record_hellos()
    with listen() as impostor, contextlib.ExitStack() as stack:

        def answer() -> None:
            connection, _ = impostor.accept()
            stack.enter_context(connection).sendall(said)

        answering = threading.Thread(target=answer)
        answering.start()
        listener = listen()
        addresses = [address_of(impostor), address_of(listener)]
        with pytest.raises(PeerLost, match="what listens there is not of this run"):
            connect_mesh(1, addresses, listener, TOKEN, timeout=60)
        answering.join(60)


def test_more_strangers_than_there_may_be_push_out_the_oldest() -> None:
    listeners = [listen(), listen()]
    addresses = [address_of(listener) for listener in listeners]
    with contextlib.ExitStack() as stack:
        accepting = threading.Thread(
            target=lambda: connect_mesh(0, addresses, listeners[0], TOKEN, timeout=60).close()
        )
        accepting.start()
        strangers = [
            stack.enter_context(socket.create_connection(addresses[0], timeout=60))
            for _ in range(STRANGERS + 2)
        ]
        until_closed(strangers[0])
        connect_mesh(1, addresses, listeners[1], TOKEN, timeout=60).close()
        accepting.join(60)
        assert not accepting.is_alive()


def test_a_rank_that_is_there_keeps_its_place() -> None:
    listener = listen()
    address = address_of(listener)
    accepting = threading.Thread(
        target=lambda: connect_mesh(0, [address] * 3, listener, TOKEN, timeout=60).close()
    )
    accepting.start()
    with contextlib.ExitStack() as stack:
        answers = []
        for claimed in (1, 1, 7, 2):
            connection = socket.create_connection(address, timeout=60)
            stack.enter_context(connection)
            own, other = claim_rank(connection, claimed, 0, TOKEN)
            right = hello(0, claimed, TOKEN, other, own)
            answers.append((connection.recv(len(right)), right))  # more may follow
        (one, right_one), (again, _), (unknown, _), (two, right_two) = answers
        assert (one, again, unknown, two) == (right_one, b"", b"", right_two)
        accepting.join(60)
        assert not accepting.is_alive()


def test_set_up_names_the_rank_that_is_missing() -> None:
    gone = listen()
    gone.close()
    with listen() as listener:
        addresses = [("127.0.0.1", 1), address_of(listener), ("127.0.0.1", 1)]
        with pytest.raises(PeerLost, match=r"rank 0 .* could not be reached at 127\.0\.0\.1:1"):
            connect_mesh(1, addresses, listener, TOKEN, timeout=5)
    with listen() as listener:
        with pytest.raises(PeerLost, match=r"rank 1 .* did not connect in time \(nor did 2\)"):
            connect_mesh(0, [address_of(listener)] * 3, listener, TOKEN, timeout=0.05)
        assert listener.fileno() == -1  # no open port remains


def test_a_rank_that_connects_tells_whom_it_waits_for() -> None:
    """Else a rank that hangs before it connects would hang like those that wait for it."""
    listeners = [listen(), listen(), listen()]
    addresses = [address_of(listener) for listener in listeners]
    told: dict[int, list[tuple[int, ...]]] = {0: [], 1: [], 2: []}

    def connect(rank: int) -> None:
        waits = told[rank].append
        listener = listeners[rank]
        connect_mesh(rank, addresses, listener, TOKEN, timeout=60, on_wait=waits).close()

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    connect(2)
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert told[0] in ([(1, 2), (2,), ()], [(1, 2), (1,), ()])
    assert (told[1], told[2]) == ([(0,), (2,), ()], [(0,), (1,), ()])


def test_an_address_of_another_machine_is_an_input_error() -> None:
    with pytest.raises(InputError, match=r"cannot listen on '192\.0\.2\.1'"):
        listen("192.0.2.1")


# --- TLS -------------------------------------------------------------------------------------


def test_messages_under_tls(tmp_path: Path) -> None:
    with mesh(3, make_tls(tmp_path)) as transports:
        on_ranks(transports, lambda t: exchange_randomly(t, 1))

        def large(transport: SocketTransport) -> None:
            peers = [rank for rank in range(3) if rank != transport.rank]
            received = exchange(transport, peers, torch.full((2 << 20,), transport.rank))
            for peer, tensor in zip(peers, received, strict=True):
                assert bool((tensor == peer).all())

        on_ranks(transports, large)
        transports[1].close()
        with pytest.raises(PeerLost, match="rank 1 is gone: it has left"):
            transports[0].receive(1, 0).wait()
        vanish(transports[2])
        with pytest.raises(PeerLost, match="rank 2 is gone: its connection"):
            transports[0].receive(2, 0).wait()


def test_tls_leaves_no_decrypted_message_where_no_selector_sees_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One record holds the end of a message, where a turn of reading ends, and the next one."""
    monkeypatch.setattr(framing, "CALL_BYTES", 45_000)
    tls = make_tls(tmp_path)
    first, second = torch.ones(46_000, dtype=torch.uint8), torch.ones(900, dtype=torch.uint8)
    wire = b"".join(pack_header(t, 0) + t.numpy().tobytes() for t in (first, second))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        server, client = in_threads(
            [
                lambda: tls.context(server_side=True).wrap_socket(ours, server_side=True),
                lambda: tls.context(server_side=False).wrap_socket(theirs),
            ]
        )
        with server, client:
            for start in range(0, len(wire), 10_000):
                client.sendall(wire[start : start + 10_000])
            mailbox = Mailbox(0)
            stream = framing.Stream(server, 1, mailbox)
            assert stream.read() == len(wire)  # in one turn


@pytest.mark.parametrize("stranger", ["no certificate", "no TLS", "another authority"])
def test_tls_refuses_who_shows_no_certificate_of_the_authority(
    tmp_path: Path, stranger: str
) -> None:
    tls = make_tls(tmp_path)
    listeners = [listen(), listen()]
    addresses = [address_of(listener) for listener in listeners]
    results: list[SocketTransport] = []
    accepting = threading.Thread(
        target=lambda: results.append(
            connect_mesh(0, addresses, listeners[0], TOKEN, tls=tls, timeout=60)
        )
    )
    accepting.start()
    shown = {
        "no certificate": Anonymous(tls.certificate, tls.key, tls.authority),
        "no TLS": None,
        "another authority": dataclasses.replace(
            make_tls(tmp_path, "foreign"), authority=tls.authority
        ),
    }
    told = {
        "no certificate": "refuses the certificate of this end: certificate required",
        "no TLS": "",
        "another authority": "refuses the certificate of this end: unknown ca",
    }
    lost = f"rank 0 is gone: it could not be reached.*{told[stranger]}"
    with pytest.raises(PeerLost, match=lost):
        connect_mesh(1, addresses, listen(), TOKEN, tls=shown[stranger], timeout=60)
    one = connect_mesh(1, addresses, listeners[1], TOKEN, tls=tls, timeout=60)
    accepting.join(60)
    results[0].close()
    one.close()


def test_a_certificate_that_is_refused_is_named_on_both_sides(tmp_path: Path) -> None:
    """Of the control connection: by the watcher, and by the rank; it costs the run nothing."""
    issuer = make_certificate(tmp_path, "authority", None)

    def shown(name: str, **about: Any) -> TLS:
        make_certificate(tmp_path, name, issuer, **about)
        names = (f"{name}.pem", f"{name}.key", "authority.pem")
        return TLS(*(tmp_path / name for name in names))

    good = shown("good")
    expired = shown("expired", hours=-1.0)
    for_servers = shown("servers", uses=[ExtendedKeyUsageOID.SERVER_AUTH])
    for_clients = shown("clients", uses=[ExtendedKeyUsageOID.CLIENT_AUTH])
    foreign = make_tls(tmp_path, "foreign")
    refuses, refused = (
        "it refuses the certificate of this end: ",
        "its certificate is refused here: ",
    )
    cases = [  # what the watcher has, what the rank has, and what each says
        (good, foreign, refuses + "unknown ca", refused + "self-signed"),
        (
            good,
            dataclasses.replace(foreign, authority=good.authority),
            refused + "unable to get local issuer",
            refuses + "unknown ca",
        ),
        (good, expired, refused + "certificate has expired", refuses + "certificate expired"),
        (expired, good, refuses + "certificate expired", refused + "certificate has expired"),
        (good, for_servers, refused + "unsuitable", refuses + "unsupported certificate"),
        (for_clients, good, refuses + "unsupported certificate", refused + "unsuitable"),
        (good, Anonymous(good.certificate, good.key, good.authority), "it shows no", refuses),
        (good, None, "it does not speak TLS", "rank 0 cannot reach the watcher"),
    ]
    for ours, theirs, here, there in cases:
        watcher = Watcher(1, Limits(), host="127.0.0.1", token="s", children=False, tls=ours)
        watcher.start()
        spec = RankSpec(0, 1, 0, watcher.address, "127.0.0.1", "s", Limits(), tls=theirs)
        with pytest.raises(RunFailed, match=there):
            Control(spec)
        notices = watcher.detector.notices
        wait_until(lambda: bool(notices), "the watcher says so")  # noqa: B023
        assert notices[0].startswith(f"a connection from 127.0.0.1 was refused: {here}"), notices
        assert (len(notices), watcher.detector.cause) == (1, None)
        watcher.abandon()


class Anonymous(TLS):
    """Trusts the authority, and shows nothing."""

    def context(self, *, server_side: bool) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.load_verify_locations(self.authority)
        return context


def test_tls_files_that_cannot_be_used_are_an_input_error(tmp_path: Path) -> None:
    tls = make_tls(tmp_path)
    with pytest.raises(InputError, match="TLS cannot use certificate"):
        dataclasses.replace(tls, key=tmp_path / "absent.key").context(server_side=True)


def test_who_connects_to_a_silent_address_looks_whether_it_is_still_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(handshake, "LOOK_SECONDS", 0.05)

    def look() -> None:
        raise GroupChanged("there is a new group")

    with contextlib.ExitStack() as sockets:
        # Linux answers nothing once as many connections wait as the listener has room for.
        full = sockets.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            waiting = sockets.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        deadline = time.perf_counter() + 60.0
        with pytest.raises(GroupChanged):
            handshake.connect(
                full.getsockname(), 1, 0, b"token", tls=None, deadline=deadline, look=look
            )
