"""Two versions beside each other: their ratios to the same peer, from the files of a benchmark."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.ratios import Ratio
from orchestra.cli.parser import Parser
from orchestra.cli.terminal import print_table
from orchestra.errors import InputError

MEASURES = {"ratio": "time", "processor_ratio": "processor"}
"""The fields of a row that are compared, and their headings."""
Key = tuple[Any, ...]
Earlier = dict[Key, dict[str, Ratio]]
"""By the key of a row: its measures."""


def add_option(parser: Parser) -> None:
    """Add the option --before, which `read` takes."""
    meaning = "compare with the figures that --json wrote for another version"
    parser.option("--before", "FILE", f"{meaning}; status 1 if a row is slower", type=Path)


def read(path: Path, benchmark: str, keys: Sequence[str]) -> Earlier:
    """Return the ratios in a file of `benchmark`, whose rows the fields `keys` tell apart.

    Raises:
        InputError: it is no such file.
    """
    try:
        document = json.loads(path.read_text())
        found = {
            tuple(row[key] for key in keys): {name: Ratio(**row[name]) for name in MEASURES}
            for row in document["rows"]
            if document["benchmark"] == benchmark
        }
    except OSError as error:
        raise InputError(f"--before: {path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        found = {}
    if not found:
        raise InputError(
            f"--before: {path} has no figures that this version of benchmarks.{benchmark} could "
            "have written: write it anew with --json"
        )
    return found


def change(now: Ratio, before: Ratio) -> str:
    """Return "faster" or "slower" where the intervals have nothing in common, else nothing."""
    if now.low is None or now.high is None or before.low is None or before.high is None:
        return ""
    if now.high < before.low:
        return "faster"
    return "slower" if now.low > before.high else ""


def print_changes(keys: Sequence[str], rows: Sequence[Any], before: Earlier) -> int:
    """Print those of `rows` that were measured before, too; return how many of them are slower.

    `keys` are the fields that tell rows apart, as for `read`.
    """
    now = {tuple(getattr(row, key) for key in keys): row for row in rows}
    lines, slower = [], 0
    for key in (key for key in now if key in before):
        # A flag stands by its name in the rows that have it
        named = zip(keys, key, strict=True)
        parts = [name if value is True else str(value) for name, value in named if value]
        line = [" ".join(parts)]
        changes = []
        for name in MEASURES:
            ratio = getattr(now[key], name)
            changes.append(change(ratio, before[key][name]))
            line += [str(before[key][name]), str(ratio), changes[-1]]
        slower += "slower" in changes
        lines.append(line)
    headings = [""]
    for heading in MEASURES.values():
        headings += [f"{heading}, before", "now", ""]
    print_table("ratios to the peer, before and now", headings, lines)
    print(f"{slower} of {len(lines)} rows are slower: their intervals have nothing in common.")
    return slower
