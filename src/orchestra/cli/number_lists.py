"""Lists of whole numbers on a command line: 1,2,4 or 1,2,4,...,256."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable

ELLIPSES = ("...", "…")
MOST = 1000


def numbers(text: str) -> list[int]:
    """The numbers in `text`; before the last one `...` stands for those that continue the others.

    They go on by equal steps where all given ones do (1,2,...,8), else by equal factors
    (1,2,4,...,256).

    Raises:
        ArgumentTypeError: it is no such list, or does not come to its last number.
    """
    parts = [part.strip() for part in text.split(",")]
    dots = [place for place, part in enumerate(parts) if part in ELLIPSES]
    try:
        given = [int(part) for place, part in enumerate(parts) if place not in dots]
    except ValueError:
        reason = "is not a list of whole numbers such as 1,2,4 or 1,2,4,...,256"
        raise _refused(text, reason) from None
    if not dots:
        return given
    if dots != [len(parts) - 2] or len(given) < 3:
        raise _refused(text, "needs ... once, after two numbers or more and before the last one")
    *first, last = given
    return _continued(text, first, last)


def _continued(text: str, first: list[int], last: int) -> list[int]:
    following = _rule(first)
    if following is None:
        raise _refused(text, "rises neither by equal steps nor by equal factors")
    if last <= first[-1]:
        raise _refused(text, f"has to end with a number above {first[-1]}")
    found = list(first)
    while found[-1] < last:
        found.append(following(found[-1]))
        if len(found) > MOST:
            raise _refused(text, f"stands for more than {MOST} numbers")
    if found[-1] != last:
        nearest = " and ".join(map(str, found[-2:]))
        raise _refused(text, f"does not come to {last}, but to {nearest}")
    return found


def _rule(first: list[int]) -> Callable[[int], int] | None:
    """What follows a number, as in `first`, which has to rise; None where nothing does."""
    pairs = list(itertools.pairwise(first))
    if any(a >= b for a, b in pairs):
        return None
    step, factor = first[1] - first[0], first[1] // first[0] if first[0] > 0 else 0
    if all(b - a == step for a, b in pairs):
        return lambda number: number + step
    if all(b == a * factor for a, b in pairs):
        return lambda number: number * factor
    return None


def _refused(text: str, reason: str) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(f"{text!r} {reason}")
