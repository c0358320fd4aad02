"""Who is dead, stopped or hung, and what follows from it.

Pure decisions: events with their time go in, instructions come out; there is no clock, no
process and no socket here. `orchestra.engines.processes.watcher` feeds it and carries out what it
says; in virtual time `orchestra.engines.simulation.faults` does so.

The rules:

- A rank whose process ended, or whose control connection closed, is dead at once.
- A rank that sends no beat for `silence` seconds is suspected. It is stopped if its kernel says
  so, and unresponsive after `patience` (native code may hold the interpreter for seconds).
  Before it has joined, the kernel alone says whether it is stopped.
- A rank that computes for longer than `patience` without a sign of progress is hung; before its
  first step it has three times as long. Ranks that wait for each other, or for nobody alive,
  are hung together.
- A rank whose script is over and one that still trains, and that wait for each other, have made
  unlike numbers of steps.
- A failure that is the consequence of another one waits a moment for the true cause.
- An expendable rank is left out. Where the programs of all ranks are elastic, a loss makes a new
  group of those that are left. Any other end of a rank ends the run.
- A rank that has lost its connection to another one waits for what is decided here. Where both
  live, all connect anew if they are elastic. If that does not help, or cannot be, one of the two is
  given up: an expendable one, and that which more ranks accuse. Otherwise the run ends. If the
  other one has ended in good order, only the rank is told so. The run ends if it cannot go on.
- The end of a newcomer does not matter. Once it is ready, and all programs are elastic and train,
  it is a member of a new group; where these rest first, once they have. A spare one is taken in
  where a rank is lost: at once, or where the others have gone on in place, in the same way.
- SIGTERM asks for an orderly stop, as Ctrl-C does, and leaves `grace` seconds for it: then the run
  ends, and its last checkpoint stands. One that comes to a rank right after the loss of another is
  its echo: torchrun ends all ranks of a node once one of them has died.
- A run that ends because a rank is gone, stopped or silent ends by a loss. An exception, an exit
  status of the program's own, a hang and Ctrl-C are no losses.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from orchestra.engines import events
from orchestra.engines.events import Instruction
from orchestra.worker.runtime import RankActivity

Refusal = Callable[[int], str | None]
"""Why a run cannot go on with so many ranks; None if it can."""
MAX_REFUSED = 8  # refused connections that a run reports: strangers cause them, too
ECHO_SECONDS = 10.0  # after a loss in which SIGTERM to another rank follows from it
BOTH_SECONDS = 0.5  # for the accusations of others, once two ranks accuse each other
RECONNECTED_SECONDS = 30.0  # in which a connection that is lost again is not made anew
CLOSED = "is gone: its control connection closed"
STOPPING = "stopping in good order"
RESERVE = 0.1  # of the grace, in which the ranks leave after a stop that took too long


@dataclass(frozen=True)
class Limits:
    """How long to wait for what, in seconds."""

    patience: float = 60.0
    joining: float = 300.0  # from the start until every rank has joined
    silence: float = 3.0  # without a beat: suspected
    cause: float = 3.0  # for the true cause behind a consequence
    status: float = 2.0  # from the end of a connection until the exit status is known
    unwinding: float = 3.0  # for a program to end once its rank was asked to leave
    parting: float = 10.0  # as patience, for ranks that wait for one whose script is over
    leaving: float = 5.0  # for the process of such a rank, or of one that delivered its result
    grace: float = 30.0  # from SIGTERM until all processes are killed, by whoever has sent it
    advice: str = ""  # for the user of a program that had more to do than `patience` allows


class State(enum.Enum):
    """How a rank is, in words."""

    ABSENT = "has not joined"
    RUNNING = "is running"
    STOPPED = "is stopped"  # expendable, and the run goes on meanwhile
    DONE = "has finished"
    FAILED = "has failed"
    LEFT_OUT = "was left out"


ALIVE = (State.RUNNING, State.STOPPED)
UNSETTLED = (State.ABSENT, *ALIVE)


@dataclass
class WatchedRank:
    """The knowledge about one rank."""

    rank: int
    seen_at: float  # its last sign of life
    active_at: float  # its last sign of progress
    beat: events.Heartbeat
    state: State = State.ABSENT
    host: str = ""
    disconnected_at: float | None = None
    gone: bool = False  # its process, or its connection where it is nobody's child
    lost: bool = False  # by a loss, in contrast to a hang or an exit of its own
    child: bool = False  # of the watcher's process, so that its exit status will be reported
    followed: bool = False  # by a launcher, which reports its exit status if it can
    cut_off: bool = False  # by the loss of that launcher's connection to its host
    settled_at: float | None = None  # when it finished, failed or was left out
    leaves: bool = False  # in good order, so that it is not killed at once

    @property
    def name(self) -> str:
        return f"rank {self.rank} on {self.host}" if self.host else f"rank {self.rank}"

    @property
    def is_pending(self) -> bool:
        """True if it is gone, and its launcher may still say how that was."""
        return self.followed and self.disconnected_at is not None and self.state in UNSETTLED

    @property
    def leaving(self) -> bool:
        return self.state not in ALIVE or self.beat.activity in (
            RankActivity.LEAVING,
            RankActivity.SCRIPT_OVER,
        )

    @property
    def is_new(self) -> bool:
        """True of a newcomer that has not trained with the others yet."""
        return self.beat.activity in (RankActivity.JOINING, RankActivity.SPARE)


@dataclass(frozen=True)
class Accusation:
    """A rank has lost its connection to another one `since` that time; see `events.Accused`."""

    since: float
    failure: events.Failure
    waits: bool


class FailureDetector:
    """Decides what a watcher of `ranks` ranks does; the run was started at the time `start`.

    Where the ranks are `children` of the watcher's process, their exit status will be reported.
    Otherwise, and of newcomers, the end of its connection is all that is known of a rank's end,
    unless the launcher `follows` the ranks other than rank 0: it reports how they end, if it can.
    The run ends where fewer than `min_ranks` are left of it. Nobody is taken in into as many as
    there is a `refusal` of.
    """

    def __init__(
        self,
        ranks: int,
        limits: Limits,
        *,
        start: float,
        children: bool,
        follows: bool = False,
        min_ranks: int = 1,
        refusal: Refusal = lambda _: None,
    ) -> None:
        self.limits = limits
        self.cause: str | None = None  # why the run fails
        self._by_loss = False  # that is the loss of a rank
        self.bad_input: str | None = None  # the same, for an input error of the set-up
        self.left_out: dict[int, str] = {}  # why, for each rank that the run goes on without
        self.notices: list[str] = []  # one line each, for the user
        self.stopped = False  # the user asked for an orderly stop
        self.terminated = False  # by SIGTERM
        self._min_ranks, self._refusal = min_ranks, refusal
        self.generation = 0  # of the group of ranks that are left
        self._started_at = self._ticked_at = self._now = start
        self._failed_at = 0.0
        self._signals = 0  # to the launcher
        self._stop_by = math.inf  # the end of what is left for an orderly stop
        self._held: tuple[float, str] | None = None  # a notice whose cause may come until then
        self._lost: tuple[float, str] | None = None  # the last loss that the run went on after
        self._consequences: list[tuple[float, WatchedRank, events.Failure]] = []  # deadlines
        # By a rank and another one to which it has lost its connection, in the newest group
        self._accusations: dict[tuple[int, int], Accusation] = {}
        self._reconnected_at = -math.inf  # when all were last told to connect anew
        self._refused: list[str] = []
        self._killed: set[int] = set()
        self._instructions: list[Instruction] = []
        self._members = {
            rank: WatchedRank(
                rank,
                start,
                start,
                events.Heartbeat(rank),
                child=children,
                followed=follows and rank > 0,
            )
            for rank in range(ranks)
        }
        self._newcomers: dict[int, WatchedRank] = {}  # that are not taken in yet
        self._called: set[int] = set()  # members that are told of the newest group, and not ready
        self._asked_to_rest = False  # all members, since the newest group began
        self._vacant = 0  # places in it of ranks that were lost, and that the run goes on without

    @property
    def ended_by_loss(self) -> bool:
        """True if the run fails by the loss of a rank, and the user has not asked for its end."""
        return self._by_loss and not self.stopped

    @property
    def over(self) -> bool:
        """True if nothing is left to wait for."""
        pending = self.cause is None and any(m.is_pending for m in self._members.values())
        return not pending and all(member.gone for member in self._members.values())

    def suspects(self, now: float) -> list[int]:
        """Return the ranks that may be stopped: the watcher should ask the kernel about them."""
        silent = now - self.limits.silence
        # The kernel's answer stands in for the beats of a rank that has not joined.
        return [
            member.rank
            for member in self._in(State.ABSENT, *ALIVE)
            if member.state is State.ABSENT or member.seen_at < silent
        ]

    def observe(self, now: float, event: events.Event) -> list[Instruction]:
        """Take in one event; return what is to be done now."""
        self._now = now
        if isinstance(event, events.Interrupted):
            self._signalled(f"{STOPPING}; press Ctrl-C again to end at once")
        elif isinstance(event, events.Terminated):
            self._terminated(event)
        elif isinstance(event, events.HostGone):
            self._lose_host(event)
        elif isinstance(event, events.ForkServerLost):
            self._fail(event.how, loss=event.by_signal)
        elif event.rank in self._members:
            self._heard(self._members[event.rank], event)
        else:
            self._heard_newcomer(event)
        return self._decided()

    def tick(self, now: float, stopped: Collection[int] = ()) -> list[Instruction]:
        """Let time pass; `stopped` are the suspects that their kernel holds stopped."""
        self._now = now
        self._forgive_own_absence()
        if self.cause is not None:
            if now - self._failed_at >= self.limits.leaving:
                self._kill(self._members.values())
            return self._decided()
        self._tell_held()
        # Ends at the first cause of a failure, so that the order of the rules matters.
        for rule in (
            self._out_of_grace, self._late, self._unknown_ends, lambda: self._silences(stopped),
            self._consequences_due, self._accusations_due, self._hangs, self._only_stopped_missing,
            self._overstayed,
        ):  # fmt: skip
            if self.cause is None:
                rule()
        self._look_after_newcomers()
        return self._decided()

    def refused(self, text: str) -> list[Instruction]:
        """Report once that a connection was refused, which may have been a rank's."""
        if text not in self._refused and len(self._refused) < MAX_REFUSED:
            self._refused.append(text)
            self._notice(text)
        return self._decided()

    def noticed(self, text: str) -> list[Instruction]:
        """Pass on what a rank has to say to the user."""
        self._notice(text)
        return self._decided()

    # What events mean

    def _signalled(self, notice: str) -> None:
        """The launcher got a signal: the first one stops the run, a second one ends it at once."""
        self._signals += 1
        if self._signals > 1:
            self._fail("interrupted")
            self._kill(self._members.values())
            return
        self._stop(notice)

    def _stop(self, notice: str, *, until: float | None = None) -> None:
        """Let all ranks stop; a notice with a time is held `until` then."""
        if not self.stopped and self.cause is None:
            self._instructions.append(events.Stop())
            if until is None:
                self._notice(notice)
            else:
                self._held = until, notice
        self.stopped = True

    def _tell_held(self) -> None:
        if self._held is not None and self._held[0] <= self._now:
            self._notice(self._held[1])
            self._held = None

    def _begin_grace(self) -> None:
        if not self.terminated:
            self.terminated = True
            self._stop_by = self._now + (1 - RESERVE) * self.limits.grace

    def _lose_host(self, event: events.HostGone) -> None:
        """Name the connection as the cause of what follows; stop in good order if that can be."""
        lost = [self._members[rank] for rank in event.ranks if rank in self._members]
        for member in lost:
            member.cut_off, member.host = True, member.host or event.host
        for member in lost:
            if member.is_pending or (event.stops and member.state is State.ABSENT):
                self._dead(member, CLOSED, loss=True)
        if not event.stops or self.cause is not None:
            return
        if self._held is not None:
            self._held, self.stopped = None, False  # that notice had this cause
        self._begin_grace()
        self._stop(f"{event.host}: the ssh connection has ended; {STOPPING}")

    def _terminated(self, event: events.Terminated) -> None:
        if event.rank is not None and (
            self.cause is not None or self._consequences or self.terminated
        ):
            return  # an echo
        if event.rank is not None and self._lost is not None:
            lost_at, how = self._lost
            if self._now - lost_at < ECHO_SECONDS:
                self._fail(f"{how}; its launcher ends the other ranks, too", loss=True)
                return
        self._begin_grace()
        within = f"all ranks have to leave within {self.limits.grace:g} s of SIGTERM"
        notice = f"{STOPPING}; {within}"
        if event.rank is None:
            self._signalled(notice)
            return
        # The agent on a host sends it where the connection to that is lost.
        member = self._members.get(event.rank)
        followed = member is not None and member.followed
        self._stop(notice, until=self._now + self.limits.status if followed else None)

    def _heard(self, member: WatchedRank, event: events.OfRank) -> None:
        member.seen_at = self._now
        match event:
            case events.Joined(host=host):
                member.state, member.host = State.RUNNING, host
                self._begin_anew()  # the others could only wait for it
            case events.Heartbeat():
                self._beat(member, event)
            case events.Ready():
                self._mark_ready(member, event.generation)
            case events.Accused(failure=failure, generation=generation, waits=waits):
                # Of a group that is over, whose members give each other up as they learn of it.
                if generation == self.generation and failure.lost is not None:
                    key = member.rank, failure.lost
                    first = self._accusations.get(key, Accusation(self._now, failure, waits))
                    waits = waits or first.waits
                    self._accusations[key] = Accusation(first.since, failure, waits)
            case events.Finished():
                self._finished(member)
            case events.Failed(failure=failure):
                self._failed(member, failure)
            case events.Left():
                member.leaves = True
                self._dead(member, "has left", loss=True)
            case events.Disconnected():
                self._disconnect(member)
            case events.Exited(status=status, host=host):
                member.gone = True
                member.host = member.host or host
                self._dead(member, events.exit_text(status), loss=status < 0)

    def _disconnect(self, member: WatchedRank) -> None:
        """Note that its connection has ended; an exit status, which may follow, says more."""
        member.disconnected_at = self._now
        member.gone = member.gone or not member.child
        if member.cut_off or not (member.child or member.followed):
            self._dead(member, CLOSED, loss=True)

    def _mark_ready(self, member: WatchedRank, generation: int) -> None:
        """Note that `member` can be reached in the group of `generation`."""
        if generation == self.generation:
            self._called.discard(member.rank)
        self._begin_anew()

    def _finished(self, member: WatchedRank) -> None:
        self._settle(member, State.DONE)
        if member.rank in self._called:  # it had ended before it heard of the new group
            self._go_on_without_new()

    def _beat(self, member: WatchedRank, beat: events.Heartbeat) -> None:
        back = member.state is State.STOPPED
        if beat.progress != member.beat.progress or back:
            member.active_at = self._now
        member.beat = beat
        if back:
            member.state = State.RUNNING
            self._notice(f"{member.name} is back")
        if beat.activity is RankActivity.RESTING:
            self._look_after_newcomers()

    def _failed(self, member: WatchedRank, failure: events.Failure) -> None:
        if member.state is State.LEFT_OUT:
            return
        self._settle(member, State.FAILED)
        if self.cause is not None:
            return
        if failure.lost is not None or failure.aborted:  # the lost rank's end may be under way
            seconds = 0.0 if failure.lost in self.left_out else self.limits.cause
            self._consequences.append((self._now + seconds, member, failure))
            return
        if failure.bad_input and member.beat.activity is RankActivity.SET_UP:
            self.bad_input = failure.message
        self._fail(events.failed_text(member.name, failure))

    def _dead(self, member: WatchedRank, how: str, *, loss: bool) -> None:
        if member.cut_off:
            how = f"is lost: the ssh connection to {member.host} has ended"
        if member.state not in (State.DONE, State.FAILED, State.LEFT_OUT):
            self._give_up(member, how, loss=loss)

    def _give_up(self, member: WatchedRank, how: str, *, loss: bool) -> None:
        """Go on without a rank if it is expendable; else end the run by its name, as in
        "rank 2 on host was killed by SIGKILL"."""
        if self.cause is not None:
            return
        member.lost = loss
        left = sum(m.state is not State.LEFT_OUT for m in self._members.values()) - 1
        expendable = self._is_expendable(member)
        regroups = loss and not expendable and self._are_elastic()
        goes_on = expendable or regroups
        left += len(self._ready(RankActivity.SPARE)[:1]) if regroups else 0
        if goes_on and left < self._min_ranks:
            count = "1 rank is left" if left == 1 else f"{left} ranks are left"
            self._fail(f"{member.name} {how}; {count}, of {self._min_ranks} at least", loss=loss)
        elif expendable:
            self._leave_out(member, how)
            self._vacant += 1
            self._instructions.append(events.Disconnect(member.rank, how))
            self._notice(f"{member.name} {how}; going on without it")
        elif goes_on:
            self._regroup_without(member, how)
        else:
            refused = self._refused if member.state is State.ABSENT else ()
            self._fail(f"{member.name} {'; '.join([how, *refused])}", loss=loss)
        if not member.leaves:  # else its process ends by itself
            self._kill([member])

    def _is_expendable(self, member: WatchedRank) -> bool:
        """Return whether all others go on in place without it; none of them does in its set-up."""
        setting_up = any(m.beat.activity is RankActivity.SET_UP for m in self._in(*ALIVE))
        return member.beat.expendable and not setting_up

    def _are_elastic(self) -> bool:
        """Return whether all programs go on in a new group where one of them is lost."""
        remaining = [m for m in self._members.values() if m.state is not State.LEFT_OUT]
        return all(m.state in ALIVE and bool(m.beat.elastic) for m in remaining)

    def _leave_out(self, member: WatchedRank, how: str) -> None:
        self._settle(member, State.LEFT_OUT)
        self.left_out[member.rank] = how
        if not member.leaves:
            self._lost = self._now, f"{member.name} {how}"
        self._begin_anew()

    def _regroup_without(self, member: WatchedRank, how: str) -> None:
        self._leave_out(member, how)
        spares = self._ready(RankActivity.SPARE)[:1]
        ranks = self._regroup([*spares, *self._ready(RankActivity.JOINING)])
        instead = f"; {spares[0].name} takes its place" if spares else ""
        self._notice(f"{member.name} {how}{instead}; going on with {ranks}")

    def _regroup(self, come: Sequence[WatchedRank]) -> str:
        """Make a group of those that are left and those that `come`; return how many they are."""
        for newcomer in come:
            self._members[newcomer.rank] = self._newcomers.pop(newcomer.rank)
        # What they say of each other until now has a loss for its cause.
        self._consequences.clear()
        self._accusations.clear()
        self.generation += 1
        self._asked_to_rest, self._vacant = False, 0
        members = tuple(m.rank for m in self._in(*ALIVE))
        self._instructions.append(events.Regroup(self.generation, members))
        self._called = set(members)
        self._begin_anew()
        return "1 rank" if len(members) == 1 else f"{len(members)} ranks"

    def _go_on_without_new(self) -> None:
        """Let those that are left end as they were about to, without a newcomer."""
        for member in self._in(*ALIVE):
            if member.is_new:
                self._newcomers[member.rank] = self._members.pop(member.rank)
                self._refuse(member, events.RUN_OVER)
        if self._in(*ALIVE):
            self._regroup([])

    # Newcomers

    def _heard_newcomer(self, event: events.OfRank) -> None:
        """Take note of a rank that is no member: its end concerns nobody."""
        match event:
            case events.Joined(rank=rank, host=host):
                beat = events.Heartbeat(rank)
                newcomer = WatchedRank(rank, self._now, self._now, beat, State.RUNNING, host)
                self._newcomers[rank] = newcomer
                self._notice(f"{newcomer.name} gets ready to join")
            case events.Heartbeat(rank=rank) if rank in self._newcomers:
                self._newcomers[rank].beat = event
                self._newcomers[rank].seen_at = self._now
            case events.Failed(rank=rank, failure=failure) if rank in self._newcomers:
                newcomer = self._newcomers[rank]
                self._refuse(newcomer, events.failed_text(newcomer.name, failure))
            case events.Disconnected(rank=rank) | events.Left(rank=rank):
                if (gone := self._newcomers.pop(rank, None)) is not None:
                    self._notice(f"{gone.name} is gone before it was taken in")

    def _look_after_newcomers(self) -> None:
        """Take in those that are ready, where the programs of all members can go on with them."""
        members = self._in(State.ABSENT, *ALIVE)
        if not members:
            for newcomer in list(self._newcomers.values()):
                self._refuse(newcomer, events.RUN_OVER)
        activities = {m.beat.activity for m in members}
        if self._asked_to_rest and activities == {RankActivity.RESTING} and self.cause is None:
            self._take_in(self._come())
        elif self._newcomers and self._are_elastic() and not self.stopped:
            rest_first = any(m.beat.rests for m in members)
            activities -= {RankActivity.SERVING} if rest_first else set()
            if activities == {RankActivity.TRAINING} and (come := self._come()):
                if not rest_first:
                    self._take_in(come)
                elif not self._asked_to_rest:
                    self._asked_to_rest = True
                    self._instructions.append(events.Quiesce())

    def _come(self) -> list[WatchedRank]:
        """Return those who are to be taken in."""
        return [
            *self._ready(RankActivity.JOINING),
            *self._ready(RankActivity.SPARE)[: self._vacant],
        ]

    def _take_in(self, come: Sequence[WatchedRank]) -> None:
        """Go on in a new group with the newcomers that `come`. Some of them may have left since."""
        ranks = self._regroup(come)
        if come:
            names = ", ".join(newcomer.name for newcomer in come)
            self._notice(f"{names} joins; going on with {ranks}")

    def _ready(self, activity: RankActivity) -> list[WatchedRank]:
        """Return the newcomers with this `activity` that can go on with the members; refuse those
        that train something else, or would be too many."""
        found: list[WatchedRank] = []
        there = len(self._in(State.ABSENT, *ALIVE))
        program = next((m.beat.elastic for m in self._in(*ALIVE)), "")
        for newcomer in list(self._newcomers.values()):
            silent = self._now - newcomer.seen_at > self.limits.silence
            if newcomer.beat.activity is not activity or silent:
                continue
            if newcomer.beat.elastic != program:
                self._refuse(
                    newcomer,
                    "its model, data or version of Orchestra is not that of the run: let it find "
                    "the same task",
                )
            elif activity is RankActivity.JOINING and (
                why := self._refusal(there + len(found) + 1)
            ):
                self._refuse(newcomer, f"it would be one rank too many: {why}")
            else:
                found.append(newcomer)
        return found

    def _refuse(self, newcomer: WatchedRank, why: str) -> None:
        del self._newcomers[newcomer.rank]
        self._instructions.append(events.Refuse(newcomer.rank, why))
        if why != events.RUN_OVER:
            first_line = why.split("\n", 1)[0].removeprefix(f"{newcomer.name} ")
            self._notice(f"{newcomer.name} is not taken in: {first_line}")

    def _begin_anew(self) -> None:
        """Count everybody's progress from now: they may have waited for a rank that has come, or
        will not come any more."""
        for member in self._members.values():
            member.active_at = self._now

    # What time means

    def _forgive_own_absence(self) -> None:
        """Put off all limits if the watcher itself was stopped, or starved of processor time."""
        absence = self._now - self._ticked_at
        self._ticked_at = self._now
        if absence >= self.limits.silence / 2:
            for member in self._members.values():
                member.seen_at = min(member.seen_at + absence, self._now)
                member.active_at = min(member.active_at + absence, self._now)

    def _out_of_grace(self) -> None:
        if self._now < self._stop_by:
            return
        late = ", ".join(member.name for member in self._in(State.ABSENT, *ALIVE))
        if late:
            self._fail(
                f"{late} did not come to rest in time within the {self.limits.grace:g} s that "
                "SIGTERM leaves (grace); the last checkpoint stands",
                at_once=True,
            )
            self._kill(self._members.values())

    def _late(self) -> None:
        absent = ", ".join(member.name for member in self._in(State.ABSENT))
        if absent and self._now - self._started_at >= self.limits.joining:
            how = f"did not join within {self.limits.joining:g} s"
            self._fail(f"{absent} {'; '.join([how, *self._refused])}")

    def _unknown_ends(self) -> None:
        for member in self._members.values():
            ended = member.disconnected_at
            if ended is None or self._now - ended <= self.limits.status:
                continue
            if member.followed:
                self._dead(member, CLOSED, loss=True)
            elif not member.gone:
                self._dead(member, "closed its control connection", loss=True)

    def _silences(self, stopped: Collection[int]) -> None:
        for rank in self.suspects(self._now):
            member = self._members[rank]
            if rank in stopped:
                if self._now - member.seen_at > self.limits.silence:
                    self._judge_stopped(member)
            elif member.state is State.ABSENT:
                member.seen_at = self._now
            elif self._now - member.seen_at > self.limits.patience:
                how = f"does not respond: no sign of life for {self.limits.patience:g} s"
                self._give_up(member, how, loss=True)

    def _judge_stopped(self, member: WatchedRank) -> None:
        """Go on without a stopped rank if it is expendable; else give it up."""
        if not self._is_expendable(member):
            self._give_up(member, events.STOPPED, loss=True)
            return
        # Once it runs again its silence counts from here, not from its last beat; it stays a
        # suspect, so that it is asked for again.
        member.seen_at = self._now - self.limits.silence
        if member.state is State.RUNNING:
            member.state = State.STOPPED
            self._notice(f"{member.name} is stopped; going on without it")

    def _consequences_due(self) -> None:
        """Report a failure whose cause did not arrive in time."""
        due = [each for each in self._consequences if each[0] <= self._now]
        if not due:
            return
        _, member, failure = due[0]
        lost = None if failure.lost is None else self._members[failure.lost]
        if lost is not None and lost.state is State.DONE:
            self._needs_ended(member, lost, failure)
        elif lost is None or lost.rank not in self.left_out:
            # Ranks may lose each other while the watcher reaches both: a connection that is gone.
            self._fail(events.failed_text(member.name, failure), loss=lost is not None)
        else:
            consequence = events.failed_text(member.name, failure, "could not go on")
            self._fail(f"{lost.name} {self.left_out[lost.rank]}; {consequence}", loss=lost.lost)

    def _needs_ended(
        self, member: WatchedRank, ended: WatchedRank, failure: events.Failure
    ) -> None:
        """End the run, as `member` cannot go on without a rank that has `ended` in good order."""
        # Of a run of ours all ranks end together: there a connection is gone.
        if ended.beat.activity in (RankActivity.LEAVING, RankActivity.EVALUATING):
            self._fail(events.failed_text(member.name, failure), loss=True)
        else:
            self._parted(ended, member)

    def _accusations_due(self) -> None:
        """Decide about a connection that two ranks have lost, once neither can be dead."""
        for (rank, lost), accusation in list(self._accusations.items()):
            if self.cause is not None or (rank, lost) not in self._accusations:
                return
            member, other = self._members[rank], self._members[lost]
            since, back = accusation.since, self._accusations.get((lost, rank))
            due = since + self.limits.cause
            if back is not None:
                due = min(due, max(since, back.since) + BOTH_SECONDS)
            if member.state not in ALIVE or other.state is State.LEFT_OUT:
                del self._accusations[rank, lost]
            elif other.state is State.DONE and not self._is_expendable(member):
                del self._accusations[rank, lost]
                if accusation.waits:
                    self._needs_ended(member, other, accusation.failure)
                else:
                    # The accuser knows whether it still needs it. Others have their connections,
                    # which may hold what they have not read yet.
                    self._instructions.append(events.Disconnect(lost, "has ended", to=rank))
            elif due <= self._now and other.state is not State.FAILED:
                self._disconnected(member, other)

    def _disconnected(self, member: WatchedRank, other: WatchedRank) -> None:
        """Two ranks that live have lost their connection: let all connect anew, or give one up; at
        once a new one, which has never reached the others."""
        pair = [member, other]
        accused = Counter(lost for _, lost in self._accusations)
        worse = max(
            [m for m in pair if m.is_new or (m.state in ALIVE and self._is_expendable(m))] or pair,
            key=lambda m: (
                m.is_new,
                accused[m.rank],
                m.beat.activity is not RankActivity.SERVING,
                m.rank,
            ),
        )
        whom = pair[worse is member]
        if worse.is_new:
            self._give_up(worse, f"cannot connect with rank {whom.rank}", loss=True)
        elif self._are_elastic() and self._now - self._reconnected_at > RECONNECTED_SECONDS:
            self._reconnected_at = self._now
            self._regroup([])
            self._notice(
                f"{member.name} lost its connection to rank {other.rank}; all ranks connect anew"
            )
        else:
            self._give_up(worse, f"lost its connection to rank {whom.rank}", loss=True)

    def _hangs(self) -> None:
        patience = self.limits.patience
        if self._in(State.ABSENT):
            return  # all others wait for it, which `_late` decides about
        under_way = any(m.beat.step > 0 for m in self._members.values())
        alive = {m.rank for m in self._in(*ALIVE)}
        over = {
            rank for rank in alive if self._members[rank].beat.activity is RankActivity.SCRIPT_OVER
        }
        limit = patience if under_way else 3 * patience
        if over and over != alive:
            limit = min(limit, self.limits.parting)
        waiting: dict[int, tuple[int, ...]] = {}
        for member in self._in(State.RUNNING):
            if member.seen_at < self._now - self.limits.silence:
                continue  # `_silences` decides about it
            idle = self._now - member.active_at
            if member.beat.waits_for:
                if idle > limit:
                    # A server beside a worker, which waits for itself, waits for any of the others.
                    beside = member.beat.waits_for == (member.rank,)
                    waiting[member.rank] = tuple(alive) if beside else member.beat.waits_for
            elif idle > patience * (1 if member.beat.step > 0 else 3) and self._is_awaited(member):
                self._give_up(member, self._idle_text(member, idle), loss=False)
        deadlocked = events.stuck(waiting, alive)
        if deadlocked:
            self._deadlocked(deadlocked, over)
            return
        stopped = self._in(State.STOPPED)
        if stopped and events.stuck(waiting, alive - {m.rank for m in stopped}):
            for member in stopped:  # at a checkpoint, say
                self._give_up(member, "is stopped, and all others wait for it", loss=True)

    def _deadlocked(self, waits: Mapping[int, tuple[int, ...]], over: Collection[int]) -> None:
        early, late = waits.keys() & over, waits.keys() - over
        if early and late:
            self._parted(self._members[min(early)], self._members[min(late)])
            return
        if new := [rank for rank in waits if self._members[rank].is_new]:
            for rank in new:
                self._give_up(self._members[rank], "cannot connect with all others", loss=True)
            return
        beats = {rank: self._members[rank].beat for rank in waits}
        whats = {rank: beat.waits_what for rank, beat in beats.items()}
        states = {m.rank: m.state.value for m in self._members.values()}
        text = f"the run hangs: {events.follow_waits(waits, whats, states)}"
        steps = {
            rank: beat.step
            for rank, beat in beats.items()
            if beat.activity is not RankActivity.SERVING
        }
        if len({*steps.values()}) > 1:
            first, last = (each(steps, key=steps.__getitem__) for each in (max, min))
            text += f"; rank {first} is at step {steps[first]}, rank {last} at {steps[last]}"
        self._fail(text)

    def _parted(self, early: WatchedRank, late: WatchedRank) -> None:
        self._fail(
            f"{early.name} ended its script after step {early.beat.step}, but {late.name} still "
            "needs it: let every rank make as many steps before its script ends"
        )

    def _is_awaited(self, member: WatchedRank) -> bool:
        """Return whether an idle rank can hang: not while paused, nor while others still train.

        One that leaves may well wait for the slowest.
        """
        if member.beat.activity is RankActivity.PAUSED:
            return False
        return member.beat.activity is not RankActivity.LEAVING or all(
            m.leaving for m in self._members.values()
        )

    def _idle_text(self, member: WatchedRank, idle: float) -> str:
        beat = member.beat
        parts = [f"hangs: no progress for {idle:.0f} s (step {beat.step}, {beat.activity})"]
        waiters = [m.rank for m in self._members.values() if member.rank in m.beat.waits_for]
        if waiters:
            who = f"rank {waiters[0]}" if len(waiters) == 1 else f"ranks {waiters}"
            parts.append(f"{who} waiting for it")
        return "; ".join([*parts, self.limits.advice] if self.limits.advice else parts)

    def _only_stopped_missing(self) -> None:
        """Give up stopped ranks once all others leave, or serve only."""
        others = [m for m in self._members.values() if m.state is not State.STOPPED]
        waiting = all(m.leaving or m.beat.activity is RankActivity.SERVING for m in others)
        if waiting and not self._in(State.ABSENT) and any(m.leaving for m in others):
            for member in self._in(State.STOPPED):
                self._give_up(member, "was still stopped at the end", loss=True)

    def _overstayed(self) -> None:
        self._kill(
            member
            for member in self._members.values()
            if member.settled_at is not None
            and self._now - member.settled_at > self.limits.leaving
            and member.state is not State.FAILED  # it waits for the cause
        )

    # Shared by all

    def _in(self, *states: State) -> list[WatchedRank]:
        return [member for member in self._members.values() if member.state in states]

    def _fail(self, cause: str, *, loss: bool = False, at_once: bool = False) -> None:
        if self.cause is None:
            self.cause, self._failed_at, self._by_loss = cause, self._now, loss
            self._instructions.append(events.Abort(cause, at_once))

    def _kill(self, members: Iterable[WatchedRank]) -> None:
        for member in members:
            if not member.gone and member.rank not in self._killed:
                self._killed.add(member.rank)
                self._instructions.append(events.Kill(member.rank))

    def _notice(self, text: str) -> None:
        self.notices.append(text)
        self._instructions.append(events.Notice(text))

    def _settle(self, member: WatchedRank, state: State) -> None:
        member.state, member.settled_at = state, self._now

    def _decided(self) -> list[Instruction]:
        decided, self._instructions = self._instructions, []
        return decided
