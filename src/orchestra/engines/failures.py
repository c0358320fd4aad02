"""Why the program of a rank ended, in words for the user."""

from __future__ import annotations

import traceback
from dataclasses import dataclass

from orchestra.errors import InputError, PeerLost, RunAborted, RunFailed, text_of


@dataclass(frozen=True)
class Failure:
    """An exception that ended a rank's program.

    `lost` is the rank whose loss the exception reports; `aborted` says that it reports the end
    of the run. Either makes it an echo: a consequence, seldom the cause. `bad_input` says that
    what the user asked for cannot be done; the message is then all that there is to say.
    """

    type: str
    message: str
    traceback: str = ""
    lost: int | None = None
    aborted: bool = False
    bad_input: bool = False

    @property
    def headline(self) -> str:
        first_line = self.message.strip().split("\n", 1)[0]
        return ": ".join(part for part in (self.type, first_line) if part)


def describe(error: BaseException) -> Failure:
    """`error` for the watcher: what it is, and of what it may be a consequence."""
    behind = error
    while not isinstance(behind, PeerLost | RunAborted) and _reason(behind) is not None:
        behind = _reason(behind) or behind
    frames = error.__traceback__.tb_next if error.__traceback__ is not None else None
    lines = traceback.format_exception(type(error), error, frames)
    clear = isinstance(error, RunFailed)  # its message says all
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
    """One line that says who failed and how; the traceback follows it."""
    text = f"{name} {verb}: {failure.headline}"
    return f"{text}\n{failure.traceback.rstrip()}" if failure.traceback else text
