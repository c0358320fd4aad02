"""The output of `orchestra watch`: tables and lines for a terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from orchestra.cluster.units import BYTES, clock_text
from orchestra.records.following import RankView
from orchestra.records.record import RunRecord
from orchestra.report.measures import PACE, TRAIN
from orchestra.report.numbers import count, or_dash, ranges, significant
from orchestra.report.sheet import Cell, Column, Sheet, terminal
from orchestra.report.watching import RunView

BLOCKS = "▁▂▃▄▅▆▇█"
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
    of_module = view.strategy.partition("(")[0].endswith(f":{view.name}")
    own = "" if of_module or view.strategy.startswith(view.name) else f"{view.name}: "
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


def _columns(view: RunView) -> Iterator[tuple[Column, Callable[[RankView], str]]]:
    rows = view.rows
    yield Column("rank", "rank"), lambda row: str(row.rank)
    if any(row.role == "server" for row in rows):
        yield Column("role", "role", words=True, order=2), lambda row: row.role
    yield Column("step", "step"), lambda row: str(row.step) if row.step else "-"
    yield Column("speed", PACE.heading), lambda row: or_dash(row.samples_per_second)
    yield Column("loss", "loss"), lambda row: or_dash(row.loss, 4)
    for name, order in (("compute", 0), ("communicate", 0), ("wait", 0), ("input", 4)):
        if any(name in row.parts for row in rows):
            title = "comm." if name == "communicate" else name
            yield Column(name, title, order=order), partial(_part, name)
    if any(row.staleness for row in rows):
        yield Column("staleness", "staleness", order=3), _staleness
    if view.balances or len({row.batch for row in rows if row.batch}) > 1:
        total = sum(row.batch or 0 for row in rows) or 1
        yield (
            Column("batch", "batch", order=3),
            lambda row: f"{row.batch} ({row.batch / total:.0%})" if row.batch else "-",
        )
    yield Column("sent", "sent", order=5), _sent
    waits = Column("waits_for", "waits for", words=True, order=1)
    yield waits, lambda row: row.waits_for or "-"


def _figures(figures: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {significant(value, 4)}" for name, value in figures.items())


def _part(name: str, row: RankView) -> str:
    return f"{row.parts[name]:.0%}" if name in row.parts else "-"


def _staleness(row: RankView) -> str:
    return "-" if row.staleness is None else f"{row.staleness[0]:.1f} ({row.staleness[1]})"


def _sent(row: RankView) -> str:
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
    styles = ["yellow" if row.rank in slow or row.silent_seconds else "" for row in rows]
    sheet = Sheet.of(_columns(view), rows).styled(styles)
    what = "shares of the time, and speeds, over the last 10 s or 10 steps"
    if view.status in ("completed", "stopped"):
        what = "over the whole run; whom a rank waits for in the steps of the timeline"
    more = len(view.rows) - len(rows)
    note = f"and {more} more ranks; {what}" if more else what
    return Group(terminal(sheet, console.width), Text(note, style="dim"))


Done = tuple[str, RunRecord]  # the name of a run that has ended, and its record


def _status(done: Done) -> Cell:
    status = done[1].ending.status
    return Cell(status, style=STYLES[status])


def _end(done: Done) -> str:
    record = done[1]
    return (record.ending.failure or _figures(record.learned.figures)).partition("\n")[0]


_RUN_COLUMNS: Sequence[tuple[Column, Callable[[Done], Cell | str]]] = (
    (Column("run", "run", words=True), lambda done: done[0]),
    (Column("status", "status", words=True), _status),
    (Column("seconds", TRAIN.heading), lambda done: or_dash(TRAIN.read(done[1]))),
    (Column("speed", PACE.heading), lambda done: or_dash(PACE.read(done[1]))),
    (Column("final", "final parameters", words=True), _end),
)


def comparison_page(
    folder: Path,
    done: Sequence[Done],
    planned: int,
    current: RenderableType | None,
    width: int,
    *,
    under_way: bool,
    room: int | None = None,
) -> RenderableType:
    """Return the runs that are `done`, in words and with their records, the last `room` of them if
    given, and the page of the current one."""
    failed = sum(record.ending.status == "failed" for _, record in done)
    state = "running" if under_way else "completed" if len(done) >= planned else "stopped"
    title = Text(f"{folder}", style="bold")
    numbers = Text.assemble((state, STYLES[state]), f"  {len(done)} of {planned} runs are done")
    if failed:
        numbers.append(f", {failed} failed", style="bold red")
    # The last ones: a comparison appends, and the first are known by now
    shown = done if room is None else done[-max(room, 3) :]
    parts: list[RenderableType] = [title, numbers, Text()]
    if len(shown) < len(done):
        parts.append(Text(f"{len(done) - len(shown)} earlier runs, and:", style="dim"))
    table = terminal(Sheet.of(_RUN_COLUMNS, shown), width)
    parts.append(table if shown else Text("no run is done yet", style="dim"))
    if current is not None:
        parts += [Text(), current]
    return Group(*parts)
