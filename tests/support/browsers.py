"""A headless Chromium for tests."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service

REQUIRED = "ORCHESTRA_REQUIRE_BROWSER"
OPTIONS = (
    "headless",
    "no-sandbox",
    "disable-gpu",
    "disable-quic",
    "no-first-run",
    "disable-background-networking",
    "disable-component-update",
    "disable-sync",
)


def start_chrome(profile: Path) -> Chrome:
    """One with an empty profile; the test is skipped where there is none, unless it is required."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), "")
    driver = shutil.which("chromedriver")
    if not (chromium and driver):
        lacking = f"no {'chromedriver' if chromium else 'chromium'} on the path"
        if os.environ.get(REQUIRED) == "1":
            pytest.fail(f"{lacking}, and {REQUIRED} is 1")
        pytest.skip(lacking)
    options = ChromeOptions()
    options.binary_location = chromium
    for option in (*OPTIONS, f"user-data-dir={profile}"):
        options.add_argument(f"--{option}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    return Chrome(options=options, service=Service(driver))
