"""One rank's transfers in the order in which a compiled executor moves them.

`executor.c` (in transports) has no rounds, and begins no transfer by a message. Every connection
takes its rows in order, and a row moves as soon, and as far, as earlier rows allow:

    A send waits for what earlier rows receive into its elements.
    A receive waits for what earlier rows send of its elements, or receive into them.

Within a round sends come before receives, so that what leaves is what was there when the round
began. Receives come in the order of the schedule, which is that of the additions. So each element
is read and written in the order of the rounds, whichever way the bytes come.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from orchestra.schedules import REDUCE
from orchestra.schedules.table import RoundPart

ROW = np.dtype(
    [
        ("first", "i8"),
        ("end", "i8"),
        ("peer", "i4"),
        *((name, "u1") for name in ("sends", "adds", "opens", "")),
    ]
)
"""A transfer to or from `peer` of what lies from `first` to before `end`, in the unit of the edges
of pieces. Exactly one of the two ranks `sends`; the other one copies, or `adds`. One that `opens`
is the first of its direction between the two ranks."""

Rows = np.ndarray[tuple[int], np.dtype[np.void]]


def rows_of(parts: Iterable[RoundPart], edges: Sequence[int] | NDArray[np.int64]) -> Rows:
    """Return the rows of a rank's `parts`, but for those of empty pieces."""
    rows = []
    for part in parts:
        for target, first, end in part.sends:
            rows.append((edges[first], edges[end], target, True, False, False, 0))
        for source, first, end, operation in part.receives:
            adds = operation == REDUCE
            rows.append((edges[first], edges[end], source, False, adds, False, 0))
    made = np.array(rows, ROW)
    made = made[made["end"] > made["first"]]
    _, firsts = np.unique(made[["peer", "sends"]], return_index=True)
    made["opens"][firsts] = True
    return made
