"""Faults of a cluster, and joins: their effects on a run, and the decisions of its watcher.

The failure detector of real processes decides (engines/failure_detector.py). While anything is
wrong, it gets here in virtual time the events that the beats of real ranks would bring it.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from orchestra.cluster import Channel, Cluster
from orchestra.engines.events import (
    BEAT_SECONDS,
    Abort,
    Accused,
    Disconnect,
    Disconnected,
    Exited,
    Failed,
    Failure,
    Finished,
    Heartbeat,
    Instruction,
    Joined,
    Kill,
    Notice,
    OfRank,
    Quiesce,
    Ready,
    Refuse,
    Regroup,
)
from orchestra.engines.failure_detector import FailureDetector, Limits, Refusal
from orchestra.engines.simulation.kernel import Call
from orchestra.engines.simulation.rank import GroupMember
from orchestra.engines.simulation.world import World
from orchestra.errors import RunFailed

CLOSED = "its connection closed"
WATCHER_RANK = 0
"""The rank that the watcher is beside."""


class Faults:
    """The faults of `cluster`, and the watcher of its ranks, which is beside rank 0.

    Args:
        members: the ranks, those that join included; the watcher tells them of new groups.
        ranks: how many of them begin with the run.
        beat: the heartbeat of a rank, now.
        patience: of the watcher, in seconds.
        notice: tells the user.
        min_ranks: with fewer, the run does not go on.
        refusal: why it does not go on with so many ranks; None if it does.

    Attributes:
        left_out: why, for each rank that the run went on without.
    """

    def __init__(
        self,
        cluster: Cluster,
        members: Sequence[GroupMember],
        ranks: int,
        world: World,
        beat: Callable[[int], Heartbeat],
        patience: float,
        notice: Callable[[str], None],
        min_ranks: int = 1,
        refusal: Refusal = lambda _: None,
    ) -> None:
        self._world, self._kernel, self._members = world, world.kernel, members
        self._first, self._ranks = ranks, [*range(ranks)]  # at the start, and until now
        self._newcomers: set[int] = set()  # ranks that have come and are in no group yet
        self._beat, self._notice = beat, notice
        self._detector = FailureDetector(
            ranks, Limits(patience=patience), start=0.0, children=True, min_ranks=min_ranks,
            refusal=refusal,
        )  # fmt: skip
        self.left_out = self._detector.left_out  # why the run went on without each of these
        self._ended: set[int] = set()
        self._unheard: list[OfRank] = []  # what ranks behind a cut link have said
        self._group: tuple[int, ...] = tuple(self._ranks)  # the newest
        self._missing: set[int] = set()  # those of it that others cannot reach yet
        self._held: set[int] = set()
        self._cut: set[str] = set()  # channels
        self._watching = False
        self._until = 0.0  # how long to watch at least
        for rank in self._ranks:
            self._detector.observe(0.0, Joined(rank, world.nodes[rank].name))
        self._schedule(cluster)

    def join(self, rank: int) -> None:
        """From an event: `rank` asks to be taken in. Its program begins."""
        self._ranks.append(rank)
        self._newcomers.add(rank)
        self._say(Joined(rank, self._world.nodes[rank].name))

    def is_newcomer(self, rank: int) -> bool:
        """Return whether `rank` has not been in a group yet."""
        return rank in self._newcomers

    def look_after_newcomers(self, rank: int) -> None:
        """From `rank`, whose state has changed: let the watcher see whether newcomers, if there are
        any, can be taken in now."""
        if self._newcomers:
            self._kernel.after(self._world.latency(rank, WATCHER_RANK), self._look)

    def ended(self, event: Finished | Failed) -> None:
        """Note that the program of a rank has ended; the run goes on until that is known."""
        self._kernel.outstanding += 1
        self._say(event)

    def ready(self, rank: int, generation: int) -> None:
        """From `rank`: it has given up its group, and can be reached by the others of the next."""
        self._say_after_latency(Ready(rank, generation))

    def accuse(self, rank: int, generation: int, failure: Failure) -> None:
        """From `rank`: it has lost another one of its group."""
        self._say_after_latency(Accused(rank, failure, generation, waits=True))

    def _say_after_latency(self, event: OfRank) -> None:
        latency = self._world.latency(event.rank, WATCHER_RANK)
        self._kernel.after(latency, partial(self._say, event))

    def _say(self, event: OfRank) -> None:
        """Let the watcher hear `event`, once no link on the way is cut."""
        self._watch()
        self._unheard.append(event)
        self._hear()

    def _hear(self) -> None:
        """Let the watcher hear what no cut link holds back."""
        said, self._unheard = self._unheard, []
        for event in said:
            given_up, is_end = event.rank in self._ended, isinstance(event, Finished | Failed)
            if not given_up and not self._world.is_heard(event.rank):
                self._unheard.append(event)
                continue
            if is_end:
                self._ended.add(event.rank)
                # The watcher waits for the cause of a failure that may be a consequence.
                is_waited_for = isinstance(event, Failed) and event.rank not in self._newcomers
                self._kernel.outstanding -= given_up or not is_waited_for
                self._newcomers.discard(event.rank)
            if not given_up:
                self._observe(event)

    def _tell(self, rank: int, order: Call) -> None:
        """Let `rank` carry out `order` after the latency. Behind a cut link it could not answer."""
        self._kernel.after(self._world.latency(WATCHER_RANK, rank), order)

    def _schedule(self, cluster: Cluster) -> None:
        at, world, ranks = self._kernel.at, self._world, self._first
        for node in {node.name: node for node in world.nodes}.values():
            for time, factor in cluster.speed_changes(node):
                at(time, partial(world.change_speed, node, factor))
        for channel in cluster.channels.values():
            for time, factor in cluster.bandwidth_changes(channel):
                at(time, partial(self._change_bandwidth, channel, factor))
        for rank in range(len(self._members)):
            for begin, end in cluster.pauses(rank, ranks):
                at(begin, partial(self.hold, rank, end - begin))
            death = cluster.death(rank, ranks)
            if death is not None:
                at(death, partial(self.die, rank))

    # What happens

    def _change_bandwidth(self, channel: Channel, factor: float) -> None:
        self._cut.discard(channel.name)
        if not factor:
            self._watch()  # hear all beats once more
            self._cut.add(channel.name)
        self._world.change_bandwidth(channel, factor)

    def hold(self, rank: int, seconds: float) -> None:
        """From an event: stop `rank` for so many seconds."""
        if rank not in self._ended:
            self._watch()
            self._held.add(rank)
            self._world.hold(rank)
            self._kernel.after(seconds, partial(self._let_go, rank))

    def _let_go(self, rank: int) -> None:
        if rank in self._held:
            self._held.discard(rank)
            self._world.let_go(rank)

    def die(self, rank: int) -> None:
        """From an event: end `rank`, as SIGKILL does."""
        if rank not in self._ended:
            self._watch()
            self._lose(rank, CLOSED, at_once=False)
            is_child = rank < self._first
            self._observe(Exited(rank, -signal.SIGKILL) if is_child else Disconnected(rank))

    def _lose(self, rank: int, reason: str, *, at_once: bool) -> None:
        """End `rank`; the others learn it at once, or from the ends of their connections."""
        self._ended.add(rank)
        self._newcomers.discard(rank)
        self._hear()  # nothing that it has said
        self._held.discard(rank)
        self._world.kill(rank, reason)
        for other in self._ranks:
            if other != rank:
                part = partial(self._world.part, other, rank, reason)
                self._kernel.after(0.0 if at_once else self._world.latency(rank, other), part)

    # The watcher

    def _watch(self) -> None:
        # Beats cost events: they are heard while something is wrong or may still be reported.
        self._until = self._kernel.now() + self._detector.limits.cause + 2 * BEAT_SECONDS
        if self._watching:
            self._hear_beats()  # a rank says at once what it tells its reporter
        else:
            self._watching = True
            self._tick()

    def _tick(self) -> None:
        now = self._kernel.now()
        self._hear()
        self._hear_beats()
        self._carry_out(self._detector.tick(now, self._held))
        self._watching = bool(self._held or self._cut) or now < self._until
        if self._watching:
            self._kernel.after(BEAT_SECONDS, self._tick)

    def _look(self) -> None:
        self._watch()  # hears all beats
        self._carry_out(self._detector.tick(self._kernel.now(), self._held))

    def _hear_beats(self) -> None:
        ending = {event.rank for event in self._unheard if isinstance(event, Finished | Failed)}
        for rank in self._ranks:
            silent = rank in self._held or rank in self._ended or rank in ending
            if not silent and self._world.is_heard(rank):
                self._observe(self._beat(rank))

    def _observe(self, event: OfRank) -> None:
        self._carry_out(self._detector.observe(self._kernel.now(), event))
        if isinstance(event, Ready) and event.generation == self._detector.generation:
            self._expect(event.rank)

    def _expect(self, rank: int) -> None:
        """Note that `rank` can be reached; connect all of the group once all can."""
        self._missing.discard(rank)
        if not self._missing:
            net = self._world.connect(self._group)
            for member in self._group:
                connect = self._members[member].connect
                self._tell(member, partial(connect, self._detector.generation, net))

    def _carry_out(self, instructions: Iterable[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Abort(cause=cause):
                    self._kernel.fail(RunFailed(cause))
                case Notice(text=text):
                    self._notice(text)
                case Disconnect(rank=rank, reason=reason) if rank not in self._ended:
                    self._lose(rank, reason, at_once=True)
                case Regroup(generation=generation, members=members):
                    self._group, self._missing = members, set(members)
                    self._newcomers.difference_update(members)
                    for rank in members:
                        change = self._members[rank].change_group
                        self._tell(rank, partial(change, generation, members))
                case Quiesce():
                    for rank in self._group:
                        self._tell(rank, self._members[rank].rest)
                case Refuse(rank=rank, why=why) if rank not in self._ended:
                    self._lose(rank, why, at_once=True)
                case Kill(rank=rank) if rank in self.left_out and rank not in self._ended:
                    self._lose(rank, self.left_out[rank], at_once=True)
                case Kill() | Disconnect() | Refuse():
                    pass  # the run is over, or it has been lost before
                case _:
                    raise AssertionError(f"{instruction} has no meaning in virtual time")
