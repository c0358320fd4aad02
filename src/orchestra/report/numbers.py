"""Figures as people read them: every number of the page is written here."""

from __future__ import annotations

import math
from collections.abc import Sequence

THIN = "\u202f"  # between thousands, and before a unit: it neither breaks nor gapes
MINUS = "\u2212"


def count(noun: str, number: int) -> str:
    """With its noun: "1 rank", "4 ranks"."""
    return f"{number} {noun}{'s' * (number != 1)}"


def fixed(value: float, decimals: int, *, sign: bool = False) -> str:
    """With so many decimals; a figure (not a difference) that would read as zero has more.

    `sign` makes it a difference: with a plus, too, and zero without a sign.
    """
    if abs(value) < 0.5 * 10.0**-decimals:
        if value and not sign:
            return significant(value, 2)
        value, sign = 0.0, False
    text = f"{value:{'+' if sign else ''},.{decimals}f}"
    return text.replace(",", THIN).replace("-", MINUS)


def significant(value: float, digits: int = 3, *, sign: bool = False) -> str:
    """With so many significant digits, whole digits aside: those are never rounded away."""
    if not math.isfinite(value):
        return str(value)
    if value and abs(value) < 1e-4:
        text = f"{value:{'+' if sign else ''}.{digits - 1}e}"
        return text.replace("-", MINUS)
    return fixed(value, decimals_for([value], digits), sign=sign)


def decimals_for(values: Sequence[float], digits: int) -> int:
    """The decimals with which the largest of `values` has so many significant digits."""
    largest = max((abs(value) for value in values), default=0.0)
    if not largest:
        return 0
    return min(6, max(0, digits - 1 - math.floor(math.log10(largest))))


def places_of(uncertainty: float) -> int:
    """The decimals that a figure is known to: one digit of its uncertainty, two after a 1.

    Below 0: so many digits before the point are not known either.
    """
    if not uncertainty > 0 or not math.isfinite(uncertainty):
        return 6
    first = math.floor(math.log10(uncertainty))
    return min(6, (uncertainty < 2 * 10.0**first) - first)


def uncertain(value: float, uncertainty: float, unit: str = "") -> str:
    """No more digits than are known: "1.13 ± 0.07 s"."""
    places = places_of(uncertainty)
    figures = (fixed(round(each, places), max(0, places)) for each in (value, uncertainty))
    return with_unit(" ± ".join(figures), unit)


def pairs_of(number: int) -> str:
    """How many pairs a difference is over."""
    return f"n{THIN}={THIN}{number}"


def figure_text(value: float, unit: str, digits: int = 3) -> str:
    """A figure with its unit: "3.10 s"."""
    return with_unit(significant(value, digits), unit)


def with_unit(text: str, unit: str) -> str:
    """`text` with a unit behind it, if there is one."""
    return f"{text}{THIN}{unit}" if unit else text


def times(ratio: float) -> str:
    """How often, with two significant digits: "1.7 times"."""
    return f"{significant(ratio, 2)} times"


def percent(part: float) -> str:
    """Of a share between 0 and 1."""
    return f"{100 * part:.0f}{THIN}%"


def listed(names: Sequence[str]) -> str:
    """As in a sentence: "a, b and c"."""
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def some(names: Sequence[str], most: int = 3) -> str:
    """The first of them, and how many there are beyond."""
    return listed(names if len(names) <= most else [*names[:most], f"{len(names) - most} more"])
