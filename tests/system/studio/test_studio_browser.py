"""The studio in a real browser: a control redraws the bars, messages travel, and all has a name."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait
from tests.support.browsers import start_chrome
from tests.support.lab import some
from werkzeug.serving import make_server

from orchestra.studio.server import Simulator, make_app

pytestmark = pytest.mark.browser

PATIENCE = 60
SMALL = "#megabytes=5&workers=4&shown=ring+server+gossip&chosen=ring"
READY = "document.documentElement.dataset.ready === 'true'"
BARS = "[...document.querySelectorAll('.bar')].map(bar => Number(bar.dataset.step))"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with ThreadPoolExecutor(2) as pool:
        server = make_server("127.0.0.1", 0, make_app(Simulator(pool, 2)), threaded=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(scope="module")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    browser = start_chrome(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.quit()


@pytest.fixture
def studio(chrome: Chrome, address: str) -> Chrome:
    _resize(chrome, 1280)
    chrome.get("about:blank")
    chrome.get_log("browser")  # type: ignore[no-untyped-call]
    chrome.get(address + SMALL)
    _until(chrome, f"{READY} && document.documentElement.dataset.course === 'ring'")
    return chrome


def _resize(chrome: Chrome, width: int) -> None:
    shape = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", shape)


def _ask(chrome: Chrome, expression: str) -> Any:
    return chrome.execute_script(f"return {expression}")


def _until(chrome: Chrome, expression: str) -> None:
    WebDriverWait(chrome, PATIENCE).until(lambda _: _ask(chrome, expression))


def test_a_control_moved_by_a_key_redraws_every_bar(studio: Chrome) -> None:
    before = _ask(studio, BARS)
    assert len(before) == 3
    assert before == sorted(before)
    control = studio.find_element(By.ID, "megabits")
    for _ in range(5):
        control.send_keys(Keys.ARROW_LEFT)  # a slower network
    _until(studio, f"{READY} && {BARS}.every((step, at) => step > {before}[at])")
    assert "shown=ring" in studio.current_url  # a page that is passed on shows the same
    slower = _ask(studio, "document.getElementById('megabits').getAttribute('aria-valuetext')")
    assert slower == "560 Mbit/s"
    assert _ask(studio, "new URLSearchParams(location.hash.slice(1)).get('megabits')") == "560"
    assert _ask(studio, "document.getElementById('answer').textContent").startswith("Fastest here")


def test_messages_travel_until_they_are_halted(studio: Chrome) -> None:
    _until(studio, "document.documentElement.dataset.travelling > 0")
    seen = _ask(studio, "document.querySelector('.message').getAttribute('cx')")
    _until(studio, f"document.querySelector('.message').getAttribute('cx') !== '{seen}'")
    studio.find_element(By.ID, "play").click()
    moment = "document.getElementById('moment').value"
    halted = _ask(studio, moment)
    studio.execute_script("return new Promise(done => requestAnimationFrame(() => "
                          "requestAnimationFrame(done)))")  # fmt: skip
    assert _ask(studio, moment) == halted
    studio.find_element(By.ID, "moment").send_keys(Keys.HOME)
    assert _ask(studio, moment) == "0"


def test_another_strategy_has_its_own_step_and_sentences(studio: Chrome) -> None:
    told = _ask(studio, "document.getElementById('does').textContent")
    studio.find_element(By.CSS_SELECTOR, ".bar[data-key=server]").click()
    _until(studio, "document.documentElement.dataset.course === 'server'")
    assert _ask(studio, "document.getElementById('does').textContent") != told
    assert _ask(studio, "document.querySelectorAll('.node text').length") == 5  # and the server
    assert "chosen=server" in studio.current_url


def test_nothing_complains_and_every_control_has_a_name(studio: Chrome, tmp_path: Path) -> None:
    log = studio.get_log("browser")  # type: ignore[no-untyped-call]
    assert [entry for entry in log if entry["level"] in ("SEVERE", "WARNING")] == []
    nameless = (
        "[...document.querySelectorAll('input, select, button, progress')].filter(one => "
        "!one.labels?.length && !one.ariaLabel && !one.textContent.trim()).length"
    )
    assert _ask(studio, nameless) == 0


@pytest.mark.parametrize("width", some([390, 800, 1280]))
def test_no_width_makes_the_page_scroll_sideways(studio: Chrome, width: int) -> None:
    _resize(studio, width)
    assert _ask(studio, "document.documentElement.scrollWidth") <= width
