"""The figures of the benchmarks as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from rich.console import Console
from rich.table import Table

from orchestra.bench.scale import ScaleRow
from orchestra.bench.server import ServerRow
from orchestra.bench.simulation import SimulationRow
from orchestra.bench.step import StepRow
from orchestra.bench.suspend import SuspendRow
from orchestra.records.environment import environment


def print_steps(rows: Iterable[StepRow]) -> None:
    """One table for each model and number of ranks."""
    for (model, ranks), group in groupby(rows, lambda row: (row.model, row.ranks)):
        lines = [
            (
                row.contestant,
                f"{row.step_seconds * 1e3:.2f}",
                f"{row.samples_per_second:,.0f}",
                f"{row.ratio:.2f}" + " (best)" * row.best_peer,
            )
            for row in group
        ]
        headings = ("", "ms a step", "samples/s", "step / best DDP's")
        _print(f"{model}, {ranks} ranks", headings, lines)
    _print_remarks("Ratios below 1: faster than DistributedDataParallel at its best bucket size.")


def print_rates(rows: Iterable[ServerRow]) -> None:
    """One line for each number of workers."""
    lines = [
        (
            str(row.workers),
            f"{row.ours_per_second:.0f}",
            f"{row.peer_per_second:.0f}",
            f"{row.ratio:.2f}",
        )
        for row in rows
    ]
    headings = ("workers", "ParameterServer", "gloo", "ratio")
    _print("pushes with pulls a second, 4 MB each way, asynchronous server", headings, lines)
    _print_remarks("Ratios above 1: faster than gloo's send and receive.")


def print_paces(rows: Sequence[SuspendRow]) -> None:
    """One line for each load."""
    lines = [
        (
            row.load,
            f"{row.before_per_second:.1f}",
            f"{row.suspended_per_second:.1f}",
            f"{row.ratio:.0%}",
            f"{min(row.ratios):.0%} to {max(row.ratios):.0%}",
            f"{row.busy_cores:.1f} of {row.cores}",
        )
        for row in rows
    ]
    headings = ("a step", "before", "suspended", "pace kept", "of the pairs", "busy cores")
    _print("steps a second of the others while one of four is suspended", headings, lines)
    _print_remarks(
        f"Required: {rows[0].required:.0%} of the pace, median of the pairs. Where a step computes "
        "and the cores are busy, the suspended worker leaves its share to the others."
    )


def print_simulations(rows: Iterable[SimulationRow]) -> None:
    """One line for each number of workers."""
    lines = [
        (
            str(row.workers),
            f"{row.simulated_seconds * 1e3:.2f}",
            f"{row.plain_seconds * 1e3:.2f}",
            f"{row.ratio:.2f}",
            f"{_part(row.ratios, 0.25):.2f} to {_part(row.ratios, 0.75):.2f}",
        )
        for row in rows
    ]
    headings = ("workers", "simulated", "plain", "ratio", "half of the pairs")
    _print("ms for a worker's step, LeNet-5, batches of 64, AllReduce('ring')", headings, lines)
    _print_remarks("Ratios near 1: the simulation costs little beside the gradients.")


def _part(values: Sequence[float], part: float) -> float:
    """What this part of `values` is below."""
    return sorted(values)[int(part * len(values))]


def print_scales(rows: Sequence[ScaleRow], limit: float) -> None:
    """One line for each strategy."""
    lines = [
        (
            row.label,
            f"{row.aim_seconds:.0f}",
            _time_of(row, limit),
            "" if row.processor_seconds is None else f"{row.processor_seconds:.1f}",
            "" if row.peak_megabytes is None else f"{row.peak_megabytes:,.0f}",
            "" if row.virtual_seconds is None else f"{row.virtual_seconds:,.1f}",
        )
        for row in rows
    ]
    first = rows[0]
    title = f"{first.workers:,} workers, {first.parameters / 1e6:,.0f} million parameters"
    headings = ("strategy", "aim, s", "seconds", "processor s", "peak MB", "virtual seconds")
    _print(f"simulations of time alone: {title}", headings, lines)
    _print_remarks(
        "Seconds from the settings to the reports, and those for which it had a processor: fewer, "
        "where other programs run. Memory with Python and torch."
    )


def _time_of(row: ScaleRow, limit: float) -> str:
    if row.seconds is None:
        return f"{row.steps} steps in {limit:.0f}" if row.steps else f"over {limit:.0f}"
    return f"{row.seconds:.1f}"


def _print(title: str, headings: Sequence[str], lines: Iterable[Sequence[str]]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="right" if place else "left", no_wrap=True)
    for line in lines:
        table.add_row(*line)
    console = Console(highlight=False)
    console.print(title, style="bold", soft_wrap=True)
    console.print(table)
    console.print()


def _print_remarks(text: str) -> None:
    about = environment()
    machine = f"{about['cores']} cores, {about['processor']}, torch {about['packages']['torch']}"
    Console(highlight=False).print(f"{text}\n{machine}.", soft_wrap=True, markup=False)
