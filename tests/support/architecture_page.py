"""The table of packages in docs/architecture.md.

`python -m tests.support.architecture_page` prints it.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

from tests.support.paths import ROOT

SOURCE = ROOT / "src" / "orchestra"
HEAD = "| layer | package | what it does |\n| --- | --- | --- |"


def layers() -> list[list[str]]:
    """Return the layers that import-linter checks, the highest first, as lists of names."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = settings["tool"]["importlinter"]["contracts"]
    (lines,) = (contract["layers"] for contract in contracts if contract["type"] == "layers")
    return [line.split(" | ") for line in lines]


def table() -> str:
    """Return the table: each package and module of a layer, with the start of its docstring."""
    rows = [HEAD]
    for number, names in enumerate(layers(), 1):
        for name in names:
            if (SOURCE / name).is_dir():
                inside = sorted(path.parent for path in (SOURCE / name).rglob("__init__.py"))
                rows += [_row(number, f"{_name(each)}/", each / "__init__.py") for each in inside]
            else:
                rows.append(_row(number, f"{name}.py", SOURCE / f"{name}.py"))
    return "\n".join(rows)


def packages() -> Iterator[str]:
    """Yield the name of every package below `orchestra`, such as `engines/processes`."""
    for path in SOURCE.rglob("__init__.py"):
        if path.parent != SOURCE:
            yield _name(path.parent)


def _name(folder: Path) -> str:
    return folder.relative_to(SOURCE).as_posix()


def _row(layer: int, name: str, file: Path) -> str:
    docstring = ast.get_docstring(ast.parse(file.read_text())) or ""
    return f"| {layer} | `{name}` | {docstring.splitlines()[0]} |"


if __name__ == "__main__":
    print(table())
