"""The tables of the pages of results, made from the files of figures in docs/results/data.

    python -m studies.results

A page has the mark `<!-- figures: NAME -->`, and below it, up to `<!-- end of figures -->`, the
tables of `docs/results/data/NAME.json`, with their date, command and machine. This command writes
all of them anew. The file is what a benchmark writes with `--json`. A file with `transcribed: true`
was made from a page instead, since no file of the command was kept: it has tables and no rows.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestra.cli.main import guarded
from orchestra.errors import InputError

PAGES = Path(__file__).parent.parent / "docs" / "results"
MARKED = re.compile(
    r"(?P<mark><!-- figures: (?P<name>\S+) -->\n)(?P<shown>.*?)(?P<end><!-- end of figures -->)",
    re.DOTALL,
)


def main(arguments: Sequence[str]) -> int:
    """Write the tables of all pages; print the pages that have changed."""
    if arguments:
        raise InputError(f"studies.results: {arguments[0]!r} is too much; it takes no arguments")
    for page in sorted(PAGES.rglob("*.md")):
        before = page.read_text()
        after = with_figures(before, page)
        if after != before:
            page.write_text(after)
            print(page.relative_to(PAGES))
    return 0


def with_figures(text: str, page: Path) -> str:
    """Return the `text` of `page` with the tables of the files that it names.

    Raises:
        InputError: a file is missing, or has no figures.
    """

    def shown(found: re.Match[str]) -> str:
        data = PAGES / "data" / f"{found['name']}.json"
        try:
            document = json.loads(data.read_text())
            lines = [*_source(document, data.name, "../" * _depth(page)), *_tables(document)]
        except OSError as error:
            raise InputError(
                f"{page}: figures of {found['name']}: {data} cannot be read: {error.strerror}; "
                "write it with --json of the benchmark"
            ) from None
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{page}: figures of {found['name']}: {data} is no file of figures "
                f"({type(error).__name__}: {error}); write it anew with --json of the benchmark"
            ) from None
        return "\n".join([found["mark"], *lines, "", found["end"]])

    return MARKED.sub(shown, text)


def _depth(page: Path) -> int:
    return len(page.relative_to(PAGES).parts) - 1


def _source(document: Mapping[str, Any], file: str, up: str) -> Iterator[str]:
    """Yield the line on date, command and machine."""
    about = document["environment"]
    torch = about["packages"]["torch"]
    machine = f"{about['cores']} cores, {about['processor']}, torch {torch}"
    note = ", transcribed: the command's own file was not kept" * document.get("transcribed", False)
    link = f"[figures]({up}data/{file}){note}"
    yield f"By `{document['command']}` on {document['date']}: {machine} ({link})."


def _tables(document: Mapping[str, Any]) -> Iterator[str]:
    for table in document["tables"]:
        yield ""
        if len(document["tables"]) > 1:
            yield f"**{table['title']}**"
            yield ""
        width = len(table["headings"])
        yield _line(table["headings"], width)
        yield _line(["---"] * width, width)
        yield from (_line(line, width) for line in table["lines"])


def _line(cells: Sequence[str], width: int) -> str:
    full = [*cells, *[""] * (width - len(cells))]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in full)} |"


if __name__ == "__main__":
    sys.exit(guarded(main))
