"""How the ranks of one host find each other, and give each other files and sockets."""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

_TOKEN_BYTES = 32
_HELLO = struct.Struct(f"<i{_TOKEN_BYTES}s")
_NOTE = b"\0"
"""What a descriptor travels with."""

POLL_SECONDS = 0.2
"""Between two looks at whether a rank that has still to connect is gone."""


def host_key() -> str:
    """What tells hosts, and containers that cannot reach each other's sockets, apart.

    It is empty where no memory can be shared.
    """
    if not hasattr(os, "memfd_create"):
        return ""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    return f"{boot.strip()} {Path('/proc/self/ns/net').readlink()}"


@dataclass(frozen=True)
class HostRendezvous:
    """How the ranks of one host find each other.

    Attributes:
        rank, size: of this rank, and how many there are.
        publish: shows bytes to all other ranks.
        lookup: what another rank has shown, waiting for it.
        timeout: seconds for a connection.
        check: called while it waits; may raise.
    """

    rank: int
    size: int
    publish: Callable[[bytes], object]
    lookup: Callable[[int], bytes]
    timeout: float
    check: Callable[[], object] = lambda: None

    def connect(self) -> dict[int, socket.socket]:
        """Connect by a Unix socket for each pair; every rank calls it.

        Raises:
            ValueError: a rank is on another host.
            TimeoutError: a rank has not come in time.
        """
        token, host = secrets.token_bytes(_TOKEN_BYTES), host_key()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind("")  # an abstract address that the kernel chooses: no file to remove
            listener.listen(self.size)
            address = listener.getsockname()
            self.publish(json.dumps([host, token.hex(), address.hex()]).encode())
            shown = {
                peer: json.loads(self.lookup(peer))
                for peer in range(self.size)
                if peer != self.rank
            }
            for peer, (other, _, _) in shown.items():
                if other != host:
                    raise ValueError(
                        f"rank {peer} is on another host than rank {self.rank}, and shared memory "
                        "joins the ranks of one host: use the backend gloo between hosts"
                    )
            peers = {peer: self._call(*shown[peer][1:]) for peer in range(self.rank)}
            self._accept(listener, token, peers)
        return peers

    def _call(self, token: str, address: str) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(self.timeout)
        connection.connect(bytes.fromhex(address))
        connection.sendall(_HELLO.pack(self.rank, bytes.fromhex(token)))
        return connection

    def _accept(
        self, listener: socket.socket, token: bytes, peers: dict[int, socket.socket]
    ) -> None:
        deadline = time.monotonic() + self.timeout
        listener.settimeout(POLL_SECONDS)
        while len(peers) < self.size - 1:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                self.check()
                if time.monotonic() > deadline:
                    raise
                continue
            connection.settimeout(self.timeout)
            peer, shown = _HELLO.unpack(_read(connection, _HELLO.size))
            if hmac.compare_digest(shown, token):
                peers[peer] = connection


def _read(connection: socket.socket, length: int) -> bytes:
    found = bytearray()
    while len(found) < length:
        more = connection.recv(length - len(found))
        if not more:
            raise ConnectionError("a rank closed its connection while the ranks connected")
        found += more
    return bytes(found)


def make_memory(length: int) -> int:
    """Make memory of `length` bytes: its file descriptor.

    Raises OSError where the limits of the process (on the size of files, for one) do not allow it.
    """
    memory = os.memfd_create("orchestra", os.MFD_CLOEXEC)
    try:
        os.ftruncate(memory, length)
    except OSError:
        os.close(memory)
        raise
    return memory


def pass_on(peers: Mapping[int, socket.socket], memory: int | None) -> int:
    """Rank 0 gives the others its `memory`: the file descriptor of each."""
    if memory is not None:
        for connection in peers.values():
            socket.send_fds(connection, [_NOTE], [memory])
        return memory
    return _descriptor(peers[0])


def second_connections(rank: int, peers: Mapping[int, socket.socket]) -> dict[int, socket.socket]:
    """One more connection to each rank; the lower rank of the two makes it."""
    return {peer: _second(rank, peer, connection) for peer, connection in peers.items()}


def _second(rank: int, peer: int, connection: socket.socket) -> socket.socket:
    if rank < peer:
        own, other = socket.socketpair()
        with other:
            socket.send_fds(connection, [_NOTE], [other.fileno()])
        return own
    return socket.socket(fileno=_descriptor(connection))


def _descriptor(connection: socket.socket) -> int:
    _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
    if not descriptors:
        raise ConnectionError("a rank closed its connection while the ranks connected")
    return descriptors[0]
