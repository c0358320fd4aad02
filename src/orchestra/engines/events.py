"""What happens to the ranks of a run, what the watcher does about it, and why a run failed."""

from __future__ import annotations

import signal
import traceback
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from orchestra.errors import InputError, PeerLost, RunAborted, RunFailed, text_of
from orchestra.records.report import Counters
from orchestra.worker.runtime import RankActivity


@dataclass(frozen=True)
class Failure:
    """An exception that ended a rank's program.

    Where it reports a loss or the end of the run, it is a consequence, seldom the cause.
    """

    type: str
    message: str
    traceback: str = ""
    lost: int | None = None  # the rank whose loss it reports
    aborted: bool = False  # it reports the end of the run
    bad_input: bool = False  # what the user asked for cannot be done, and the message says all

    @property
    def headline(self) -> str:
        first_line = self.message.strip().split("\n", 1)[0]
        return ": ".join(part for part in (self.type, first_line) if part)


BEAT_SECONDS = 0.5
RUN_OVER = "the run is over"
"""Why a newcomer is refused that was not needed."""


# Events -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OfRank:
    """What happened to `rank`."""

    rank: int


@dataclass(frozen=True)
class Joined(OfRank):
    """A rank has opened its control connection. One with a new number is a newcomer."""

    host: str


@dataclass(frozen=True)
class Heartbeat(OfRank):
    """A rank is alive, as it says every `BEAT_SECONDS`, and this is how far it is."""

    step: int = 0
    samples: int = 0
    loss: float | None = None
    fraction: float | None = None  # of the run's budget that the cluster has consumed
    activity: RankActivity = RankActivity.SET_UP
    progress: int = 0  # changes whenever anything progressed
    waits_for: tuple[int, ...] = ()  # ranks any of which may release it
    waits_what: str = ""  # what it waits for, in words
    expendable: bool = False  # the run can go on without it
    elastic: str = ""  # see `Reporter.elastic`
    rests: bool = False  # the same
    counters: Counters | None = None  # the latest


@dataclass(frozen=True)
class Ready(OfRank):
    """A rank has given up what was under way, and can be reached by the others of a new group."""

    generation: int


@dataclass(frozen=True)
class Accused(OfRank):
    """A rank has lost another one of its group. The watcher may not know of the loss yet.

    `waits`: the rank has given up its group, and can continue only in the next one.
    """

    failure: Failure
    generation: int
    waits: bool = False


@dataclass(frozen=True)
class Finished(OfRank):
    """A rank has delivered its result."""


@dataclass(frozen=True)
class Failed(OfRank):
    """A rank's program has ended with an exception."""

    failure: Failure


class Disconnected(OfRank):
    """The control connection of a rank has ended."""


class Left(OfRank):
    """A rank ends in good order; the others are to go on without it."""


@dataclass(frozen=True)
class Exited(OfRank):
    """A process has ended, as its parent knows; `status` is negative for a signal."""

    status: int
    host: str = ""  # where that was, if the rank may not have told


@dataclass(frozen=True)
class Interrupted:
    """The user pressed Ctrl-C."""


@dataclass(frozen=True)
class Terminated:
    """SIGTERM came to the launcher, or to the process of `rank`: all will be killed soon."""

    rank: int | None = None


@dataclass(frozen=True)
class ForkServerLost:
    """The fork server, which starts the ranks and learns how they end, is gone or does not run."""

    how: str
    by_signal: bool  # a signal killed or stopped it


@dataclass(frozen=True)
class HostGone:
    """The launcher has lost its connection to a host, whose ranks therefore end; `stops`: all
    others are to stop, too."""

    host: str
    ranks: tuple[int, ...]
    stops: bool


Event = OfRank | Interrupted | Terminated | ForkServerLost | HostGone

# Instructions -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Abort:
    """Tell every rank that the run ends for `cause`; `at_once`: there is no time to unwind."""

    cause: str
    at_once: bool = False


@dataclass(frozen=True)
class Disconnect:
    """Tell all others that `rank` is gone for good; with `to`, that rank alone."""

    rank: int
    reason: str
    to: int | None = None


@dataclass(frozen=True)
class Regroup:
    """Tell `members` that they are the new group: each gives up what is under way between ranks.

    Groups are numbered: that of the start has the `generation` 0.
    """

    generation: int
    members: tuple[int, ...]


@dataclass(frozen=True)
class Quiesce:
    """Ask every rank to come to rest, and to wait there for the next group."""


@dataclass(frozen=True)
class Refuse:
    """Tell a newcomer that it is not taken in, and why."""

    rank: int
    why: str


@dataclass(frozen=True)
class Kill:
    """End the process of `rank`."""

    rank: int


@dataclass(frozen=True)
class Stop:
    """Ask every rank for an orderly stop."""


@dataclass(frozen=True)
class Notice:
    """One line for the user."""

    text: str


Instruction = Abort | Disconnect | Regroup | Quiesce | Refuse | Kill | Stop | Notice

# Texts --------------------------------------------------------------------------------------

STOPPED = "is stopped (by SIGSTOP or its terminal)"


def describe(error: BaseException) -> Failure:
    """Describe `error` to the watcher, with the loss or end of the run behind it, if any."""
    behind, reason = error, _reason(error)
    # A user's code may have raised an error of its own from the transport's.
    while reason is not None and not isinstance(behind, PeerLost | RunAborted):
        behind, reason = reason, _reason(reason)
    frames = error.__traceback__.tb_next if error.__traceback__ is not None else None
    lines = traceback.format_exception(type(error), error, frames)
    # Its message says all: a loss is nothing that the program does wrong.
    clear = isinstance(error, RunFailed | PeerLost)
    return Failure(
        type="" if clear else type(error).__name__,
        message=text_of(error),
        traceback="" if clear else "".join(lines),
        lost=behind.rank if isinstance(behind, PeerLost) else None,
        aborted=isinstance(behind, RunAborted),
        bad_input=isinstance(error, InputError),
    )


def _reason(error: BaseException) -> BaseException | None:
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def failed_text(name: str, failure: Failure, verb: str = "failed") -> str:
    """Return one line that says who failed and how, followed by the traceback."""
    text = f"{name} {verb}: {failure.headline}"
    return f"{text}\n{failure.traceback.rstrip()}" if failure.traceback else text


def exit_text(status: int) -> str:
    """Say how a process without a result ended, as the end of "rank 2 ..."."""
    if status >= 0:
        return f"exited with status {status} without a result"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


def stuck(
    waiting: Mapping[int, tuple[int, ...]], alive: Collection[int]
) -> dict[int, tuple[int, ...]]:
    """Return the largest part of `waiting` in which every wait leads to a rank of that part, or to
    one that is no longer `alive`: no living rank outside can release them.

    `waiting` maps each rank that has been blocked for long to the ranks that can release it; any
    one of them is enough.
    """
    blocked, before = dict(waiting), -1
    # Remove whoever may be released by a rank that is not blocked, until nothing changes: the fixed
    # point is the largest deadlocked set.
    while len(blocked) != before:
        before = len(blocked)
        releasing = set(alive).difference(blocked)
        blocked = {
            rank: targets for rank, targets in blocked.items() if releasing.isdisjoint(targets)
        }
    return blocked


def follow_waits(
    blocked: Mapping[int, tuple[int, ...]], whats: Mapping[int, str], states: Mapping[int, str]
) -> str:
    """Follow the waits from the first blocked rank, until they repeat or lead to nobody alive."""
    rank, path, lines = min(blocked), set[int](), list[str]()
    while rank in blocked and rank not in path:
        path.add(rank)
        target = next((t for t in blocked[rank] if t in blocked), blocked[rank][0])
        what = f" ({whats[rank]})" if whats.get(rank) else ""
        lines.append(f"rank {rank} waits for rank {target}{what}")
        rank = target
    if rank not in blocked:
        lines.append(f"rank {rank} {states.get(rank, 'is not part of the run')}")
    return ", ".join(lines)
