"""Strategies, and what they are made of, cannot tell on which engine they run."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import orchestra

SOURCES = Path(orchestra.__file__).parent
ROOMS = [
    "collectives",
    "data",
    "exchange",
    "optimizers",
    "parameter_server",
    "strategies",
    "worker",
]
EXEMPT = (
    SOURCES / "strategies" / "registry.py",  # tells where strategies did well, simulated or not
    SOURCES / "worker" / "interception.py",  # adds interceptors to those that an engine has
)
ENGINE = re.compile(r"engines|simulat|virtual|socket|\bgloo|at_once|station", re.IGNORECASE)
FILES = sorted(
    path for room in ROOMS for path in (SOURCES / room).rglob("*.py") if path not in EXEMPT
)


def tells(source: str) -> Iterator[str]:
    """Where `source` names an engine, or looks at the type of what an engine has given it."""
    for node in ast.walk(ast.parse(source)):
        names = [getattr(node, field, None) for field in ("id", "attr", "name", "arg", "module")]
        for name in names:
            if isinstance(name, str) and ENGINE.search(name):
                yield f"line {getattr(node, 'lineno', 0)}: {name}"
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "hasattr"):
            if re.search("transport|compute|runtime|native", ast.unparse(node.args[0])):
                yield f"line {node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Compare) and ast.unparse(node.left) == "type(self)":
            yield f"line {node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCES)))
def test_no_engine_is_known(path: Path) -> None:
    assert not list(tells(path.read_text()))


@pytest.mark.parametrize(
    "source",
    [
        "from orchestra.engines.simulation import transport",
        "if isinstance(worker.transport, Meets): ...",
        "alone = type(self) is AllReduce",
        "buffer = worker.average_at_once()",
        "if transport.is_virtual: ...",
    ],
)
def test_what_knows_an_engine_is_found(source: str) -> None:
    assert list(tells(source))
