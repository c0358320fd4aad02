"""Numbers on the command line, and lists of them such as 1,2,4,...,256."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable

from orchestra.errors import InputError

ELLIPSES = ("...", "…")
MOST = 1000


def numbers(text: str) -> list[int]:
    """Return the numbers in `text`; before the last one `...` stands for those in between.

    They go on by equal steps where all given ones do (1,2,...,8), else by equal factors
    (1,2,4,...,256).

    Raises:
        ArgumentTypeError: it is no such list, or does not come to its last number.
    """
    parts = [part.strip() for part in text.split(",")]
    dots = [place for place, part in enumerate(parts) if part in ELLIPSES]
    try:
        given = [int(part) for part in parts if part not in ELLIPSES]
    except ValueError:
        reason = "is not a list of whole numbers such as 1,2,4 or 1,2,4,...,256"
        raise _refused(text, reason) from None
    if not dots:
        return given
    if dots != [len(parts) - 2] or len(given) < 3:
        raise _refused(text, "needs ... once, after two numbers or more and before the last one")
    return _continued(text, *given)


def amount(unit: str, example: str) -> Callable[[str], float]:
    """Return what reads the number of an option that counts in `unit`, such as minutes.

    It raises ArgumentTypeError where the text is no number.
    """

    def read(text: str) -> float:
        try:
            return float(text)
        except ValueError:
            raise _refused(text, f"is no number of {unit}; write {example}") from None

    return read


def counts(option: str, text: str, *, low: int, why: str = "") -> list[int]:
    """Return the numbers in the value of `option`, each at least `low`, for the reason `why`.

    Raises:
        InputError: they are no such numbers.
    """
    try:
        found = numbers(text)
    except argparse.ArgumentTypeError as error:
        raise InputError(f"{option}: {error}") from None
    if min(found) < low:
        raise InputError(f"{option}: {min(found)} is below {low}{why}")
    return found


def _continued(text: str, *given: int) -> list[int]:
    """Go on as the numbers before the last one do, which have to rise, up to the last one."""
    *found, last = given
    # Equal steps come first: 1,2,...,8 are steps of one, and not powers of two.
    rules = (1, found[1] - found[0]), (found[1] // max(found[0], 1), 0)
    for factor, step in rules if found[1] > found[0] else ():
        if all(b == a * factor + step for a, b in itertools.pairwise(found)):
            break
    else:
        raise _refused(text, "rises neither by equal steps nor by equal factors")
    if last <= found[-1]:
        raise _refused(text, f"has to end with a number above {found[-1]}")
    while found[-1] < last:
        found.append(found[-1] * factor + step)
        if len(found) > MOST:
            raise _refused(text, f"stands for more than {MOST} numbers")
    if found[-1] != last:
        raise _refused(text, f"does not come to {last}, but to {found[-2]} and {found[-1]}")
    return found


def _refused(text: str, reason: str) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(f"{text!r} {reason}")
