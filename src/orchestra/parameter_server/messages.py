"""What workers and servers tell each other, as messages; which requests were taken, and answered.

A message is a small float64 vector (exact for integers below 2^53).
"""

from __future__ import annotations

import enum
import functools
from array import array
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from orchestra.coordinator.events import Instruction, instruction_of, numbers_of
from orchestra.coordinator.rest import Reason, Rest

if TYPE_CHECKING:
    from orchestra.parameter_server.state import Decision, ServerState

PUSH_HEAD, ANSWER_HEAD = 9, 11
"""Numbers before the rates of a push, and before the flags of an answer."""

NOTHING = (-1, 0, 0, 0)
"""Stands in an answer for an instruction if there is none."""


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
    """The reply to a push, beside the values.

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
    """Kinds of requests; LOST, CONFIRMED and DONE where slices have replicas."""

    PUSH = 0
    PAUSE = 1
    LEAVE = 2
    LOST = 3  # the worker is
    CONFIRMED = 4  # by the other replica: it has taken the next request
    DONE = 5  # the worker has all that it wanted of this server
    WAIT = 6  # for work, where there is none left
    PART = 7  # of the gradient of a push that is to come
    OPTIONS = 8  # in messages: a PUSH with options, whose characters and number come last


PUSH, PART = Kind.PUSH, Kind.PART  # attributes of an Enum are slow to look up
_KINDS = tuple(Kind)


class Request(NamedTuple):
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
    """Encode a request; `place` is that of the slice among all, if it has a replica."""
    push = request.push
    if push is not None:
        position = -1 if push.position is None else push.position
        kind = Kind.OPTIONS if push.options else PUSH
        head = (kind, push.clock, push.samples, push.step_samples, push.loss, push.stop)
        counts = (len(push.rates), len(push.report))
        part = (PART, request.step) if request.kind is PART else ()
        body = _vector(
            (*part, *head, position, *counts, *push.rates, *push.report), push.used, push.options
        )
    elif place is None:
        body = _vector((request.kind, request.step))
    else:
        body = _vector((request.kind, request.step, request.points, request.values))
    return body if place is None else torch.cat([_vector((place, request.worker)), body])


def decode_request(message: Tensor, worker: int, points: int = 0) -> Request:
    """Decode the request of `worker` in `message`, which begins with its kind.

    A worker whose slices have no replica does not tell its quiet points so far: they are `points`.
    """
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
    _, step, *more = map(int, numbers)
    points, values = more or (points, False)
    return Request(worker, kind, None, step, points, bool(values))


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


class Reply(NamedTuple):
    """The reply to `worker`: the answer to its push, a quiet point, its next work; None if all have
    left. With `values` the values come with it."""

    worker: int
    content: Answer | QuietPoint | Instruction | None
    values: bool


class RequestLog:
    """Takes the requests for a slice, each once, and says what has to be replied. Pure.

    Where `backed`, another server takes each request after this one, and nobody is answered before
    it has confirmed that: what a worker knows outlives either server. `points` counts quiet points;
    `quiet_point` is the last one, and `gives_values` says that its workers asked for values.
    """

    def __init__(self, state: ServerState) -> None:
        self.state = state
        self.backed = False
        self.points = 0
        self.quiet_point = QuietPoint(Rest(Reason.CHECKPOINT), complete=True)
        self.gives_values = False
        self._last_pause: Request
        self._last: dict[int, Answer | Instruction] = {}  # that a push, or a wait for work, led to
        self._waits: dict[int, int] = {}  # requests for work that were taken of each worker
        self._asking: dict[int, Request] = {}
        self._settled: list[int] = []  # workers about whom something was decided, in that order
        self._left: set[int] = set()
        self._unconfirmed: deque[list[Reply]] = deque()  # what each request passed on led to

    @property
    def confirmed_all(self) -> bool:
        """True if the other server has confirmed all requests that were passed on."""
        return not self._unconfirmed

    def hear(self, request: Request) -> bool:
        """Note a request that its worker has sent. True if it is new, and has to be taken."""
        worker, kind = request.worker, request.kind
        if kind in (Kind.PUSH, Kind.PAUSE, Kind.WAIT) and worker not in self.state.live:
            return False  # it is lost, and its loss came first
        if kind is Kind.LOST:
            self._asking.pop(worker, None)
        elif kind is not Kind.LEAVE or request.values:
            self._asking[worker] = request
        new = self._is_new(request)
        # Asked again after a server was lost: the reply is that of the first time.
        if not new:
            self._settled.append(worker)
        elif self.backed:
            # One list for each request that is passed on, in order; `due` fills it.
            self._unconfirmed.append([])
        return new

    def _is_new(self, request: Request) -> bool:
        state, worker = self.state, request.worker
        if request.push is not None:
            return request.push.clock > state.clocks.get(worker, 0)
        if request.kind is Kind.PAUSE:
            return request.points == self.points and worker not in state.paused
        if request.kind is Kind.WAIT:
            return request.step > self._waits.get(worker, 0)
        return worker in state.live

    def take(self, request: Request) -> Decision:
        """Carry out a new request; both servers of a slice do so, in the same order."""
        state, worker = self.state, request.worker
        if request.push is not None:
            decision = state.push(request.push)
        elif request.kind is Kind.PAUSE:
            self._last_pause = request
            decision = state.pause(worker)
        elif request.kind is Kind.WAIT:
            self._waits[worker] = request.step
            decision = state.wait(worker)
        else:
            if request.kind is Kind.LEAVE:
                self._left.add(worker)
            decision = state.leave(worker)
        last = {answer.worker: answer for answer in decision.answers} | dict(decision.work)
        self._last.update(last)
        self._settled += last
        if decision.quiet:
            self._settled += sorted(self._asking)
            if state.live:
                self.points += 1
                # Servers may hear of a loss at different times, but of who left they agree.
                rest = Rest.of(self._last_pause.step)
                self.quiet_point = QuietPoint(rest, complete=not self._left)
                self.gives_values = self._last_pause.values
                state.resume()  # before anybody takes a checkpoint of it
        return decision

    def due(self) -> list[Reply]:
        """Return the replies that may be sent now; others are returned by `confirmed`."""
        replies = []
        for worker in self._settled:
            reply = self._reply(self._asking[worker]) if worker in self._asking else None
            if reply is not None:
                replies.append(reply)
                del self._asking[worker]
        self._settled.clear()
        if not self._unconfirmed:
            return replies
        # Behind the last request passed on, since they may show what came of it.
        self._unconfirmed[-1] += replies
        return []

    def _reply(self, request: Request) -> Reply | None:
        """Return the reply to `request`, if it is known."""
        state, worker = self.state, request.worker
        if request.kind is Kind.PAUSE:
            done = self.points > request.points
            return Reply(worker, self.quiet_point, request.values) if done else None
        if request.kind is Kind.LEAVE:
            return None if state.live else Reply(worker, None, values=True)
        last = self._last.get(worker)
        if request.push is None:
            decided = worker not in state.idle
        else:
            decided = isinstance(last, Answer) and last.clock >= request.push.clock
        if not decided:
            return None
        assert last is not None
        return Reply(worker, last, values=request.kind is Kind.PUSH)

    def confirmed(self) -> list[Reply]:
        """Note that the other server has taken one more request; return the replies due by that."""
        return self._unconfirmed.popleft()

    def backup_lost(self) -> list[Reply]:
        """Note that the other server is lost; return the replies that have waited for it."""
        self.backed = False
        replies = [reply for waiting in self._unconfirmed for reply in waiting]
        self._unconfirmed.clear()
        return replies
