"""Two versions of a benchmark's figures: a row is slower where intervals have nothing in common."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks import before, collectives
from benchmarks.collectives import KEYS, CollectiveRow
from benchmarks.options import write_figures
from benchmarks.ratios import Ratio

from orchestra.errors import InputError


def interval(low: float, high: float) -> Ratio:
    return Ratio((low + high) / 2, low, high, 12)


def row(algorithm: str, ratio: Ratio, processor: Ratio) -> CollectiveRow:
    return CollectiveRow(
        2, "sockets", "4 KB", False, algorithm, 1.0, 1.0, ratio, 1.0, 1.0, processor
    )


def measured_as(rows: list[CollectiveRow], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "bench_collectives", lambda *_: rows)


@pytest.mark.parametrize(
    ("now", "then", "expected"),
    [
        (interval(0.8, 0.9), interval(0.91, 0.95), "faster"),
        (interval(0.8, 0.9), interval(0.9, 0.95), ""),
        (interval(0.8, 0.9), interval(0.7, 0.8), ""),
        (interval(0.8, 0.9), interval(0.7, 0.79), "slower"),
        (Ratio(9.0, None, None, 5), interval(0.7, 0.8), ""),
    ],
)
def test_intervals_that_touch_tell_no_change(now: Ratio, then: Ratio, expected: str) -> None:
    assert before.change(now, then) == expected


@pytest.mark.parametrize(("slowed", "status"), [("time", 1), ("processor", 1), ("nothing", 0)])
def test_a_slower_schedule_is_found_in_the_figures_of_the_version_before(
    slowed: str,
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    usual, high = interval(0.8, 0.9), interval(1.0, 1.1)
    file = tmp_path / "before.json"
    write_figures(file, "collectives", [row(name, usual, usual) for name in ("ring", "tree")])
    tree = row(
        "tree", high if slowed == "time" else usual, high if slowed == "processor" else usual
    )
    # The butterfly was not measured before
    measured_as([row("ring", usual, usual), tree, row("butterfly", high, high)], monkeypatch)
    assert collectives.main(["--over", "sockets", "--before", str(file)]) == status
    printed = capsys.readouterr().out
    assert printed.count("slower") == 1 + status
    assert f"{status} of 2 rows are slower" in printed
    assert "\ntree 2 sockets 4 KB  " in printed


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (None, "cannot be read: No such file"),
        ({"benchmark": "server", "rows": [{"ranks": 2}]}, "write it anew"),
        ({"benchmark": "collectives", "rows": [{"ranks": 2, "ratio": 7.8}]}, "write it anew"),
        ([], "write it anew"),
    ],
)
def test_another_file_is_refused_in_one_line(document: Any, message: str, tmp_path: Path) -> None:
    file = tmp_path / "before.json"
    if document is not None:
        file.write_text(json.dumps(document))
    with pytest.raises(InputError, match=message) as error:
        before.read(file, "collectives", KEYS)
    assert "\n" not in str(error.value)
