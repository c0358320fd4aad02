"""The HTTP server of the page, for this machine only; simulations run in other processes."""

from __future__ import annotations

import contextlib
import json
import queue
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import asdict, dataclass, fields
from importlib.resources import files
from typing import Any, Literal

from flask import Flask, Response, request

from orchestra.errors import InputError, RunFailed
from orchestra.report.study import COLOURS, DASHES
from orchestra.settings.base import NumberRange
from orchestra.studio.menu import BATCH, MENU, MOST_WORKERS, MenuEntry, Situation, entry_of

KEPT: dict[str, int] = {"step": 4000, "course": 40}  # the most cached answers of each kind
MOST_PAGES = 100  # the most pages whose latest question is remembered
HOSTS = ("127.0.0.1", "localhost", "[::1]")
"""The names of this machine in a browser. Any other name belongs to another site, which makes the
browser resolve it to this machine (DNS rebinding)."""
COUNTS = (2, 4, 8, 16, 32, 64)  # the numbers of workers in a scaling curve, up to the chosen number
MOST_WATCHED = 16  # the most workers whose messages are shown; more could not be followed
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:"
)
TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css"}


@dataclass(frozen=True)
class SimulationJob:
    """A simulation: the time of a step ("step"), or the events in it ("course")."""

    kind: Literal["step", "course"]
    situation: Situation
    entry: MenuEntry


def carry_out(job: SimulationJob) -> dict[str, Any]:
    """Return the answer, computed in this process."""
    from orchestra.studio.simulate import answer  # torch: in the processes of the pool only

    return answer(job.kind, job.situation, job.entry)


def load_torch() -> None:
    """Prepare a process of the pool."""
    # Now, so that the first question does not wait two seconds for the import
    import torch

    import orchestra.studio.simulate  # noqa: F401

    # The pool has one process for each core
    torch.set_num_threads(1)


class Simulator:
    """Carries out jobs in a pool of `size` processes (or threads), and caches their answers."""

    def __init__(self, pool: Executor, size: int) -> None:
        self._pool = pool
        self._size = size
        self._lock = threading.Lock()
        self._kept: dict[str, dict[SimulationJob, dict[str, Any]]] = {kind: {} for kind in KEPT}
        self._newest: dict[str, object] = {}

    def answers(
        self, page: str, jobs: Sequence[SimulationJob]
    ) -> Iterator[tuple[SimulationJob, dict[str, Any]]]:
        """Yield the jobs with their answers: the cached ones first, the others as they are done.
        Jobs are started in order.

        If the same `page` asks again, no further job is started for this call, which then ends.
        """
        # A new object equals no earlier one: an older call sees that it is no longer the newest
        token = object()
        with self._lock:
            _keep(self._newest, page, token, MOST_PAGES)
            # Read at once, since another call may push answers out meanwhile
            known = {job: self._kept[job.kind].get(job) for job in jobs}
        # What is known is shown at once, whatever has to be simulated first
        yield from ((job, answer) for job, answer in known.items() if answer is not None)
        done: queue.SimpleQueue[tuple[SimulationJob, dict[str, Any] | BaseException]] = (
            queue.SimpleQueue()
        )
        waiting = iter([job for job, answer in known.items() if answer is None])
        under_way = 0
        while self._newest.get(page) is token:
            # No more than the pool works on: its queue could not be taken back when asked again.
            while under_way < self._size and (job := next(waiting, None)) is not None:
                self._begin(job, done)
                under_way += 1
            if not under_way:
                return
            job, answer = done.get()
            under_way -= 1
            if isinstance(answer, BaseException):
                raise answer
            yield job, answer

    def _begin(self, job: SimulationJob, done: queue.SimpleQueue[Any]) -> None:
        def keep(future: Future[dict[str, Any]]) -> None:
            if (error := future.exception()) is not None:
                done.put((job, error))
                return
            answer = future.result()
            with self._lock:
                _keep(self._kept[job.kind], job, answer, KEPT[job.kind])
            done.put((job, answer))

        self._pool.submit(carry_out, job).add_done_callback(keep)


def _keep(kept: dict[Any, Any], key: object, value: object, most: int) -> None:
    """Append `value` to `kept`, and remove the oldest one if there are more than `most`."""
    # A dict keeps its order of insertion; taken out first, the key is the newest again
    kept.pop(key, None)
    kept[key] = value
    if len(kept) > most:
        del kept[next(iter(kept))]


def make_app(simulator: Simulator) -> Flask:
    """Return the Flask application; `simulator` carries out its simulations."""
    app = Flask("orchestra.studio", static_folder=None)

    app.before_request(_refuse_strangers)
    app.after_request(_protect)
    app.register_error_handler(InputError, lambda error: _line(str(error), 400))
    app.register_error_handler(RunFailed, lambda error: _line(str(error), 503))

    @app.get("/")
    def page() -> Response:
        return _file("index.html")

    @app.get("/<name>.<kind>")
    def part(name: str, kind: str) -> Response:
        return _file(f"{name}.{kind}")

    @app.get("/api/menu")
    def menu() -> Response:
        return _json(_menu())

    @app.get("/api/steps")
    def steps() -> Response:
        situation, entries, caller = _asked()
        # Up to 16 in any case: a curve of two points says nothing
        counts = [count for count in COUNTS if count <= max(situation.workers, 16)]
        places = [situation, *(situation.with_setting("workers", count) for count in counts)]
        # The chosen number of workers comes first; equal jobs are one.
        jobs = dict.fromkeys(
            SimulationJob("step", place, entry) for place in places for entry in entries
        )
        # Both kinds of questions of a page are under way at the same time
        lines = _lines(simulator.answers(f"steps {caller}", list(jobs)), len(jobs))
        return Response(lines, mimetype="application/x-ndjson")

    @app.get("/api/course")
    def course() -> Response:
        situation, entries, caller = _asked()
        if len(entries) != 1:
            raise InputError(f"strategies: {len(entries)} strategies; give one")
        few = situation.with_setting("workers", min(situation.workers, MOST_WATCHED))
        job = SimulationJob("course", few, entries[0])
        for _, answer in simulator.answers(f"course {caller}", [job]):
            return _json({"workers": few.workers, "strategy": job.entry.key, **answer})
        # The generator ended without an answer
        return _line("outdated: the page has asked for another one", 409)

    return app


def _refuse_strangers() -> Response | None:
    host = request.headers.get("Host", "")
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    # Another site's page can let its own name point to this machine; the browser still sends that
    # name.
    if name not in HOSTS:
        return _line(f"this page is served to {', '.join(HOSTS)}, not to {host!r}", 403)
    # Browsers say who asks; a link to the page itself may come from anywhere
    if request.headers.get("Sec-Fetch-Site") in ("cross-site", "same-site") and request.path != "/":
        return _line("this page is served to its own requests only", 403)
    return None


def _protect(response: Response) -> Response:
    response.headers["Content-Security-Policy"] = POLICY
    response.headers["X-Content-Type-Options"] = "nosniff"
    # The page of another version would ask for what this server does not have
    response.headers["Cache-Control"] = "no-store"
    return response


def _asked() -> tuple[Situation, list[Any], str]:
    """Return the query: a situation, the entries of `strategies`, and the `page` that asks."""
    values = request.args.to_dict()
    keys = values.pop("strategies", ",".join(entry.key for entry in MENU))
    caller = values.pop("page", "")
    return Situation.read(values), [entry_of(key) for key in keys.split(",")], caller


def _lines(answers: Iterator[tuple[SimulationJob, dict[str, Any]]], total: int) -> Iterator[str]:
    """Yield a line of JSON for the number of answers, then one for each answer as it arrives.

    A failure is the last line: the status of the response went out with the first one.
    """
    yield json.dumps({"total": total}) + "\n"
    try:
        for job, answer in answers:
            about = {"strategy": job.entry.key, "workers": job.situation.workers}
            yield json.dumps(about | answer) + "\n"
    except RunFailed as error:
        yield json.dumps({"error": str(error)}) + "\n"


def _menu() -> dict[str, Any]:
    """Return the strategies with their looks, the controls with their ranges, and the constants."""
    # All colours of one dash first, as in a report
    looks = [(dash, colour) for dash in DASHES for colour in COLOURS]
    strategies = [
        asdict(entry) | {"colour": colour, "dash": list(dash)}
        for entry, (dash, colour) in zip(MENU, looks, strict=False)
    ]
    controls = {}
    for field in fields(Situation):
        limits: NumberRange = field.metadata["limits"]
        controls[field.name] = {
            "low": limits.low, "high": limits.high, "default": field.default,
            "meaning": field.metadata["meaning"],
        }  # fmt: skip
    fixed = {"batch": BATCH, "most": MOST_WORKERS, "watched": MOST_WATCHED}
    return {"strategies": strategies, "controls": controls, **fixed}


def _file(name: str) -> Response:
    """Return a file of the page, or the report's style sheet, which both pages share."""
    folder = files("orchestra.report") / "templates" if name == "page.css" else None
    path = (folder or files("orchestra.studio") / "page") / name
    # Of the page's folder, and only what a page is made of
    kind = TYPES.get(name.rpartition(".")[2])
    is_there = False
    with contextlib.suppress(OSError):  # as of a name that is too long
        is_there = kind is not None and path.is_file()
    if not is_there:
        return _line(f"there is no {name} here", 404)
    return Response(path.read_bytes(), mimetype=kind)


def _json(value: Any) -> Response:
    return Response(json.dumps(value), mimetype="application/json")


def _line(text: str, status: int) -> Response:
    return Response(f"{text}\n", status, mimetype="text/plain")
