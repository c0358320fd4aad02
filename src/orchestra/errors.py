"""Every error that a user can meet, drawn once.

    OrchestraError
    ├── InputError (also a ValueError)      bad input: one line, exit status 2
    ├── RunFailed                           a run ended before its time: exit status 1
    ├── PeerLost                            a rank on the other end of a stream is gone
    └── RunAborted                          another rank ended this run; never a first cause

`InputError` is raised before anything is started, with what is wrong, where, and the remedy.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class OrchestraError(Exception):
    """The root of the tree."""


class InputError(OrchestraError, ValueError):
    """What the user asked for cannot be done; the message says what, where and the remedy."""


class RunFailed(OrchestraError):
    """A run had begun and did not end well; the message names the first cause."""


class PeerLost(OrchestraError):
    """Rank `rank` closed its stream without a farewell, or was declared dead by the watcher."""

    def __init__(self, rank: int, reason: str = "its connection closed") -> None:
        super().__init__(f"rank {rank} is gone: {reason}")
        self.rank = rank
        self.reason = reason

    def __reduce__(self) -> tuple[type[PeerLost], tuple[int, str]]:
        return PeerLost, (self.rank, self.reason)


class RunAborted(OrchestraError):
    """The watcher ended the run for a cause that lies in another rank."""


def nearest(name: str, known: Iterable[str], others: Iterable[str] = ()) -> str:
    """The end of a message about an unknown `name`: the nearest of all names, or all `known`."""
    choices = sorted(known)
    every = sorted([*choices, *others])
    close = difflib.get_close_matches(name, every, n=1, cutoff=0.5)
    if not close:
        by_lower = {choice.lower(): choice for choice in every}
        close = [by_lower[name.lower()]] if name.lower() in by_lower else []
    if close:
        return f"did you mean {close[0]!r}?"
    return "known: " + ", ".join(choices)
