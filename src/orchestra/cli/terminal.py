"""Progress and tables on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from rich import progress

from orchestra.records.terminal import Terminal
from orchestra.report.sheet import Cell, Column, Sheet, terminal


@contextmanager
def progress_line() -> Iterator[Callable[[str, float], None]]:
    """Show progress on standard error: a bar on a terminal, elsewhere a line now and then."""
    if not sys.stderr.isatty():
        from orchestra.engines.live import Lines

        yield Lines()
        return
    text, bar = progress.TextColumn("{task.description}"), progress.BarColumn(bar_width=24)
    columns = (text, bar, progress.TimeElapsedColumn())
    with progress.Progress(*columns, console=Terminal(stderr=True), transient=True) as line:
        task = line.add_task("starting", total=1.0)

        def tell(what: str, part: float) -> None:
            line.update(task, description=what, completed=part)

        yield tell


def print_table(title: str, headings: Sequence[str], lines: Iterable[Sequence[str]]) -> None:
    """Print a table; its first column is of names, the others of numbers. The last cells of a line
    may be missing.
    """
    columns = [Column(heading, heading, words=not place) for place, heading in enumerate(headings)]
    cells = [[Cell(text) for text in line] for line in lines]
    empty = Cell("")
    sheet = Sheet(columns, [[*line, *[empty] * (len(columns) - len(line))] for line in cells])
    console = Terminal()
    if not console.is_terminal:  # a file has room for all columns
        console.width = 1000
    console.print(title, style="bold", soft_wrap=True)
    console.print(terminal(sheet, console.width), end="\n\n")
