"""What is drawn of a simulated network: the busiest links."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import vl_convert
from tests.support.drawn import drawn_alone, keep, record

from orchestra.records.files import run_folder
from orchestra.records.links import LinkLoad, Links
from orchestra.records.store import write_links
from orchestra.report.figures.bars import links
from orchestra.report.figures.frame import for_image


def with_links(folder: Path, label: str, shares: Sequence[float], **changes: Any) -> None:
    inner = run_folder(folder, label, 4, 0)
    busiest = [
        LinkLoad(f"worker-{place} up", 125e6, round(share * 1e6), share)
        for place, share in enumerate(shares)
    ]
    whole: dict[str, Any] = {"seconds": 2.0, "count": 9, "unused": 2, "tenths": [9] + [0] * 9}
    write_links(inner, Links(**{**whole, **changes}, busiest=busiest))


def test_the_busiest_links_of_each_strategy(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    labels = ("one process", "ring", "server")
    keep(tmp_path, [record(label, engine="simulation") for label in labels], trace=False)
    with_links(tmp_path, "one process", [], count=0, unused=0)
    with_links(tmp_path, "ring", [0.5] * 8)
    with_links(tmp_path, "server", [0.9, 0.001], count=2, unused=0)
    found = drawn_alone(tmp_path, links)
    bars = found.values("link-utilisation", "percent")
    assert [(v["strategy"], v["link"]) for v in bars if "bytes" in v][: 6 + 2] == [
        *(("ring", f"worker-{place} up") for place in range(6)),
        ("server", "worker-0 up"), ("server", "worker-1 up"),
    ]  # fmt: skip
    thin = "\u202f"
    told = {v["text"] for v in found.values("link-utilisation", "text")}
    assert told == {
        f"50{thin}% · 500{thin}kB", f"90{thin}% · 900{thin}kB", f"0.10{thin}% · 1.00{thin}kB",
        "and 3 more links, 2 of them unused", "",
    }  # fmt: skip
    headings = [v["strategy"] for v in found.values("link-utilisation", "lane")
                if v["lane"].endswith("\u2063")]  # fmt: skip
    assert [*dict.fromkeys(headings)] == ["ring", "server"]
    spec = for_image(found.figures["link-utilisation"], 290)
    vl_convert.vegalite_to_svg(spec, show_warnings=True)
    assert capfd.readouterr().err == ""


def test_real_links_are_not_drawn(tmp_path: Path) -> None:
    assert not drawn_alone(keep(tmp_path, [record("ring")], trace=False), links).figures
