"""The page and its answers by HTTP, for this machine alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, fields
from importlib.resources import files
from typing import Any

from flask import Flask, Response, request

from orchestra.errors import InputError
from orchestra.report.study import COLOURS, DASHES
from orchestra.settings.base import Limits
from orchestra.studio.jobs import Job, Simulator
from orchestra.studio.menu import MENU, entry_of
from orchestra.studio.situation import BATCH, MOST_WORKERS, Situation

HOSTS = ("127.0.0.1", "localhost", "[::1]")
"""What a browser calls this machine. Any other name is that of a stranger's page, which has the
browser believe that the name is this machine (DNS rebinding)."""
COUNTS = (2, 4, 8, 16, 32, 64)
"""Workers of the points of a scaling curve, as far as there are so many."""
MOST_WATCHED = 16
"""Workers whose messages are shown: of more, nobody could follow them."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:"
)
TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css"}


def make_app(simulator: Simulator) -> Flask:
    """The application, whose simulations `simulator` carries out."""
    app = Flask("orchestra.studio", static_folder=None)

    app.before_request(_refuse_strangers)
    app.after_request(_protect)
    app.register_error_handler(InputError, _refuse)

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
        counts = [count for count in COUNTS if count <= max(situation.workers, 16)]
        places = [situation, *(situation.with_workers(count) for count in counts)]
        jobs = dict.fromkeys(Job("step", place, entry) for place in places for entry in entries)
        lines = _lines(simulator.answers(f"steps {caller}", list(jobs)), len(jobs))
        return Response(lines, mimetype="application/x-ndjson")

    @app.get("/api/course")
    def course() -> Response:
        situation, entries, caller = _asked()
        if len(entries) != 1:
            raise InputError(f"strategies: {len(entries)} strategies; give one")
        few = situation.with_workers(min(situation.workers, MOST_WATCHED))
        job = Job("course", few, entries[0])
        for _, answer in simulator.answers(f"course {caller}", [job]):
            return _json({"workers": few.workers, "strategy": job.entry.key, **answer})
        return _line("outdated: the page has asked for another one", 409)

    return app


def _refuse_strangers() -> Response | None:
    host = request.headers.get("Host", "")
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    if name not in HOSTS:
        return _line(f"this page is served to {', '.join(HOSTS)}, not to {host!r}", 403)
    if request.headers.get("Sec-Fetch-Site") in ("cross-site", "same-site") and request.path != "/":
        return _line("this page is served to its own requests only", 403)
    return None


def _protect(response: Response) -> Response:
    response.headers["Content-Security-Policy"] = POLICY
    response.headers["X-Content-Type-Options"] = "nosniff"
    response.headers["Cache-Control"] = "no-store"
    return response


def _refuse(error: InputError) -> Response:
    return _line(str(error), 400)


def _asked() -> tuple[Situation, list[Any], str]:
    """Read the query: a situation, `strategies` by their keys, and the `page` that asks."""
    values = request.args.to_dict()
    keys = values.pop("strategies", ",".join(entry.key for entry in MENU))
    caller = values.pop("page", "")
    return Situation.read(values), [entry_of(key) for key in keys.split(",")], caller


def _lines(answers: Iterator[tuple[Job, dict[str, Any]]], total: int) -> Iterator[str]:
    """Yield a line of JSON for each answer, when it is there."""
    yield json.dumps({"total": total}) + "\n"
    for job, answer in answers:
        about = {"strategy": job.entry.key, "workers": job.situation.workers}
        yield json.dumps(about | answer) + "\n"


def _menu() -> dict[str, Any]:
    """The strategies with their looks, the controls with their ranges, and what is fixed."""
    looks = [(dash, colour) for dash in DASHES for colour in COLOURS]
    strategies = [
        asdict(entry) | {"colour": colour, "dash": list(dash)}
        for entry, (dash, colour) in zip(MENU, looks, strict=False)
    ]
    controls = {}
    for field in fields(Situation):
        limits: Limits = field.metadata["limits"]
        controls[field.name] = {
            "low": limits.low, "high": limits.high, "default": field.default,
            "meaning": field.metadata["meaning"],
        }  # fmt: skip
    fixed = {"batch": BATCH, "most": MOST_WORKERS, "watched": MOST_WATCHED}
    return {"strategies": strategies, "controls": controls, **fixed}


def _file(name: str) -> Response:
    """A file of the page, or the style sheet of the report, which both pages share."""
    folder = files("orchestra.report") / "templates" if name == "page.css" else None
    path = (folder or files("orchestra.studio") / "page") / name
    kind = TYPES.get(name.rpartition(".")[2])
    if kind is None or not path.is_file():
        return _line(f"there is no {name} here", 404)
    return Response(path.read_bytes(), mimetype=kind)


def _json(value: Any) -> Response:
    return Response(json.dumps(value), mimetype="application/json")


def _line(text: str, status: int) -> Response:
    return Response(f"{text}\n", status, mimetype="text/plain")
