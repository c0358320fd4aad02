"""The page of a report in a real browser: it is drawn, it reacts, and it asks nobody."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.support.ui import WebDriverWait
from tests.support.browsers import start_chrome
from tests.support.drawn import STRATEGIES, all_runs, keep, record
from tests.support.lab import in_lab

from orchestra.report.page import write_report

pytestmark = pytest.mark.browser

PATIENCE = 60


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report with every section: two rank counts, a failure, timelines."""
    folder = tmp_path_factory.mktemp("report")
    failed = record("ring", seed=9, status="failed", failure="rank 2 died\nTraceback")
    return write_report([keep(folder, [*all_runs((2, 4)), failed])], folder)


@pytest.fixture(scope="module")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    browser = start_chrome(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.quit()


@pytest.fixture
def opened(chrome: Chrome, report: Path) -> Chrome:
    """The page on a desk, drawn, with the logs of before read away."""
    return _open(chrome, report, 1400, 900)


def _open(chrome: Chrome, path: Path, width: int, height: int, night: bool = False) -> Chrome:
    shape = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", shape)
    theme = {"name": "prefers-color-scheme", "value": "dark" if night else "light"}
    chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [theme]})
    for log in ("browser", "performance"):
        chrome.get_log(log)  # type: ignore[no-untyped-call]
    chrome.get(path.as_uri())
    _until(chrome, "document.documentElement.dataset.ready === 'true'")
    return chrome


def _ask(chrome: Chrome, expression: str) -> Any:
    return chrome.execute_script(f"return {expression}")


def _until(chrome: Chrome, expression: str) -> None:
    WebDriverWait(chrome, PATIENCE).until(lambda _: _ask(chrome, expression))


def _click(chrome: Chrome, selector: str) -> None:
    chrome.execute_script(f"document.querySelector({json.dumps(selector)}).click()")


def test_every_figure_is_drawn_and_nobody_is_asked(opened: Chrome, report: Path) -> None:
    figures = _ask(opened, "document.querySelectorAll('[data-figure]').length")
    assert figures >= 16
    assert figures == len([*(report.parent / "figures").glob("*.png")])
    assert (
        _ask(opened, "document.querySelectorAll('[data-drawn=true] .plot svg').length") == figures
    )
    empty = (
        "[...document.querySelectorAll('.plot svg')].filter(s => !s.querySelector('path')).length"
    )
    assert _ask(opened, empty) == 0
    log = opened.get_log("browser")  # type: ignore[no-untyped-call]
    assert [entry for entry in log if entry["level"] == "SEVERE"] == []
    events = [json.loads(entry["message"])["message"] for entry in opened.get_log("performance")]  # type: ignore[no-untyped-call]
    asked = [event["params"]["request"]["url"] for event in events
             if event["method"] == "Network.requestWillBeSent"]  # fmt: skip
    assert asked
    assert all(url.startswith(("file:", "data:", "blob:")) for url in asked)


def _marks(chrome: Chrome, figure: str) -> int:
    return int(_ask(chrome, f"document.querySelectorAll('#figure-{figure} svg path').length"))


@pytest.mark.parametrize(
    "figure", ["loss-against-seconds", *in_lab(["time-to-target", "bytes-sent"])]
)
def test_a_chip_hides_a_strategy_and_brings_it_back(opened: Chrome, figure: str) -> None:
    before = _marks(opened, figure)
    chip = '.chips button[data-name="ring"]'
    ring = f"document.querySelector('{chip}').getAttribute('aria-pressed')"
    assert _ask(opened, ring) == "true"
    count = f"document.querySelectorAll('#figure-{figure} svg path').length"
    _click(opened, chip)
    assert _ask(opened, ring) == "false"
    _until(opened, f"{count} < {before}")
    _click(opened, chip)
    _until(opened, f"{count} === {before}")


def _column(chrome: Chrome, key: str) -> list[float | None]:
    cells = f"[...document.querySelectorAll('.results tbody td[data-key=\"{key}\"]')]"
    values = _ask(chrome, f"{cells}.map(cell => cell.dataset.value ?? null)")
    return [None if value is None else float(value) for value in values]


def test_a_title_sorts_the_table_best_first_then_the_other_way(opened: Chrome) -> None:
    place = _ask(
        opened,
        "[...document.querySelectorAll('.results thead th')]"
        ".findIndex(title => title.textContent.startsWith('speed'))",
    )
    title = f".results thead th:nth-child({place + 1}) button"
    orders = []
    for _ in range(2):
        _click(opened, title)
        values = _column(opened, "samples_per_second")
        assert None not in values[:-1]
        orders.append([value for value in values if value is not None])
    assert orders == [sorted(orders[0], reverse=True), sorted(orders[0])]
    assert _ask(opened, "document.querySelector('[aria-sort]').getAttribute('aria-sort')") == (
        "ascending"
    )


def test_rows_without_a_figure_stay_last(opened: Chrome) -> None:
    _click(opened, ".results thead th:nth-last-child(1) button")  # only switches have one
    values = _column(opened, "switched_at_step")
    known = [value for value in values if value is not None]
    assert values == [*known, *[None] * (len(values) - len(known))]
    assert known == [5.0, 5.0]


@pytest.mark.parametrize("width", [320, *in_lab([390]), 768, *in_lab([1400])])
def test_no_width_makes_the_page_scroll_sideways(chrome: Chrome, report: Path, width: int) -> None:
    _open(chrome, report, width, 844)
    assert _ask(chrome, "document.documentElement.scrollWidth") <= width
    wide = (
        "[...document.querySelectorAll('.plot svg')]"
        ".filter(svg => svg.getBoundingClientRect().right > innerWidth).length"
    )
    assert _ask(chrome, wide) == 0


def test_figures_follow_the_dark_theme(chrome: Chrome, report: Path) -> None:
    colour = "getComputedStyle(document.querySelector('.plot svg text')).fill"
    _open(chrome, report, 1400, 900)
    day = _ask(chrome, colour)
    _open(chrome, report, 1400, 900, night=True)
    night = _ask(chrome, colour)
    assert _brightness(day) < 100 < 180 < _brightness(night)


def _brightness(colour: str) -> float:
    numbers = colour.removeprefix("rgb(").removesuffix(")").split(",")
    return sum(map(float, numbers)) / 3


def test_it_prints(opened: Chrome) -> None:
    printed = opened.execute_cdp_cmd("Page.printToPDF", {"preferCSSPageSize": True})
    content = base64.b64decode(printed["data"])
    assert content.startswith(b"%PDF")
    assert content.count(b"/Type /Page\n") > 3
    assert b"/Subtype /Image" not in content  # figures are drawn, not photographed
    assert _ask(opened, "[...document.querySelectorAll('details')].every(part => part.open)")


def test_perfetto_is_asked_and_given_the_timeline(opened: Chrome) -> None:
    stand_in: Callable[[str], Any] = opened.execute_script
    stand_in("""
        window.told = [];
        const take = (message, to) => window.told.push([message, to]);
        window.other = { closed: false, postMessage: take };
        window.open = (url) => { window.asked = url; return window.other; };
    """)
    _click(opened, "[data-trace]")
    _until(opened, "window.told.some(([message]) => message === 'PING')")
    assert _ask(opened, "window.asked") == "https://ui.perfetto.dev"
    stand_in("""
        const pong = new MessageEvent("message", { data: "PONG" });
        Object.defineProperty(pong, "source", { value: window.other });
        window.dispatchEvent(pong);
    """)
    _until(opened, "window.told.some(([message]) => message.perfetto)")
    magic = "[...new Uint8Array(window.told.at(-1)[0].perfetto.buffer).slice(0, 2)]"
    assert _ask(opened, magic) == [0x1F, 0x8B]  # gzip
    assert _ask(opened, "window.told.at(-1)[1]") == "https://ui.perfetto.dev"


def test_all_strategies_have_a_chip_for_all_numbers_of_ranks(opened: Chrome) -> None:
    chips = _ask(
        opened,
        "[...document.querySelectorAll('.chips button')]"
        ".map(chip => [chip.dataset.name, JSON.parse(chip.dataset.rows)])",
    )
    assert {name: {*rows} for name, rows in chips} == {
        label: {f"{label} ({n} ranks)" for n in (2, 4)} for label in STRATEGIES
    }
