"""The one model of a table, and its writers: for terminals, CSV and LaTeX, as `sheet` in the
templates for pages."""

from __future__ import annotations

import csv
import io
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from rich.table import Table
from rich.text import Text

from orchestra.errors import visible
from orchestra.report.numbers import MINUS, THIN

T = TypeVar("T")
NONE = "–"
WHOLE = 24  # characters; a longer cell of a narrow terminal is broken, as is one with a spread
_TEX = str.maketrans(
    {letter: f"\\{letter}" for letter in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    | {"±": r"$\pm$", "²": "$^2$", "≤": r"$\leq$", NONE: "--", MINUS: "$-$", THIN: r"\,"}
)


@dataclass(frozen=True)
class Column:
    """A column; on a page, clicking its title sorts by the values of its cells, the best first."""

    key: str
    title: str
    unit: str = ""
    rising: bool = False  # the largest is the best
    words: bool = False  # of words, which begin on one line, not of figures, which end on one
    order: int = 0  # on a terminal that is too narrow, the highest is left out first; 0 never


@dataclass(frozen=True)
class Cell:
    """A cell: `text`, in smaller type below it `details`; `value` is to sort by, and for CSV."""

    text: str
    details: Sequence[str] = ()
    value: object = None
    spread: float | None = None
    verdict: str = ""  # "better" or "worse" than the rival, where seeds cannot explain it
    notation: str = ""  # in a head: the notation of what it names
    style: str = ""  # on a terminal


@dataclass(frozen=True)
class Sheet:
    """A table: its columns, and lines with a cell for each of them; the first names the line."""

    columns: Sequence[Column]
    lines: Sequence[Sequence[Cell]]

    @classmethod
    def of(
        cls, columns: Iterable[tuple[Column, Callable[[T], Cell | str]]], items: Sequence[T]
    ) -> Sheet:
        """Return a line for each of `items`, with a cell by the function of each column."""
        parts = list(columns)
        lines = [[_cell(make(item)) for _, make in parts] for item in items]
        return cls([column for column, _ in parts], lines)

    def only(self, wanted: Callable[[Column, Sequence[Cell]], bool]) -> Sheet:
        """Return the sheet with those columns that are `wanted`, by what their cells are."""
        cells = [[line[place] for line in self.lines] for place in range(len(self.columns))]
        kept = [place for place, column in enumerate(self.columns) if wanted(column, cells[place])]
        lines = [[line[place] for place in kept] for line in self.lines]
        return Sheet([self.columns[place] for place in kept], lines)

    def styled(self, styles: Sequence[str]) -> Sheet:
        """Return the sheet with a style of the terminal for each line."""
        pairs = zip(self.lines, styles, strict=True)
        lines = [
            [replace(cell, style=cell.style or style) for cell in line] for line, style in pairs
        ]
        return Sheet(self.columns, lines)


def _cell(made: Cell | str) -> Cell:
    return made if isinstance(made, Cell) else Cell(made)


def terminal(sheet: Sheet, width: int) -> Table:
    """Return the sheet for a terminal of `width` columns: closer together, and without the columns
    that may be left out, as far as it would not fit."""

    def widths() -> list[int]:
        return [
            max(map(len, (*title.splitlines(), *texts)), default=0)
            for title, texts in _shown(sheet)
        ]

    def needed(gap: int) -> int:
        return sum(widths()) + gap * (len(sheet.columns) - 1)

    while needed(1) > width and any(column.order for column in sheet.columns):
        # Measured anew after each: without its longest cell a table may fit at once
        last = max(sheet.columns, key=lambda column: column.order)
        sheet = sheet.only(lambda column, _, last=last: column is not last)  # type: ignore[misc]
    gap = 2 if needed(2) <= width else 1
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
    for column, (title, texts) in zip(sheet.columns, _shown(sheet), strict=True):
        whole = all(len(text) <= WHOLE and "±" not in text for text in texts)
        justify: Literal["left", "right"] = "left" if column.words else "right"
        # Folded, since a name that is cut off could be another's; a figure that is cut off says so
        overflow: Literal["ellipsis", "fold"] = "ellipsis" if whole else "fold"
        table.add_column(title, justify=justify, no_wrap=whole, overflow=overflow)
    for line in sheet.lines:
        table.add_row(*(Text(cell.text, style=cell.style) for cell in line))
    return table


def _shown(sheet: Sheet) -> Iterator[tuple[str, list[str]]]:
    """Yield the title of each column, broken between its words where it is long and longer than
    the cells below it, and the texts of these."""
    for place, column in enumerate(sheet.columns):
        texts = [line[place].text for line in sheet.lines]
        room = max(WHOLE // 2, *map(len, texts), 1)
        lines = textwrap.wrap(column.title.replace("_", "_ "), room)
        yield "\n".join(line.replace("_ ", "_") for line in lines), texts


def csv_text(sheet: Sheet) -> str:
    """Return the sheet as CSV: the keys of its columns, and the values of its cells, or their texts
    where they have none."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([_plain(column.key) for column in sheet.columns])
    for line in sheet.lines:
        writer.writerow([_plain(cell.text if cell.value is None else cell.value) for cell in line])
    return file.getvalue()


def _plain(value: object) -> object:
    """Return a value for CSV; a text that a spreadsheet would take for a formula is quoted."""
    text = visible(value) if isinstance(value, str) else ""
    return f"'{text}" if text[:1] in set("=@+-") else text or value


def latex_text(sheet: Sheet) -> str:
    """Return the sheet as a `tabular`, for the package booktabs."""
    titles = [f"{c.title} ({c.unit})" if c.unit else c.title for c in sheet.columns]
    texts = [[cell.text for cell in line] for line in sheet.lines]
    head, *body = (
        " & ".join(visible(text).translate(_TEX) for text in line) + r" \\"
        for line in (titles, *texts)
    )
    layout = "".join("l" if column.words else "r" for column in sheet.columns)
    begin = [r"% \usepackage{booktabs}", rf"\begin{{tabular}}{{{layout}}}", r"\toprule"]
    lines = [*begin, head, r"\midrule", *body, r"\bottomrule", r"\end{tabular}"]
    return "\n".join(lines) + "\n"
