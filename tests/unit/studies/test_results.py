"""The pages of results have the tables of the files of figures that they name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.options import PrintedTable, bench_parser, read_options, write_figures
from benchmarks.ratios import Ratio
from studies import results

from orchestra.cli.main import guarded

PAGES = sorted(results.PAGES.rglob("*.md"))
FILES = sorted((results.PAGES / "data").glob("*.json"))


def test_pages_have_the_tables_of_their_files() -> None:
    stale = [
        page.name
        for page in PAGES
        if results.with_figures(page.read_text(), page) != page.read_text()
    ]
    assert not stale, "write them anew: python -m studies.results"


def test_every_file_of_figures_is_on_one_page_and_names_no_place_of_a_machine() -> None:
    named = [found["name"] for page in PAGES for found in results.MARKED.finditer(page.read_text())]
    assert sorted(named) == [file.stem for file in FILES]
    for file in FILES:
        assert not [
            part for part in ("/home", "/root", "/tmp", "/work") if part in file.read_text()
        ]


def test_what_a_benchmark_writes_is_a_table_of_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    file, page = tmp_path / "data" / "steps.json", tmp_path / "page.md"
    options = read_options(
        bench_parser("python -m benchmarks.steps", "", rounds=3),
        ["--rounds", "5", "--json", str(file)],
    )
    table = PrintedTable("steps", ("a | b", "ratio"), [("ring",), ("tree", "1.00")])
    write_figures(options.json, "steps", [Ratio(1.0, None, None, 5)], [table], options.command)
    page.write_text("Before.\n\n<!-- figures: steps -->\nold\n<!-- end of figures -->\n\nAfter.\n")
    monkeypatch.setattr(results, "PAGES", tmp_path)

    assert guarded(results.main, []) == 0
    text = page.read_text()
    assert "| a \\| b | ratio |\n| --- | --- |\n| ring |  |\n| tree | 1.00 |\n" in text
    assert "By `python -m benchmarks.steps --rounds 5` on " in text
    assert json.loads(file.read_text())["rows"] == [
        {"median": 1.0, "low": None, "high": None, "pairs": 5}
    ]
    assert (text.startswith("Before."), text.endswith("After.\n"), "old" in text) == (
        True,
        True,
        False,
    )
    assert guarded(results.main, []) == 0
    assert page.read_text() == text


@pytest.mark.parametrize("content", [None, "{", "[]", '{"tables": []}'])
def test_a_file_without_figures_is_named_in_one_line(
    content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "data").mkdir()
    if content is not None:
        (tmp_path / "data" / "steps.json").write_text(content)
    (tmp_path / "page.md").write_text("<!-- figures: steps -->\n<!-- end of figures -->\n")
    monkeypatch.setattr(results, "PAGES", tmp_path)
    assert guarded(results.main, []) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "steps.json" in line
    assert "--json" in line
