"""Numbers for readers, and differences between those of runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from orchestra.cluster.units import BYTES

CONFIDENCE = 0.95
THIN = "\u202f"  # between thousands, and before a unit: it neither breaks nor gapes
MINUS = "\u2212"


def count(noun: str, number: int) -> str:
    """Return a number with its noun: "1 rank", "4 ranks"."""
    return f"{number} {noun}{'s' * (number != 1)}"


def fixed(value: float, decimals: int, *, sign: bool = False) -> str:
    """Return `value` with `decimals` decimals; a figure that would read as zero gets more of them.

    `sign` is for differences: they have a plus as well, may read as zero, and zero has no sign.
    """
    if abs(value) < 0.5 * 10.0**-decimals:
        # A difference of 1e-7 in a column of seconds is noise; with more decimals than its column
        # it would look like a finding.
        if value and not sign:
            return significant(value, 2)
        value, sign = 0.0, False
    text = f"{value:{'+' if sign else ''},.{decimals}f}"
    return text.replace(",", THIN).replace("-", MINUS)


def significant(value: float, digits: int = 3) -> str:
    """Return `value` with `digits` significant digits; those before the point all stay."""
    if not math.isfinite(value):
        return str(value)
    # In fixed notation it would be mostly zeros
    if value and abs(value) < 1e-4:
        return f"{value:.{digits - 1}e}".replace("-", MINUS)
    return fixed(value, decimals_for([value], digits))


def or_dash(value: float | None, digits: int = 3) -> str:
    """Return `value` with `digits` significant digits; "-" if it is not known."""
    return "-" if value is None else significant(value, digits)


def decimals_for(values: Sequence[float], digits: int) -> int:
    """Return the decimals with which the largest of `values` has `digits` significant digits."""
    largest = max((abs(value) for value in values), default=0.0)
    return min(6, max(0, digits - 1 - math.floor(math.log10(largest)))) if largest else 0


def places_of(uncertainty: float) -> int:
    """Return the decimals to which a figure is known: one digit of its uncertainty, two after a 1.

    A negative number counts digits before the point that are not known either.
    """
    if not uncertainty > 0 or not math.isfinite(uncertainty):
        return 6
    first = math.floor(math.log10(uncertainty))
    # Two digits after a 1: rounding 1.4 to 1 would change the uncertainty by almost a third
    return min(6, (uncertainty < 2 * 10.0**first) - first)


def uncertain(value: float, uncertainty: float, unit: str = "") -> str:
    """Return `value` with no more digits than `uncertainty` allows: "1.13 ± 0.07 s"."""
    places = places_of(uncertainty)
    # round() first: `places` is negative where digits before the point are not known
    figures = (fixed(round(each, places), max(0, places)) for each in (value, uncertainty))
    return with_unit(" ± ".join(figures), unit)


def pairs_of(number: int) -> str:
    """Return the number of pairs of a difference: "n = 3"."""
    return f"n{THIN}={THIN}{number}"


def figure_text(value: float, unit: str, digits: int = 3) -> str:
    """Return a figure with its unit: "3.10 s"."""
    return with_unit(significant(value, digits), unit)


def bytes_text(value: float) -> str:
    """Return bytes, in the unit that makes them a short number: "3.10 MB"."""
    unit = BYTES.name_for(value)
    return figure_text(value / float(BYTES.factors[unit]), unit)


def with_unit(text: str, unit: str) -> str:
    """Return `text` with a unit behind it, if there is one."""
    return f"{text}{THIN}{unit}" if unit else text


def times(ratio: float) -> str:
    """Return a ratio with two significant digits: "1.7 times"."""
    return f"{significant(ratio, 2)} times"


def percent(part: float) -> str:
    """Return a share between 0 and 1 as a percentage."""
    return f"{100 * part:.0f}{THIN}%"


def listed(names: Sequence[str]) -> str:
    """Return the names as in a sentence: "a, b and c"."""
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def some(names: Sequence[str]) -> str:
    """Return the first three of them, and how many there are beyond."""
    return listed(names if len(names) <= 3 else [*names[:3], f"{len(names) - 3} more"])


def ranges(ranks: Iterable[int]) -> list[str]:
    """Return runs of consecutive ranks: "0-3", "8"."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return [str(first) if first == last else f"{first}-{last}" for first, last in spans]


# Differences


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences over `n` pairs, with its confidence interval.

    `below` and `above` are how much less or more the mean may truly be, because the figures are
    read at snapshots; the interval includes them.
    """

    mean: float
    low: float | None  # None, as `high`, of one pair only, which says nothing about the spread
    high: float | None
    n: int
    below: float = 0.0
    above: float = 0.0

    @property
    def too_coarse(self) -> bool:
        """True if the snapshots are too far apart to say which figure is the larger."""
        return -self.above < self.mean < self.below

    @property
    def certain(self) -> bool:
        """True if the interval lies on one side of zero."""
        return self.low is not None and self.high is not None and self.low * self.high > 0

    def texts(self, places: int | None = None) -> list[str]:
        """Return the mean and the ends of the interval, if there is one, with `places` decimals:
        by default three significant digits of the largest, or as many as the snapshots allow."""
        values = [value for value in (self.mean, self.low, self.high) if value is not None]
        if places is None:
            coarse = max(self.below, self.above)
            places = max(0, places_of(coarse)) if coarse else decimals_for(values, 3)
        return [fixed(value, places, sign=True) for value in values]

    def widened(self, below: float, above: float) -> Difference:
        """Return the same difference, of figures that may be smaller than they were read: the
        first ones by `below` in the mean, the subtracted ones by `above`."""
        low = None if self.low is None else self.low - below
        high = None if self.high is None else self.high + above
        return replace(self, low=low, high=high, below=below, above=above)


def paired_difference(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Difference | None:
    """Return `ours` - `theirs`, paired by seed; None where they share no seed.

    The interval is Student's t over the differences, at 95 %. It assumes that they are about
    normal, and takes nothing as known of the two spreads.
    """
    # Runs of one seed share initial parameters and the order of samples. Their difference is due to
    # the strategy and the machine.
    differences = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
    if len(differences) < 2:
        return Difference(differences[0], None, None, 1) if differences else None
    n, middle = len(differences), statistics.fmean(differences)
    from scipy.special import stdtrit  # 0.1 s, which a page without seeds need not pay

    quantile = float(stdtrit(n - 1, (1 + CONFIDENCE) / 2))
    half = quantile * statistics.stdev(differences) / math.sqrt(n)
    return Difference(middle, middle - half, middle + half, n)
