"""The site builds without a warning, its links lead somewhere, and it needs no network."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from tests.support.paths import ROOT

import orchestra

API = ROOT / "docs" / "reference" / "api.md"
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
NOT_LOADED = {"canonical", "next", "prev", "edit"}


class Page(HTMLParser):
    """What a page links to, what a browser loads for it, and the names of its places."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.places: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.places |= {name for key in ("id", "name") if (name := given.get(key))}
        target = given.get("href")
        if tag == "a" and target:
            self.links.append(target)
        loaded = given.get(LOADED.get(tag, ""))
        if loaded and given.get("rel") not in NOT_LOADED:
            self.loaded.append(loaded)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the site, built strictly: a warning of MkDocs is an error."""
    for name in ("mkdocs", "material", "mkdocstrings"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed: pip install '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in sorted(site.rglob("*.html")) if path.name != "404.html"}


def test_every_link_of_the_site_leads_to_a_place(site: Path, pages: dict[Path, Page]) -> None:
    lost = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            places = pages[target].places if target in pages else {parts.fragment}
            if not target.is_file() or (parts.fragment and unquote(parts.fragment) not in places):
                lost.append(f"{path.relative_to(site)}: {link}")
    assert not lost


def test_no_page_loads_anything_from_a_network(pages: dict[Path, Page]) -> None:
    loaded = {url for page in pages.values() for url in page.loaded}
    assert any("iframe-worker-shim" in url for url in loaded)
    assert not [url for url in loaded if urlsplit(url).netloc]


def headings(text: str) -> Iterator[str]:
    """Yield the anchors of a Markdown file as repositories show it."""
    for line in re.sub(r"```.*?```", "", text, flags=re.DOTALL).splitlines():
        if found := re.match(r"#+ (.*)", line):
            yield re.sub(r"[^\w\- ]", "", found[1].lower()).replace(" ", "-")


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_of_a_page_in_the_root_lead_to_a_place(name: str) -> None:
    text = (ROOT / name).read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        parts = urlsplit(target)
        if parts.scheme:
            continue
        path = ROOT / parts.path if parts.path else ROOT / name
        assert path.exists(), target
        if parts.fragment:
            assert parts.fragment in headings(path.read_text()), target


def test_every_page_that_code_names_exists() -> None:
    folders = ("src", "examples", "benchmarks", "studies", "tests")
    files = [path for name in folders for path in (ROOT / name).rglob("*.*")]
    texts = [path.read_text() for path in files if path.suffix in (".py", ".yaml", ".sh")]
    named = {page for text in texts for page in re.findall(r"docs/[\w/-]+\.md", text)}
    assert named
    assert not [page for page in named if not (ROOT / page).exists()]


def test_the_api_has_every_public_name() -> None:
    shown = re.findall(r"^::: orchestra\.(\w+)$", API.read_text(), re.MULTILINE)
    assert sorted(shown) == sorted(orchestra.__all__)
