"""A rank is killed at a random moment of a training in shared memory: it is named, and
nothing is left.

`pytest -m lab tests/system/engines/test_killed_ranks.py -s` kills 500, and tells when;
`-k "[7-"` takes one piece of them.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing import forkserver
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.support.commands import rank_pids
from tests.support.training import settings
from tests.support.waiting import descendants, wait_until

from orchestra.engines.events import Event, Exited, Failed, Finished, Heartbeat, Joined, Notice
from orchestra.engines.processes import launch
from orchestra.engines.processes.training import program
from orchestra.errors import RunFailed
from orchestra.settings import parse
from orchestra.strategies.registry import STRATEGIES
from orchestra.trainer.settings import Run
from orchestra.worker.runtime import PassingReporter, RankActivity, Runtime

IN_MEMORY = ("AllReduce('ring')", "ParameterServer", "Hogwild()")
"""By collectives, by large messages, and by parameters in shared memory."""
STEPS = 30
PATIENCE = 1000.0  # a run here ends because a rank has died, not because somebody waited
LIMIT_SECONDS = 150.0  # after which a run hangs
PIECES, KILLS = 25, 20


@dataclass
class Counted(PassingReporter):
    """Adds a byte to a file at each step."""

    path: Path

    def progress(self, *_: Any, **facts: Any) -> None:
        with self.path.open("ab") as file:
            file.write(b".")
        super().progress(**facts)


def counted(runtime: Runtime, assignment: tuple[Run, Path]) -> None:
    reporter = Counted(runtime.reporter, assignment[1] / f"steps of {runtime.rank}")
    program(replace(runtime, reporter=reporter), assignment)


class Trained:
    """A training on processes, in which a rank may be killed.

    Args:
        victim: the rank to kill.
        phase: which it has to be in: set-up, training or end.
        steps: that all ranks have to have made together.
        delay: seconds from then on.

    Attributes:
        failure: the first line of why it ended, if it did not end well.
        finished: the ranks that have delivered their results.
        setup: seconds from the moment at which all ranks were there until the victim trained.
        hit: the victim's phase when it was killed, and whether it had mapped shared memory.
        ending: seconds from the kill to the end of the run.
        noticed: the ranks of whose loss others told before it was known how the victim had ended.
    """

    def __init__(
        self,
        strategy: str,
        ranks: int,
        folder: Path,
        victim: int = 0,
        phase: str = "end",
        steps: float = math.inf,
        delay: float = 0.0,
    ) -> None:
        self.failure: str | None = None
        self.finished: set[int] = set()
        self.noticed: set[int | None] = set()
        self.setup = 0.0
        self.hit: tuple[str, bool] | None = None
        self._folder, self._ranks, self._victim = folder, ranks, victim
        self._wanted, self._steps, self._delay = phase, steps, delay
        self._missing, self._began, self._killed_at = set(range(ranks)), 0.0, math.inf
        self._phase, self._known = "set-up", False
        self._over = threading.Event()
        self._killer = threading.Thread(target=self._kill)
        folder.mkdir()
        chosen = parse(strategy, STRATEGIES, where="test")
        task = "images(samples=96, model='wide')"
        run = settings(chosen, ranks, task, steps=STEPS, optimizer="SGD(lr=0.01)")
        try:
            launch(
                counted, (run, folder), ranks,
                on_event=self._on_event, patience=PATIENCE, limit=LIMIT_SECONDS,
            )  # fmt: skip
        except RunFailed as failed:
            self.failure = str(failed).split("\n", 1)[0]
        self.ending = time.monotonic() - self._killed_at
        self._over.set()
        if self._killer.ident is not None:
            self._killer.join()

    def steps_made(self) -> int:
        return sum(path.stat().st_size for path in self._folder.glob("steps of *"))

    def _on_event(self, event: Event | Notice) -> None:
        if isinstance(event, Joined):
            self._missing.discard(event.rank)
            if not self._missing:
                self._began = time.monotonic()
                self._killer.start()
        elif isinstance(event, Finished):
            self.finished.add(event.rank)
        elif isinstance(event, Failed) and not self._known:
            self.noticed.add(event.failure.lost)
        elif isinstance(event, Exited) and event.rank == self._victim:
            self._known = True
        elif isinstance(event, Heartbeat) and event.rank == self._victim:
            if self._phase == "set-up" and event.activity != RankActivity.SET_UP:
                self.setup = time.monotonic() - self._began
            training = ("training", "serving")
            names = {"set-up": "set-up", **dict.fromkeys(training, "training")}
            self._phase = names.get(event.activity, "end")

    def _kill(self) -> None:
        pids = rank_pids()
        if len(pids) != self._ranks or math.isinf(self._steps):
            return
        process = os.pidfd_open(pids[self._victim])
        try:
            while self._wanted not in (self._phase, "set-up") or self.steps_made() < self._steps:
                if self._over.wait(0.001):
                    return
            self._over.wait(self._delay)
            mapped = "/memfd:orchestra " in Path(f"/proc/{pids[self._victim]}/maps").read_text()
            signal.pidfd_send_signal(process, signal.SIGKILL)
            self._killed_at, self.hit = time.monotonic(), (self._phase, mapped)
        except (FileNotFoundError, ProcessLookupError):
            pass  # it has left before
        finally:
            os.close(process)


def moment(part: float, draw: Random, whole: Trained) -> dict[str, Any]:
    """When to kill, at `part` of a training that was like the `whole` one."""
    if part < 0.15:
        return {"phase": "set-up", "steps": 0, "delay": part / 0.15 * whole.setup}
    if part < 0.9:
        steps = int((part - 0.15) / 0.75 * whole.steps_made())
        return {"phase": "training", "steps": steps, "delay": draw.uniform(0, 0.01)}
    return {"phase": "end", "steps": 0, "delay": draw.uniform(0, 0.1)}


def held() -> dict[str, Counter[Any]]:
    """What there is of this process and its fork server: descriptors, mapped files, children; and
    the names of all shared memory. (Names of semaphores are those of other programs.)"""
    names = (path.name for path in Path("/dev/shm").iterdir() if not path.name.startswith("sem."))
    found: dict[str, Counter[Any]] = {"children": Counter(descendants()), "names": Counter(names)}
    server: Any = forkserver._forkserver
    for pid in (os.getpid(), server._forkserver_pid):
        text = Path(f"/proc/{pid}/maps").read_text()
        lines = [line.split(maxsplit=5) for line in text.splitlines()]
        found[f"files that {pid} has mapped"] = Counter(line[5] for line in lines if line[4] != "0")
        found[f"descriptors of {pid}"] = Counter(_descriptors(pid))
    return found


def _descriptors(pid: int) -> Iterator[str]:
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            yield str(entry.readlink()).partition("[")[0]  # sockets and pipes by their kind
        except FileNotFoundError:
            continue


def left(before: dict[str, Counter[Any]]) -> list[str]:
    """What there is in addition, once what is on its way out is gone."""
    found: list[str] = []

    def gone() -> bool:
        more = {name: now - before[name] for name, now in held().items()}
        found[:] = [f"{name}: {dict(items)}" for name, items in more.items() if items]
        return not found

    with contextlib.suppress(AssertionError):  # the caller says what is left
        wait_until(gone, "nothing is left")
    return found


@pytest.mark.parametrize(
    ("piece", "number"),
    [
        (PIECES, 3),
        *(pytest.param(piece, KILLS, marks=pytest.mark.lab) for piece in range(PIECES)),
    ],
)
@pytest.mark.timeout(1800)
def test_a_rank_killed_in_training_is_named_and_nothing_is_left(
    piece: int, number: int, tmp_path: Path
) -> None:
    """Moments are spread over set-up, steps and end; strategies take turns."""
    draw, ranks = Random(piece), 2 + piece % 3
    wholes = {name: Trained(name, ranks, tmp_path / name) for name in IN_MEMORY}
    assert all(whole.finished == set(range(ranks)) for whole in wholes.values())
    before = held()  # now that there is a fork server
    done: Counter[tuple[str, str, bool]] = Counter()
    slowest = 0.0
    parts = [(index + draw.random()) / number for index in range(number)]
    draw.shuffle(parts)
    for index in itertools.count():
        strategy, victim = IN_MEMORY[index % 3], draw.randrange(ranks)
        part = parts[index] if index < number else draw.random()
        when = moment(part, draw, wholes[strategy])
        run = Trained(strategy, ranks, tmp_path / str(index), victim, **when)
        where = f"run {index}: {strategy}, rank {victim}, {when}: {run.hit}, {run.failure}"
        if run.failure is None:  # the rank had delivered its result before
            assert run.finished == set(range(ranks)), f"a hang in {where}"
        else:
            assert run.hit is not None, where
            assert run.failure.startswith(f"rank {victim} on "), where
            assert run.failure.endswith(" was killed by SIGKILL"), where
            assert run.noticed <= {victim}, where
            done[strategy, *run.hit] += 1
            slowest = max(slowest, run.ending)
        assert left(before) == [], where
        if done.total() == number:
            break
        assert index < 3 * number, "hardly any rank is killed before it has left"
    print(
        f"{number} kills in {index + 1} runs of {ranks} ranks; {slowest:.2f} s to the slowest end"
    )
    for (strategy, phase, mapped), times in sorted(done.items()):
        print(f"{times:3} {strategy}, {phase}, {'' if mapped else 'no '}memory was mapped")
