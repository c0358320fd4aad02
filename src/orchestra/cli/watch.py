"""`orchestra watch`: a run or a comparison in the terminal, while it goes on or afterwards."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from rich.console import Console, RenderableType
from rich.live import Live

from orchestra.engines.live import moments
from orchestra.errors import InputError
from orchestra.records.files import PARENT
from orchestra.records.live import read_live, under_way
from orchestra.records.store import RunFolder, RunStore, newest
from orchestra.records.terminal import Terminal
from orchestra.report.watch_page import comparison_page, run_page
from orchestra.report.watching import RunWatch

REDRAW_SECONDS = 1.0
PLAIN_COLUMNS = 140  # the width of output that does not go to a terminal


def main(options: Namespace) -> int:
    page = page_of(options.folder or newest_run())
    console = Terminal()
    if not console.is_terminal:
        # A file has no width, and rich would take 80 columns.
        console = Terminal(width=PLAIN_COLUMNS, no_color=True)
    try:
        return follow(page, console, once=options.once or not console.is_terminal)
    except KeyboardInterrupt:
        return 0


class RunPage:
    def __init__(self, run: RunFolder) -> None:
        self.path = run.path
        self.over, self.well = False, True
        self._watch = RunWatch(run)

    def draw(self, now: float, console: Console, height: int | None) -> RenderableType:
        view = self._watch.look(now)
        self.over, self.well = view.over, view.status not in ("failed", "cut off")
        return run_page(view, console, height)


class ComparisonPage:
    """The page of a comparison: the runs that are done, and the one under way."""

    def __init__(self, store: RunStore) -> None:
        self._store = store
        self._current: RunPage | None = None
        self.over, self.well = False, True

    def draw(self, now: float, console: Console, height: int | None) -> RenderableType:
        at_work = under_way(self._store.folder, None, now)
        current, done = None, []
        places = self._store.planned
        for run, what in places:
            record = run.ended()
            if (
                record is not None and record.ending.status != "stopped"
            ):  # a stopped run is not over
                done.append((what, record))
            # Of several that were begun only the one under way holds its folder's lock.
            elif run.path.exists() and under_way(run.path, read_live(run.path), now):
                current = run
        self.over = not (at_work or current)
        self.well = all(record.ending.status == "completed" for _, record in done)
        page = None
        if current is not None:
            if self._current is None or current.path != self._current.path:
                self._current = RunPage(current)
            page = self._current.draw(now, console, None if height is None else height * 2 // 3)
        room = None if height is None else height // 3 - 5
        return comparison_page(
            self._store.folder,
            done,
            len(places),
            page,
            console.width,
            under_way=not self.over,
            room=room,
        )


def page_of(folder: Path) -> RunPage | ComparisonPage:
    """Return the page for `folder`; raise `InputError` if it is not that of a run or comparison."""
    store = RunStore(folder)
    if store.is_comparison:
        return ComparisonPage(store)
    try:
        return RunPage(RunFolder(folder))
    except InputError as error:
        inner = newest(folder)
        raise InputError(f"{error}; name one in it, such as {inner}") if inner else error from None


def newest_run() -> Path:
    """Return the folder of the newest run or comparison in `PARENT`; raise `InputError` if
    `PARENT` has no such folder."""
    found = newest(PARENT)
    if found is None:
        raise InputError(f"{PARENT}: holds no run; name the folder of one: orchestra watch DIR")
    return found


def follow(page: RunPage | ComparisonPage, console: Console, *, once: bool) -> int:
    """Show `page` again and again until nothing more is to come; return the exit status."""
    times = moments(REDRAW_SECONDS)
    if once:
        console.print(page.draw(next(times), console, None))
        return 0 if page.well else 1
    with Live(console=console, auto_refresh=False, transient=True) as live:
        for now in times:
            live.update(page.draw(now, console, console.height), refresh=True)
            if page.over:
                break
    # The live display is transient: what is left is the whole page, in as many lines as it takes.
    console.print(page.draw(now, console, None))
    return 0 if page.well else 1
