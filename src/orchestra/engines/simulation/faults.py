"""What goes wrong in a cluster, acting on a run, and what its watcher makes of it.

What decides is that of real processes (engines/failure_detector.py); here it is told in virtual
time what the beats of real ranks would tell it, as long as anything is wrong.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable
from functools import partial

from orchestra.cluster import Channel, Cluster
from orchestra.engines.events import (
    BEAT_SECONDS,
    Abort,
    Disconnect,
    Event,
    Exited,
    Failed,
    Finished,
    Heartbeat,
    Instruction,
    Joined,
    Kill,
    Notice,
)
from orchestra.engines.failure_detector import FailureDetector, Limits
from orchestra.engines.simulation.world import World
from orchestra.errors import RunFailed

CLOSED = "its connection closed"


class Faults:
    """The faults of `cluster` on `ranks` ranks.

    Args:
        beat: the heartbeat of a rank, now.
        patience: of the watcher, in seconds.
        notice: tells the user.
        min_ranks: with fewer, the run does not go on.

    Attributes:
        left_out: why, for each rank that the run went on without.
    """

    def __init__(
        self,
        cluster: Cluster,
        ranks: int,
        world: World,
        beat: Callable[[int], Heartbeat],
        patience: float,
        notice: Callable[[str], None],
        min_ranks: int = 1,
    ) -> None:
        self._world, self._kernel, self._ranks = world, world.kernel, range(ranks)
        self._beat, self._notice = beat, notice
        self._detector = FailureDetector(
            ranks, Limits(patience=patience), start=0.0, children=True, min_ranks=min_ranks
        )
        self.left_out = self._detector.left_out  # why the run went on without each of these
        self._ended: set[int] = set()
        self._unheard: dict[int, Finished | Failed] = {}  # the ends of ranks behind a cut, by rank
        self._held: set[int] = set()
        self._cut: set[str] = set()  # channels
        self._watching = False
        self._until = 0.0  # how long to watch at least
        for rank in self._ranks:
            self._detector.observe(0.0, Joined(rank, world.nodes[rank].name))
        self._schedule(cluster)

    def ended(self, event: Finished | Failed) -> None:
        """Note that the program of a rank has ended; the run goes on until that is known."""
        self._watch()
        self._unheard[event.rank] = event
        self._kernel.outstanding += 1
        self._hear(event.rank)

    def _hear(self, rank: int) -> None:
        """Let the watcher hear of the end of `rank`, if no link on the way is cut."""
        if self._world.is_heard(rank):
            self._ended.add(rank)
            event = self._unheard.pop(rank)
            self._observe(event)
            # The watcher waits for the cause of a failure that may be a consequence.
            self._kernel.outstanding -= not isinstance(event, Failed)

    def _schedule(self, cluster: Cluster) -> None:
        at, world, ranks = self._kernel.at, self._world, len(self._ranks)
        for node in {node.name: node for node in world.nodes}.values():
            for time, factor in cluster.speed_changes(node):
                at(time, partial(world.change_speed, node, factor))
        for channel in cluster.channels.values():
            for time, factor in cluster.bandwidth_changes(channel):
                at(time, partial(self._change_bandwidth, channel, factor))
        for rank in self._ranks:
            for begin, end in cluster.pauses(rank, ranks):
                at(begin, partial(self._hold, rank))
                at(end, partial(self._let_go, rank))
            death = cluster.death(rank, ranks)
            if death is not None:
                at(death, partial(self._die, rank))

    # What happens

    def _change_bandwidth(self, channel: Channel, factor: float) -> None:
        self._cut.discard(channel.name)
        if not factor:
            self._watch()  # hear all beats once more
            self._cut.add(channel.name)
        self._world.change_bandwidth(channel, factor)

    def _hold(self, rank: int) -> None:
        if rank not in self._ended:
            self._watch()
            self._held.add(rank)
            self._world.hold(rank)

    def _let_go(self, rank: int) -> None:
        if rank in self._held:
            self._held.discard(rank)
            self._world.let_go(rank)

    def _die(self, rank: int) -> None:
        if rank not in self._ended:
            self._watch()
            self._lose(rank, CLOSED, at_once=False)
            self._observe(Exited(rank, -signal.SIGKILL))

    def _lose(self, rank: int, reason: str, *, at_once: bool) -> None:
        """End `rank`; the others learn it at once, or from the ends of their connections."""
        self._ended.add(rank)
        if self._unheard.pop(rank, None) is not None:
            self._kernel.outstanding -= 1
        self._held.discard(rank)
        cut_off = self._world.kill(rank, reason)
        for other in self._ranks:
            if other != rank:
                part = partial(self._world.part, other, rank, reason, cut_off.get(other))
                self._kernel.after(0.0 if at_once else self._world.latency(rank, other), part)

    # The watcher

    def _watch(self) -> None:
        # Beats cost events: they are heard while something is wrong or may still be reported.
        self._until = self._kernel.now() + self._detector.limits.cause + 2 * BEAT_SECONDS
        if not self._watching:
            self._watching = True
            self._tick()

    def _tick(self) -> None:
        now = self._kernel.now()
        for rank in list(self._unheard):
            self._hear(rank)
        for rank in self._ranks:
            silent = rank in self._held or rank in self._ended or rank in self._unheard
            if not silent and self._world.is_heard(rank):
                self._observe(self._beat(rank))
        self._carry_out(self._detector.tick(now, self._held))
        self._watching = bool(self._held or self._cut) or now < self._until
        if self._watching:
            self._kernel.after(BEAT_SECONDS, self._tick)

    def _observe(self, event: Event) -> None:
        self._carry_out(self._detector.observe(self._kernel.now(), event))

    def _carry_out(self, instructions: Iterable[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Abort(cause=cause):
                    self._kernel.fail(RunFailed(cause))
                case Notice(text=text):
                    self._notice(text)
                case Disconnect(rank=rank, reason=reason) if rank not in self._ended:
                    self._lose(rank, reason, at_once=True)
                case Kill() | Disconnect():
                    pass  # the run is over, or it has been lost before
                case _:
                    raise AssertionError(f"{instruction} has no meaning in virtual time")
