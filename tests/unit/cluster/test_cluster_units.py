"""Quantities with units: exact values, every unit, refusals with their remedy, and back to text."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestra.cluster.units import (
    BANDWIDTH,
    BYTES,
    FLOPS,
    SECONDS,
    SECONDS_PER_BYTE,
    Unit,
    quantity,
)
from orchestra.errors import InputError
from orchestra.settings.base import NumberRange

UNITS = [BANDWIDTH, SECONDS, BYTES, FLOPS, SECONDS_PER_BYTE]


@pytest.mark.parametrize(
    ("unit", "text", "value"),
    [
        (BANDWIDTH, "1 Gbit/s", 125e6),
        (BANDWIDTH, "25 Mbit/s", 3.125e6),
        (BANDWIDTH, "125 MB/s", 125e6),
        (BANDWIDTH, "8 bit/s", 1.0),
        (BANDWIDTH, "1 kbit/s", 125.0),
        (BANDWIDTH, "1 KiB/s", 1024.0),
        (BANDWIDTH, "3 GiB/s", 3 * 2**30),
        (BANDWIDTH, "0.1 Tbit/s", 12.5e9),
        (SECONDS, "50 us", 50e-6),
        (SECONDS, "50 µs", 50e-6),
        (SECONDS, "2 ms", 0.002),
        (SECONDS, "600ns", 600e-9),
        (SECONDS, " 1.5   s ", 1.5),
        (SECONDS, "2 min", 120.0),
        (SECONDS, "1.5 h", 5400.0),
        (SECONDS, "0 s", 0.0),
        (SECONDS, "1e-3 s", 0.001),
        (SECONDS, ".5 s", 0.5),
        (SECONDS, "-1 s", -1.0),
        (BYTES, "16 GB", 16e9),
        (BYTES, "512 MiB", 512 * 2**20),
        (BYTES, "7 B", 7.0),
        (FLOPS, "1.5 TFLOP/s", 1.5e12),
        (SECONDS_PER_BYTE, "0.3 ns/B", 3e-10),
    ],
)
def test_reads_exactly(unit: Unit, text: str, value: float) -> None:
    assert unit.read(text, where="x") == value


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.kind)
def test_every_name_is_its_factor_rounded_once(unit: Unit) -> None:
    for name, factor in unit.factors.items():
        assert unit.read(f"3.7 {name}", where="x") == float(Fraction("3.7") * factor)
    assert {*unit.written} <= {*unit.factors}
    assert unit.read(unit.example.split(",")[0].split(" or ")[0], where="x") > 0


@pytest.mark.parametrize(
    ("unit", "value", "message"),
    [
        (BANDWIDTH, 1000, "1000 has no unit; write bandwidth like 1 Gbit/s or 125 MB/s"),
        (BANDWIDTH, "1e9", "1e9 has no unit"),
        (SECONDS, 0.5, "0.5 has no unit; write time like 50 us, 2 ms or 1.5 s"),
        (SECONDS, "", "'' is no time; write a number and its unit"),
        (SECONDS, "soon", "'soon' is no time"),
        (SECONDS, "nan s", "'nan s' is no time"),
        (SECONDS, "1_0 s", "unknown unit '_0 s' of time"),
        (SECONDS, None, "None is no time"),
        (SECONDS, True, "True is no time"),
        (SECONDS, [1], "[1] is no time"),
        (SECONDS, "5 m", "'5 m': unknown unit 'm' of time; did you mean"),
        (BANDWIDTH, "1 Gb/s", "'1 Gb/s': write Gbit/s for bits, or GB/s for bytes"),
        (BANDWIDTH, "1 Gbps", "write Gbit/s for bits, or GB/s for bytes"),
        (BANDWIDTH, "1 Kb/s", "write kbit/s for bits, or kB/s for bytes"),
        (BANDWIDTH, "1 gbit/s", "unknown unit 'gbit/s' of bandwidth; did you mean 'Gbit/s'?"),
        (BANDWIDTH, "1 GB", "unknown unit 'GB' of bandwidth; did you mean 'GB/s'?"),
        (BYTES, "1 Gbit", "unknown unit 'Gbit' of size"),
        (SECONDS, "1e400 s", "'1e400 s' is beyond any machine"),
    ],
)
def test_refuses_with_the_remedy(unit: Unit, value: object, message: str) -> None:
    with pytest.raises(InputError) as refused:
        unit.read(value, where="c.yaml:3 key")
    assert str(refused.value).startswith("c.yaml:3 key: ")
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("unit", "value", "text"),
    [
        (BANDWIDTH, 125e6, "1 Gbit/s"),
        (BANDWIDTH, 12.5e6, "100 Mbit/s"),
        (BANDWIDTH, 0.125, "1 bit/s"),
        (SECONDS, 5e-05, "50 us"),
        (SECONDS, 0.0, "0 s"),
        (SECONDS, 90.0, "90 s"),
        (BYTES, 16e9, "16 GB"),
        (FLOPS, 1.5e12, "1.5 TFLOP/s"),
    ],
)
def test_writes_what_people_would(unit: Unit, value: float, text: str) -> None:
    assert unit.write(value) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (999_600, "1 MB"),
        (1_234_567, "1.23 MB"),
        (5 * 10**12, "5 TB"),
    ],
)
def test_rounds_for_people(count: int, text: str) -> None:
    assert BYTES.rounded(count) == text


@given(value=st.floats(min_value=0, max_value=1e15, allow_nan=False), at=st.sampled_from(UNITS))
def test_reading_what_was_written_changes_nothing(value: float, at: Unit) -> None:
    assert at.read(at.write(value), where="x") == value


def test_a_quantity_says_what_a_plain_number_means() -> None:
    field: Any = quantity(SECONDS, 1.0, "how long", low=0)
    assert field.metadata["meaning"] == "how long (seconds)"
    assert field.metadata["limits"] == NumberRange(low=0, high=SECONDS.most)
