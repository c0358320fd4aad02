"""A slice on two servers: which request is new, and who may be told of it when. No input or output.

Both replicas take the same requests in the same order, and so hold the same. Workers ask the
first one. It passes each new request on to the second, and tells nobody what came of it before
the second has confirmed it: what a worker knows outlives either server. Where the first dies its
workers ask the second again. A request that it has taken before is not taken twice, and is
answered as it would have been.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from orchestra.parameter_server.state import Answer, Decision, Pause, ServerState
from orchestra.parameter_server.wire import Kind, Request
from orchestra.schedules.work_queue import WorkItem


@dataclass(frozen=True)
class Reply:
    """What `worker` is told: the answer to its push, of a quiet point, what to do next; None if all
    have left.

    `values` tells whether the values come with it.
    """

    worker: int
    content: Answer | Pause | WorkItem | None
    values: bool


class Replica:
    """One replica of a slice's state, and what its workers have still to be told.

    `backed`: another server takes the requests that this one passes on. `points` counts quiet
    points; `pause` is the last one, and `gives_values` tells whether its workers asked for them.
    """

    def __init__(self, state: ServerState, *, backed: bool) -> None:
        self.state = state
        self.backed = backed
        self.points = 0
        self.pause = Pause(0, complete=True)
        self.gives_values = False
        self._last_pause: Request
        self._answers: dict[int, Answer] = {}
        self._work: dict[int, WorkItem] = {}
        self._waits: dict[int, int] = {}  # requests for work that were taken of each worker
        self._asking: dict[int, Request] = {}
        self._left: set[int] = set()
        self._unconfirmed: deque[list[Reply]] = deque()  # what each request passed on led to

    @property
    def confirmed_all(self) -> bool:
        """Whether nobody has to wait for the other replica."""
        return not self._unconfirmed

    def hear(self, request: Request) -> bool:
        """A request has come from its worker; whether it is new, and so to be taken."""
        worker = request.worker
        if request.kind in (Kind.PUSH, Kind.PAUSE, Kind.WAIT) and worker not in self.state.live:
            return False  # it is lost, and its loss came first
        if request.kind is Kind.LOST:
            self._asking.pop(worker, None)
        else:
            self._asking[worker] = request
        new = self._is_new(request)
        if new and self.backed:
            self._unconfirmed.append([])
        return new

    def take(self, request: Request) -> Decision:
        """Let a new request count; both replicas do, in one order."""
        state, worker = self.state, request.worker
        if request.kind is Kind.PUSH:
            assert request.push is not None
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
        self._answers.update((answer.worker, answer) for answer in decision.answers)
        self._work.update(decision.work)
        if decision.quiet and state.live:
            self.points += 1
            self.pause = Pause(self._last_pause.step, complete=not self._left)
            self.gives_values = self._last_pause.values
            state.resume()
        return decision

    def due(self) -> list[Reply]:
        """What may be told now; what has to wait for the other replica comes with `confirmed`."""
        replies = []
        for worker in sorted(self._asking):
            reply = self._reply(self._asking[worker])
            if reply is not None:
                replies.append(reply)
                del self._asking[worker]
        if not self._unconfirmed:
            return replies
        self._unconfirmed[-1] += replies
        return []

    def confirmed(self) -> list[Reply]:
        """The other replica has taken the oldest request that it had not confirmed."""
        return self._unconfirmed.popleft()

    def left_alone(self) -> list[Reply]:
        """The other replica is lost: nobody waits for it any more."""
        self.backed = False
        replies = [reply for waiting in self._unconfirmed for reply in waiting]
        self._unconfirmed.clear()
        return replies

    def _is_new(self, request: Request) -> bool:
        state, worker = self.state, request.worker
        if request.kind is Kind.PUSH:
            assert request.push is not None
            seen = request.push.clock <= state.clocks.get(worker, 0)
            return not seen and worker not in state.pending
        if request.kind is Kind.PAUSE:
            return request.points == self.points and worker not in state.paused
        if request.kind is Kind.WAIT:
            return request.step > self._waits.get(worker, 0)
        return worker in state.live

    def _reply(self, request: Request) -> Reply | None:
        """The reply to `request`, if it is known."""
        state, worker = self.state, request.worker
        if request.kind is Kind.PUSH:
            done = worker not in state.pending and worker not in state.waiting
            return Reply(worker, self._answers[worker], values=True) if done else None
        if request.kind is Kind.PAUSE:
            done = self.points > request.points
            return Reply(worker, self.pause, request.values) if done else None
        if request.kind is Kind.WAIT:
            done = worker not in state.idle
            return Reply(worker, self._work[worker], values=False) if done else None
        return None if state.live else Reply(worker, None, values=True)
