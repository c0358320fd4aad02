"""Write a report: `report.html`, and its figures as images."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from orchestra.errors import InputError
from orchestra.records.record import write_atomically
from orchestra.report.collect import collect
from orchestra.report.export import csv_text, latex_text
from orchestra.report.figures import figures, save
from orchestra.report.page import page
from orchestra.report.rows import rows_of
from orchestra.report.study import Study

PAGE = "report.html"
TABLES = {"csv": ("table.csv", csv_text), "latex": ("table.tex", latex_text)}
"""What else the table of a report can be written as."""


def write_report(
    folders: Sequence[Path],
    out: Path,
    baseline: str | None = None,
    tables: Collection[str] = (),
) -> Path:
    """Report on the runs in `folders`, those of trainings or of comparisons, into the folder `out`.

    Args:
        baseline: the label, or the name in the report, of the row that differences are taken from;
            without it one process with all cores.
        tables: "csv" for a `table.csv` beside the page, "latex" for a `table.tex`.

    Returns:
        The path of `report.html`; the images lie beside it in `figures`. What was there is
        replaced, each file whole or not at all.

    Raises:
        InputError: a folder that is none of a run, no run yet, or an unknown baseline.
    """
    sources = collect(folders)
    study = Study(sources, rows_of(sources), baseline)
    drawn = figures(sources, study.ranked, baseline)
    try:
        (out / "figures").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{out}: cannot be made: {error.strerror}; choose another --out") from None
    for figure in drawn:
        save(figure, out / "figures")
    for kind in tables:
        name, text = TABLES[kind]
        write_atomically(out / name, text(study))
    write_atomically(out / PAGE, page(study, drawn, out))
    return out / PAGE
