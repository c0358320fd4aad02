"""What goes wrong at times of a run: quotas, cables and processes change by a schedule."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from orchestra.cluster.faults import Changes
from orchestra.engines.emulation.nodes import EmulatedCluster, share_of
from orchestra.engines.events import Event, Heartbeat, Notice

TRAINING = ("training", "serving")
"""The phases of a rank while the stopwatch runs."""


@dataclass(frozen=True)
class Change:
    """`act` is called `at` seconds after the beginning."""

    at: float
    act: Callable[[], None]


def changes_of(emulated: EmulatedCluster) -> list[Change]:
    """What is to be changed from outside, rising; ranks see to delays of messages themselves."""
    cluster, ranks, network = emulated.cluster, emulated.ranks, emulated.network
    found = []
    for node in {node.name: node for node in emulated.nodes}.values():
        for at, factor in _beginning_as_described(cluster.speed_changes(node)):
            act = partial(emulated.quotas.limit, node.name, share_of(node) * factor)
            found.append(Change(at, act))
    for name, end in network.ends.items():
        owner, _, kind = name.rpartition(" ")
        was_cut = False
        for at, factor in _beginning_as_described(cluster.bandwidth_changes(end.channel)):
            is_cut = factor == 0.0
            if is_cut != was_cut and kind == "down":  # one pull for both directions
                found.append(Change(at, partial(network.cut, owner, cut=is_cut)))
            if not is_cut:
                found.append(Change(at, partial(network.shape, name, factor)))
            was_cut = is_cut
    for rank, node in enumerate(emulated.nodes):
        send = partial(emulated.quotas.signal, node.name, rank)
        for begin, end_of_pause in cluster.pauses(rank, ranks):
            found.append(Change(begin, partial(send, signal.SIGSTOP)))
            found.append(Change(end_of_pause, partial(send, signal.SIGCONT)))
        death = cluster.death(rank, ranks)
        if death is not None:
            found.append(Change(death, partial(send, signal.SIGKILL)))
    return sorted(found, key=lambda change: change.at)


def _beginning_as_described(changes: Changes) -> Changes:
    """Without a first one that changes nothing."""
    return changes[1:] if changes[0] == (0.0, 1.0) else changes


class Schedule:
    """Carries out `changes` in a thread, once all `ranks` have begun to train, until `close`."""

    def __init__(self, changes: Sequence[Change], ranks: int) -> None:
        self._changes = changes
        self._awaited = set(range(ranks))
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._carry_out, name="faults", daemon=True)
        self._error: BaseException | None = None

    def on_event(self, event: Event | Notice) -> None:
        """Take in what a watcher hears."""
        if isinstance(event, Heartbeat) and event.phase in TRAINING and self._awaited:
            self._awaited.discard(event.rank)
            if not self._awaited:
                self.begin()

    def begin(self) -> None:
        """Times count from now on."""
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
