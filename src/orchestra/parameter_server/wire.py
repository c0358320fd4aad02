"""Pushes and answers as small float64 vectors (exact for integers below 2^53)."""

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


@dataclass(frozen=True)
class Request:
    """A request of `worker` to a slice, or the news that it is lost.

    `push` comes with PUSH. A PAUSE comes after step `step`, from a worker that has `points` quiet
    points behind it; with `values` it wants them as they are at this one. `step` numbers the WAITs
    of a worker, from 1.
    """

    worker: int
    kind: Kind
    push: Push | None = None
    step: int = 0
    points: int = 0
    values: bool = False


def request(kind: Kind, step: int) -> Tensor:
    """A request without a gradient; `step` is the step after which the worker pauses."""
    return torch.tensor([kind, step], dtype=torch.float64)


def encode_request(home: int, request: Request) -> Tensor:
    """The message of a request to a slice with a replica; `home` is the place of the slice."""
    if request.push is not None:
        body = encode_push(request.push)
    else:
        numbers = [request.kind, request.step, request.points, request.values]
        body = torch.tensor([float(x) for x in numbers], dtype=torch.float64)
    return torch.cat([torch.tensor([home, request.worker], dtype=torch.float64), body])


def decode_request(message: Tensor) -> tuple[int, Request]:
    """The place of the slice, and the request, that `message` holds."""
    home, worker, kind = (int(number) for number in message[:3])
    if kind == Kind.PUSH:
        return home, Request(worker, Kind.PUSH, decode_push(worker, message[2:]))
    step, points, values = (int(number) for number in message[3:])
    return home, Request(worker, Kind(kind), None, step, points, bool(values))


def encode_pause(pause: Pause) -> Tensor:
    """The message to a paused worker at the quiet point."""
    return torch.tensor([pause.step, pause.complete], dtype=torch.float64)


def decode_pause(message: Tensor) -> Pause:
    """The pause that `message` holds."""
    step, complete = message.tolist()
    return Pause(int(step), bool(complete))


def encode_work(item: WorkItem) -> Tensor:
    """The message to a worker that waits for work."""
    return torch.tensor(item, dtype=torch.float64)


def decode_work(message: Tensor) -> WorkItem:
    """The item that `message` holds."""
    return item_of(message.tolist())


def encode_push(push: Push) -> Tensor:
    """The message of a push."""
    position = -1 if push.position is None else push.position
    head = (Kind.PUSH, push.clock, push.samples, push.step_samples, push.loss, push.stop, position)
    counts = (len(push.rates), len(push.report))
    return _vector((*head, *counts, *push.rates, *push.report), push.used)


def decode_push(worker: int, message: Tensor) -> Push:
    """The push that `message` of `worker` holds."""
    numbers = message.numpy()
    _, clock, samples, step_samples, loss, stop, position, *counts = numbers[:PUSH_HEAD].tolist()
    report = PUSH_HEAD + int(counts[0])
    used = report + int(counts[1])
    return Push(
        worker, int(clock), int(samples), int(step_samples), loss, bool(stop),
        tuple(numbers[PUSH_HEAD:report].tolist()), _flags(numbers[used:].tobytes()),
        int(position) if position >= 0 else None, tuple(numbers[report:used].tolist()),
    )  # fmt: skip


def encode_answer(answer: Answer) -> Tensor:
    """The message of an answer."""
    head = (answer.version, answer.staleness, answer.loss, answer.stop, answer.consumed)
    return _vector((*head, answer.clock, answer.dropped, *(answer.work or NOTHING)), answer.used)


def decode_answer(worker: int, message: Tensor) -> Answer:
    """The answer that `message` holds for `worker`."""
    numbers = message.numpy()
    version, staleness, loss, stop, consumed, clock, dropped, *work = numbers[:ANSWER_HEAD].tolist()
    return Answer(
        worker, int(version), int(staleness), loss, bool(stop), int(consumed), int(clock),
        bool(dropped), _flags(numbers[ANSWER_HEAD:].tobytes()),
        item_of(work) if work[0] >= 0 else None,
    )  # fmt: skip


def _vector(head: Sequence[float], used: tuple[bool, ...]) -> Tensor:
    """NumPy takes a third of the time that torch takes for it."""
    return torch.from_numpy(np.concatenate([np.array(head, np.float64), _numbers(used)]))


# One flag for each tensor of the model, and nearly always the same ones


@functools.lru_cache(maxsize=64)
def _numbers(used: tuple[bool, ...]) -> NDArray[np.float64]:
    return np.array(used, np.float64)


@functools.lru_cache(maxsize=64)
def _flags(numbers: bytes) -> tuple[bool, ...]:
    return tuple(np.frombuffer(numbers).astype(bool).tolist())
