"""`orchestra report`: a page about any past runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from orchestra.cli.arguments import Parser

DESCRIPTION = """\
Make a report of past runs: report.html, one file that needs nothing else, and each figure as PNG
and SVG. Its first sentence says which strategy was first, and whether distributing paid.

A folder is that of a comparison or of a training; several are shown side by side. Where they
differ in more than their strategy, ranks and seed, the report says so first.
"""

EPILOG = """\
examples:
  orchestra report runs/quickstart-1
      into that folder, as orchestra compare did; again after an interruption

  orchestra report runs/ring runs/servers --out both --baseline ring
      two trainings on one page, with differences to the first

  orchestra report runs/quickstart-1 --csv --latex
      the table as table.csv and table.tex, too
"""


def main(arguments: Sequence[str]) -> int:
    """Report as the command line says."""
    parser = Parser("report", DESCRIPTION, EPILOG)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a folder")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="where to (default: the folder itself if there is one, else report)",
    )
    parser.add_argument(
        "--baseline",
        metavar="LABEL",
        help="the row that differences refer to (default: one process with all cores)",
    )
    parser.add_argument("--csv", action="store_true", help="write the table as table.csv, too")
    parser.add_argument("--latex", action="store_true", help="write it as table.tex, for booktabs")
    options = parser.read(arguments)
    folders: list[Path] = options.runs
    out: Path = options.out or (folders[0] if len(folders) == 1 else Path("report"))
    from orchestra.report.page import TABLES, write_report

    kinds = [kind for kind in TABLES if getattr(options, kind)]
    print(write_report(folders, out, options.baseline, kinds))
    for kind in kinds:
        print(out / TABLES[kind][0])
    return 0
