"""What the shaping of an emulated cluster really gives, beside what its file says."""

from __future__ import annotations

import socket
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from orchestra.cluster import Cluster, Node
from orchestra.cluster.units import BANDWIDTH, SECONDS
from orchestra.engines.emulation.groups import Quotas
from orchestra.engines.emulation.network import HEADERS_BYTES, WIRE_BYTES, Network
from orchestra.engines.emulation.nodes import require_emulation, require_room, share_of
from orchestra.worker.runtime import usable_cores

TOLERANCE = 0.1

_SEGMENT_BYTES = 1500 - 20 - 32  # of a message, in each frame
_UNSHAPED = 1e9
_SENDING_SECONDS = 1.0
_LEAST_SENT, _MOST_SENT = 1 << 17, 1 << 28
_ROUND_TRIPS, _TAG = 100, 1
_WARM_SECONDS, _COMPUTING_SECONDS = 0.2, 2.0
_COMPUTE = 'echo $$ > "$0"; while :; do :; done'

Tell = Callable[[str, float], None]


@dataclass(frozen=True)
class CheckedFigure:
    """A quantity that a cluster's file gives: its name, both values in one unit, and in words."""

    name: str
    described: float
    measured: float
    texts: tuple[str, str]

    @property
    def off(self) -> float:
        """The relative excess of the measured value over the described one."""
        return self.measured / self.described - 1

    @property
    def holds(self) -> bool:
        return abs(self.off) <= TOLERANCE


def check_cluster(cluster: Cluster, tell: Tell) -> list[CheckedFigure]:
    """Measure the links, latencies and processors of all nodes of `cluster`.

    Links are measured alone, one after the other, latencies by messages of ranks' own transport,
    and processors all at the same time, as a run needs them. `tell` hears how far it is.

    Raises `InputError` where this machine cannot emulate the cluster.
    """
    require_emulation()
    require_room(cluster, cluster.nodes)
    rows = []
    with closing(Network(cluster, cluster.nodes)) as network:
        for index, name in enumerate(network.ends):
            tell(name, index / len(network.ends))
            rows.append(_bandwidth(cluster, network, name))
        rows += _latencies(cluster, network, tell)
    tell("processors", 1.0)
    return rows + _speeds(cluster)


# Bandwidths


def _bandwidth(cluster: Cluster, network: Network, name: str) -> CheckedFigure:
    """Send through one link, while all others are so wide that it alone is felt."""
    source, target = next(
        (a, b)
        for a in cluster.nodes
        for b in cluster.nodes
        if any(channel.name == name for channel in cluster.path(a, b).channels)
    )
    described = cluster.channels[name].bandwidth
    size = min(max(int(described * _SENDING_SECONDS), _LEAST_SENT), _MOST_SENT)
    for other in network.ends:
        if other != name:
            network.shape(other, _UNSHAPED)
    try:
        with ExitStack() as held:
            one, two = connected(network, source, target, held)
            _pass(one, two, size // 4)  # what the bucket has saved up, and how TCP starts
            seconds = _pass(one, two, size)
    finally:
        for other in network.ends:
            network.shape(other)
    frames = 1 + (HEADERS_BYTES + WIRE_BYTES) / _SEGMENT_BYTES
    measured = size * frames / seconds
    texts = BANDWIDTH.write(described), BANDWIDTH.write(float(f"{measured:.3g}"))
    return CheckedFigure(name, described, measured, texts)


def connected(
    network: Network, source: Node, target: Node, held: ExitStack
) -> tuple[socket.socket, socket.socket]:
    """Connect two nodes; return both ends, which are in this process."""
    with network.namespaces[target.name].inside():
        listener = held.enter_context(socket.create_server((network.addresses[target.name], 0)))
    with network.namespaces[source.name].inside():
        one = held.enter_context(socket.create_connection(listener.getsockname()))
    return one, held.enter_context(listener.accept()[0])


def _pass(one: socket.socket, two: socket.socket, size: int) -> float:
    """Send `size` bytes; return the seconds until they have come."""
    piece, rest = bytes(1 << 16), size

    def send() -> None:
        for start in range(0, size, len(piece)):
            one.sendall(piece[: size - start])

    began = time.perf_counter()
    sender = threading.Thread(target=send)
    sender.start()
    while rest > 0:
        rest -= len(two.recv(1 << 18))
    sender.join()
    return time.perf_counter() - began


# Latencies


def _latencies(cluster: Cluster, network: Network, tell: Tell) -> Iterator[CheckedFigure]:
    """From the first node to each other one: what a message takes more than without latencies.

    Either way both ends have been idle for the latency when it comes: waking up is not part of it.
    """
    first, *others = cluster.nodes
    for node in others:
        described = cluster.path(first, node).latency
        if described == 0:
            continue
        tell(f"{first.name} to {node.name}", 1.0)
        held = 0.0 if network.netem else described
        measured = _one_way(network, first, node, held=held)
        if not network.netem:
            # Without latency, but with pauses as long: what is left does not contain the time to
            # wake up.
            measured -= _one_way(network, first, node, pause=described)
        texts = SECONDS.write(described), SECONDS.write(float(f"{measured:.3g}"))
        yield CheckedFigure(f"{first.name} to {node.name}", described, measured, texts)


def _one_way(
    network: Network, source: Node, target: Node, *, held: float = 0.0, pause: float = 0.0
) -> float:
    """Measure the seconds of a small message one way: the median half of a round trip.

    Each message is `held` by its transport so long, and sent after a `pause`, which does not count.
    """
    import torch

    from orchestra.transports.progress import ProgressEngine
    from orchestra.transports.sockets import SocketTransport

    message, found, paused = torch.zeros(1), list[float](), list[float]()
    with ExitStack() as stack:
        ends = connected(network, source, target, stack)
        for end in ends:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        here, there = (
            SocketTransport(ProgressEngine(rank, {1 - rank: end})) for rank, end in enumerate(ends)
        )
        for transport in (here, there):
            stack.callback(transport.close, 0.1)
            if held:
                transport.hold(lambda peer, now: held)

        def answer() -> None:
            for _ in range(_ROUND_TRIPS):
                there.receive(0, _TAG).wait()
                began = time.perf_counter()
                time.sleep(pause)
                paused.append(time.perf_counter() - began)
                there.send(message, 0, _TAG)

        answering = threading.Thread(target=answer)
        answering.start()
        for _ in range(_ROUND_TRIPS):
            time.sleep(pause)
            began = time.perf_counter()
            here.send(message, 1, _TAG)
            here.receive(1, _TAG).wait()
            found.append(time.perf_counter() - began)
        answering.join()
    return statistics.median((one - other) / 2 for one, other in zip(found, paused, strict=True))


# Processors


def _speeds(cluster: Cluster) -> list[CheckedFigure]:
    """Let all nodes compute at the same time, on all of their cores."""
    shares = {node.name: share_of(node) for node in cluster.nodes}
    spinning: dict[str, list[subprocess.Popen[bytes]]] = {name: [] for name in shares}
    # Closing the quotas ends the processes, which are waited for then.
    with ExitStack() as started, closing(Quotas(shares)) as quotas:
        for node in cluster.nodes:
            command = ["sh", "-c", _COMPUTE, str(quotas.members(node.name, 0))]
            for _ in range(min(node.cores, len(usable_cores()))):
                spinning[node.name].append(started.enter_context(subprocess.Popen(command)))
        time.sleep(_WARM_SECONDS)
        before, began = _computed(spinning), time.perf_counter()
        time.sleep(_COMPUTING_SECONDS)
        after, passed = _computed(spinning), time.perf_counter() - began
    return [
        CheckedFigure(f"{name} computes", share, cores, (f"{share:g} cores", f"{cores:.3g} cores"))
        for name, share in shares.items()
        for cores in [(after[name] - before[name]) / passed]
    ]


def _computed(spinning: Mapping[str, Sequence[subprocess.Popen[bytes]]]) -> dict[str, float]:
    """Return processor seconds so far, by node (proc(5): first number of schedstat, in ns)."""
    return {
        name: sum(
            int(Path(f"/proc/{process.pid}/schedstat").read_text().split()[0]) / 1e9
            for process in processes
        )
        for name, processes in spinning.items()
    }
