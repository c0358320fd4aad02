"""How a process enters a run under way: it asks the watcher for a place, and becomes a rank.

The folder of a run that can be joined has a file that only its owner can read: where to ask, and
the secret of the run. Imports without torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from orchestra.engines.failure_detector import Limits, Refusal
from orchestra.engines.processes.control import Frames, RankSpec, pack
from orchestra.engines.processes.environment import towards
from orchestra.errors import InputError, RunFailed
from orchestra.records.files import partial_of
from orchestra.settings.base import Mismatch, from_plain
from orchestra.settings.reading import read_json
from orchestra.transports.handshake import NEWCOMER, TLS, WATCHER, connect

PACKAGE = "neural-orchestra"
ENTRANCE = "join.json"
ANSWER_SECONDS = 30.0


@dataclass(frozen=True)
class Invitation:
    """A run that newcomers may join."""

    path: Path  # of the file of its entrance
    folder: str = ""  # of its records, if it has some
    experiment: str = ""  # the text of its file
    next_rank: int = 0  # the number of the first newcomer, at least
    refusal: Refusal = lambda _: None


@dataclass(frozen=True)
class Entrance:
    """Where to ask for a place in a run, and the secret that one has to show."""

    host: str
    port: int
    secret: str

    @staticmethod
    def read(path: Path) -> Entrance:
        """Read the file of an entrance. Raises `InputError` where it is none, or is not there."""
        try:
            found: Entrance = read_json(path, Entrance)
        except FileNotFoundError:
            raise InputError(
                f"{path}: there is no such file: the run is over, or cannot be joined; one that "
                "can is started with min_ranks"
            ) from None
        return found


@contextlib.contextmanager
def opened(path: Path, address: tuple[str, int], secret: str) -> Iterator[None]:
    """Keep the file of an entrance."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unnamed = partial_of(path)
    unnamed.unlink(missing_ok=True)
    with os.fdopen(os.open(unnamed, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
        file.write(json.dumps(asdict(Entrance(*address, secret))) + "\n")
    unnamed.replace(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


@dataclass(frozen=True)
class Admission:
    """A place in a run: the number of the rank, and what it has to know."""

    rank: int
    ranks: int  # that the run had at its start
    folder: str  # see `Invitation`
    experiment: str
    limits: Limits
    shared_memory: bool

    def spec(self, entrance: Entrance, tls: TLS | None, threads: int | None) -> RankSpec:
        """Return the description of a rank of this process."""
        watcher = entrance.host, entrance.port
        return RankSpec(
            self.rank, self.ranks, self.rank, watcher, towards(*watcher), entrance.secret,
            self.limits, local=False, supervised=False, tls=tls, threads=threads,
            shared_memory=self.shared_memory, newcomer=True,
        )  # fmt: skip


def ask(entrance: Entrance, tls: TLS | None) -> Admission:
    """Ask for a place. Raises `RunFailed` where nobody answers, or the run takes nobody in."""
    where = f"{entrance.host}:{entrance.port}"
    deadline = time.perf_counter() + ANSWER_SECONDS
    try:
        connection = connect(
            (entrance.host, entrance.port), NEWCOMER, WATCHER, entrance.secret.encode(), tls=tls,
            deadline=deadline,
        )  # fmt: skip
    except ConnectionError as error:
        raise RunFailed(f"{where}: no run can be joined there: {error}") from None
    with connection:
        connection.settimeout(ANSWER_SECONDS)
        frames, answer = Frames(connection), None
        with contextlib.suppress(OSError):
            connection.sendall(pack({"kind": "application", "version": version(PACKAGE)}))
            while answer is None and time.perf_counter() < deadline and frames.read():
                answer = next((message for message, _ in frames.complete()), None)
    if answer is None:
        raise RunFailed(f"{where}: the run gave no answer")
    if answer.get("kind") != "place":
        raise RunFailed(f"{where}: the run takes nobody in: {answer.get('why')}")
    try:
        found: Admission = from_plain(Admission, answer["place"])
    except (KeyError, Mismatch) as error:
        raise RunFailed(f"{where}: the answer of the run is not understood: {error}") from None
    return found


def answer_to(application: Any, place: Admission) -> dict[str, Any]:
    """Return the watcher's answer to an application for `place`."""
    own, other = version(PACKAGE), application.get("version")
    if other != own:
        return {"kind": "refusal", "why": f"it is of Orchestra {own}, and this is {other}"}
    return {"kind": "place", "place": asdict(place)}
