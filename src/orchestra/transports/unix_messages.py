"""Messages between two ranks of one host, over Unix sockets, matched by source and tag."""

from __future__ import annotations

import contextlib
import queue
import socket
import struct
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from orchestra.errors import PeerLost

_HEADER = struct.Struct("<qq")  # tag, bytes


@dataclass
class _Posted:
    """A receive that waits for its message; from any rank where `source` is None."""

    source: int | None
    tag: int
    into: Tensor
    done: Future[Any]


class UnixMessages:
    """One rank's end. Messages of one source and tag arrive in the order in which they were sent.

    A send is complete once the kernel has taken the whole message. A message that nobody waits for
    is kept until somebody does. Each direction to each peer has a thread, from its first use on.

    Args:
        peers: a connected Unix socket for each other rank.
    """

    def __init__(self, peers: Mapping[int, socket.socket]) -> None:
        self._peers = dict(peers)
        self._outgoing: dict[int, queue.SimpleQueue[tuple[Tensor, int, Future[Any]] | None]] = {}
        self._lock = threading.Lock()
        self._posted: list[_Posted] = []
        self._unexpected: dict[int, deque[tuple[int, Tensor]]] = defaultdict(deque)  # by tag
        self._lost: set[int] = set()
        self._threads: list[threading.Thread] = []
        self._reading = False

    def send(self, tensor: Tensor, to: int, tag: int) -> Future[Any]:
        """Begin to send a contiguous `tensor`."""
        if to not in self._outgoing:
            self._outgoing[to] = queue.SimpleQueue()
            self._start(self._send_all, to)
        done: Future[Any] = Future()
        self._outgoing[to].put((tensor, tag, done))
        return done

    def receive(self, into: Tensor, source: int | None, tag: int) -> Future[Any]:
        """Begin to receive into a contiguous tensor; the result is the rank that sent it."""
        posted = _Posted(source, tag, into, Future())
        with self._lock:
            if not self._reading:
                self._reading = True
                for peer in self._peers:
                    self._start(self._receive_all, peer)
            waiting = self._unexpected[tag]
            for message in waiting:
                if source in (None, message[0]):
                    waiting.remove(message)
                    _deliver(posted, *message)
                    return posted.done
            if source in self._lost:
                posted.done.set_exception(PeerLost(source))
            else:
                self._posted.append(posted)
        return posted.done

    def close(self) -> None:
        """Disconnect, once what was sent has gone."""
        for outgoing in self._outgoing.values():
            outgoing.put(None)
        for connection in self._peers.values():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RD)  # which ends the thread that reads
        for thread in self._threads:
            thread.join()
        for connection in self._peers.values():
            connection.close()

    def _start(self, function: Callable[[int], None], peer: int) -> None:
        self._threads.append(threading.Thread(target=function, args=(peer,), daemon=True))
        self._threads[-1].start()

    def _send_all(self, to: int) -> None:
        connection = self._peers[to]
        while (message := self._outgoing[to].get()) is not None:
            tensor, tag, done = message
            try:
                connection.sendall(_HEADER.pack(tag, tensor.nbytes))
                connection.sendall(_memory(tensor))
            except OSError:
                done.set_exception(PeerLost(to))
            else:
                done.set_result(None)

    def _receive_all(self, source: int) -> None:
        connection = self._peers[source]
        header = bytearray(_HEADER.size)
        while _fill(connection, memoryview(header)):
            tag, length = _HEADER.unpack(header)
            message = torch.empty(length, dtype=torch.uint8)
            if not _fill(connection, _memory(message)):
                break
            with self._lock:
                for posted in self._posted:
                    if posted.tag == tag and posted.source in (None, source):
                        self._posted.remove(posted)
                        _deliver(posted, source, message)
                        break
                else:
                    self._unexpected[tag].append((source, message))
        with self._lock:
            self._lost.add(source)
            for posted in self._posted[:]:
                if posted.source == source or len(self._lost) == len(self._peers):
                    self._posted.remove(posted)
                    posted.done.set_exception(PeerLost(source))


def _deliver(posted: _Posted, source: int, message: Tensor) -> None:
    if message.nbytes != posted.into.nbytes:
        error = ValueError(
            f"rank {source} sent {message.nbytes} bytes, and the receive is of "
            f"{posted.into.nbytes}: both ends need tensors of one size and dtype"
        )
        posted.done.set_exception(error)
        return
    posted.into.view(-1).view(torch.uint8).copy_(message)
    posted.done.set_result(source)


def _memory(tensor: Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data


def _fill(connection: socket.socket, memory: memoryview) -> bool:
    """Read until `memory` is full: False where the connection ended before."""
    while memory:
        try:
            count = connection.recv_into(memory)
        except OSError:
            return False
        if not count:
            return False
        memory = memory[count:]
    return True
