"""The loop of a server: it receives, asks `ServerState` what to do, computes, and answers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor

from orchestra.errors import PeerLost
from orchestra.optimizers.spec import set_rates
from orchestra.optimizers.state import restore
from orchestra.parameter_server.state import Decision, Pause, ServerState, Update
from orchestra.parameter_server.wire import Kind, decode_push, encode_reply
from orchestra.transports.protocol import Handle, Transport
from orchestra.transports.tags import Tag

Charge = Callable[[str, int, Callable[[], Any]], None]

EPSILON = 1e-7
"""Inside the root of the adaptive strength, as in the authors' code of DC-ASGD."""


class DelayCompensation:
    """DC-ASGD (Zheng et al., ICML 2017) on one server's slice.

    w_bak(m) are the values that worker m was last given. The gradient g of worker m was computed at
    w_bak(m), and the slice w has moved since. Its Taylor expansion around w_bak(m), with
    lambda g*g for the diagonal of the Hessian, gives g + lambda g*g*(w - w_bak(m)), element by
    element. lambda is `lambda0` where `mean_square` is None (DC-ASGD-c). Otherwise (DC-ASGD-a),
    with m = `mean_square`,

        MS <- m MS + (1 - m) g*g        lambda = lambda0 / sqrt(MS + 1e-7)

    where each worker has an MS of its own, 0 at first. Memory: a copy of the slice for each
    worker, and as much again for MS.
    """

    def __init__(
        self, lambda0: float, mean_square: float | None, values: Tensor, workers: Sequence[int]
    ) -> None:
        self.lambda0 = lambda0
        self.mean_square = mean_square
        self._given = dict.fromkeys(workers, values.clone())
        self._squares: dict[int, Tensor] = {}

    def correct(self, worker: int, gradient: Tensor, values: Tensor) -> None:
        """Change the `gradient` of `worker`, in place, to what it would be at `values`."""
        if not self.lambda0:
            return
        square = gradient * gradient
        if self.mean_square is not None:
            mean = self._squares.setdefault(worker, torch.zeros_like(square))
            mean.mul_(self.mean_square).add_(square, alpha=1 - self.mean_square)
            square.div_((mean + EPSILON).sqrt_())
        gradient.addcmul_(square, values - self._given[worker], value=self.lambda0)

    def give(self, worker: int, values: Tensor) -> None:
        """`worker` computes its next gradient at `values`, which nobody changes from now on."""
        self._given[worker] = values

    def state_dict(self) -> Mapping[str, Any]:
        """State for a checkpoint."""
        return {
            "given": {str(worker): values for worker, values in self._given.items()},
            "squares": {str(worker): mean for worker, mean in self._squares.items()},
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from `saved`."""
        device = next(iter(self._given.values())).device
        self._given = {int(worker): values.to(device) for worker, values in saved["given"].items()}
        self._squares = {int(worker): mean.to(device) for worker, mean in saved["squares"].items()}


@dataclass(eq=False)
class Server:
    """Owner of one slice: `values`, flat, [elements of the slice].

    `parts` are those of parameters inside the slice (views of `values`, each with the element at
    which it begins) that `optimizer` updates; without an optimizer the server only averages, and
    answers with the average. `charge(kind, amount, function)` runs and charges computation; `clip`
    clips an averaged gradient together with the other servers; `rate_divisor` gives, for the
    staleness of an update, what its learning rates are divided by; `compensation` corrects a push
    before it is applied; `on_update` is called with the samples consumed and the new values. An
    `elastic` server owns a centre c: a push holds x of a worker and, as its rate, alpha; c <- c +
    alpha (x - c), and the answer is alpha (x - c).
    """

    state: ServerState
    values: Tensor
    parts: Sequence[tuple[Tensor, int]]
    optimizer: torch.optim.Optimizer | None
    charge: Charge
    _: KW_ONLY
    clip: Callable[[Transport, Tensor], None] | None = None
    rate_divisor: Callable[[int], int] = lambda staleness: 1
    compensation: DelayCompensation | None = None
    on_update: Callable[[int, Tensor], None] | None = None
    elastic: bool = False

    def __post_init__(self) -> None:
        self._total = torch.zeros_like(self.values)
        self._buffers: dict[int, Tensor] = {}
        self._sending: dict[int, list[Handle]] = {}
        self._paused_at = 0
        self._workers = frozenset(self.state.live)
        self._lost: set[int] = set()

    def serve_to_the_end(self, transport: Transport) -> None:
        """Serve until all workers have left: the flow of a server beside a worker."""
        while self.state.live:
            self.serve(transport)

    def serve(self, transport: Transport) -> Pause | None:
        """Serve until nothing is in flight; the quiet point, None if all workers left."""
        while True:
            try:
                handle = transport.receive(None, Tag.REQUEST)
                message = handle.wait()
                decision = self._handle(transport, handle.source, message)
            except PeerLost as lost:
                decision = self._lose(lost)
            self._follow(transport, decision)
            if decision.quiet:
                return self._become_quiet(transport)

    def _handle(self, transport: Transport, worker: int, message: Tensor) -> Decision:
        kind = Kind(int(message[0]))
        if kind is Kind.PAUSE:
            self._paused_at = int(message[1])
            return self.state.pause(worker)
        if kind is Kind.LEAVE:
            return self.state.leave(worker)
        if kind is Kind.WAIT:
            return self.state.wait(worker)
        for sending in self._sending.pop(worker, ()):
            sending.wait()
        # The gradient came before the request.
        self.keep(worker, transport.receive(worker, Tag.GRADIENT).wait())
        return self.state.push(decode_push(worker, message))

    def _lose(self, lost: PeerLost) -> Decision:
        if lost.rank not in self.state.live:
            return Decision()
        if not self.state.consistency.tolerates_loss:
            raise lost
        self._lost.add(lost.rank)
        self._sending.pop(lost.rank, None)
        self.forget(lost.rank)
        return self.state.leave(lost.rank)

    def keep(self, worker: int, gradient: Tensor) -> None:
        """Until its push is applied."""
        self._buffers[worker] = gradient.to(self.values.device)

    def forget(self, worker: int) -> None:
        """`worker` is lost."""
        self._buffers.pop(worker, None)

    def _follow(self, transport: Transport, decision: Decision) -> None:
        self.apply(transport, decision.apply)
        for answer in decision.answers:
            copy, worker = self.copy_for(answer.worker), answer.worker
            self._sending[worker] = [
                transport.send(encode_reply(answer), worker, Tag.ANSWER),
                transport.send(copy, worker, Tag.VALUES),
            ]
        for worker, item in decision.work:
            self._finish([transport.send(encode_reply(item), worker, Tag.ANSWER)])

    def apply(self, transport: Transport, updates: Sequence[Update]) -> None:
        """Apply `updates`, in order; the gradients of their pushes are kept."""
        elements = self.values.numel()
        for update in updates:
            count = len(update.pushes)
            if count > 1:
                add_up = functools.partial(self._add_up, update)
                self.charge("mix", 2 * count * elements, add_up)
            self.charge("update", elements, functools.partial(self._apply, transport, update))
            if self.on_update is not None:
                self.on_update(self.state.consumed, self.values)

    def _add_up(self, update: Update) -> None:
        """The sample-weighted average of several pushes, summed in rank order."""
        samples = sum(push.samples for push in update.pushes)
        self._total.zero_()
        for push in update.pushes if samples else ():
            self._total.add_(self._buffers[push.worker].mul_(push.samples / samples))

    def _apply(self, transport: Transport, update: Update) -> None:
        """One update from the gradient of its push, or from the average of several."""
        pushes = update.pushes
        if self.elastic:
            (push,) = pushes
            force = self._buffers[push.worker].sub_(self.values).mul_(push.rates[0])
            self.values.add_(force)
            return
        if not any(push.samples for push in pushes):
            return
        average = self._buffers[pushes[0].worker] if len(pushes) == 1 else self._total
        if self.clip is not None:
            self.clip(transport, average)
        if self.compensation is not None:
            (push,) = pushes
            self.compensation.correct(push.worker, average, self.values)
        if self.optimizer is None:
            self._total.copy_(average)
            return
        used = map(any, zip(*(push.used for push in pushes), strict=True))
        for (tensor, first), is_used in zip(self.parts, used, strict=True):
            own = average[first : first + tensor.numel()]
            tensor.grad = own.view(tensor.shape) if is_used else None
        divisor = self.rate_divisor(update.staleness)
        set_rates(self.optimizer, [rate / divisor for rate in pushes[0].rates])
        self.optimizer.step()

    def copy_for(self, worker: int) -> Tensor:
        """The values for `worker`: a copy, so that a slow worker holds up nobody."""
        copy = self._buffers[worker]
        if self.elastic:
            return copy
        values = self.values if self.optimizer is not None else self._total
        self.charge("encode", values.numel(), lambda: copy.copy_(values))
        if self.compensation is not None:
            self.compensation.give(worker, copy)  # its next gradient comes in a new buffer
        return copy

    def _become_quiet(self, transport: Transport) -> Pause | None:
        for worker in sorted(self._sending):
            self._finish(self._sending.pop(worker))
        # Servers may hear of a loss at different times, but of who left in order they agree.
        pause = Pause(self._paused_at, complete=self.state.live | self._lost == self._workers)
        self.state.resume()  # before anybody takes a checkpoint of it
        # The worker on this rank comes last: then all that this server has sent is counted.
        for worker in sorted(self.state.live, key=lambda rank: (rank == transport.rank, rank)):
            self._finish([transport.send(encode_reply(pause), worker, Tag.ANSWER)])
        return pause if self.state.live else None

    def _finish(self, sending: Sequence[Handle]) -> None:
        try:
            for handle in sending:
                handle.wait()
        except PeerLost as lost:
            self._lose(lost)

    def all_have_read(self) -> None:
        """At a quiet point: every worker was given the values as they are now."""
        self.state.all_have_read()
        if self.compensation is not None:
            given = self.values.clone()
            for worker in self.state.live:
                self.compensation.give(worker, given)

    def state_dict(self) -> Mapping[str, Any]:
        """State for a checkpoint, taken at a quiet point."""
        return {
            "values": self.values,
            "version": self.state.version,
            "consumed": self.state.consumed,
            "clocks": {str(worker): clock for worker, clock in self.state.clocks.items()},
            "read": {str(worker): version for worker, version in self.state.read.items()},
            "staleness": self.state.staleness,
            "dropped": self.state.dropped,
            "optimizer": self.optimizer,
            "compensation": self.compensation,
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from `saved`."""
        if self.optimizer is not None:
            restore(self.optimizer, saved["optimizer"])
        if self.compensation is not None:
            restore(self.compensation, saved["compensation"])
        self.values.copy_(saved["values"])
        self.state.version = saved["version"]
        self.state.consumed = saved["consumed"]
        self.state.clocks = {int(worker): clock for worker, clock in saved["clocks"].items()}
        self.state.read = {int(worker): version for worker, version in saved["read"].items()}
        self.state.staleness = list(saved["staleness"])
        self.state.dropped = saved["dropped"]
