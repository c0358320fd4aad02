"""Requests and answers as small float64 vectors (exact for integers below 2^53)."""

from __future__ import annotations

import enum
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from orchestra.parameter_server.state import Answer, Pause, Push
from orchestra.schedules.work_queue import WorkItem, item_of

PUSH_HEAD, ANSWER_HEAD = 9, 11
"""Numbers before the rates of a push, and before the flags of an answer."""

NOTHING = (-1, 0, 0, 0)
"""In place of an item of work."""


class Kind(enum.IntEnum):
    """Kinds of requests; LOST, CONFIRMED and DONE where slices have replicas."""

    PUSH = 0
    PAUSE = 1
    LEAVE = 2
    LOST = 3  # the worker is
    CONFIRMED = 4  # by the other replica: it has taken the next request
    DONE = 5  # the worker has all that it wanted of this server
    WAIT = 6  # for work, where there is none left
    PART = 7  # of the gradient of a push that is to come


@dataclass(frozen=True)
class Request:
    """A request of `worker` to a slice, or the news that it is lost.

    `push` comes with PUSH, and with PART, where it tells of the tensors of that part alone. A PAUSE
    comes after step `step`, from a worker that has `points` quiet points behind it; with `values`
    it wants them as they are at this one. `step` numbers the WAITs of a worker, from 1, and the
    PARTs of a push, from 0. `points` and `values` are for slices with replicas.
    """

    worker: int
    kind: Kind
    push: Push | None = None
    step: int = 0
    points: int = 0
    values: bool = False


def encode_request(request: Request, place: int | None = None) -> Tensor:
    """The message of a request; `place` is that of the slice among all, where it has a replica."""
    push = request.push
    if push is not None:
        position = -1 if push.position is None else push.position
        head = (Kind.PUSH, push.clock, push.samples, push.step_samples, push.loss, push.stop)
        counts = (len(push.rates), len(push.report))
        part = (Kind.PART, request.step) if request.kind is Kind.PART else ()
        body = _vector((*part, *head, position, *counts, *push.rates, *push.report), push.used)
    elif place is None:
        body = _vector((request.kind, request.step))
    else:
        body = _vector((request.kind, request.step, request.points, request.values))
    return body if place is None else torch.cat([_vector((place, request.worker)), body])


def decode_request(message: Tensor, worker: int, points: int = 0) -> Request:
    """The request of `worker` that `message` holds, from its kind on.

    A worker whose slices have no replica does not say how many quiet points it has behind it: it
    has `points`.
    """
    numbers = message.numpy()
    if numbers[0] == Kind.PART:
        push = decode_request(message[2:], worker).push
        return Request(worker, Kind.PART, push, step=int(numbers[1]))
    if numbers[0] != Kind.PUSH:
        kind, step, *more = map(int, numbers.tolist())
        points, values = more or (points, False)
        return Request(worker, Kind(kind), None, step, points, bool(values))
    _, clock, samples, step_samples, loss, stop, position, *counts = numbers[:PUSH_HEAD].tolist()
    report = PUSH_HEAD + int(counts[0])
    used = report + int(counts[1])
    push = Push(
        worker, int(clock), int(samples), int(step_samples), loss, bool(stop),
        tuple(numbers[PUSH_HEAD:report].tolist()), _flags(numbers[used:].tobytes()),
        int(position) if position >= 0 else None, tuple(numbers[report:used].tolist()),
    )  # fmt: skip
    return Request(worker, Kind.PUSH, push)


def encode_reply(content: Answer | Pause | WorkItem) -> Tensor:
    """The message of an answer, to a worker that paused or to one that waits for work."""
    if isinstance(content, Pause):
        return _vector((content.step, content.complete))
    if isinstance(content, WorkItem):
        return _vector(content)
    head = (content.version, content.staleness, content.loss, content.stop, content.consumed)
    work = content.work or NOTHING
    return _vector((*head, content.clock, content.dropped, *work), content.used)


def decode_answer(worker: int, message: Tensor) -> Answer:
    """The answer that `message` holds for `worker`."""
    numbers = message.numpy()
    version, staleness, loss, stop, consumed, clock, dropped, *work = numbers[:ANSWER_HEAD].tolist()
    return Answer(
        worker, int(version), int(staleness), loss, bool(stop), int(consumed), int(clock),
        bool(dropped), _flags(numbers[ANSWER_HEAD:].tobytes()),
        item_of(work) if work[0] >= 0 else None,
    )  # fmt: skip


def decode_pause(message: Tensor) -> Pause:
    """The pause that `message` holds."""
    step, complete = message.tolist()
    return Pause(int(step), bool(complete))


def _vector(head: Sequence[float], used: tuple[bool, ...] = ()) -> Tensor:
    # NumPy takes a third of the time that torch takes for it.
    return torch.from_numpy(np.concatenate([np.array(head, np.float64), _numbers(used)]))


# One flag for each tensor of the model, and nearly always the same ones


@functools.lru_cache(maxsize=64)
def _numbers(used: tuple[bool, ...]) -> NDArray[np.float64]:
    return np.array(used, np.float64)


@functools.lru_cache(maxsize=64)
def _flags(numbers: bytes) -> tuple[bool, ...]:
    return tuple(np.frombuffer(numbers).astype(bool).tolist())
