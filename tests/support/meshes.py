"""Meshes of socket transports whose ranks are threads of this process, and their certificates."""

from __future__ import annotations

import contextlib
import datetime
import random
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from torch import Tensor

from orchestra.errors import RunAborted
from orchestra.transports import executor
from orchestra.transports.framing import DTYPES
from orchestra.transports.handshake import (
    CHALLENGE_BYTES,
    TLS,
    address_of,
    challenge,
    hello,
    listen,
)
from orchestra.transports.protocol import Transport
from orchestra.transports.sockets import SocketTransport, connect_mesh

T = TypeVar("T")
TOKEN = b"the run's token"
SHARES_MEMORY = False
"""Whether large messages between the ranks of a mesh usually go in shared memory."""
SEGMENT_BYTES = 32 << 20
"""Of the segment that each rank has for each other one from the beginning."""


def in_threads(functions: Sequence[Callable[[], T]]) -> list[T]:
    """Run all at once; raise the first error."""
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def call(index: int) -> None:
        try:
            results[index] = functions[index]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call, args=(i,), daemon=True) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), f"hangs; errors elsewhere: {errors}"
    if errors:
        raise errors[0]
    return [results[index] for index in range(len(functions))]


def connect(
    size: int, tls: TLS | None = None, on_flow_start: Callable[[], None] = lambda: None
) -> list[SocketTransport]:
    listeners = [listen() for _ in range(size)]
    addresses = [address_of(listener) for listener in listeners]

    def join(rank: int) -> SocketTransport:
        return connect_mesh(
            rank,
            addresses,
            listeners[rank],
            TOKEN,
            tls=tls,
            timeout=120,
            compiled=tls is None and executor.is_there(),
            on_flow_start=on_flow_start,
        )

    return in_threads([lambda rank=rank: join(rank) for rank in range(size)])  # type: ignore[misc]


@contextlib.contextmanager
def mesh(
    size: int, tls: TLS | None = None, memory: bool | None = None
) -> Iterator[list[SocketTransport]]:
    """`memory`: whether large messages go in shared memory, if not as usual."""
    transports = connect(size, tls)
    try:
        if SHARES_MEMORY if memory is None else memory:
            share_memory(transports)
        yield transports
    finally:
        for transport in transports:
            transport.close()


def claim_rank(
    connection: socket.socket, claimed: int, receiver: int, token: bytes, then: bytes = b""
) -> tuple[bytes, bytes]:
    """Send the hello of rank `claimed`, and `then`; return the challenges, this end's first."""
    own, other = challenge(), connection.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)
    connection.sendall(own + hello(claimed, receiver, token, own, other) + then)
    return own, other


def until_closed(stranger: socket.socket) -> None:
    """Block until the other end, which sends no more than its challenge, has closed."""
    said = b""
    with contextlib.suppress(ConnectionResetError):  # it has not read all that was sent
        while data := stranger.recv(100):
            said += data
    assert len(said) in (0, CHALLENGE_BYTES)


def share_memory(transports: Sequence[SocketTransport]) -> None:
    """Let large messages go in shared memory; ranks elsewhere have to call this as well.

    Returns when each rank has a segment for messages to each other one.
    """
    outboxes = []
    for transport in transports:
        transport.share_memory(range(transport.size))
        for rank, stream in transport._engine._streams.items():
            assert transport._engine.segment(rank, SEGMENT_BYTES) is None  # there is none yet
            assert stream.outbox is not None
            outboxes.append(stream.outbox)
    while not all(segment.is_mapped for outbox in outboxes for segment in outbox._segments):
        for transport in transports:
            transport._engine.check(range(transport.size))


def on_ranks(
    transports: Sequence[SocketTransport], function: Callable[[SocketTransport], T]
) -> list[T]:
    return in_threads([lambda t=t: function(t) for t in transports])  # type: ignore[misc]


def random_tensor(generator: random.Random, largest: int = 200_000) -> Tensor:
    dtype = generator.choice(DTYPES)
    shape = generator.choice(
        [(), (0,), (3, 0, 2), (1,), (7, 5), (2, 3, 4, 5), (generator.randrange(largest),)]
    )
    count = int(torch.Size(shape).numel()) * dtype.itemsize
    values = torch.frombuffer(bytearray(generator.randbytes(count) or b"\0"), dtype=torch.uint8)
    if dtype == torch.bool:
        values = values % 2
    return values[:count].clone().view(dtype).reshape(shape)


def same(a: Tensor, b: Tensor) -> bool:
    """Equal shape, dtype and bits (NaN included)."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def exchange_randomly(transport: SocketTransport, seed: int) -> None:
    """Every rank knows every message of the plan; all go at once, in an order of their own."""
    plan = random.Random(seed)
    ranks = range(transport.size)
    messages = [
        (plan.choice(ranks), plan.choice(ranks), plan.randrange(3), random_tensor(plan))
        for _ in range(60)
    ]
    own = random.Random(seed * 100 + transport.rank)
    actions: list[tuple[str, int, int, Tensor]] = [
        ("send", target, tag, tensor)
        for source, target, tag, tensor in messages
        if source == transport.rank
    ] + [
        ("receive", source, tag, tensor)
        for source, target, tag, tensor in messages
        if target == transport.rank
    ]
    # Any interleaving of sends and receives that keeps the order within each (kind, peer, tag).
    order = sorted(range(len(actions)), key=lambda _: own.random())
    queues: dict[tuple[str, int, int], list[Tensor]] = {}
    for kind, peer, tag, tensor in actions:
        queues.setdefault((kind, peer, tag), []).append(tensor)
    pending = []
    sends = []
    for index in order:
        kind, peer, tag, _ = actions[index]
        tensor = queues[kind, peer, tag].pop(0)
        if kind == "send":
            sends.append((transport.send(tensor, peer, tag), tensor))
        else:
            into = torch.empty_like(tensor) if own.random() < 0.5 else None
            pending.append((transport.receive(peer, tag, into), into, peer, tensor))
    own.shuffle(pending)
    for handle, into, peer, expected in pending:
        received = handle.wait()
        assert same(received, expected)
        assert into is None or received is into
        assert handle.source == peer
        assert handle.done()
    for send, tensor in sends:
        assert send.wait() is tensor
        assert send.source == transport.rank


def exchange(transport: Transport, peers: Sequence[int], tensor: Tensor) -> list[Tensor]:
    """Send `tensor` to each of `peers`, and return what they send."""
    sends = [transport.send(tensor, peer, 0) for peer in peers]
    received = [transport.receive(peer, 0).wait() for peer in peers]
    for send in sends:
        send.wait()
    return received


def until(condition: Callable[[], bool]) -> None:
    """Spin; the time limit of the test ends what never comes."""
    while not condition():
        pass


def vanish(transport: SocketTransport) -> None:
    """End without a farewell, as a killed process does."""
    transport.abort(RunAborted("killed"))
    transport.close()


def make_certificate(
    folder: Path,
    name: str,
    issuer: tuple[x509.Certificate, ec.EllipticCurvePrivateKey] | None,
    *,
    hours: float = 1.0,
    uses: Sequence[x509.ObjectIdentifier] = (
        ExtendedKeyUsageOID.SERVER_AUTH,
        ExtendedKeyUsageOID.CLIENT_AUTH,
    ),
) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer[0].subject if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=2))
        .not_valid_after(now + datetime.timedelta(hours=hours))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        .sign(issuer[1] if issuer else key, hashes.SHA256())
    )
    (folder / f"{name}.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (folder / f"{name}.key").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return certificate, key


def make_tls(folder: Path, authority: str = "authority") -> TLS:
    issuer = make_certificate(folder, authority, None)
    make_certificate(folder, f"{authority}-rank", issuer)
    return TLS(
        folder / f"{authority}-rank.pem",
        folder / f"{authority}-rank.key",
        folder / f"{authority}.pem",
    )
