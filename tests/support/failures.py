"""Trainings from the command line in which a rank is disturbed."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.commands import Ended, rank_pids, started

RING = "AllReduce('ring')"
HOST = socket.gethostname()


def train(task: str, strategy: str, **settings: Any) -> list[str]:
    words = ["train", "--task", f"tests.support.failing_tasks:{task}", "--strategy", strategy]
    words += ["--ranks", "3", "--out", "out"]
    settings = {"steps": 40, "batch_size": 8, "equal": "worker_batch", "snapshots": 0, **settings}
    for key, value in settings.items():
        words += ["--set", f"{key}={value}"]
    return words


class Gate:
    """A training whose workers wait in mid-epoch, for the test to do something to one rank.

    `more` is added to its command line.
    """

    def __init__(
        self,
        folder: Path,
        strategy: str,
        workers: int,
        more: Sequence[str] = (),
        **settings: Any,
    ) -> None:
        self.folder = folder
        self.temporary = folder / ("longer-than-the-name-of-a-socket-may-be-" * 3)
        self.temporary.mkdir()
        words = [*train(f"gated('{folder}')", strategy, **settings), *more]
        self.command = started(words, folder, TMPDIR=str(self.temporary))
        self._workers = workers

    def __enter__(self) -> Gate:
        arrived = lambda: len(list(self.folder.glob("at-*"))) == self._workers  # noqa: E731
        try:
            self.command.wait_until(arrived, "all workers are in mid-epoch")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        self.command.__exit__(None, None, None)

    def signal(self, rank: int, number: signal.Signals) -> None:
        os.kill(rank_pids(self.command.process.pid)[rank], number)

    def open(self) -> None:
        (self.folder / "go").touch()

    def told(self, text: str) -> None:
        """Wait until the user is told `text`."""
        self.command.wait_until(lambda: text in self.command.err(), f"the user is told {text!r}")

    def end(self) -> Ended:
        """No process and no file is left."""
        ended = self.command.end()
        # torch keeps a cache of that name for each user, and never removes it.
        left = {path.name.partition("_")[0] for path in self.temporary.iterdir()}
        assert left <= {"torchinductor"}, left
        return ended

    def entry(self) -> dict[str, Any]:
        return entry_of(self.folder)


def entry_of(folder: Path) -> dict[str, Any]:
    (entry,) = json.loads((folder / "out" / "summary.json").read_text())["runs"]
    assert isinstance(entry, dict)
    return entry
