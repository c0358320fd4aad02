"""A server's mind: messages in, decisions out, no input or output of its own.

Consistency is two questions. Which pushes may be applied now, and together? May this worker's
pull be answered yet?
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol


@dataclass(frozen=True)
class Push:
    """A worker's gradient of its step `clock` (from 1), computed at server version `version_read`.

    `samples` are those behind the gradient; 0 where the worker had no data in this step.
    """

    worker: int
    clock: int
    samples: int
    loss: float
    stop: bool
    version_read: int
    rates: tuple[float, ...] = ()
    used: tuple[bool, ...] = ()


@dataclass(frozen=True)
class Answer:
    """What a pull is told beside the values.

    `version` counts the updates applied when the answer leaves; `staleness` those applied between
    this worker's read and its push. `loss` and `stop` are those of the pushes applied together.
    """

    worker: int
    version: int
    staleness: int
    loss: float
    stop: bool
    consumed: int
    used: tuple[bool, ...] = ()


@dataclass(frozen=True)
class Decision:
    """Apply the groups of pushes, in order, each as one update; then answer."""

    apply: tuple[tuple[Push, ...], ...] = ()
    answers: tuple[Answer, ...] = ()
    quiet: bool = False


@dataclass(frozen=True)
class Pause:
    """A quiet point: nothing is in flight. All workers paused, the last one after `step`.

    `complete` tells whether no worker of the phase has left; a lost one has not.
    """

    step: int
    complete: bool


class Consistency(Protocol):
    """When pushes become updates, and when pulls are answered."""

    tolerates_loss: bool

    def ready(self, pending: Mapping[int, Push], live: frozenset[int]) -> list[list[int]]:
        """Groups of workers whose pending pushes are to be applied now, each as one update."""
        ...

    def may_answer(self, clock: int, clocks: Mapping[int, int], live: frozenset[int]) -> bool:
        """Whether a worker whose push of step `clock` is applied may go on."""
        ...


class Synchronous:
    """One update a step, from the average over all workers that are still there."""

    tolerates_loss = False

    def ready(self, pending: Mapping[int, Push], live: frozenset[int]) -> list[list[int]]:
        """All pending pushes together, once every live worker has pushed."""
        return [sorted(pending)] if pending and live <= pending.keys() else []

    def may_answer(self, clock: int, clocks: Mapping[int, int], live: frozenset[int]) -> bool:
        """At once: the update held everybody's gradient."""
        return True


class Asynchronous:
    """One update a push, on arrival."""

    tolerates_loss = True

    def ready(self, pending: Mapping[int, Push], live: frozenset[int]) -> list[list[int]]:
        """Each push alone."""
        return [[worker] for worker in sorted(pending)]

    def may_answer(self, clock: int, clocks: Mapping[int, int], live: frozenset[int]) -> bool:
        """At once."""
        return True


@dataclass
class ServerState:
    """What a server knows of its workers.

    `live` workers are expected to push; `paused` ones wait for the quiet point. `clocks` holds
    the last step of each worker whose push was applied, `waiting` the answers held back.
    """

    consistency: Consistency
    live: set[int]
    version: int = 0
    consumed: int = 0
    clocks: dict[int, int] = field(default_factory=dict)
    pending: dict[int, Push] = field(default_factory=dict)
    paused: set[int] = field(default_factory=set)
    waiting: dict[int, Answer] = field(default_factory=dict)
    staleness: list[int] = field(default_factory=list)

    def push(self, push: Push) -> Decision:
        """A gradient has arrived."""
        assert push.worker in self.live, f"push of worker {push.worker}, which is not live"
        assert push.worker not in self.pending, f"second push of worker {push.worker}"
        expected = self.clocks.get(push.worker, 0) + 1
        assert push.clock == expected, f"worker {push.worker}: step {push.clock}, not {expected}"
        self.pending[push.worker] = push
        return self._decide()

    def pause(self, worker: int) -> Decision:
        """`worker` pushes no more until all have paused: then nothing is in flight."""
        self.paused.add(worker)
        return self._decide()

    def leave(self, worker: int) -> Decision:
        """`worker` is gone for good: it has finished, or was lost with its push, if any."""
        self.live.discard(worker)
        self.paused.discard(worker)
        self.pending.pop(worker, None)
        self.waiting.pop(worker, None)
        return self._decide()

    def resume(self) -> None:
        """After a quiet point: the paused workers may push again."""
        self.paused.clear()

    def _decide(self) -> Decision:
        groups = []
        expected = frozenset(self.live - self.paused)
        for members in self.consistency.ready(self.pending, expected):
            group = tuple(self.pending.pop(worker) for worker in members)
            groups.append(group)
            self._account(group)
        answers = [
            replace(self.waiting.pop(worker), version=self.version, consumed=self.consumed)
            for worker in sorted(self.waiting)
            if self.consistency.may_answer(self.clocks[worker], self.clocks, expected)
        ]
        quiet = not self.pending and not self.waiting and self.live <= self.paused
        return Decision(tuple(groups), tuple(answers), quiet)

    def _account(self, group: tuple[Push, ...]) -> None:
        samples = sum(push.samples for push in group)
        loss = sum(push.loss * push.samples for push in group) / samples if samples else 0.0
        stop = any(push.stop for push in group)
        used = tuple(map(any, zip(*(push.used for push in group), strict=True)))
        before = self.version
        self.version += bool(samples)
        self.consumed += samples
        for push in group:
            self.clocks[push.worker] = push.clock
            staleness = before - push.version_read
            if push.samples:
                self.staleness.append(staleness)
            self.waiting[push.worker] = Answer(
                push.worker, self.version, staleness, loss, stop, self.consumed, used
            )
