"""Records and settings as tables for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from orchestra.records.record import RunRecord
from orchestra.report.fairness import costs_text
from orchestra.report.numbers import fixed, places_of
from orchestra.settings import Described
from orchestra.trainer.settings import Run

_NARROWEST = 20  # columns of text, on however small a terminal


def print_record(record: RunRecord, run: Run) -> None:
    """The figures of a run, and where its record lies."""
    table = Table(title=record.strategy, title_justify="left", show_header=False, box=None)
    table.add_column(style="bold")
    table.add_column()
    for name, value in _figures(record, run):
        table.add_row(name, value)
    console = Console(highlight=False)
    console.print(table)
    console.print(f"record: {record.folder}", soft_wrap=True, markup=False)


def print_names(titles: Mapping[str, Sequence[tuple[str, ...]]]) -> None:
    """Under each title, names with a line of meaning; further lines stand below that, dim."""
    console = Console(highlight=False)
    width = max(len(name) for rows in titles.values() for name, *_ in rows)
    for title, rows in titles.items():
        console.print(f"[bold]{title}[/bold]")
        for name, meaning, *more in rows:
            _print_indented(console, meaning, 4 + width, f"  {name}")
            for line in more:
                _print_indented(console, line, 4 + width, style="dim")
        console.print()


def print_variants(name: str, meaning: Sequence[str], rows: Iterable[tuple[str, ...]]) -> None:
    """A name, lines of meaning, and notations with lines on each, dim."""
    console = Console(highlight=False)
    console.print(f"[bold]{name}[/bold]")
    for line in meaning:
        _print_indented(console, line, 2)
    for notation, *lines in rows:
        _print_indented(console, notation, 4)
        for line in lines:
            _print_indented(console, line, 8, style="dim")
    console.print()


def print_wrapped(text: str) -> None:
    """`text` in lines as long as the terminal is wide."""
    _print_indented(Console(highlight=False), text, 0)


def _print_indented(
    console: Console, text: str, indent: int, before: str = "", style: str | None = None
) -> None:
    """`text` in lines that fit the terminal, all `indent` from its edge; `before` the first."""
    lines = textwrap.wrap(text, max(console.width - indent, _NARROWEST), break_on_hyphens=False)
    for number, line in enumerate(lines or [""]):
        start = before.ljust(indent) if number == 0 else " " * indent
        console.print(f"{start}{line}".rstrip(), style=style, markup=False, soft_wrap=True)


def print_settings(rows: Sequence[Described]) -> None:
    """Each setting's values, default and meaning."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("setting", "values", "default", "meaning"):
        table.add_column(heading, overflow="fold", no_wrap=heading == "setting")
    for row in rows:
        values = f"{row.type}, {row.range}" if row.range else row.type
        table.add_row(*map(_literally, (row.name, values, row.default, row.meaning)))
    Console(highlight=False).print(table)


def _literally(text: str) -> str:
    return text.replace("[", r"\[")


def _figures(record: RunRecord, run: Run) -> Iterator[tuple[str, str]]:
    yield "status", record.status
    yield "ranks", f"{record.ranks} ({record.workers} workers, {record.servers} servers)"
    yield "length", f"{record.steps} steps, {record.samples} samples"
    if record.train_seconds is not None:
        yield "time", f"{record.train_seconds:.2f} s, and {record.setup_seconds or 0:.2f} s set-up"
    if record.samples_per_second is not None:
        yield "speed", f"{record.samples_per_second:.0f} samples/s"
    if record.final_loss is not None:
        yield "loss", f"{record.final_loss:.4g}"
    for name, value in record.metrics.items():
        yield name, f"{value:.4g}"
    if record.nodes is not None:
        yield "nodes' own models", _nodes(record.nodes)
    if run.training.target is not None:
        yield "target", _reached(record)
    yield from _conditions(record, run)


def _conditions(record: RunRecord, run: Run) -> Iterator[tuple[str, str]]:
    yield "sent", f"{record.bytes_sent / 1e6:.3f} MB" + " (estimated)" * record.bytes_estimated
    if record.seconds:
        yield "a worker's time", ", ".join(f"{k} {v:.2f} s" for k, v in record.seconds.items())
    if record.costs is not None:
        yield "cost model", costs_text(record)
    if record.disturbed:
        part = f"{record.busy_with_others:.0%} of the processor time"
        yield "busy machine", f"other programs took {part}: these seconds are too long"
    if record.staleness is not None:
        mean, most = record.staleness["mean"], record.staleness["max"]
        yield "staleness", f"{mean:.2f} updates in the mean, at most {most:.0f}"
    if run.strategy.switches:
        step = record.switched_at_step
        yield "switched", "never: its rule did not fire" if step is None else f"at step {step}"
    for rank, reason in record.left_out.items():
        yield f"without rank {rank}", reason


def _reached(record: RunRecord) -> str:
    """Between which snapshots the target was reached."""
    after, by = record.time_to_target_after_seconds, record.time_to_target_seconds
    if after is None or by is None:
        return "not reached"
    places = max(0, places_of(by - after))
    return f"reached between {fixed(after, places)} and {fixed(by, places)} s"


def _nodes(nodes: Mapping[str, Any]) -> str:
    """Their mean and the worst, at the last snapshot."""
    worst = nodes["worst"]
    figures = [
        f"{name} {mean:.4g}" + (f" (worst {worst[name]:.4g})" if name in worst else "")
        for name, mean in nodes["mean"].items()
    ]
    return "mean " + ", ".join(figures)
