"""docs/architecture.md and docs/decisions say what is there: packages, files, classes."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest
from tests.support.architecture_page import SOURCE, packages, table
from tests.support.paths import ROOT

DECISIONS = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
ARCHITECTURE = ROOT / "docs" / "architecture.md"
FILE = re.compile(r"[\w./-]+\.(?:py|c)|[\w/]+/")
NAME = re.compile(r"([A-Z]\w*[a-z]\w*)(?:\.(\w+))?")


def in_code(page: Path) -> Iterator[str]:
    """Yield what the page has between single backticks."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    yield from re.findall(r"`([^`\n]+)`", text)


def exists(name: str) -> bool:
    """Return whether a file or folder exists, in the project, in the package, or anywhere in it."""
    inside = "/" not in name and any(SOURCE.rglob(name))
    return inside or any((folder / name).exists() for folder in (ROOT, SOURCE))


@cache
def names() -> Mapping[str, set[str]]:
    """Return for each class the names in it, and nothing for each other name of a module."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in SOURCE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        found.update({name: set() for name in _defined(tree) if name not in found})
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found[node.name].update(_defined(node))
    return found


def _defined(tree: ast.Module | ast.ClassDef) -> Iterator[str]:
    """Yield the names of functions, classes, fields and constants in the body of `tree`."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        yield from (target.id for target in targets if isinstance(target, ast.Name))


def test_architecture_has_the_table_of_packages() -> None:
    assert table() in ARCHITECTURE.read_text(), (
        "python -m tests.support.architecture_page prints it"
    )


def test_table_has_every_package() -> None:
    assert not {name for name in packages() if f"`{name}/`" not in table()}


@pytest.mark.parametrize("page", [ARCHITECTURE, *DECISIONS], ids=lambda page: page.stem)
def test_files_and_names_of_the_page_exist(page: Path) -> None:
    words = {*in_code(page)}
    assert not {word for word in words if FILE.fullmatch(word) and not exists(word)}
    dotted = {word: match.groups() for word in words if (match := NAME.fullmatch(word))}
    known = names()
    assert not {
        word
        for word, (name, inside) in dotted.items()
        if name not in known or (inside is not None and inside not in known[name])
    }


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.stem)
def test_decision_is_short_and_has_a_status(page: Path) -> None:
    lines = page.read_text().splitlines()
    assert len(lines) <= 60
    assert lines[0].startswith(f"# {int(page.name[:2])}. ")
    assert re.fullmatch(r"\*\*Status:\*\* (accepted|replaced by \[.+\]\(.+\))\.", lines[2])


def test_index_lists_every_decision() -> None:
    index = (ROOT / "docs" / "decisions" / "README.md").read_text()
    assert [int(page.name[:2]) for page in DECISIONS] == [*range(1, len(DECISIONS) + 1)]
    assert not [page.name for page in DECISIONS if f"]({page.name})" not in index]


def test_architecture_is_short() -> None:
    assert len(ARCHITECTURE.read_text().splitlines()) <= 250
