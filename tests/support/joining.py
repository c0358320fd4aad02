"""A training that is held at a gate, so that ranks join it there: `orchestra join`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.commands import Started, Training, started
from tests.support.waiting import wait_until

STEPS = 20
SETTINGS: dict[str, Any] = {
    "min_ranks": 1, "steps": STEPS, "batch_size": 8, "checkpoint_every": 3, "threads": 1,
    "optimizer": "Adam(lr=0.01)",
}  # fmt: skip


@contextmanager
def held(
    folder: Path, strategy: str = "AllReduce('ring')", ranks: int = 2, readers: int | None = None
) -> Iterator[Training]:
    """A training whose ranks all wait in their fourth step, until the file `go` is there. So many
    of them are `readers` of data; None: all."""
    task = f"tests.support.failing_tasks:gated({str(folder)!r}, model='normalised')"
    settings = {**SETTINGS, "min_ranks": ranks - 1}
    training = Training(task, strategy, ranks, out=folder / "run", **settings)
    try:
        training.wait_until(
            lambda: len(list(folder.glob("at-*"))) >= (readers or ranks), "the gate"
        )
        yield training
    finally:
        (folder / "go").touch()
        training.join()


def join(folder: Path, *more: str) -> Started:
    return started(["join", str(folder / "run"), *more], folder)


def pids_of_ranks(folder: Path) -> list[int]:
    """The processes that wait at the gate, by rank: in the order of their start."""

    def start(pid: int) -> int:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])

    return sorted((int(path.name.removeprefix("at-")) for path in folder.glob("at-*")), key=start)


def told(folder: Path, text: str) -> None:
    """Wait until the user of the run was told `text`."""

    def there() -> bool:
        live = folder / "run" / "live.json"
        return live.exists() and any(
            text in each for each in json.loads(live.read_text())["notices"]
        )

    wait_until(there, text)
