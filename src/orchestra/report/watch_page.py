"""The output of `orchestra watch`: tables and lines for a terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from orchestra.cluster.units import BYTES, clock_text
from orchestra.records.record import RunRecord
from orchestra.report.numbers import count, or_dash, ranges, significant
from orchestra.report.watching import Row, RunView

BLOCKS = "▁▂▃▄▅▆▇█"
WIDE = 100  # columns of a terminal, from which on the table has more space between its own
MAX_LINKS = 4
NOTE_LENGTH = 100  # characters below the table, at most
STYLES = {
    "running": "cyan", "completed": "green", "stopped": "yellow", "failed": "bold red",
    "cut off": "bold red",
}  # fmt: skip
CUT_OFF = "no process is at work here, and there is no record: it was killed, or its machine ended"


def sparkline(points: Sequence[tuple[float, float]], width: int) -> str:
    """Return the values over their places as `width` characters, each the mean of its part.

    Values that are positive and differ by more than a factor of 10 are drawn on a log scale.
    """
    if len(points) < 2 or width < 2:
        return ""
    begin, end = points[0][0], points[-1][0]
    cells: list[list[float]] = [[] for _ in range(width)]
    for place, value in points:
        part = (place - begin) / (end - begin) if end > begin else 0.0
        cells[min(int(part * width), width - 1)].append(value)
    means = [sum(cell) / len(cell) for cell in cells if cell]
    # As in the figures of a report: beyond a factor of ten a loss is shown by its logarithm
    if 0 < 10 * min(means) < max(means):
        means = [math.log(mean) for mean in means]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(BLOCKS[round((mean - low) / span * (len(BLOCKS) - 1))] for mean in means)


def run_page(view: RunView, console: Console, height: int | None = None) -> RenderableType:
    """Return the view of a run, in `height` lines of `console` if that is given."""
    above, below = list(_above(view, console.width)), list(_below(view))
    room = None
    if height is not None:
        # Rich breaks long lines, so how many there are shows only when they are drawn
        others = console.render_lines(Group(*above, Text(), *below))
        note = -(-NOTE_LENGTH // console.width)  # it may be broken, too
        room = max(height - len(others) - 1 - note, 3)  # 1: the table's headings
    return Group(*above, Text(), _ranks_table(view, console, room), *below)


def _above(view: RunView, width: int) -> Iterator[RenderableType]:
    """Yield the run's name, progress, speed and quality."""
    yield Text(str(view.folder), style="bold")
    own = f"{view.name}: " if not view.strategy.startswith(view.name) else ""
    ranks = count("rank", view.ranks)
    yield Text(f"{own}{view.strategy}, {ranks}, engine {view.engine}, seed {view.seed}")
    phase = f", {view.phase}" if view.phase and view.phase != "training" else ""
    line = Text.assemble((f"{view.status}{phase}", STYLES[view.status]))
    if view.seconds is not None:
        clock = "virtual " if view.engine == "simulation" else ""
        # Runs of shapes may take milliseconds of virtual time
        passed = clock_text(view.seconds) if view.seconds >= 10 else f"{view.seconds:.2g} s"
        line.append(f"  {passed} {clock}on the stopwatch")
    if view.seconds_left is not None:
        line.append(f", about {clock_text(view.seconds_left)} left")
    if view.status == "cut off" and view.silent_seconds is not None:
        line.append(f", last heard of {clock_text(view.silent_seconds)} ago")
    yield line
    if view.fraction is not None and not view.over:
        bar = ProgressBar(total=1.0, completed=view.fraction, width=min(40, width // 2))
        line_of_bar = Table.grid(padding=(0, 1))
        line_of_bar.add_row(bar, f"{view.fraction:.0%}")
        yield line_of_bar
    facts = []
    if view.loss is not None:
        shown = sparkline(view.history, min(40, width // 3))
        facts.append(f"loss {significant(view.loss, 4)}{'  ' * bool(shown)}{shown}")
    if view.samples_per_second is not None:
        facts.append(f"{view.samples_per_second:,.0f} samples/s")
    if facts:
        yield Text("   ".join(facts))
    if view.staleness:
        mean, most = view.staleness["mean"], view.staleness["max"]
        yield Text(f"staleness {significant(mean, 3)} updates in the mean, at most {most:.0f}")
    if view.metrics:
        yield Text(f"final parameters: {_figures(view.metrics)}")


def _below(view: RunView) -> Iterator[Text]:
    """Yield what stands out, and the events of the run."""
    if view.status == "cut off":
        yield Text(f"{CUT_OFF}. The same command goes on with it, or begins anew", style="bold red")
    if view.failure is not None:
        yield Text(f"failed: {view.failure.splitlines()[0]}", style="bold red")
    for straggler in view.stragglers:
        since = f", since step {straggler.since_step}" if straggler.since_step else ""
        until = f" until step {straggler.until_step}" if straggler.until_step else ""
        yield Text(f"straggler: {straggler.text}{since}{until}", style="yellow")
    # A rank that evaluates or saves says so in its phase, and is not silent
    silent = [row for row in view.rows if row.silent_seconds and row.phase in ("training", "")]
    if silent and view.status == "running":
        who = " or ".join(ranges(row.rank for row in silent))
        longest = max(row.silent_seconds for row in silent)
        yield Text(f"no step for up to {clock_text(longest)}: rank {who}", style="yellow")
    yield from (Text(f"switched {switch}", style="magenta") for switch in view.switches)
    if view.links:
        more = f", {len(view.links) - MAX_LINKS} more" if len(view.links) > MAX_LINKS else ""
        yield Text("busiest links: " + ", ".join(view.links[:MAX_LINKS]) + more)
    yield from (Text(f"notice: {notice}", style="yellow") for notice in view.notices)


class Column(NamedTuple):
    """A column of the table of ranks; those of the highest `order` are left out first."""

    heading: str
    cell: Callable[[Row], str]
    order: int = 0
    left: bool = False


def _columns(view: RunView) -> Iterator[Column]:
    rows = view.rows
    yield Column("rank", lambda row: str(row.rank))
    if any(row.role == "server" for row in rows):
        yield Column("role", lambda row: row.role, 2, left=True)
    yield Column("step", lambda row: str(row.step) if row.step else "-")
    yield Column("samples/s", lambda row: or_dash(row.samples_per_second))
    yield Column("loss", lambda row: or_dash(row.loss, 4))
    for name, order in (("compute", 0), ("communicate", 0), ("wait", 0), ("input", 4)):
        if any(name in row.parts for row in rows):
            heading = "comm." if name == "communicate" else name
            yield Column(heading, lambda row, name=name: _part(row, name), order)  # type: ignore[misc]
    if any(row.staleness for row in rows):
        yield Column("staleness", _staleness, 3)
    if view.balances or len({row.batch for row in rows if row.batch}) > 1:
        total = sum(row.batch or 0 for row in rows) or 1
        yield Column(
            "batch", lambda row: f"{row.batch} ({row.batch / total:.0%})" if row.batch else "-", 3
        )
    yield Column("sent", _sent, 5)
    yield Column("waits for", lambda row: row.waits_for or "-", 1, left=True)


def _figures(figures: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {significant(value, 4)}" for name, value in figures.items())


def _part(row: Row, name: str) -> str:
    return f"{row.parts[name]:.0%}" if name in row.parts else "-"


def _staleness(row: Row) -> str:
    return "-" if row.staleness is None else f"{row.staleness[0]:.1f} ({row.staleness[1]})"


def _sent(row: Row) -> str:
    return "-" if row.bytes_per_second is None else f"{BYTES.rounded(row.bytes_per_second)}/s"


def _ranks_table(view: RunView, console: Console, room: int | None) -> RenderableType:
    """Return the table of the ranks, with as many as fit, and first of all those that stand out."""
    if not view.rows:
        return Text("no rank has said anything yet", style="dim")
    slow = {rank for straggler in view.stragglers for rank in straggler.ranks}
    rows = list(view.rows)
    if room is not None and len(rows) > room:
        # With a thousand ranks whoever looks wants to see those that hold up the others
        notable = [row for row in rows if row.rank in slow or row.silent_seconds]
        others = [row for row in rows if row not in notable]
        chosen = (notable + others)[: room - 1]
        # In the order of ranks again, so that a row stays where it was from look to look
        rows = [row for row in rows if row in chosen]
    gap = 2 if console.width >= WIDE else 1
    columns = _fitting(list(_columns(view)), rows, console.width, gap)
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
    for column in columns:
        justify: JustifyMethod = "left" if column.left else "right"
        table.add_column(column.heading, justify=justify, no_wrap=True, overflow="ellipsis")
    for row in rows:
        style = "yellow" if row.rank in slow or row.silent_seconds else ""
        table.add_row(*(Text(column.cell(row), style=style) for column in columns))
    what = "shares of the time, and speeds, over the last 10 s or 10 steps"
    if view.status in ("completed", "stopped"):
        what = "over the whole run; whom a rank waits for in the steps of the timeline"
    more = len(view.rows) - len(rows)
    note = f"and {more} more ranks; {what}" if more else what
    return Group(table, Text(note, style="dim"))


def _fitting(columns: list[Column], rows: Sequence[Row], width: int, gap: int) -> list[Column]:
    """Return the columns that fit into `width`."""

    def needed() -> int:
        cells = (max(len(c.heading), *(len(c.cell(row)) for row in rows)) for c in columns)
        return sum(cells) + gap * (len(columns) - 1)

    while needed() > width and any(column.order for column in columns):
        # Measured anew after each: without its longest cell a table may fit at once
        columns.remove(max(columns, key=lambda column: column.order))
    return columns


def comparison_page(
    folder: Path,
    done: Sequence[tuple[str, RunRecord]],
    planned: int,
    current: RenderableType | None,
    *,
    under_way: bool,
    room: int | None = None,
) -> RenderableType:
    """Return the runs that are `done`, in words and with their records, the last `room` of them if
    given, and the page of the current one."""
    failed = sum(record.status == "failed" for _, record in done)
    state = "running" if under_way else "completed" if len(done) >= planned else "stopped"
    title = Text(f"{folder}", style="bold")
    numbers = Text.assemble((state, STYLES[state]), f"  {len(done)} of {planned} runs are done")
    if failed:
        numbers.append(f", {failed} failed", style="bold red")
    # The last ones: a comparison appends, and the first are known by now
    shown = done if room is None else done[-max(room, 3) :]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("run", overflow="fold")
    table.add_column("status", no_wrap=True)
    table.add_column("seconds", justify="right", no_wrap=True)
    table.add_column("samples/s", justify="right", no_wrap=True)
    table.add_column("final parameters", no_wrap=True)
    for what, record in shown:
        table.add_row(
            Text(what),
            Text(record.status, style=STYLES[record.status]),
            or_dash(record.train_seconds),
            or_dash(record.samples_per_second),
            Text((record.failure or _figures(record.figures)).partition("\n")[0]),
        )
    parts: list[RenderableType] = [title, numbers, Text()]
    if len(shown) < len(done):
        parts.append(Text(f"{len(done) - len(shown)} earlier runs, and:", style="dim"))
    parts.append(table if shown else Text("no run is done yet", style="dim"))
    if current is not None:
        parts += [Text(), current]
    return Group(*parts)
