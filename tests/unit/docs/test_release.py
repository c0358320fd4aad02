"""What a release says of itself is the same everywhere."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import yaml
from tests.support.paths import ROOT

import orchestra

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_there_is_one_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    cited = re.search(r"version = {(\S+)}", (ROOT / "docs" / "how-to" / "cite.md").read_text())
    assert newest is not None
    assert cited is not None
    versions = {PROJECT["version"], orchestra.__version__, citation["version"]}
    assert versions | {newest[1], cited[1]} == {PROJECT["version"]}
    assert citation["license"] == PROJECT["license"]


def test_packages_of_the_site_are_those_of_the_developers() -> None:
    extras = PROJECT["optional-dependencies"]
    assert {*extras["docs"]} <= {*extras["dev"]}


def test_no_page_installs_orchestra_from_an_index() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    commands = [line for page in pages for line in re.findall("pip install.*", page.read_text())]
    assert commands
    assert not [line for line in commands if re.search(r"neural.orchestra|orchestra\[", line)]


def test_messages_install_extras_from_the_clone() -> None:
    sources = [path.read_text() for path in (ROOT / "src").rglob("*.py")]
    commands = [line for text in sources for line in re.findall("pip install.*", text)]
    assert not [line for line in commands if re.search(r"neural.orchestra|orchestra\[", line)]
