"""The page: everything that a report says, in one HTML file that needs nothing else."""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2
import vl_convert
from markupsafe import Markup, escape

from orchestra.errors import InputError
from orchestra.records.record import write_atomically
from orchestra.report.answer import answer
from orchestra.report.collect import collect
from orchestra.report.conditions import conditions
from orchestra.report.fairness import fairness
from orchestra.report.figures import Figure, figures, save, style_of
from orchestra.report.figures.frame import for_page
from orchestra.report.figures.subject import INK, SIGNS, lines_of
from orchestra.report.methods import agreement, endings, methods
from orchestra.report.outcomes import switched, troubles, tuning_tables
from orchestra.report.rows import Row, rows_of
from orchestra.report.study import Study
from orchestra.report.table import csv_text, latex_text, plain_figures, table

SCHEMA = 1

SECTIONS = {
    "convergence": "Convergence",
    "target": "Time to target, and differences",
    "differences": "Time to target, and differences",
    "time": "Where the time went",
    "traffic": "Traffic and staleness",
    "staleness": "Traffic and staleness",
    "scaling": "Scaling",
    "timeline": "The course of a run",
}
"""Titles of the sections that figures belong to, in their order."""


HEAD = "cluster"
"""The section of those figures that stand beside the answer."""


def page(study: Study, figures: Sequence[Figure], out: Path) -> str:
    """The text of the page that is to lie in the folder `out`, beside the images of `figures`."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("orchestra.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["breakable"] = _breakable
    environment.filters["together"] = lambda text: text.replace("± ", "±\N{NO-BREAK SPACE}")
    ends, sections = endings(study), _sections(figures)
    return environment.get_template("page.html").render(
        title=_title(study),
        study=study,
        answer=answer(study),
        conditions=conditions(study),
        clusters=[figure for figure in figures if figure.section == HEAD],
        fairness=fairness(study),
        table=table(study),
        sections=sections,
        captions=_captions(sections),
        looks=_looks(study),
        lines=_lines(study),
        switched=switched(study),
        troubles=troubles(study),
        trials=tuning_tables(study.sources),
        traces=traces(study.ranked, out),
        methods=methods(study),
        endings=ends,
        agreement=agreement(ends),
        data=_data(study),
        specs={figure.name: for_page(figure) for figure in figures},
        library=_library(),
    )


def _title(study: Study) -> str:
    names = [str(s.experiment.get("name", s.folder.name)) for s in study.sources]
    return ", ".join(dict.fromkeys(names))


def _sections(figures: Sequence[Figure]) -> dict[str, list[Figure]]:
    """The figures by the titles of their sections."""
    found: dict[str, list[Figure]] = {title: [] for title in SECTIONS.values()}
    for figure in figures:
        if figure.section != HEAD:
            found[SECTIONS[figure.section]].append(figure)
    return {title: members for title, members in found.items() if members}


def _captions(sections: Mapping[str, Sequence[Figure]]) -> dict[str, str]:
    """By figure, of its caption the sentences that no figure before it in its section has."""
    captions = {}
    for members in sections.values():
        said: set[str] = set()
        for figure in members:
            sentences = re.split(r"(?<=\.) (?=[A-Z±≈])", figure.caption)
            captions[figure.name] = " ".join(text for text in sentences if text not in said)
            said.update(sentences)
    return captions


def _looks(study: Study) -> dict[str, dict[str, str]]:
    """The colour, dash and shape that a row has in the figures, by its name."""
    styles = style_of([row for row in study.ranked if row.completed])
    return {
        name: {
            "colour": "currentColor" if style.colour == INK else style.colour,
            "dash": " ".join(map(str, style.dash)),
            "sign": SIGNS.get(style.shape, "★"),
        }
        for name, style in styles.items()
    }


def _lines(study: Study) -> dict[str, list[str]]:
    """By strategy the names of its rows in the figures, which are one on each number of ranks."""
    rows = [row for row in study.ranked if row.completed]
    lines = lines_of(rows)
    found: dict[str, list[str]] = {}
    for row in rows:
        found.setdefault(lines[row.name], []).append(row.name)
    return found


def _data(study: Study) -> Mapping[str, Any]:
    """The figures of the page for machines, those of every run included."""
    rows = [
        {
            "name": row.name,
            "label": row.label,
            "strategy": row.strategy,
            "ranks": row.ranks,
            "figures": plain_figures(study, row),
            "runs": [run.record.summary() for run in row.runs],
        }
        for row in study.ranked
    ]
    target = None if study.target is None else asdict(study.target)
    return {"schema": SCHEMA, "target": target, "baseline": study.baseline, "rows": rows}


def _breakable(text: str) -> Markup:
    """A strategy's notation, which a line may end in after a bracket, comma or equals sign."""
    return Markup(re.sub(r"([(,=])", r"\1<wbr>", str(escape(text))))


def _library() -> Markup:
    """The plotting library. No text inside may look like the end of the script to a browser."""
    return Markup(
        vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;").replace(
            "</script", "<\\/script"
        )
    )


ROOM = 3_000_000
"""The most characters that copies may add to a page."""


@dataclass(frozen=True)
class Traces:
    """The timelines of a row.

    `links` are their places, seen from the page, by seed. `copy` is the first of them in base64,
    None where it would have made the page too large.
    """

    name: str
    links: Mapping[int, str]
    copy: str | None = None


def traces(rows: Sequence[Row], page: Path) -> list[Traces]:
    """The timelines of the runs of `rows`, for a page in the folder `page`."""
    found = []
    room = ROOM
    for row in rows:
        paths = {run.record.seed: run.trace for run in row.runs if run.trace is not None}
        if not paths:
            continue
        links = {seed: Path(os.path.relpath(path, page)) for seed, path in paths.items()}
        copy = base64.b64encode(next(iter(paths.values())).read_bytes()).decode()
        fits = len(copy) <= room
        room -= len(copy) * fits
        places = {seed: quote(link.as_posix()) for seed, link in links.items()}
        found.append(Traces(row.name, places, copy if fits else None))
    return found


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
