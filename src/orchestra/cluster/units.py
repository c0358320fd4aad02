"""Quantities with their units, read and written without a loss.

BANDWIDTH.read("1 Gbit/s")    # 125000000.0 bytes a second
SECONDS.write(5e-05)          # "50 us"
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from typing import TypeVar

from orchestra.errors import InputError, nearest
from orchestra.settings import setting

T = TypeVar("T")
_QUANTITY = re.compile(
    r"(?P<number>[-+]?(?:\d{1,400}(?:\.\d{0,400})?|\.\d{1,400})(?:[eE][-+]?\d{1,3}(?!\d))?)"
    r"\s*(?P<unit>.*)"
)


@dataclasses.dataclass(frozen=True)
class Unit:
    """One kind of quantity."""

    kind: str  # what is measured ("bandwidth")
    base: str  # what a plain number means in Python ("bytes/s")
    example: str  # a quantity to offer in messages
    factors: Mapping[str, Fraction]  # of each name in a text, in terms of `base`
    written: tuple[str, ...]  # the names that `write` chooses from, rising
    least: float  # what is computed with, in terms of `base`; 0 is refused where it is declared
    most: float

    def read(self, text: object, *, where: str) -> float:
        """Return the quantity that `text` names, in terms of `base`, rounded once.

        Raises:
            InputError: a plain number, an unknown unit, or no quantity.
        """
        match = _QUANTITY.fullmatch(text.strip()) if isinstance(text, str) else None
        if match is None or not (name := match["unit"]):
            raise InputError(f"{where}: {self._complaint(match['number'] if match else text)}")
        if name not in self.factors:
            raise InputError(f"{where}: {text!r}: {self._unknown(name)}")
        try:
            # Rounded once: what is written into a record and read back is the same cluster, bit for
            # bit.
            return float(Fraction(match["number"]) * self.factors[name])
        except OverflowError:
            raise InputError(f"{where}: {text!r} is beyond any machine") from None

    def write(self, value: float) -> str:
        """Return a text that `read` turns back into exactly `value`, which is finite."""
        # repr is the shortest text that gives this float again; Decimal moves its point exactly
        number, name = Decimal(repr(value)), self.name_for(value)
        return f"{(number / self._decimal(name)).normalize():f} {name}"

    def rounded(self, value: float) -> str:
        """Return `value` in a text for people, with three significant digits: "1.23 MB"."""
        return self.write(float(f"{value:.3g}"))

    def name_for(self, value: float) -> str:
        """Return the name of a unit in which `value` is a short number: "MB" for 1.2e6 bytes."""
        number = Decimal(repr(value))
        if number == 0:  # the name that is nearest to one of `base`
            return min(self.written, key=lambda name: abs(self._decimal(name).log10()))
        fitting = [name for name in self.written if abs(number) >= self._decimal(name)]
        return (fitting or self.written[:1])[-1]

    def _decimal(self, name: str) -> Decimal:
        factor = self.factors[name]
        return Decimal(factor.numerator) / Decimal(factor.denominator)

    def _complaint(self, value: object) -> str:
        bare = isinstance(value, int | float) and not isinstance(value, bool)
        if bare or (isinstance(value, str) and re.fullmatch(r"[-+\d.eE]+", value)):
            return f"{value} has no unit; write {self.kind} like {self.example}"
        return f"{value!r} is no {self.kind}; write a number and its unit: {self.example}"

    def _unknown(self, name: str) -> str:
        # "Gb/s" is refused, because readers take it for bits or for bytes, a factor of 8 apart.
        bits = re.fullmatch(r"([kKMGT]?)b(?:/s|ps)?", name)
        if bits and self.kind == "bandwidth":
            prefix = bits[1].replace("K", "k")
            return f"write {prefix}bit/s for bits, or {prefix}B/s for bytes"
        same = [known for known in self.factors if known.lower() == name.lower()]
        return f"unknown unit {name!r} of {self.kind}; {nearest(name, same or self.factors)}"


_PRICE = re.compile(r"(\d{1,12}(?:\.\d{1,12})?) ([A-Z]{3})/h")


def clock_text(seconds: float) -> str:
    """Return a duration as text, such as 1:05 or 2:03:04."""
    minutes, rest = divmod(round(max(seconds, 0.0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def read_price(text: str, *, where: str) -> tuple[float, str]:
    """Return the cost of an hour, and its currency: "3.06 USD/h".

    Raises:
        InputError: it is no such text.
    """
    match = _PRICE.fullmatch(text)
    if match is None:
        raise InputError(
            f"{where}: {text!r} is no price; write an amount and the three letters of a currency, "
            "for an hour: 3.06 USD/h"
        )
    return float(match[1]), match[2]


def _scaled(unit: str, factor: Fraction, prefixes: Mapping[str, int]) -> dict[str, Fraction]:
    return {prefix + unit: factor * scale for prefix, scale in prefixes.items()}


_ONE = Fraction(1)
_DECIMAL = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_BYTES = _scaled("B", _ONE, _DECIMAL | _BINARY)
_POWERS = {"ps": 12, "ns": 9, "us": 6, "µs": 6, "ms": 3, "s": 0}
_TIMES = {name: Fraction(1, 10**power) for name, power in _POWERS.items()}

BANDWIDTH = Unit(
    "bandwidth", "bytes/s", "1 Gbit/s or 125 MB/s",
    _scaled("bit/s", Fraction(1, 8), _DECIMAL) | {f"{k}/s": v for k, v in _BYTES.items()},
    ("bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s"), least=1e-3, most=1e18,
)  # fmt: skip
SECONDS = Unit(
    "time", "seconds", "50 us, 2 ms or 1.5 s",
    _TIMES | {"min": Fraction(60), "h": Fraction(3600)},
    ("ps", "ns", "us", "ms", "s"), least=1e-12, most=1e12,
)  # fmt: skip
BYTES = Unit(
    "size", "bytes", "16 GB or 512 MiB", _BYTES,
    ("B", "kB", "MB", "GB", "TB", "PB"), least=1, most=1e18,
)  # fmt: skip
FLOPS = Unit(
    "computing speed", "FLOP/s", "1.5 TFLOP/s", _scaled("FLOP/s", _ONE, _DECIMAL),
    ("FLOP/s", "kFLOP/s", "MFLOP/s", "GFLOP/s", "TFLOP/s", "PFLOP/s"), least=1, most=1e24,
)  # fmt: skip
SECONDS_PER_BYTE = Unit(
    "time for each byte", "seconds/byte", "0.3 ns/B", {f"{k}/B": v for k, v in _TIMES.items()},
    ("ps/B", "ns/B", "us/B", "ms/B", "s/B"), least=1e-18, most=1e3,
)  # fmt: skip


def quantity(
    unit: Unit, default: T, meaning: str, *, low: float | None = None, above: float | None = None
) -> T:
    """Return a field of a `Settings` class that a file gives with `unit`, and Python in its base.

    Its range is the unit's, from `low` on where that is given.
    """
    low, text = unit.least if low is None else low, f"{meaning} ({unit.base})"
    return setting(default, text, low=low, high=unit.most, above=above, unit=unit)
