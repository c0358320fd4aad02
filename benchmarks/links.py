"""How long rounds of messages take over TCP, between network namespaces with links that are shaped.

Each node is a namespace; veth pairs join them to a bridge, with a token bucket (tbf) at both ends.
In a round each node sends and receives as the pattern says; a round is over when all is received.
Linux, root, iproute2; figures are the mean of later rounds over what the bytes and their headers
take at the rate of the link.

Then what a kernel takes in for a process that does not read, in MB: on a new connection, and after
the process has read as many bytes as stand there.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import multiprocessing
import os
import selectors
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

FRAME = 1514 / 1448  # of what tbf counts for each byte: headers, without preamble and checksum
NEW_NETWORK = 0x40000000  # CLONE_NEWNET
PREFIX = f"links{os.getpid() % 10000}-"
Exchange = Callable[[Sequence[int], Sequence[int]], None]
Pattern = Callable[[Exchange, int, int], None]


def one_way(exchange: Exchange, rank: int, ranks: int) -> None:
    """Rank 0 sends to rank 1, then rank 1 to rank 0."""
    for sender in range(2):
        if rank == sender:
            exchange([1 - rank], [])
        else:
            exchange([], [1 - rank])


def ring(exchange: Exchange, rank: int, ranks: int) -> None:
    """Each sends to the next one."""
    exchange([(rank + 1) % ranks], [(rank - 1) % ranks])


def changing(exchange: Exchange, rank: int, ranks: int) -> None:
    """Each exchanges with one partner, then with another one."""
    for distance in (1, 2):
        exchange([rank ^ distance], [rank ^ distance])


PATTERNS: dict[str, tuple[Pattern, int, int]] = {  # ranks, messages on the busiest link
    "one way": (one_way, 2, 2),
    "both ways": (ring, 2, 1),
    "ring": (ring, 4, 1),
    "changing partners": (changing, 4, 2),
}


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def inside(name: str, *command: str) -> None:
    run("ip", "netns", "exec", PREFIX + name, *command)


def set_up(nodes: int, megabits: float, queue: str) -> None:
    """Make the namespaces, and a bridge in one of its own."""
    burst = str(max(16 * 1024, int(megabits * 1e6 / 8 / 250)))  # of 4 ms
    shape = ("root", "tbf", "rate", f"{megabits}mbit", "burst", burst, *queue.split())
    run("ip", "netns", "add", PREFIX + "switch")
    inside("switch", "ip", "link", "add", "bridge", "type", "bridge")
    inside("switch", "ip", "link", "set", "bridge", "up")
    for rank in range(nodes):
        name, here, there = f"n{rank}", f"a{os.getpid()}-{rank}", f"b{os.getpid()}-{rank}"
        run("ip", "netns", "add", PREFIX + name)
        run("ip", "link", "add", here, "type", "veth", "peer", "name", there)
        run("ip", "link", "set", here, "netns", PREFIX + name)
        run("ip", "link", "set", there, "netns", PREFIX + "switch")
        inside(name, "ip", "addr", "add", f"10.77.0.{rank + 1}/24", "dev", here)
        inside(name, "ip", "link", "set", here, "up")
        inside("switch", "ip", "link", "set", there, "master", "bridge", "up")
        inside(name, "tc", "qdisc", "add", "dev", here, *shape)
        inside("switch", "tc", "qdisc", "add", "dev", there, *shape)


def clean_up(nodes: int) -> None:
    for name in ("switch", *(f"n{rank}" for rank in range(nodes))):
        with suppress(subprocess.CalledProcessError):
            run("ip", "netns", "del", PREFIX + name)


def connect(rank: int, ranks: int, control: str, barrier: Any) -> dict[int, socket.socket]:
    """Enter the namespace of `rank`, and connect with all others."""
    with Path(f"/run/netns/{PREFIX}n{rank}").open() as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), NEW_NETWORK):
            raise OSError(ctypes.get_errno(), "setns")
    connections: dict[int, socket.socket] = {}
    listener = socket.create_server((f"10.77.0.{rank + 1}", 7000))
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, control.encode())
    barrier.wait()
    for peer in range(rank + 1, ranks):
        connection = socket.socket()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, control.encode())
        connection.connect((f"10.77.0.{peer + 1}", 7000))
        connection.sendall(bytes([rank]))
        connections[peer] = connection
    for _ in range(rank):
        connection, _ = listener.accept()
        connections[connection.recv(1)[0]] = connection
    for connection in connections.values():
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(False)
    return connections


def measure(
    pattern: str, rank: int, size: int, rounds: int, control: str, barrier: Any, results: Any
) -> None:
    """One node: carry out the rounds, and tell how long they took after the first third."""
    carry_out, ranks, _ = PATTERNS[pattern]
    connections = connect(rank, ranks, control, barrier)
    payload, buffer = memoryview(bytearray(size)), bytearray(1 << 20)

    def exchange(targets: Sequence[int], sources: Sequence[int]) -> None:
        left = {("to", peer): size for peer in targets} | {("from", p): size for p in sources}
        with selectors.DefaultSelector() as selector:
            for peer in {*targets, *sources}:
                selector.register(connections[peer], 3, peer)
            while left:
                for key, events in selector.select():
                    out, back = ("to", key.data), ("from", key.data)
                    if events & selectors.EVENT_WRITE and out in left:
                        left[out] -= connections[key.data].send(payload[-left[out] :])
                    if events & selectors.EVENT_READ and back in left:
                        wanted = min(left[back], len(buffer))
                        left[back] -= connections[key.data].recv_into(buffer, wanted)
                    left = {end: rest for end, rest in left.items() if rest}
                    wanted = (back in left) * selectors.EVENT_READ
                    wanted |= (out in left) * selectors.EVENT_WRITE
                    if wanted:
                        selector.modify(connections[key.data], wanted, key.data)
                    else:
                        selector.unregister(connections[key.data])

    barrier.wait()
    times = [time.perf_counter()]
    for _ in range(rounds):
        carry_out(exchange, rank, ranks)
        times.append(time.perf_counter())
    results.put(times[-1] - times[rounds // 3])
    barrier.wait()


READ_BEFORE = (0, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26)
"""Bytes that node 1 reads before it stops to."""


def fill(rank: int, before: int, control: str, barrier: Any, results: Any) -> None:
    """Node 0 sends without end; node 1 reads `before` bytes, then none until nothing comes."""
    connection = connect(rank, 2, control, barrier)[1 - rank]
    connection.setblocking(True)
    if rank == 0:
        with suppress(ConnectionError):
            while True:
                connection.sendall(bytes(1 << 20))
    while before:
        before -= len(connection.recv(min(before, 1 << 20)))
    unread, last = 0, -1
    while unread > last:
        time.sleep(0.5)  # longer than a link stalls for
        held = fcntl.ioctl(connection, termios.FIONREAD, struct.pack("i", 0))
        last, (unread,) = unread, struct.unpack("i", held)
    results.put(unread)


def fill_buffers(megabits: float, queue: str, control: str) -> list[float]:
    """Return the bytes that nobody has read at the end of `fill`, for each of READ_BEFORE."""
    unread = []
    for before in READ_BEFORE:
        results: multiprocessing.Queue[float] = multiprocessing.Queue()
        set_up(2, megabits, queue)
        try:
            how = before, control, multiprocessing.Barrier(2), results
            nodes = [
                multiprocessing.Process(target=fill, args=(rank, *how), daemon=True)
                for rank in range(2)
            ]
            for node in nodes:
                node.start()
            unread.append(results.get(timeout=600))
            for node in nodes:
                node.kill()
                node.join()
        finally:
            clean_up(2)
    return unread


def main(arguments: list[str]) -> int:
    """Measure all patterns, and print a line for each; then the buffers."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.links", description=__doc__)
    parser.add_argument("--megabits", type=float, default=40.0, help="a second, of each link")
    parser.add_argument("--control", default="cubic", help="TCP's congestion control")
    parser.add_argument(
        "--queue", default="latency 50ms", help="of tbf: 'latency 50ms' or 'limit 30000' (bytes)"
    )
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args(arguments)
    size = int(options.megabits * 1e6 / 8 * 0.2)  # a fifth of a second
    for pattern, (_, ranks, messages) in PATTERNS.items():
        barrier = multiprocessing.Barrier(ranks)
        results: multiprocessing.Queue[float] = multiprocessing.Queue()
        set_up(ranks, options.megabits, options.queue)
        try:
            how = (size, options.rounds, options.control, barrier, results)
            nodes = [
                multiprocessing.Process(target=measure, args=(pattern, rank, *how), daemon=True)
                for rank in range(ranks)
            ]
            for node in nodes:
                node.start()
            seconds = [results.get(timeout=120) for _ in nodes]
            for node in nodes:
                node.join()
        finally:
            clean_up(ranks)
        ideal = size * FRAME / (options.megabits * 1e6 / 8) * messages
        later = options.rounds - options.rounds // 3
        print(f"{pattern:18} {sum(seconds) / ranks / later / ideal:.3f}", flush=True)
    unread = fill_buffers(options.megabits, options.queue, options.control)
    for before, held in zip(READ_BEFORE, unread, strict=True):
        print(f"read {before / 1e6:5.2f} MB, then {held / 1e6:.2f} MB unread", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
