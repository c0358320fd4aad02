"""The model of a table, and its writers."""

from __future__ import annotations

import pytest
from rich.console import Console

from orchestra.cli.terminal import print_table
from orchestra.report.sheet import Cell, Column, Sheet, csv_text, latex_text, terminal

SHEET = Sheet.of(
    [
        (Column("name", "run", words=True), lambda item: Cell(item[0], notation=item[1])),
        (Column("loss", "final loss"), lambda item: Cell(f"{item[2]:.2f}", value=item[2])),
        (Column("sent", "bytes sent", "MB", order=1), lambda item: "0.5"),
        (Column("input", "input", order=2), lambda item: "7%"),
    ],
    [("ring", "AllReduce('ring')", 0.25), ("=server & co", "ParameterServer()", 1.5)],
)


def drawn(sheet: Sheet, width: int) -> list[str]:
    console = Console(width=width, record=True, highlight=False)
    console.print(terminal(sheet, width))
    return [line.rstrip() for line in console.export_text().splitlines()]


@pytest.mark.parametrize(
    ("width", "head"),
    [
        (60, "run           final loss  bytes sent  input"),
        (42, "run          final loss bytes sent input"),  # closer together
        (36, "run           final loss  bytes sent"),  # without the one of the highest order
        (24, "run           final loss"),
        (10, None),  # broken, but whole
    ],
)
def test_a_narrow_terminal_leaves_out_columns_by_their_order(width: int, head: str | None) -> None:
    lines = drawn(SHEET, width)
    assert max(map(len, lines)) <= width
    if head is None:
        assert "".join(lines).replace(" ", "").count("0.25") == 1
    else:
        assert lines[0] == head
        assert len(lines) == 3


def test_a_long_title_takes_no_more_room_than_its_cells_need() -> None:
    sheet = Sheet.of([(Column("a", "a very long title of figures"), str)], [1, 2])
    assert drawn(sheet, 80)[:3] == ["a very long", "   title of", "    figures"]


def test_a_figure_that_does_not_fit_is_marked_as_cut_off() -> None:
    sheet = Sheet.of([(Column("bytes", "bytes"), str)], [123456789])
    assert drawn(sheet, 9)[1] == "123456789"
    assert drawn(sheet, 6)[1] == "12345…"


def test_a_printed_table_fills_up_lines_that_end_early(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("a step", ("", "amount", "seconds"), [("gradient", "32", "1.5"), ("update", "8")])
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == [
        "a step",
        "          amount  seconds",
        "gradient      32      1.5",
        "update         8",
    ]
    print_table("none", ("", "amount"), [])
    assert capsys.readouterr().out.split() == ["none", "amount"]


def test_csv_has_keys_and_values_and_no_formula() -> None:
    assert csv_text(SHEET) == ("name,loss,sent,input\nring,0.25,0.5,7%\n'=server & co,1.5,0.5,7%\n")


def test_latex_escapes_texts_and_has_units() -> None:
    text = latex_text(SHEET)
    assert r"run & final loss & bytes sent (MB) & input \\" in text
    assert r"=server \& co & 1.50 & 0.5 & 7\% \\" in text
    assert r"\begin{tabular}{lrrr}" in text


def test_only_keeps_columns_by_their_cells() -> None:
    kept = SHEET.only(lambda _, cells: any("%" in cell.text for cell in cells))
    assert [column.key for column in kept.columns] == ["input"]
    assert [[cell.text for cell in line] for line in kept.lines] == [["7%"], ["7%"]]
