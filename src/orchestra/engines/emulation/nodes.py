"""An emulated cluster: where each rank is on it, and what goes wrong."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

from orchestra.cluster import Cluster, Node
from orchestra.cluster.faults import Changes
from orchestra.cluster.faults import Delay as DelayFault
from orchestra.engines.emulation.groups import Quotas, hierarchy
from orchestra.engines.emulation.network import NODE_END, Namespace, Network
from orchestra.engines.processes.system import Delay, RankPlace
from orchestra.errors import InputError
from orchestra.worker.runtime import chosen_threads, usable_cores

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

    `nodes` has that of each rank. Raises `InputError` where this machine cannot emulate it; the
    error says why, and what to do.
    """

    def __init__(self, cluster: Cluster, ranks: int, threads: int | None = None) -> None:
        require_emulation()
        self.cluster, self.ranks = cluster, ranks
        self.nodes = cluster.nodes_of(ranks)
        there = {node.name: node for node in self.nodes}
        require_room(cluster, list(there.values()))
        self._threads = threads or chosen_threads(os.environ)
        with contextlib.ExitStack() as held:
            self.network = Network(cluster, there.values())
            held.callback(self.network.close)
            self.quotas = Quotas({name: share_of(node) for name, node in there.items()})
            held.callback(self.quotas.close)
            self._held = held.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def places(self) -> list[RankPlace]:
        """Return the place of each rank."""
        threads = self.cluster.threads_of(self.ranks, self._threads)
        return [
            RankPlace(
                node.name,
                self.network.addresses[node.name],
                NODE_END if node.switch is not None else "lo",
                self.network.namespaces[node.name].path,
                str(self.quotas.members(node.name, rank)),
                min(threads[rank], len(usable_cores())),
                sum(other.name == node.name for other in self.nodes[:rank]),
                tuple(self._latency(node, other) for other in self.nodes),
                tuple(self._delays(rank)),
                node.shared_memory,
            )
            for rank, node in enumerate(self.nodes)
        ]

    def changes(self) -> list[Change]:
        """Return what is changed from outside, by time; ranks delay their messages themselves."""
        found = []
        for node in {node.name: node for node in self.nodes}.values():
            for at, factor in _beginning_as_described(self.cluster.speed_changes(node)):
                limit = partial(self.quotas.limit, node.name, share_of(node) * factor)
                found.append(Change(at, limit))
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
            found += [
                Delay(other, fault.seconds, fault.at, end)
                for other in range(self.ranks)
                if self._means(fault.source, rank) and self._means(fault.target, other)
            ]
        return found

    def _means(self, name: str | None, rank: int) -> bool:
        """Return whether a fault at `name` concerns `rank`; None means every rank."""
        return name in (None, f"rank {rank}", self.nodes[rank].name)


def _beginning_as_described(changes: Changes) -> Changes:
    """Return `changes` without a first one that changes nothing."""
    return changes[1:] if changes[0] == (0.0, 1.0) else changes


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
