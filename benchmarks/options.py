"""The options of all benchmarks, and the figures that they write."""

from __future__ import annotations

import json
import shlex
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any, TypeVar

from orchestra.cli.numbers import counts
from orchestra.cli.parser import Parser
from orchestra.cli.terminal import print_table
from orchestra.errors import InputError, nearest
from orchestra.records.files import environment

T = TypeVar("T")


@dataclass(frozen=True)
class PrintedTable:
    """A table of texts, as a benchmark prints it and as a page of results shows it."""

    title: str
    headings: Sequence[str]
    lines: Sequence[Sequence[str]]

    def show(self) -> None:
        """Print it."""
        print_table(self.title, self.headings, self.lines)


def listed(option: str, text: str | None, known: Mapping[str, T]) -> dict[str, T]:
    """Return those of `known` that `text`, the value of `option`, names (ring,server); None: all.

    Raises:
        InputError: an unknown name.
    """
    names = list(known) if text is None else [word.strip() for word in text.split(",")]
    for name in names:
        if name not in known:
            raise InputError(f"{option}: unknown {name!r}; {nearest(name, known)}")
    return {name: known[name] for name in names}


def bench_parser(
    program: str, description: str, *, rounds: int | None = None, rounds_of: str = ""
) -> Parser:
    """Return a parser with the options of every benchmark; `rounds` is the default."""
    parser = Parser("bench", description)
    parser.prog = program
    if rounds is not None:
        meaning = f"{rounds_of or 'how often all take turns'} (default: {rounds})"
        parser.option("--rounds", "N", meaning, type=int, default=rounds)
    parser.option("--json", "FILE", "write the figures to a new file", type=Path)
    return parser


def read_options(parser: Parser, arguments: Sequence[str]) -> Namespace:
    """Return the options, checked before minutes are spent; `command` is the command line."""
    options = parser.read(arguments)
    options.command = shlex.join([*parser.prog.split(), *_measured_by(arguments)])
    if getattr(options, "rounds", 1) < 1:
        raise InputError(f"--rounds: {options.rounds} is below 1")
    if options.json is not None and options.json.exists():
        raise InputError(f"--json: {options.json} exists; name a new file")
    if options.json is not None and not options.json.parent.is_dir():
        raise InputError(f"--json: there is no folder {options.json.parent}; make it first")
    return options


def rank_counts(text: str) -> list[int]:
    """Return numbers of ranks, such as 2,4; each at least 2."""
    return counts("--ranks", text, low=2, why=": nothing would be exchanged")


def _measured_by(arguments: Sequence[str]) -> list[str]:
    """Return `arguments` without those that have no effect on the figures."""
    kept = list(arguments)
    while "--json" in kept:
        place = kept.index("--json")
        del kept[place : place + 2]
    return kept


def write_figures(
    path: Path | None,
    name: str,
    rows: Sequence[Any],
    tables: Sequence[PrintedTable] = (),
    command: str = "",
) -> None:
    """Write the rows (dataclasses) and the tables as JSON, if a path is given, with the date, the
    command and a description of the machine.

    The file has no path of the machine, so that it can be kept in docs/results/data.
    """
    if path is None:
        return
    machine = environment()
    document = {
        "benchmark": name,
        "date": date.today().isoformat(),
        "command": command,
        "environment": {key: machine[key] for key in machine if key not in ("command", "modules")},
        "tables": [asdict(table) for table in tables],
        "rows": [asdict(row) for row in rows],
    }
    try:
        path.write_text(json.dumps(document, indent=2) + "\n")
    except OSError as error:
        raise InputError(f"--json: {path} cannot be written: {error.strerror}") from None


def print_remarks(text: str) -> None:
    """Print a sentence below a table, and which machine the figures are of."""
    about = environment()
    machine = f"{about['cores']} cores, {about['processor']}, torch {about['packages']['torch']}"
    print(f"{text}\n{machine}.")
