"""Who is dead, stopped or hung, and what follows from it.

Pure decisions: events with their time go in, instructions come out; there is no clock, no
process and no socket here. `orchestra.engines.processes.watcher` feeds it and carries out what
it says.

The rules:

- A rank whose process ended, or whose control connection closed, is dead at once.
- A rank that sends no beat for `silence` seconds is suspected. It is stopped if its kernel says
  so, and unresponsive after `patience` (native code may hold the interpreter for seconds).
- A rank that computes for longer than `patience` without a sign of progress is hung; before its
  first step it has three times as long. Ranks that wait for each other, or for nobody alive,
  are hung together.
- A failure that is the consequence of another one waits a moment for the true cause.
- An expendable rank is left out; any other ends the run.
"""

from __future__ import annotations

import enum
import signal
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from orchestra.engines import events
from orchestra.engines.events import Instruction

REFUSALS = 8
"""Refused connections that a run reports at most: strangers cause them, too."""


@dataclass(frozen=True)
class Limits:
    """How long to wait for what, in seconds."""

    patience: float = 60.0
    joining: float = 300.0  # from the start until every rank has joined
    silence: float = 3.0  # without a beat: suspected
    echo: float = 3.0  # for the true cause behind a consequence
    status: float = 2.0  # from the end of a connection until the exit status is known
    unwinding: float = 3.0  # for a program to end once its rank was told to leave
    leaving: float = 5.0  # for the process of such a rank, or of one that delivered its result
    advice: str = ""  # for the user of a program that had more to do than `patience` allows


class State(enum.Enum):
    ABSENT = "has not joined"
    RUNNING = "is running"
    STOPPED = "is stopped"  # expendable, and the run goes on meanwhile
    DONE = "has finished"
    FAILED = "has failed"
    LEFT_OUT = "was left out"


ALIVE = (State.RUNNING, State.STOPPED)


@dataclass
class Member:
    """The knowledge about one rank."""

    rank: int
    seen_at: float  # its last sign of life
    active_at: float  # its last sign of progress
    state: State = State.ABSENT
    host: str = ""
    pulse: events.Pulse = field(default_factory=events.Pulse)
    disconnected_at: float | None = None
    gone: bool = False  # its process, or its connection where it is nobody's child
    settled_at: float | None = None  # when it finished, failed or was left out

    @property
    def name(self) -> str:
        return f"rank {self.rank} on {self.host}" if self.host else f"rank {self.rank}"

    @property
    def leaving(self) -> bool:
        return self.state not in ALIVE or self.pulse.phase == "leaving"

    @property
    def has_no_work_left(self) -> bool:
        """It only waits for others: it leaves, or serves those that still work."""
        return self.leaving or self.pulse.phase == "serving"


class Verdicts:
    """Decides what a watcher does.

    Args:
        ranks: how many ranks the run has.
        limits: how long to wait for what.
        start: the time at which the run was started.
        children: the ranks are child processes whose exit status will be reported.
            Otherwise the end of its connection is all that is known of a rank's end.
    """

    def __init__(self, ranks: int, limits: Limits, *, start: float, children: bool) -> None:
        self.limits = limits
        self.cause: str | None = None
        self.bad_input: str | None = None  # the cause, where nothing had begun but set-up
        self.left_out: dict[int, str] = {}
        self.notices: list[str] = []
        self.stopped = False
        self._children = children
        self._started_at = self._ticked_at = start
        self._failed_at: float | None = None
        self._consequences: list[tuple[float, Member, events.Failure]] = []  # deadlines
        self._refused: list[str] = []
        self._killed: set[int] = set()
        self._members = {rank: Member(rank, start, start) for rank in range(ranks)}

    @property
    def over(self) -> bool:
        """Nothing is left to wait for."""
        return all(member.gone for member in self._members.values())

    def suspects(self, now: float) -> list[int]:
        """The ranks of which the watcher should ask the kernel whether they are stopped."""
        silent = now - self.limits.silence
        return [member.rank for member in self._in(*ALIVE) if member.seen_at < silent]

    def observe(self, now: float, event: events.Event) -> list[Instruction]:
        """Take in one event; what is to be done now."""
        return self._kept(self._observe(now, event))

    def _observe(self, now: float, event: events.Event) -> Iterable[Instruction]:
        if isinstance(event, events.Interrupted):
            return self._interrupted(now)
        if isinstance(event, events.ServerLost):
            return self._fail(now, event.how)
        member = self._members[event.rank]
        member.seen_at = now
        match event:
            case events.Joined(host=host):
                member.state, member.host = State.RUNNING, host
                for other in self._members.values():  # they could only wait for it
                    other.active_at = now
                return []
            case events.Beat(pulse=pulse):
                return self._beat(now, member, pulse)
            case events.Finished():
                self._settle(now, member, State.DONE)
                return []
            case events.Failed(failure=failure):
                return self._failed(now, member, failure)
            case events.Disconnected():
                return self._disconnected(now, member)
            case events.Exited(status=status):
                member.gone = True
                return self._dead(now, member, describe_exit(status))

    def tick(self, now: float, stopped: Collection[int] = ()) -> list[Instruction]:
        """Let time pass; `stopped` are the suspects that their kernel holds stopped."""
        self._forgive_own_absence(now)
        if self.cause is not None:
            return self._kept(self._clear_out(now))
        instructions: list[Instruction] = []
        for rule in (
            self._late,
            self._unknown_ends,
            self._silences,
            self._consequences_due,
            self._hangs,
        ):
            if self.cause is None:
                instructions += rule(now, stopped)
        if self.cause is None:
            instructions += self._only_stopped_missing(now)
            instructions += self._overstayed(now)
        return self._kept(instructions)

    def refused(self, text: str) -> list[Instruction]:
        """Report once that a connection was refused, which may have been a rank's."""
        if text in self._refused or len(self._refused) == REFUSALS:
            return []
        self._refused.append(text)
        return self._kept([events.Notice(text)])

    # What events mean

    def _interrupted(self, now: float) -> Iterable[Instruction]:
        if not self.stopped:
            self.stopped = True
            if self.cause is not None:
                return []
            notice = "stopping in good order; press Ctrl-C again to end at once"
            return [events.Stop(), events.Notice(notice)]
        ending = self._fail(now, "interrupted")
        return [*ending, *self._kill(m for m in self._members.values() if not m.gone)]

    def _beat(self, now: float, member: Member, pulse: events.Pulse) -> Iterable[Instruction]:
        back = member.state is State.STOPPED
        if pulse.activity != member.pulse.activity or back:
            member.active_at = now
        member.pulse = pulse
        if not back:
            return []
        member.state = State.RUNNING
        return [events.Notice(f"{member.name} is back")]

    def _failed(self, now: float, member: Member, failure: events.Failure) -> Iterable[Instruction]:
        if member.state is State.LEFT_OUT:
            return []
        self._settle(now, member, State.FAILED)
        if self.cause is not None:
            return []
        if failure.lost is None and not failure.aborted:
            if failure.bad_input and member.pulse.phase == "set-up":
                self.bad_input = failure.message
            return self._fail(now, events.failed_text(member.name, failure))
        self._consequences.append((now + self.limits.echo, member, failure))
        return []

    def _disconnected(self, now: float, member: Member) -> Iterable[Instruction]:
        member.disconnected_at = now
        if self._children:
            return []  # the exit status says more, and comes in a moment
        member.gone = True
        return self._dead(now, member, "is gone: its control connection closed")

    def _dead(self, now: float, member: Member, how: str) -> Iterable[Instruction]:
        if member.state in (State.DONE, State.FAILED, State.LEFT_OUT) or self.cause is not None:
            return []
        return self._lose(now, member, how)

    def _lose(self, now: float, member: Member, how: str) -> Iterable[Instruction]:
        """A rank is lost for good: go on without it where it is expendable."""
        if self.cause is not None:
            return []
        if not member.pulse.expendable:
            if member.state is State.ABSENT:
                how = "; ".join([how, *self._refused])
            return [*self._fail(now, f"{member.name} {how}"), *self._kill([member])]
        self._settle(now, member, State.LEFT_OUT)
        self.left_out[member.rank] = how
        for other in self._members.values():  # whoever waited for it has a new start
            other.active_at = now
        notice = events.Notice(f"{member.name} {how}; going on without it")
        return [events.Disconnect(member.rank, how), notice, *self._kill([member])]

    # What time means

    def _forgive_own_absence(self, now: float) -> None:
        """Nobody is late because the watcher itself was stopped, or starved of processor time."""
        absence = now - self._ticked_at
        self._ticked_at = now
        if absence < self.limits.silence / 2:
            return
        for member in self._members.values():
            member.seen_at = min(member.seen_at + absence, now)
            member.active_at = min(member.active_at + absence, now)

    def _late(self, now: float, _: Collection[int]) -> Iterable[Instruction]:
        absent = self._in(State.ABSENT)
        if not absent or now - self._started_at < self.limits.joining:
            return []
        names = ", ".join(m.name for m in absent)
        how = f"did not join within {self.limits.joining:g} s"
        return self._fail(now, f"{names} {'; '.join([how, *self._refused])}")

    def _unknown_ends(self, now: float, _: Collection[int]) -> Iterable[Instruction]:
        for member in self._members.values():
            ended = member.disconnected_at
            if ended is not None and not member.gone and now - ended > self.limits.status:
                yield from self._dead(now, member, "closed its control connection")

    def _silences(self, now: float, stopped: Collection[int]) -> Iterable[Instruction]:
        for rank in self.suspects(now):
            member = self._members[rank]
            if rank in stopped:
                yield from self._held(now, member)
            elif now - member.seen_at > self.limits.patience:
                how = f"does not respond: no sign of life for {self.limits.patience:g} s"
                yield from self._lose(now, member, how)

    def _held(self, now: float, member: Member) -> Iterable[Instruction]:
        if not member.pulse.expendable:
            yield from self._lose(now, member, "is stopped (by SIGSTOP or its terminal)")
            return
        # Once it runs again its silence counts from here, not from its last beat; it stays a
        # suspect, so that it is asked for again.
        member.seen_at = now - self.limits.silence
        if member.state is State.RUNNING:
            member.state = State.STOPPED
            yield events.Notice(f"{member.name} is stopped; going on without it")

    def _consequences_due(self, now: float, _: Collection[int]) -> Iterable[Instruction]:
        """Of a failure whose cause did not come in time."""
        for deadline, member, failure in self._consequences[:1]:
            if deadline <= now:
                return self._fail(now, self._consequence_text(member, failure))
        return []

    def _hangs(self, now: float, _: Collection[int]) -> Iterable[Instruction]:
        patience = self.limits.patience
        if self._in(State.ABSENT):
            return  # all others wait for it, which `_late` judges
        beating = [m for m in self._in(State.RUNNING) if m.seen_at >= now - self.limits.silence]
        under_way = any(m.pulse.step > 0 for m in self._members.values())
        alive = {m.rank for m in self._in(*ALIVE)}
        waiting: dict[int, tuple[int, ...]] = {}
        for member in beating:
            idle = now - member.active_at
            if member.pulse.waits_for:
                if idle > patience * (1 if under_way else 3):
                    # A server beside a worker, which waits for itself, waits for any of the others.
                    beside = member.pulse.waits_for == (member.rank,)
                    waiting[member.rank] = tuple(alive) if beside else member.pulse.waits_for
            elif idle > patience * (1 if member.pulse.step > 0 else 3) and self._is_awaited(member):
                yield from self._lose(now, member, self._idle_text(member, idle))
        deadlocked = events.stuck(waiting, alive)
        if deadlocked and self.cause is None:
            whats = {rank: self._members[rank].pulse.waits_what for rank in deadlocked}
            states = {m.rank: m.state.value for m in self._members.values()}
            yield from self._fail(now, f"the run hangs: {events.tell(deadlocked, whats, states)}")
            return
        held = self._in(State.STOPPED)
        if held and events.stuck(waiting, alive - {m.rank for m in held}):  # at a checkpoint, say
            for member in held:
                yield from self._lose(now, member, "is stopped, and all others wait for it")

    def _consequence_text(self, member: Member, failure: events.Failure) -> str:
        if failure.lost not in self.left_out:
            return events.failed_text(member.name, failure)
        lost = self._members[failure.lost]
        consequence = events.failed_text(member.name, failure, "could not go on")
        return f"{lost.name} {self.left_out[lost.rank]}; {consequence}"

    def _is_awaited(self, member: Member) -> bool:
        """A rank that leaves may well wait for the slowest: it hangs once all are leaving. One that
        is paused has said that it may take long."""
        if member.pulse.phase == "paused":
            return False
        return member.pulse.phase != "leaving" or all(m.leaving for m in self._members.values())

    def _idle_text(self, member: Member, idle: float) -> str:
        pulse = member.pulse
        waiters = [m.rank for m in self._members.values() if member.rank in m.pulse.waits_for]
        text = f"hangs: no progress for {idle:.0f} s (step {pulse.step}, {pulse.phase})"
        if waiters:
            who = "rank " + str(waiters[0]) if len(waiters) == 1 else f"ranks {waiters}"
            text = f"{text}; {who} waiting for it"
        return f"{text}; {self.limits.advice}" if self.limits.advice else text

    def _only_stopped_missing(self, now: float) -> Iterable[Instruction]:
        held = self._in(State.STOPPED)
        others = [m for m in self._members.values() if m.state is not State.STOPPED]
        waiting = all(m.has_no_work_left and m.state is not State.ABSENT for m in others)
        if held and waiting and any(m.leaving for m in others):
            for member in held:
                yield from self._lose(now, member, "was still stopped at the end")

    def _overstayed(self, now: float) -> Iterable[Instruction]:
        limit = self.limits.leaving
        return self._kill(
            m
            for m in self._members.values()
            if not m.gone and m.settled_at is not None and now - m.settled_at > limit
            if m.state is not State.FAILED  # it waits for the cause
        )

    def _clear_out(self, now: float) -> Iterable[Instruction]:
        assert self._failed_at is not None
        if now - self._failed_at < self.limits.leaving:
            return []
        return self._kill(m for m in self._members.values() if not m.gone)

    # Shared by all

    def _in(self, *states: State) -> list[Member]:
        return [member for member in self._members.values() if member.state in states]

    def _fail(self, now: float, cause: str) -> Iterable[Instruction]:
        if self.cause is not None:
            return []
        self.cause, self._failed_at = cause, now
        return [events.Abort(cause)]

    def _kill(self, members: Iterable[Member]) -> list[Instruction]:
        ranks = [m.rank for m in members if not m.gone and m.rank not in self._killed]
        self._killed.update(ranks)
        return [events.Kill(rank) for rank in ranks]

    @staticmethod
    def _settle(now: float, member: Member, state: State) -> None:
        member.state, member.settled_at = state, now

    def _kept(self, instructions: Iterable[Instruction]) -> list[Instruction]:
        listed = list(instructions)
        self.notices += [item.text for item in listed if isinstance(item, events.Notice)]
        return listed


def describe_exit(status: int) -> str:
    """How a process ended that had not delivered a result, after "rank 2 ..."."""
    if status >= 0:
        return f"exited with status {status} without a result"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"
