"""Why all workers come to rest, with nothing in flight: told to the ranks that serve."""

from __future__ import annotations

import enum
from typing import NamedTuple


class Reason(enum.IntEnum):
    """What follows once nothing is in flight."""

    CHECKPOINT = 0  # all ranks write one, and go on
    PHASE = 1  # a phase ends, and a transition leads to the next one
    EPOCH = 2  # of a loop of the user's own: all take the model that was learnt
    AGREEMENT = 3  # the same within an epoch
    SAVE = 4  # the first worker collects the state of all ranks
    STOP = 5  # all ranks write a checkpoint; the run ends, or goes on in another group
    END = 6  # of the run, or of the strategy in it: nobody takes a further step
    CANDIDATE = 7  # `Auto` goes on with another candidate
    # Of a strategy in a loop of the user's own:
    RESTART = 8  # it begins anew, with what the user has loaded into model or optimizer
    RESUME = 9  # it goes on from a state that the user has loaded
    NEXT_LOOP = 10  # the script goes on with another loop

    @property
    def ends(self) -> bool:
        """True if members of the strategy under way take no further step."""
        return self is Reason.PHASE or self >= Reason.END

    @property
    def takes_model(self) -> bool:
        """True if all ranks take the model that was learnt next."""
        return self.ends or self in (Reason.EPOCH, Reason.AGREEMENT)


class Rest(NamedTuple):
    """A rest of all workers.

    `to`: of a PHASE the number of the transition that follows, of a CANDIDATE that one's number.
    """

    reason: Reason
    to: int = 0

    @property
    def code(self) -> int:
        """The rest as a number, for messages."""
        return self.to * len(Reason) + self.reason

    @staticmethod
    def of(code: int) -> Rest:
        """Return the rest that has this `code`."""
        to, reason = divmod(code, len(Reason))
        return Rest(Reason(reason), to)
