"""An emulated cluster: its network and quotas, where each rank is on it, and what goes wrong."""

from __future__ import annotations

import math
import os
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Self

from orchestra.cluster import Cluster, Node
from orchestra.cluster.faults import Changes
from orchestra.cluster.faults import Delay as DelayFault
from orchestra.engines.emulation.network import NODE_END, Namespace, Network
from orchestra.engines.emulation.quota import Quotas, hierarchy
from orchestra.engines.events import Event, Heartbeat, Notice
from orchestra.engines.processes.place import Delay, Place
from orchestra.errors import InputError
from orchestra.worker.threads import chosen_threads, usable_cores

TRAINING = ("training", "serving")
"""The phases of a rank while the stopwatch runs."""
INSTEAD = "or predict the same with --engine simulation"


@dataclass(frozen=True)
class Change:
    """`act` is called `at` seconds after the beginning."""

    at: float
    act: Callable[[], None]


class EmulatedCluster:
    """`cluster` with `ranks` ranks on it, until the end of a `with` block.

    Only nodes with ranks are there. `threads` are those that each rank is to compute with; by
    default `OMP_NUM_THREADS`, else its share of the cores of its node.

    Attributes:
        nodes: of each rank.
        network, quotas: what they are made of.

    Raises:
        InputError: this machine cannot emulate it; says why, and what to do.
    """

    def __init__(self, cluster: Cluster, ranks: int, threads: int | None = None) -> None:
        require_emulation()
        self.cluster, self.ranks = cluster, ranks
        self.nodes = cluster.nodes_of(ranks)
        there = {node.name: node for node in self.nodes}
        require_room(cluster, list(there.values()))
        self._threads = threads or chosen_threads(os.environ)
        self.network = Network(cluster, there.values())
        try:
            self.quotas = Quotas({name: share_of(node) for name, node in there.items()})
        except BaseException:
            self.network.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        try:
            self.quotas.close()
        finally:
            self.network.close()

    def places(self) -> list[Place]:
        seen: Counter[str] = Counter()
        found = []
        threads = self.cluster.threads_of(self.ranks, self._threads)
        for rank, node in enumerate(self.nodes):
            found.append(
                Place(
                    node.name,
                    self.network.addresses[node.name],
                    NODE_END if node.switch is not None else "lo",
                    self.network.namespaces[node.name].path,
                    str(self.quotas.members(node.name, rank)),
                    min(threads[rank], len(usable_cores())),
                    seen[node.name],
                    tuple(self._latency(node, other) for other in self.nodes),
                    tuple(self._delays(rank)),
                    node.shared_memory,
                )
            )
            seen[node.name] += 1
        return found

    def changes(self) -> list[Change]:
        """Return what is changed from outside, by time; ranks delay their messages themselves."""
        found = []
        for node in {node.name: node for node in self.nodes}.values():
            for at, factor in _beginning_as_described(self.cluster.speed_changes(node)):
                act = partial(self.quotas.limit, node.name, share_of(node) * factor)
                found.append(Change(at, act))
        for name, end in self.network.ends.items():
            owner, _, kind = name.rpartition(" ")
            was_cut = False
            for at, factor in _beginning_as_described(self.cluster.bandwidth_changes(end.channel)):
                is_cut = factor == 0.0
                if is_cut != was_cut and kind == "down":  # one pull for both directions
                    found.append(Change(at, partial(self.network.cut, owner, cut=is_cut)))
                if not is_cut:
                    found.append(Change(at, partial(self.network.shape, name, factor)))
                was_cut = is_cut
        for rank, node in enumerate(self.nodes):
            send = partial(self.quotas.signal, node.name, rank)
            for begin, end_of_pause in self.cluster.pauses(rank, self.ranks):
                found.append(Change(begin, partial(send, signal.SIGSTOP)))
                found.append(Change(end_of_pause, partial(send, signal.SIGCONT)))
            death = self.cluster.death(rank, self.ranks)
            if death is not None:
                found.append(Change(death, partial(send, signal.SIGKILL)))
        return sorted(found, key=lambda change: change.at)

    def _latency(self, source: Node, target: Node) -> float:
        if self.network.netem or source.name == target.name:
            return 0.0
        return self.cluster.path(source, target).latency

    def _delays(self, rank: int) -> list[Delay]:
        found = []
        for fault in self.cluster.faults:
            if not isinstance(fault, DelayFault):
                continue
            end = math.inf if fault.until is None else fault.until
            for other in range(self.ranks):
                if fault.source is not None and not self._means(fault.source, rank):
                    continue
                if fault.target is not None and not self._means(fault.target, other):
                    continue
                found.append(Delay(other, fault.seconds, fault.at, end))
        return found

    def _means(self, name: str, rank: int) -> bool:
        return name in (f"rank {rank}", self.nodes[rank].name)


def _beginning_as_described(changes: Changes) -> Changes:
    """Return `changes` without a first one that changes nothing."""
    return changes[1:] if changes[0] == (0.0, 1.0) else changes


class Schedule:
    """Carries out `changes` in a thread, once all `ranks` have begun to train, until `close`.

    When they evaluate and none trains any more, nothing more is changed, and `at_end` is called.
    """

    def __init__(
        self, changes: Sequence[Change], ranks: int, at_end: Callable[[], None] = lambda: None
    ) -> None:
        self._changes, self._at_end = changes, at_end
        self._awaited, self._training = set(range(ranks)), set[int]()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._carry_out, name="faults", daemon=True)
        self._error: BaseException | None = None

    def on_event(self, event: Event | Notice) -> None:
        if not isinstance(event, Heartbeat):
            return
        if event.phase in TRAINING:
            self._training.add(event.rank)
            if event.rank in self._awaited:
                self._awaited.remove(event.rank)
                if not self._awaited:
                    self.begin()
            return
        self._training.discard(event.rank)
        over = event.phase == "evaluating" and not self._awaited and not self._training
        if over and not self._closed.is_set():
            self._closed.set()
            self._at_end()

    def begin(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Change nothing more. Raises what a change raised, if anything."""
        self._closed.set()
        if self._thread.ident is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error

    def _carry_out(self) -> None:
        began = time.monotonic()
        try:
            for change in self._changes:
                if self._closed.wait(max(0.0, began + change.at - time.monotonic())):
                    return
                change.act()
        except BaseException as error:
            self._error = error


def share_of(node: Node) -> float:
    """Return how much of the processor a node has, in cores of this machine."""
    assert node.speed is not None  # see require_room
    return node.cores * node.speed


def require_emulation() -> None:
    """Raises `InputError` where this system lacks what an emulation needs."""
    if sys.platform != "linux":
        raise InputError(f"emulation needs Linux, not {sys.platform}: run it there, {INSTEAD}")
    if os.geteuid() != 0:
        raise InputError(f"emulation needs root for its networks: run it with sudo, {INSTEAD}")
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            raise InputError(f"emulation needs {program}: install the package iproute2, {INSTEAD}")
    try:
        Namespace().close()
    except OSError as error:
        raise InputError(
            f"emulation cannot make a network namespace: {error.strerror}; in a container run it "
            f"with --privileged, {INSTEAD}"
        ) from None
    hierarchy()


def require_plain(cluster: Cluster, nodes: Sequence[Node]) -> None:
    """Raises `InputError` for what no machine can emulate."""
    where = f"cluster {cluster.name}"
    for node in nodes:
        if node.speed is None:
            raise InputError(
                f"{where}: node {node.name} has flops, and an emulation goes by the cores of this "
                f"machine: give it a speed, {INSTEAD}"
            )
        if node.devices:
            raise InputError(
                f"{where}: node {node.name} has devices, which cannot be emulated: leave them out, "
                f"{INSTEAD}"
            )


def require_room(cluster: Cluster, nodes: Sequence[Node]) -> None:
    """Raises `InputError` for what cannot be emulated, or not on this machine."""
    require_plain(cluster, nodes)
    wanted, there = sum(map(share_of, nodes)), len(usable_cores())
    if wanted > there * (1 + 1e-9):
        factor = math.floor(1000 * there / wanted) / 1000
        raise InputError(
            f"cluster {cluster.name}: its nodes with ranks want {wanted:g} cores (cores x speed); "
            f"this machine has {there}: multiply each speed by {factor:g} or less, {INSTEAD}"
        )


def not_emulated(emulated: EmulatedCluster, *, native: bool) -> list[str]:
    """Return a line for each thing that the emulation leaves out or does otherwise."""
    cluster, nodes, lines = emulated.cluster, emulated.nodes, []
    if any(any(place.latencies) for place in emulated.places()):
        lines.append("latencies are added in the transport, as this kernel has no netem")
        if native:
            lines.append("native collectives have no latency, as torch.distributed adds none")
    ignored = {
        "jitter": any(node.jitter not in (None, "default") for node in nodes),
        "drift": any(node.drift is not None for node in nodes),
        "memory": any(node.memory is not None for node in nodes),
        "overhead": cluster.overhead is not None,
    }
    names = [name for name, given in ignored.items() if given]
    if names:
        lines.append(f"not emulated: {', '.join(names)} of cluster {cluster.name}")
    if any(node.cores > 1 for node in nodes):
        lines.append(
            "a quota is for all cores of a node together: while a rank computes with fewer "
            "threads, each has more of the processor than one core of the node"
        )
    return lines
