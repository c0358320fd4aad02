"""The table of a report for other programs: CSV for spreadsheets, LaTeX for papers."""

from __future__ import annotations

import csv
import io

from orchestra.report.numbers import MINUS, THIN
from orchestra.report.study import Study
from orchestra.report.table import NONE, Column, figures_of, table

_HEAD = ("name", "strategy", "ranks", "workers", "servers", "global_batch", "runs", "completed")
_TEX = {
    **{letter: f"\\{letter}" for letter in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "²": "$^2$",
    "≤": r"$\leq$",
    MINUS: "$-$",
    NONE: "--",
    THIN: r"\,",
}


def csv_text(study: Study) -> str:
    """A line for each row, best first; of every figure the mean over the seeds, the sample standard
    deviation (_sd), the number of seeds (_n), and the paired difference from the rival with its
    95 % interval (_difference, _low, _high). A field is empty where nothing is known."""
    file = io.StringIO()
    keys = [measure.key for measure in study.measures]
    parts = ("", "_sd", "_n", "_difference", "_low", "_high")
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([*_HEAD, *(f"{key}{part}" for key in keys for part in parts)])
    for row in study.ranked:
        known = [row.name, row.strategy, row.ranks, row.workers, row.servers, row.global_batch]
        values: list[object] = [*known, len(row.runs), len(row.completed)]
        for figure in figures_of(study, row).values():
            difference = figure["difference"] or {}
            values += [figure["mean"], figure["spread"], figure["n"]]
            values += [difference.get(part) for part in ("mean", "low", "high")]
        writer.writerow(values)
    return file.getvalue()


def latex_text(study: Study) -> str:
    """The table as a `tabular`, best first, for the package booktabs."""
    found = table(study)
    lines = [" & ".join(["strategy", *map(_title, found.columns)])]
    for line in found.lines:
        texts = [line.row.name, *(cell.text for cell in line.cells)]
        lines.append(" & ".join(map(_tex, texts)))
    head, *body = (f"{line} \\\\" for line in lines)
    return "\n".join(
        [
            r"% \usepackage{booktabs}",
            rf"\begin{{tabular}}{{l{'r' * len(found.columns)}}}",
            r"\toprule",
            head,
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}",
            "",
        ]
    )


def _title(column: Column) -> str:
    return _tex(f"{column.title} ({column.unit})" if column.unit else column.title)


def _tex(text: str) -> str:
    return "".join(_TEX.get(letter, letter) for letter in text)
