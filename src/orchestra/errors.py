"""The tree of all errors that a user can meet.

    OrchestraError
    ├── InputError (also a ValueError)      bad input: one line, exit status 2
    ├── RunFailed                           a run ended before its time: exit status 1
    │   ├── RunEnded                        the same, where rank 0 has told this rank
    │   └── RankLost                        the same, for a loss; a restart goes on with the run
    ├── PeerLost                            a rank on the other end of a stream is gone
    ├── GroupChanged                        the run goes on with other ranks
    └── RunAborted                          another rank ended this run; never a first cause

`Stopped` is no error: it ends a loop of the user's own in good order.

`InputError` is raised before anything is started, with what is wrong, where, and the remedy.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterable

REPEATED = 200
"""The most characters of an input that a message repeats."""
LISTED = 100
"""The most known names that a message lists."""


CONTROLS = "\0-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
"""Characters that act on a terminal, turn text round or are none, as a class of a pattern."""
_ACTING = re.compile(f"(?![\n\t])[{CONTROLS}]")


class OrchestraError(Exception):
    """The root of the tree."""


class InputError(OrchestraError, ValueError):
    """What the user asked for cannot be done; the message says what, where and the remedy.

    The message is one line, and repeats at most `REPEATED` characters of any one input.
    """

    def __init__(self, message: str) -> None:
        super().__init__(shortened(message))


class RunFailed(OrchestraError):
    """A run had begun and did not end well; the message names the first cause."""


class RunEnded(RunFailed):
    """The run failed for a cause that this rank was told by the watcher, which tells the user."""


class RankLost(RunFailed):
    """The run lost a rank that it needs: a signal killed or stopped it, its connection closed, or
    it fell silent. Neither the program nor its input is at fault, so that a restart can help."""


class PeerLost(OrchestraError):
    """Rank `rank` closed its stream without a farewell, or was declared dead by the watcher."""

    def __init__(self, rank: int, reason: str = "its connection closed") -> None:
        super().__init__(f"rank {rank} is gone: {reason}")
        self.rank = rank
        self.reason = reason

    def __reduce__(self) -> tuple[type[PeerLost], tuple[int, str]]:
        return PeerLost, (self.rank, self.reason)


class GroupChanged(OrchestraError):
    """A rank was lost or is to join, and there is a new group: what was under way between the ranks
    of the last one has no result."""

    def __init__(self, text: str = "there is a new group") -> None:
        super().__init__(text)


class RunAborted(OrchestraError):
    """The watcher ended the run for a cause that lies in another rank."""


class Stopped(SystemExit):
    """All workers end their loops in good order, since SIGTERM came to one of them.

    The next batch of each worker raises it, after a common step. A script that does not catch it
    ends with status 0. One that does may save `batches.state_dict()` before it ends.
    """

    def __init__(self) -> None:
        super().__init__(0)


def shortened(message: str) -> str:
    """`message` in one line, with the middle of each long value left out.

    A value is what stands in quotes or brackets, or goes on without a blank.
    """
    shown, begin, closing, depth, last = [], 0, "", 0, ""
    for place, sign in enumerate(message):
        if closing:
            closing = "" if sign == closing and last != "\\" else closing
        elif sign in "'\"" and not last.isalnum():  # "the worker's" opens nothing
            closing = sign
        elif sign in "([{":
            depth += 1
        elif sign in ")]}":
            depth = max(0, depth - 1)
        elif sign.isspace() and not depth:
            shown.append(_part(message[begin:place]))
            begin = place + 1
        last = "" if last == sign == "\\" else sign
    return " ".join([*shown, _part(message[begin:])])


def _part(text: str) -> str:
    if len(text) > REPEATED:
        text = f"{text[: REPEATED - 55]} ... {text[-50:]}"
    return " ".join(text.splitlines())


def text_of(error: BaseException) -> str:
    """What `error` says; nothing where it cannot even say that."""
    try:
        return str(error)
    except Exception:
        return ""


def visible(text: str) -> str:
    """`text` without control and bidirectional characters; line ends and tabs stay."""
    return _ACTING.sub("", text)


def tell(message: object) -> None:
    """Print a message for the user on standard error, at once."""
    print(f"orchestra: {visible(str(message))}", file=sys.stderr, flush=True)


def nearest(name: str, known: Iterable[str], others: Iterable[str] = ()) -> str:
    """The end of a message about an unknown `name`: the nearest of all names, or all `known`.

    One of the `others` has to be near enough to be the same name, misspelt.
    """
    choices, name = sorted(known), name[:REPEATED]
    every = sorted([*choices, *difflib.get_close_matches(name, others, cutoff=0.75)])
    close = difflib.get_close_matches(name, every, n=1, cutoff=0.5)
    if not close:
        by_lower = {choice.lower(): choice for choice in every}
        close = [by_lower[name.lower()]] if name.lower() in by_lower else []
    if close:
        return f"did you mean {close[0]!r}?"
    return "known: " + ", ".join(choices[:LISTED] + ["..."] * (len(choices) > LISTED))
