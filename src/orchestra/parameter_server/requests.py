"""Which requests a server has taken, and which replies are due: no input or output."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from orchestra.parameter_server.state import Answer, Decision, Pause, ServerState
from orchestra.parameter_server.wire import Kind, Request
from orchestra.schedules.work_queue import WorkItem


@dataclass(frozen=True)
class Reply:
    """The reply to `worker`: the answer to its push, a quiet point, its next work; None if all have
    left. With `values` the values come with it."""

    worker: int
    content: Answer | Pause | WorkItem | None
    values: bool


class RequestLog:
    """Takes the requests for a slice, each once, and says what has to be replied.

    Where `backed`, another server takes each request after this one, and nobody is answered before
    it has confirmed that: what a worker knows outlives either server. `points` counts quiet points;
    `pause` is the last one, and `gives_values` says that its workers asked for values.
    """

    def __init__(self, state: ServerState, *, backed: bool = False) -> None:
        self.state = state
        self.backed = backed
        self.points = 0
        self.pause = Pause(0, complete=True)
        self.gives_values = False
        self._last_pause: Request
        self._last: dict[int, Answer | WorkItem] = {}  # that a push, or a wait for work, led to
        self._waits: dict[int, int] = {}  # requests for work that were taken of each worker
        self._asking: dict[int, Request] = {}
        self._settled: list[int] = []  # workers about whom something was decided, in that order
        self._left: set[int] = set()
        self._unconfirmed: deque[list[Reply]] = deque()  # what each request passed on led to

    @property
    def confirmed_all(self) -> bool:
        """Nobody has to wait for the other server."""
        return not self._unconfirmed

    def hear(self, request: Request) -> bool:
        """A request has come from its worker; True if it is new, and so to be taken."""
        worker, kind = request.worker, request.kind
        if kind in (Kind.PUSH, Kind.PAUSE, Kind.WAIT) and worker not in self.state.live:
            return False  # it is lost, and its loss came first
        if kind is Kind.LOST:
            self._asking.pop(worker, None)
        elif kind is not Kind.LEAVE or request.values:
            self._asking[worker] = request
        new = self._is_new(request)
        if not new:
            self._settled.append(worker)
        elif self.backed:
            self._unconfirmed.append([])
        return new

    def _is_new(self, request: Request) -> bool:
        state, worker = self.state, request.worker
        if request.push is not None:
            seen = request.push.clock <= state.clocks.get(worker, 0)
            return not seen and worker not in state.pending
        if request.kind is Kind.PAUSE:
            return request.points == self.points and worker not in state.paused
        if request.kind is Kind.WAIT:
            return request.step > self._waits.get(worker, 0)
        return worker in state.live

    def take(self, request: Request) -> Decision:
        """Let a new request count; both servers of a slice do, in one order."""
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
                self.pause = Pause(self._last_pause.step, complete=not self._left)
                self.gives_values = self._last_pause.values
                state.resume()  # before anybody takes a checkpoint of it
        return decision

    def due(self) -> list[Reply]:
        """The replies for now; those that wait for the other server come with `confirmed`."""
        replies = []
        for worker in self._settled:
            reply = self._reply(self._asking[worker]) if worker in self._asking else None
            if reply is not None:
                replies.append(reply)
                del self._asking[worker]
        self._settled.clear()
        if not self._unconfirmed:
            return replies
        self._unconfirmed[-1] += replies
        return []

    def _reply(self, request: Request) -> Reply | None:
        """Return the reply to `request`, if it is known."""
        state, worker = self.state, request.worker
        if request.kind is Kind.PAUSE:
            done = self.points > request.points
            return Reply(worker, self.pause, request.values) if done else None
        if request.kind is Kind.LEAVE:
            return None if state.live else Reply(worker, None, values=True)
        if worker in state.pending or worker in state.waiting or worker in state.idle:
            return None
        return Reply(worker, self._last[worker], values=request.kind is Kind.PUSH)

    def confirmed(self) -> list[Reply]:
        """The other server has taken the oldest request that it had not confirmed."""
        return self._unconfirmed.popleft()

    def backup_lost(self) -> list[Reply]:
        """The other server is lost: nobody waits for it any more."""
        self.backed = False
        replies = [reply for waiting in self._unconfirmed for reply in waiting]
        self._unconfirmed.clear()
        return replies
