"""What happens in a run, and what the watcher does about it: the words of the verdicts."""

from __future__ import annotations

from dataclasses import dataclass

from orchestra.engines.failures import Failure


@dataclass(frozen=True)
class Pulse:
    """What a beat says of its rank. `activity` changes whenever anything progressed."""

    step: int = 0
    samples: int = 0
    loss: float | None = None
    fraction: float | None = None
    phase: str = "set-up"
    activity: int = 0
    waits_for: tuple[int, ...] = ()
    waits_what: str = ""
    expendable: bool = False


# Events -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Joined:
    """A rank has opened its control connection."""

    rank: int
    host: str


@dataclass(frozen=True)
class Beat:
    rank: int
    pulse: Pulse


@dataclass(frozen=True)
class Finished:
    """A rank has delivered its result."""

    rank: int


@dataclass(frozen=True)
class Failed:
    rank: int
    failure: Failure


@dataclass(frozen=True)
class Disconnected:
    """The control connection of a rank has ended."""

    rank: int


@dataclass(frozen=True)
class Exited:
    """A child process has ended; `status` is negative for a signal."""

    rank: int
    status: int


@dataclass(frozen=True)
class Interrupted:
    """The user pressed Ctrl-C, or SIGTERM came."""


@dataclass(frozen=True)
class ServerLost:
    """What starts the ranks, and knows how they end, is gone or does not run."""

    how: str


Event = Joined | Beat | Finished | Failed | Disconnected | Exited | Interrupted | ServerLost

# Instructions -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Abort:
    """Tell every rank that the run ends for `cause`."""

    cause: str


@dataclass(frozen=True)
class Disconnect:
    """Tell the others that `rank` is gone for good."""

    rank: int
    reason: str


@dataclass(frozen=True)
class Kill:
    rank: int


@dataclass(frozen=True)
class Stop:
    """Ask every rank for an orderly stop."""


@dataclass(frozen=True)
class Notice:
    """One line for the user."""

    text: str


Instruction = Abort | Disconnect | Kill | Stop | Notice
