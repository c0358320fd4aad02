"""One simulated rank in one group after the other: what its program is given, and what it reports.

It behaves like a real rank (engines/processes/rank.py): when the watcher reports that its group is
over, it gives the group up, says that it can be reached, and connects with the others anew.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from orchestra.engines.events import describe
from orchestra.engines.simulation.kernel import Flow, Wait
from orchestra.engines.simulation.network import Net, Port
from orchestra.errors import GroupChanged, PeerLost
from orchestra.records.report import Counters
from orchestra.transports.handshake import HELLO_BYTES
from orchestra.transports.protocol import Transport
from orchestra.transports.tags import Tag
from orchestra.worker.runtime import PassingReporter, RankActivity, Runtime

if TYPE_CHECKING:
    from orchestra.engines.simulation.faults import Faults
    from orchestra.engines.simulation.simulate import Simulation

HANDSHAKE = 2
"""Round trips of a new connection: TCP's, with the challenges, and the hellos behind it."""


class GroupMember:
    """The rank `slot` of a simulation, and the group that it is in.

    `make_runtime` makes what its program is given in a group, on its port of the group's `net`.
    """

    def __init__(
        self, slot: int, net: Net, make_runtime: Callable[[GroupMember, Port], Runtime]
    ) -> None:
        self.slot = slot
        self._kernel, self._make_runtime = net.kernel, make_runtime
        self._generation = self._ordered = 0  # of its group, and of the newest that it knows of
        self._members = net.members  # of that one
        self._next = 0, net  # the newest group of which all ranks can be reached
        self._port = next(port for port in net.ports if port.slot == slot)
        self.is_to_rest = False  # in its group, as there are newcomers
        self._waiting: Flow | None = None  # its main flow, as long as it waits for an order

    @property
    def is_over(self) -> bool:
        """True if the rank is to give up its group."""
        return self._ordered > self._generation

    def begin(self) -> Runtime:
        """Return what the program works with at first."""
        return self._make_runtime(self, self._port)

    def join(self, net: Net) -> Runtime:
        """Return what the program works with in the group of `net`."""
        self._port = next(port for port in net.ports if port.slot == self.slot)
        return self._make_runtime(self, self._port)

    def mark_caches_cold(self) -> None:
        """See `Port.mark_caches_cold`."""
        self._port.mark_caches_cold()

    # Orders of the watcher, from events

    def change_group(self, generation: int, members: tuple[int, ...]) -> None:
        """Learn that `members` are to be the group of this number."""
        self._ordered, self._members, self.is_to_rest = generation, members, False
        self._port.close()
        self._wake()

    def rest(self) -> None:
        """Learn that all of the group are to come to rest, to take in newcomers."""
        self.is_to_rest = True

    def connect(self, generation: int, net: Net) -> None:
        """Learn that all ranks of the group can be reached, over `net`."""
        self._next = generation, net
        self._wake()

    def _wake(self) -> None:
        flow, self._waiting = self._waiting, None
        if flow is not None:
            self._kernel.resume(flow)

    # From the main flow

    def regroup(self, watcher: Faults, error: PeerLost | GroupChanged) -> Runtime:
        """See `Runtime.regroup`."""
        while True:
            if isinstance(error, PeerLost):
                lost = self._port.net.members[error.rank]
                watcher.accuse(self.slot, self._generation, replace(describe(error), lost=lost))
            try:
                runtime = self.join(self._next_net(watcher))
                shake_hands(runtime.transport)
                return runtime
            except (PeerLost, GroupChanged) as again:
                error = again

    def _next_net(self, watcher: Faults) -> Net:
        """Wait until all ranks of the newest group can be reached; return its net. Raises
        `GroupChanged` where one of them is lost before that."""
        self._wait_until(lambda: self.is_over)
        self._generation = self._ordered
        watcher.ready(self.slot, self._generation)
        self._wait_until(lambda: self.is_over or self._next[0] == self._generation)
        if self.is_over:
            raise GroupChanged()
        return self._next[1]

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        flow = self._kernel.current
        flow.waits = self._waits
        while not condition():
            self._waiting = flow
            self._kernel.park()
        flow.waits = None

    def _waits(self) -> Wait:
        return tuple(slot for slot in self._members if slot != self.slot), "to connect"


def shake_hands(transport: Transport) -> None:
    """Connect with all others of a group, as real ranks do (`connect_mesh`): with those before this
    one in turn, then with the others as they come.

    Raises:
        PeerLost: one of them is lost.
        GroupChanged: there is another group.
    """
    rank, hello = transport.rank, torch.zeros(HELLO_BYTES, dtype=torch.uint8)
    for peer in range(rank):
        for _ in range(HANDSHAKE):
            transport.send(hello, peer, Tag.CONNECT).wait()
            transport.receive(peer, Tag.CONNECT).wait()
    for _ in range(HANDSHAKE * (transport.size - rank - 1)):
        coming = transport.receive(None, Tag.CONNECT)
        coming.wait()
        transport.send(hello, coming.source, Tag.CONNECT).wait()


@dataclass
class SimulatedReporter(PassingReporter):
    """One rank's; what it says goes to the `inner` one, that of the process."""

    member: GroupMember
    simulation: Simulation
    current_activity: RankActivity | None = None  # None: the program reports none, and trains
    current_step: int = 0
    samples: int = 0
    is_set_up: bool = False
    is_expendable: bool = False
    elastic_program: str = ""  # see `Reporter.elastic`
    rests_first: bool = False  # the same
    counters: Counters | None = None

    def progress(
        self,
        *,
        step: int,
        samples: int,
        loss: float | None = None,
        fraction: float | None = None,
        counters: Counters | None = None,
    ) -> None:
        self.current_step = step
        self.simulation.consumed += samples - self.samples
        self.samples, self.counters = samples, counters
        whole = self.simulation.consumed
        self.inner.progress(step=step, samples=whole, loss=loss, fraction=fraction)
        self.simulation.look(fraction)

    def activity(self, activity: RankActivity) -> None:
        if activity is not self.current_activity:
            self.current_activity = activity
            if activity is RankActivity.TRAINING and not self.is_set_up:
                self.is_set_up = True
                gc.freeze()  # what was made until now lives as long as the run
            if self.simulation.is_first(self.member.slot):
                self.inner.activity(activity)
            self.simulation.look_after_newcomers(self.member.slot)

    def expendable(self, yes: bool) -> None:
        self.is_expendable = yes

    def elastic(self, program: str, *, rests: bool = False) -> None:
        self.elastic_program, self.rests_first = program, rests
        self.simulation.look_after_newcomers(self.member.slot)

    def newcomers_wait(self) -> bool:
        return self.member.is_to_rest

    def group_is_over(self) -> bool:
        return self.member.is_over

    def notice(self, text: str) -> None:
        self.simulation.notice(text)
