"""Simulations in processes beside the server: the newest wishes of a page only, each done once."""

from __future__ import annotations

import queue
import signal
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.pool import AsyncResult, Pool
from typing import Any, Literal

from orchestra.engines.processes.system import die_with_parent
from orchestra.studio.menu import Entry
from orchestra.studio.situation import Situation

KEPT = 4000
"""Answers that are kept; of courses as many as KEPT_COURSES."""
KEPT_COURSES = 40


@dataclass(frozen=True)
class Job:
    """One simulation: how long a step takes, or what happens in it."""

    kind: Literal["step", "course"]
    situation: Situation
    entry: Entry


def carry_out(job: Job) -> dict[str, Any]:
    """The answer, worked out in this process."""
    from orchestra.studio.simulate import answer, watch  # torch: in the processes of the pool only

    return (answer if job.kind == "step" else watch)(job.situation, job.entry)


def begin_process() -> None:
    """What a process of the pool does first: leave Ctrl-C to its parent, load torch."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
    import torch

    import orchestra.studio.simulate  # noqa: F401

    torch.set_num_threads(1)


class Simulator:
    """Carries out jobs in a pool of `size` processes (or threads), and keeps their answers."""

    def __init__(self, pool: Pool, size: int) -> None:
        self._pool = pool
        self._size = size
        self._lock = threading.Lock()
        self._kept: dict[str, OrderedDict[Job, dict[str, Any]]] = {
            "step": OrderedDict(), "course": OrderedDict(),
        }  # fmt: skip
        self._newest: OrderedDict[str, object] = OrderedDict()

    def answers(self, page: str, jobs: Sequence[Job]) -> Iterator[tuple[Job, dict[str, Any]]]:
        """Yield the jobs as they are done, those known already first; what is begun is in order.

        Once the same `page` asks again, nothing more is begun for this call, and it ends.
        """
        token = object()
        with self._lock:
            self._newest[page] = token
            self._newest.move_to_end(page)
            if len(self._newest) > 100:
                self._newest.popitem(last=False)
        left = []
        for job in jobs:
            known = self._known(job)
            if known is None:
                left.append(job)
            else:
                yield job, known
        yield from self._worked_out(left, lambda: self._newest.get(page) is token)

    def _worked_out(
        self, jobs: Iterable[Job], wanted: Callable[[], bool]
    ) -> Iterator[tuple[Job, dict[str, Any]]]:
        done: queue.SimpleQueue[tuple[Job, dict[str, Any] | BaseException]] = queue.SimpleQueue()
        waiting, under_way = iter(jobs), 0
        while wanted():
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

    def _begin(self, job: Job, done: queue.SimpleQueue[Any]) -> AsyncResult[Any]:
        def keep(answer: dict[str, Any]) -> None:
            with self._lock:
                kept = self._kept[job.kind]
                kept[job] = answer
                if len(kept) > (KEPT if job.kind == "step" else KEPT_COURSES):
                    kept.popitem(last=False)
            done.put((job, answer))

        return self._pool.apply_async(
            carry_out, (job,), callback=keep, error_callback=lambda error: done.put((job, error))
        )

    def _known(self, job: Job) -> dict[str, Any] | None:
        with self._lock:
            known = self._kept[job.kind].get(job)
            if known is not None:
                self._kept[job.kind].move_to_end(job)
            return known
