"""The page: the whole report in one HTML file that needs no other file."""

from __future__ import annotations

import base64
import os
import re
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2
import vl_convert
from markupsafe import Markup, escape

from orchestra.errors import InputError, visible
from orchestra.records.files import write_atomically
from orchestra.records.record import RunRecord
from orchestra.records.report import StragglerFinding, changes_in
from orchestra.records.store import RunStore, collect
from orchestra.report.answer import ComparisonAnswer, answer
from orchestra.report.fairness import conditions, fairness, machine_text, worker_batch
from orchestra.report.figures import figures
from orchestra.report.figures.frame import Figure, for_page, save
from orchestra.report.numbers import count, figure_text, listed, percent, significant, times
from orchestra.report.rows import grouped
from orchestra.report.sheet import NONE, Cell, Column, Sheet, csv_text, latex_text
from orchestra.report.study import Study
from orchestra.report.table import figures_sheet, plain_figures, table, techniques_sheet
from orchestra.settings.base import to_plain
from orchestra.settings.reading import yaml_text

SCHEMA = 1
MOST = 5  # the most stragglers of a run that have rows of their own
ROOM = 3_000_000  # the most characters by which copies of timelines may enlarge a page

SECTIONS = {
    "convergence": "Convergence",
    "target": "Time to target, and differences",
    "differences": "Time to target, and differences",
    "time": "Where the time went",
    "traffic": "Traffic and staleness",
    "staleness": "Traffic and staleness",
    "logged": "Logged by the strategies",
    "scaling": "Scaling",
    "timeline": "The course of a run",
}
"""Titles of the sections that figures belong to, in their order."""
HEAD = "cluster"  # the section of those figures that stand beside the answer
PAGE = "report.html"
TABLES: Mapping[str, tuple[str, Callable[[Study], str]]] = {
    "csv": ("table.csv", lambda study: csv_text(figures_sheet(study))),
    "latex": ("table.tex", lambda study: latex_text(table(study).sheet)),
}
"""The other formats in which the table of a report can be written."""


def write_report(
    folders: Sequence[Path], out: Path, baseline: str | None = None, tables: Collection[str] = ()
) -> Path:
    """Report on the runs in `folders`, those of trainings or of comparisons, into the folder `out`.

    Args:
        baseline: the label, or the name in the report, of the row that differences are taken from;
            without it one process with all cores.
        tables: "csv" for a `table.csv` in the same folder as the page, "latex" for a `table.tex`.

    Returns the path of `report.html`; the images lie in the folder `figures` next to it. Earlier
    files are replaced, each file whole or not at all. Raises `InputError` for a folder that is not
    a run's, where there is no run yet, and for an unknown baseline.
    """
    study = Study(collect(folders), baseline)
    drawn = figures(study)
    # Nothing is written where a file turns out to be damaged
    text = page(study, drawn, out)
    try:
        (out / "figures").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{out}: cannot be made: {error.strerror}; choose another --out") from None
    # The page is written last: it links to the images and tables
    for figure in drawn:
        save(figure, out / "figures")
    for kind in tables:
        name, written = TABLES[kind]
        write_atomically(out / name, written(study))
    write_atomically(out / PAGE, text)
    return out / PAGE


def page(study: Study, figures: Sequence[Figure], out: Path) -> str:
    """Return the text of the page that is to lie in `out`, together with images of `figures`."""
    others = (figure for figure in figures if figure.section != HEAD)
    below = grouped(others, lambda figure: SECTIONS[figure.section])
    sections = {title: below[title] for title in dict.fromkeys(SECTIONS.values()) if title in below}
    said, found, techniques = answer(study), _endings(study), techniques_sheet(study)
    return (
        templates()
        .get_template("page.html")
        .render(
            title=", ".join(dict.fromkeys(source.name for source in study.sources)),
            study=study,
            answer=said,
            conditions=conditions(study),
            clusters=[figure for figure in figures if figure.section == HEAD],
            fairness=fairness(study),
            table=table(study),
            techniques=techniques,
            searched=any(column.key == "break_even" for column in techniques.columns),
            sections=sections,
            captions=_captions(sections),
            lines={line: [row.name for row in rows] for line, rows in study.by_line.items()},
            stragglers=_stragglers(study),
            switched=_switched(study),
            troubles=list(_troubles(study)),
            tuned=[(source, _trials(source)) for source in study.sources if source.tuning],
            traces=list(_traces(study, out)),
            methods=list(map(_method, study.sources)),
            endings=found,
            agreement=_agreement(list(found.values())),
            data=_data(study, said),
            specs={figure.name: for_page(figure.spec) for figure in figures},
            library=library(),
        )
    )


def templates() -> jinja2.Environment:
    """Return the templates of pages, with their filters."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("orchestra.report"),
        # Labels, failures and notices are texts of the user and of his libraries
        autoescape=True,
        # What is Markup comes from here
        finalize=lambda value: visible(value) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
        # A misspelt name is an error, not an empty place in the page
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {
        "breakable": _breakable,
        "together": lambda text: text.replace("± ", "±\N{NO-BREAK SPACE}"),
        "listed": listed,
        "significant": significant,
    }
    return environment


def _breakable(text: str) -> Markup:
    """Return a notation, which has no spaces at which a narrow column could break it."""
    return Markup(re.sub(r"([(,=])", r"\1<wbr>", str(escape(visible(text)))))


def library() -> Markup:
    """Return the plotting library; no text inside may look like the end of the script."""
    text = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    # HTML ends a script at this text wherever it stands, inside a string of JavaScript, too
    return Markup(text.replace("</script", "<\\/script"))


def _captions(sections: Mapping[str, Sequence[Figure]]) -> dict[str, str]:
    """Return each figure's caption, without sentences that an earlier one in its section has."""
    # Figures of a section explain the same marks; images stand alone, with the whole caption
    captions = {}
    for members in sections.values():
        said: set[str] = set()
        for figure in members:
            sentences = re.split(r"(?<=\.) (?=[A-Z±≈])", figure.caption)
            captions[figure.name] = " ".join(text for text in sentences if text not in said)
            said.update(sentences)
    return captions


def _data(study: Study, said: ComparisonAnswer) -> Mapping[str, Any]:
    rows = [
        {
            "name": row.name, "label": row.label, "strategy": row.record.asked.strategy,
            "ranks": row.ranks, "figures": plain_figures(study, row),
            "runs": [run.record.summary() for run in row.runs],
        }
        for row in study.ranked
    ]  # fmt: skip
    aim = study.target
    target = aim and {"metric": aim.metric, "bound": aim.bound, "rising": aim.rising}
    about = {"schema": SCHEMA, "target": target, "baseline": study.baseline}
    return {**about, "answer": to_plain(said), "rows": rows}


def _traces(study: Study, page: Path) -> Iterator[dict[str, Any]]:
    """Yield, for each row, the paths of its timelines relative to the folder `page`, by seed.

    `trace` is the first of them in base64, None where it would have made the page too large.
    """
    room = ROOM
    for row in study.ranked:
        paths = {run.record.asked.seed: run.trace for run in row.runs if run.trace is not None}
        if not paths:
            continue
        copy = base64.b64encode(next(iter(paths.values())).read_bytes()).decode()
        # A smaller timeline further down may still fit
        fits = len(copy) <= room
        room -= len(copy) * fits
        # Relative, so that the report still works when the folders are moved together
        relative = {seed: Path(os.path.relpath(path, page)) for seed, path in paths.items()}
        links = {seed: quote(path.as_posix()) for seed, path in relative.items()}
        yield {"name": row.name, "links": links, "trace": copy if fits else None}


def _stragglers(study: Study) -> Sheet:
    """Return the stragglers of all completed runs, in each run those first that cost most; of those
    beyond the first few only how many they are."""
    titles = {
        "strategy": "strategy",
        "seed": "seed",
        "who": "who",
        "took": "took",
        "cause": "because of",
        "since": "since",
        "until": "until",
        "lost": "lost",
    }
    figures = ("seed", "took", "lost")
    columns = [Column(key, title, words=key not in figures) for key, title in titles.items()]
    lines: list[tuple[str, ...]] = []
    for row in study.completed:
        for record in (run.record for run in row.completed):
            found, seed = record.machine.stragglers, str(record.asked.seed)
            for each in found[:MOST]:
                since = _moment(each.since_seconds, each.since_step)
                until = _moment(each.until_seconds, each.until_step)
                about = each.who, times(each.factor), each.cause, since, until, _lost([each])
                lines.append((row.name, seed, *about))
            if more := found[MOST:]:
                rest = f"and {len(more)} more", *[""] * 4, _lost(more)
                lines.append((row.name, seed, *rest))
    return Sheet(columns, [[*map(Cell, line)] for line in lines])


def _moment(seconds: float | None, step: int | None) -> str:
    if seconds is None:
        return "the end"
    return figure_text(seconds, "s") + (f", step {step}" if step is not None else "")


def _lost(found: Sequence[StragglerFinding]) -> str:
    lost = sum(each.lost_seconds for each in found)
    return figure_text(lost, "s") if lost else "nothing"


def _switched(study: Study) -> Sheet:
    """Return the switches of each completed run of a strategy that may switch."""
    columns = [
        Column("strategy", "strategy", words=True),
        Column("seed", "seed"),
        Column("what", "what happened", words=True),
    ]
    lines = [
        [Cell(row.name), Cell(str(run.record.asked.seed)), Cell(what)]
        for row in study.rows
        if row.record.pacing.switches is True
        for run in row.completed
        for what in _changes(run.record)
    ]
    return Sheet(columns, lines)


def _changes(record: RunRecord) -> list[str]:
    """Return in words when a run changed its strategy, or that it never did."""
    switching = record.switching
    if changes := changes_in(switching.decisions):
        return [f"switched {text}" for text in changes]
    what = "never switched"
    if switching.decisions:
        what += f" in {len(switching.decisions)} decisions"
    if switching.at_step is not None:
        what = f"switched after step {switching.at_step}"
        if switching.at_sample and record.learned.samples:
            share = percent(switching.at_sample / record.learned.samples)
            what += f", after {share} of the samples"
    return [what]


def _trials(source: RunStore) -> Sheet:
    """Return the trials of a comparison's tuning, the chosen ones marked."""
    tuning = source.tuning
    columns = [
        Column("strategy", "strategy", words=True),
        Column("ranks", "ranks"),
        Column("settings", "settings", words=True),
        Column("score", tuning["metric"]),
        Column("loss", "loss"),
        Column("chosen", "chosen"),
    ]
    lines = []
    for choice in tuning["choices"]:
        for trial in choice["trials"]:
            score, loss = trial["score"], trial["loss"]
            chosen = trial["trial"] == choice["chosen"]
            settings = ", ".join(f"{key} {value}" for key, value in trial["settings"].items())
            shown = trial["status"] if score is None else significant(score, 4)
            lines.append([
                Cell(choice["name"], verdict="chosen" * chosen),
                Cell(str(choice["ranks"])),
                Cell(settings),
                Cell(shown, value=score),
                Cell(NONE if loss is None else significant(loss, 4)),
                Cell("chosen" * chosen),
            ])  # fmt: skip
    return Sheet(columns, lines)


@dataclass(frozen=True)
class Trouble:
    """Something that befell a run: `what`, and a text, whose first line says most."""

    name: str
    seed: int | None
    what: str
    text: str = ""


def _troubles(study: Study) -> Iterator[Trouble]:
    """Yield failures, stops, rows that were not run, and notices."""
    records = [(row.name, run.record) for row in study.rows for run in row.runs]
    for name, record in records:
        if record.ending.status == "failed":
            yield Trouble(name, record.asked.seed, "failed", record.ending.failure or "unknown")
        elif record.ending.status != "completed":
            yield Trouble(name, record.asked.seed, record.ending.status, "before its end")
    for entry in (entry for source in study.sources for entry in source.not_run):
        yield Trouble(f"{entry['name']} ({entry['ranks']} ranks)", None, "not run", entry["reason"])
    for name, record in records:
        for rank, reason in record.ending.left_out.items():
            yield Trouble(name, record.asked.seed, f"went on without rank {rank}", reason)
        yield from (
            Trouble(name, record.asked.seed, "notice", notice) for notice in record.ending.notices
        )


def _endings(study: Study) -> dict[int, dict[str, tuple[str, ...]]]:
    """Return by seed the hashes of the final parameters, with the rows that share each."""
    found: dict[int, dict[str, tuple[str, ...]]] = {}
    for row in study.rows:
        for record in (run.record for run in row.completed):
            if digest := record.learned.parameters_sha256:
                of_seed = found.setdefault(record.asked.seed, {})
                of_seed[digest] = (*of_seed.get(digest, ()), row.name)
    return dict(sorted(found.items()))


def _agreement(endings: Sequence[Mapping[str, tuple[str, ...]]]) -> str:
    """Return which rows ended with the same parameters, bit for bit, under every seed."""
    shared = [{names for names in groups.values() if len(names) > 1} for groups in endings]
    always = set.intersection(*shared) if shared else set()
    if not always:
        return (
            "No two rows ended with the same bits under every seed. Strategies that add in "
            "different orders differ in the last bits, asynchronous ones from run to run."
        )
    text = "; ".join(map(listed, sorted(always)))
    return f"Bit for bit the same final parameters under every seed: {text}."


def _method(source: RunStore) -> dict[str, Any]:
    """Return how the runs of a source were made, and the commands to do so and to repeat it."""
    command = source.environment.get("command") or []
    several = len(source.runs) > 1 or source.tuning or source.not_run
    return {
        "title": source.name,
        "facts": list(_facts(source)),
        "file": yaml_text(dict(source.experiment)),
        "command": shlex.join([Path(command[0]).name, *command[1:]]) if command else "",
        "repeat": f"orchestra {'compare' if several else 'train'} experiment.yaml --out repeated",
    }


def _facts(source: RunStore) -> Iterator[tuple[str, str]]:
    experiment, environment = source.experiment, source.environment
    records = [run.record for run in source.runs]
    completed = [record for record in records if record.ending.status == "completed"]
    yield "task and model", str(experiment.get("task", "not known"))
    epochs = experiment.get("epochs")
    if completed and isinstance(epochs, int):
        # The task may not be importable where the report is made; the records know the samples
        samples = max(record.learned.samples for record in completed) // epochs
        yield "training data", f"{samples} samples a pass; passes: {epochs}"
    if completed:
        yield (
            "final figures on",
            f"the {listed(sorted({r.asked.judged_on for r in completed}))} data",
        )
    yield from _batches(source)
    yield "seeds", ", ".join(map(str, sorted({record.asked.seed for record in records})))
    engines = sorted({record.asked.engine for record in records})
    yield "engine", listed(engines)
    threads = sorted({n for record in records for n in record.threads_by_rank})
    if threads:
        yield "threads of a rank", ", ".join(map(str, threads))
    if machine := machine_text(source):
        yield "machine" if "processes" in engines else "simulated by", machine
    if system := environment.get("platform"):
        yield "system", system
    packages = {"Python": environment.get("python"), **environment.get("packages", {})}
    versions = [f"{name} {version}" for name, version in packages.items() if version]
    if versions:
        yield "versions", ", ".join(versions)


def _batches(source: RunStore) -> Iterator[tuple[str, str]]:
    whole = "the global batch: workers together process ranks x batch_size samples a step"
    if (held := source.experiment.get("equal")) is not None:
        yield "held equal", "the batch of each worker" if held == "worker_batch" else whole
    names: dict[str, dict[str, None]] = {}
    for record in (run.record for run in source.runs):
        if record.ending.status == "completed" and record.batching.worker_batches:
            of_worker = worker_batch(record.batching.worker_batches)
            parts = (
                f"{record.batching.global_batch} samples",
                of_worker,
                count("step", record.learned.steps),
            )
            names.setdefault(", ".join(filter(None, parts)), {})[record.asked.name] = None
    if names:
        yield "global batches", "; ".join(f"{t} ({listed([*own])})" for t, own in names.items())
