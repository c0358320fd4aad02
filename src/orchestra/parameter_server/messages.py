"""What workers and servers tell each other, as messages.

A message is a small float64 vector (exact for integers below 2^53).
"""

from __future__ import annotations

import enum
import functools
from array import array
from typing import Any, NamedTuple

import torch
from torch import Tensor

from orchestra.coordinator.events import Instruction, instruction_of, numbers_of
from orchestra.coordinator.rest import Rest

PUSH_HEAD, ANSWER_HEAD = 9, 11
"""Numbers before the rates of a push, and before the flags of an answer."""

NOTHING = (-1, 0, 0, 0)
"""The place of the instruction in an answer that has no instruction."""


# Tuples: a message makes several of them, and a frozen dataclass takes five times as long to make.


class Push(NamedTuple):
    """A worker's gradient of its step `clock` (from 1).

    `samples` are those behind the gradient; 0 where the worker had no data in this step.
    `step_samples` are those of the step over all workers. `position`: where they begin in the
    global order, if they came from a queue. `report`: the input of a rule that ends
    the phase, from the step's loss on, where there is such a rule. `options`: of the optimizer's
    groups, those that have changed since the start; see `changed_options`. `staleness` is set by
    the server: the updates between the worker's read and this push.
    """

    worker: int
    clock: int
    samples: int
    step_samples: int
    loss: float
    stop: bool
    rates: tuple[float, ...] = ()
    used: tuple[bool, ...] = ()
    position: int | None = None
    report: tuple[float, ...] = ()
    options: str = ""
    staleness: int = 0


class Answer(NamedTuple):
    """The reply to a push, without the values, which follow it.

    `version` counts the updates applied when the answer leaves; `staleness` those applied between
    this worker's read and its push. `loss` and `stop` are those of the pushes applied together.
    `clock` is the step that the worker has behind it now. A push that was `dropped` came too late
    for its step, and the worker may be several steps further than it was. `work`: what the worker
    does next, from the server that holds the coordinator.
    """

    worker: int
    version: int
    staleness: int
    loss: float
    stop: bool
    consumed: int
    clock: int
    dropped: bool = False
    used: tuple[bool, ...] = ()
    work: Instruction | None = None


class QuietPoint(NamedTuple):
    """All workers have paused, for this `rest`, and nothing is in flight.

    `complete`: no worker of the phase has signed off; a lost worker does not count as one that has.
    """

    rest: Rest
    complete: bool


class Kind(enum.IntEnum):
    """Kinds of requests."""

    PUSH = 0
    PAUSE = 1
    LEAVE = 2
    LOST = 3  # the worker is; the server tells itself
    WAIT = 4  # for work, where there is none left
    PART = 5  # of the gradient of a push that is to come
    OPTIONS = 6  # in messages: a PUSH with options, whose characters and number come last


PUSH, PART = Kind.PUSH, Kind.PART  # attributes of an Enum are slow to look up
_KINDS = tuple(Kind)


class Request(NamedTuple):
    """A request of `worker` to a slice, or the news that it is lost.

    `push` comes with PUSH, and with PART, where it tells of the tensors of that part alone. `step`
    is the code of the rest that a PAUSE is for; it numbers the WAITs of a worker, from 1, and the
    PARTs of a push, from 0.
    """

    worker: int
    kind: Kind
    push: Push | None = None
    step: int = 0


def encode_request(request: Request) -> Tensor:
    """Encode a request."""
    push = request.push
    if push is None:
        return _vector((request.kind, request.step))
    position = -1 if push.position is None else push.position
    kind = Kind.OPTIONS if push.options else PUSH
    head = (kind, push.clock, push.samples, push.step_samples, push.loss, push.stop)
    counts = (len(push.rates), len(push.report))
    part = (PART, request.step) if request.kind is PART else ()
    numbers = (*part, *head, position, *counts, *push.rates, *push.report)
    return _vector(numbers, push.used, push.options)


def decode_request(message: Tensor, worker: int) -> Request:
    """Decode the request of `worker` in `message`."""
    numbers = tuple(message.tolist())
    kind = _KINDS[int(numbers[0])]
    if kind is PART:
        push = Push(worker, *_content_of_push(numbers[2:]))
        return Request(worker, kind, push, int(numbers[1]))
    if kind is PUSH:
        return Request(worker, kind, Push(worker, *_content_of_push(numbers)))
    if kind is Kind.OPTIONS:
        first = -1 - int(numbers[-1])
        options = bytes(map(int, numbers[first:-1])).decode("ascii")
        push = Push(worker, *_content_of_push(numbers[:first]))
        return Request(worker, PUSH, push._replace(options=options))
    return Request(worker, kind, step=int(numbers[1]))


# What messages say is nearly always the same for all workers, and so made and read once.


@functools.lru_cache(maxsize=256)
def _vector(head: tuple[float, ...], used: tuple[bool, ...] = (), options: str = "") -> Tensor:
    """Encode numbers, a flag for each tensor of the model, and text in ASCII with its length.

    Nobody may change the result.
    """
    text = (*options.encode("ascii"), len(options)) if options else ()
    # `torch.tensor` takes three times as long for it.
    return torch.frombuffer(array("d", (*head, *used, *text)), dtype=torch.float64)


@functools.lru_cache(maxsize=256)
def _content_of_push(numbers: tuple[float, ...]) -> tuple[Any, ...]:
    """Decode the fields of a `Push` behind its worker."""
    _, clock, samples, step_samples, loss, stop, position, *counts = numbers[:PUSH_HEAD]
    report = PUSH_HEAD + int(counts[0])
    used = report + int(counts[1])
    return (
        int(clock), int(samples), int(step_samples), loss, bool(stop), numbers[PUSH_HEAD:report],
        tuple(map(bool, numbers[used:])), int(position) if position >= 0 else None,
        numbers[report:used],
    )  # fmt: skip


@functools.lru_cache(maxsize=256)
def _content_of_answer(numbers: tuple[float, ...]) -> tuple[Any, ...]:
    """Decode the fields of an `Answer` behind its worker."""
    version, staleness, loss, stop, consumed, clock, dropped, *work = numbers[:ANSWER_HEAD]
    return (
        int(version), int(staleness), loss, bool(stop), int(consumed), int(clock), bool(dropped),
        tuple(map(bool, numbers[ANSWER_HEAD:])), instruction_of(work) if work[0] >= 0 else None,
    )  # fmt: skip


def encode_reply(content: Answer | QuietPoint | Instruction) -> Tensor:
    """Encode an answer to a push, a quiet point, or an instruction."""
    if isinstance(content, QuietPoint):
        return _vector((content.rest.code, content.complete))
    if not isinstance(content, Answer):
        return _vector(numbers_of(content))
    head = (content.version, content.staleness, content.loss, content.stop, content.consumed)
    work = NOTHING if content.work is None else numbers_of(content.work)
    return _vector((*head, content.clock, content.dropped, *work), content.used)


def decode_answer(worker: int, message: Tensor) -> Answer:
    """Decode the answer for `worker`."""
    return Answer(worker, *_content_of_answer(tuple(message.tolist())))


def decode_quiet_point(message: Tensor) -> QuietPoint:
    """Decode a quiet point."""
    code, complete = message.tolist()
    return QuietPoint(Rest.of(int(code)), bool(complete))
