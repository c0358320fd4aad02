"""`orchestra watch`: a run or a comparison in the terminal, while it goes on or afterwards; and
`orchestra studio`: a local web page on the simulation.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import socket
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, RenderableType
from rich.live import Live

from orchestra.cli.terminal import Parser
from orchestra.engines.live import moments
from orchestra.errors import InputError
from orchestra.experiments.run import PARENT, finished
from orchestra.records.live import read_live, under_way
from orchestra.records.record import EXPERIMENT, read_planned
from orchestra.records.terminal import Terminal
from orchestra.report.watch_page import comparison_page, run_page
from orchestra.report.watching import RunWatch, experiment_of
from orchestra.worker.runtime import usable_cores

DESCRIPTION = """\
Show a run, or a comparison, in the terminal while it goes on: progress and loss; for each rank its
steps, samples/s, loss, and the shares of its time that go into compute, communication, waiting and
input; staleness, batches, bytes sent, and whom it waits for; stragglers, and the switch of
strategies when it happens.

DIR is the folder of `orchestra train` or `orchestra compare` (on any engine); it may be watched
from another terminal, or another machine that shares the folder, at no cost for the run. A run
that has ended is shown once. Ctrl-C ends the watching, never the run.

Where output is no terminal, and with --once, what is known now is printed once. Exit status: 0, and
1 if the run failed or was cut off.
"""

EPILOG = """\
examples:
  orchestra watch
      the newest folder in runs/

  orchestra watch runs/quickstart-1
      a comparison: what is done, and the run under way

  orchestra watch runs/quickstart-1/runs/servers/4-ranks/seed-0 --once
      one of its runs, printed once

  while sleep 60; do orchestra watch runs/first >> progress.txt; done
      a table a minute, in a file

docs/watching.md explains each column.
"""

REDRAW_SECONDS = 1.0
PLAIN_COLUMNS = 140  # the width of output that does not go to a terminal


def main(arguments: Sequence[str]) -> int:
    parser = Parser("watch", DESCRIPTION, EPILOG)
    folder = "of a run or a comparison (default: the newest in runs/)"
    parser.add_argument("folder", nargs="?", type=Path, metavar="DIR", help=folder)
    parser.flag("--once", "print what is known now, and end")
    options = parser.read(arguments)
    page = page_of(options.folder or newest(PARENT))
    console = Terminal()
    if not console.is_terminal:
        # A file has no width, and rich would take 80 columns.
        console = Terminal(width=PLAIN_COLUMNS, no_color=True)
    try:
        return follow(page, console, once=options.once or not console.is_terminal)
    except KeyboardInterrupt:
        return 0


class RunPage:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.over, self.well = False, True
        self._watch = RunWatch(folder)

    def draw(self, now: float, console: Console, height: int | None) -> RenderableType:
        view = self._watch.look(now)
        self.over, self.well = view.over, view.status not in ("failed", "cut off")
        return run_page(view, console, height)


class ComparisonPage:
    """The page of a comparison: the runs that are done, and the one under way."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._current: RunPage | None = None
        self.over, self.well = False, True

    def draw(self, now: float, console: Console, height: int | None) -> RenderableType:
        at_work = under_way(self._folder, None, now)
        current, done = None, []
        places = read_planned(self._folder)
        for folder, what in places:
            if records := finished(folder, failed=True):  # a stopped run is not over
                done.append((what, records[0]))
            # Of several that were begun only the one under way holds its folder's lock.
            elif folder.exists() and under_way(folder, read_live(folder), now):
                current = folder
        self.over = not (at_work or current)
        self.well = all(record.status == "completed" for _, record in done)
        page = None
        if current is not None:
            if self._current is None or current != self._current.folder:
                self._current = RunPage(current)
            page = self._current.draw(now, console, None if height is None else height * 2 // 3)
        room = None if height is None else height // 3 - 5
        total = len(places)
        return comparison_page(self._folder, done, total, page, under_way=not self.over, room=room)


def page_of(folder: Path) -> RunPage | ComparisonPage:
    """Return the page for `folder`.

    Raises:
        InputError: it is not the folder of a run or of a comparison.
    """
    try:
        experiment = experiment_of(folder)
    except InputError as error:
        inner = _newest_in(folder)
        raise InputError(f"{error}; name one in it, such as {inner}") if inner else error from None
    several = any(
        isinstance(value := experiment.get(key), list | dict) and len(value) > 1
        for key in ("strategies", "ranks", "seeds")
    )
    return ComparisonPage(folder) if several or (folder / "runs").is_dir() else RunPage(folder)


def newest(parent: Path) -> Path:
    """Return the folder in `parent` in which a run or comparison was begun last.

    Raises:
        InputError: there is none.
    """
    found = _newest_in(parent)
    if found is None:
        raise InputError(f"{parent}: holds no run; name the folder of one: orchestra watch DIR")
    return found


def _newest_in(parent: Path) -> Path | None:
    found = list(parent.glob(f"*/{EXPERIMENT}"))
    return max(found, key=lambda path: path.stat().st_mtime).parent if found else None


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


STUDIO = """\
Open a page on which you choose the size of a model, the number of workers, the bandwidth and the
latency of their network, and how slow the slowest of them is. The time of a step, its timeline and
the scaling of every strategy are simulated as you move the controls, and the messages of a step
travel on the network. Nothing is trained, and nothing has to be measured first.

The page is served to this machine alone (127.0.0.1). Ctrl-C ends it.
"""
STUDIO_EPILOG = """\
examples:
  orchestra studio --open
      the page in your browser

  orchestra studio --port 8000
      at http://127.0.0.1:8000/, such as for ssh -L 8000:127.0.0.1:8000 from another machine
"""
MOST_PROCESSES = 8
ADDRESS = "127.0.0.1"


def studio(arguments: Sequence[str]) -> int:
    parser = Parser("studio", STUDIO, STUDIO_EPILOG)
    parser.option("--port", "N", "port of the address (default: a free one)", type=int, default=0)
    parser.flag("--open", "open the page in the browser of this machine")
    options = parser.read(arguments)
    if not 0 <= options.port < 65536:
        raise InputError(f"--port: {options.port} is no port; give one from 1024 to 65535")
    try:
        from werkzeug.serving import make_server

        from orchestra.studio.server import Simulator, begin_process, make_app
    # Only for what the extra brings: another missing module is a fault of the installation.
    except ModuleNotFoundError as error:
        if error.name not in ("flask", "werkzeug"):
            raise
        raise InputError(
            "orchestra studio needs Flask: pip install '.[studio]' in a clone of Orchestra"
        ) from None
    # A page asks many times a second: no line for each request.
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    # Bound before processes are started, so that a port that is taken is noticed at once.
    listening = _listen(options.port)
    size = min(len(usable_cores()), MOST_PROCESSES)
    # Spawned: each process imports torch, and the server itself stays without (decision 101).
    with multiprocessing.get_context("spawn").Pool(size, begin_process) as pool:
        app = make_app(Simulator(pool, size))
        server = make_server(ADDRESS, 0, app, threaded=True, fd=listening.fileno())
        address = f"http://{ADDRESS}:{listening.getsockname()[1]}/"
        print(f"orchestra studio: {address} (Ctrl-C ends it)", flush=True)
        if options.open:
            webbrowser.open(address)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
        server.server_close()
    return 0


def _listen(port: int) -> socket.socket:
    """Return a socket that listens on `port` of this machine, for itself alone.

    Raises:
        InputError: somebody else does.
    """
    try:
        return socket.create_server((ADDRESS, port))
    except OSError as error:
        raise InputError(f"--port: {port} cannot be had ({error.strerror}); leave it out") from None
