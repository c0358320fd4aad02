"""A slice of the parameters as a server holds it: pushes become updates, updates become answers."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor

from orchestra.errors import PeerLost
from orchestra.optimizers.spec import apply_changed_options, get_options, plain_step, set_rates
from orchestra.optimizers.state import restore
from orchestra.parameter_server.messages import (
    Answer,
    Kind,
    Push,
    Reply,
    Request,
    RequestLog,
    encode_reply,
)
from orchestra.parameter_server.placement import Part
from orchestra.parameter_server.state import ServerState, Update
from orchestra.transports.protocol import Handle, Transport
from orchestra.transports.tags import Tag

Charge = Callable[[str, int, Callable[[], Any]], Any]

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
        # Not even 0 times infinity.
        if not self.lambda0:
            return
        # lambda g*g stands for the diagonal of the Hessian.
        square = gradient * gradient
        if self.mean_square is not None:
            mean = self._squares.setdefault(worker, torch.zeros_like(square))
            mean.mul_(self.mean_square).add_(square, alpha=1 - self.mean_square)
            square.div_((mean + EPSILON).sqrt_())
        gradient.addcmul_(square, values - self._given[worker], value=self.lambda0)

    def give(self, worker: int, values: Tensor) -> None:
        """Note `values` as those of the next gradient of `worker`; nobody may change them now."""
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
class HeldSlice:
    """A slice of the parameters, `values`, flat, [elements of the slice], on a server.

    `tensors` are the parameters inside the slice that `optimizer` updates: by name a view of
    `values`, and the element of the parameter at which it begins. Without an optimizer the server
    only averages, and answers with the average. `charge(kind, amount, function)` runs and charges
    computation; `clip` clips an averaged gradient together with the other servers; `rate_divisor`
    gives, for the staleness of an update, what its learning rates are divided by; `compensation`
    corrects a push before it is applied; `on_update` is called with the samples consumed and the
    new values; `decode` makes the gradient of a push from what has arrived. Pushes come in `parts`,
    unless there are none; with `early` they are weighted, and a part is added up, applied and
    answered as soon as all workers have pushed it. An `elastic` slice is a centre c: a push holds x
    of a worker and, as its rate, alpha; c <- c + alpha (x - c), and the answer is alpha (x - c).
    """

    state: ServerState
    values: Tensor
    tensors: Mapping[str, tuple[Tensor, int]]
    optimizer: torch.optim.Optimizer | None
    charge: Charge
    _: KW_ONLY
    clip: Callable[[Transport, Tensor], None] | None = None
    rate_divisor: Callable[[int], int] = lambda staleness: 1
    compensation: DelayCompensation | None = None
    on_update: Callable[[int, Tensor], None] | None = None
    decode: Callable[[Push, Tensor], Tensor] | None = None
    parts: Sequence[Part] = ()
    early: bool = False
    elastic: bool = False

    def __post_init__(self) -> None:
        self.log = RequestLog(self.state)
        self.place = 0
        self._tags = Tag.ANSWER, Tag.VALUES
        begin = int(self.values.storage_offset())
        self._tensors = [
            (each, each.shape, each.stride(), int(each.storage_offset()) - begin)
            for each, _ in self.tensors.values()
        ]
        self._options = [] if self.optimizer is None else get_options(self.optimizer)
        self._changed = ""  # of these options, by the last push that was applied
        self._total = torch.zeros_like(self.values)
        self._buffers: dict[int, Tensor] = {}  # the gradient of each worker's last push
        start = self.parts[0].first if self.parts else 0
        self._spans = [(part.first - start, part.end - start) for part in reversed(self.parts)]
        self._given: dict[int, Tensor] | None = None
        self._agreed: Tensor | None = None
        self._sending: dict[int, list[Handle]] = {}
        self._here: dict[int, dict[int, tuple[Push, Tensor]]] = {}  # early parts, of each worker

    def replicate(self, place: int, *, backed: bool, is_mirror: bool) -> None:
        """Let another server hold the slice, too; it is at `place` among all slices.

        Values are then copied when they are decided on, not when they are sent: what a worker is
        given must not hold what only this server has taken.
        """
        self.place = place
        self.log.backed = backed
        self._given = {}
        if is_mirror:
            self._tags = Tag.BACKUP_ANSWER, Tag.BACKUP_VALUES

    def take(self, transport: Transport, request: Request, gradient: Tensor | None) -> None:
        """Carry out a new request, and apply the updates that follow from it."""
        if gradient is not None:
            gradient = gradient.to(self.values.device)
            if self.decode is not None:
                assert request.push is not None
                gradient = self.decode(request.push, gradient)
            self._buffers[request.worker] = gradient
        elif request.kind is Kind.LOST:
            self._buffers.pop(request.worker, None)
        decision = self.log.take(request)
        for update in decision.apply:
            self._update(transport, update)
        if self._given is None:
            return
        for answer in decision.answers:
            # Now, not when it is sent: further requests may be taken before the confirmation.
            self._given[answer.worker] = self._copy_for(answer.worker)
        if decision.quiet and self.state.live and self.log.gives_values:
            self._agreed = self.values.clone()
            self.all_have_read()

    def take_part(self, transport: Transport, request: Request, gradient: Tensor) -> None:
        """Take the next part of a worker's push."""
        assert request.push is not None
        worker, part = request.worker, self.parts[request.step]
        first, end = part.first - self.parts[0].first, part.end - self.parts[0].first
        gradient = gradient.to(self.values.device)
        if not self.early:
            if part.number == 0:
                self._buffers[worker] = torch.empty_like(self.values)
            self._buffers[worker][first:end].copy_(gradient)
            return
        here = self._here.setdefault(part.number, {})
        here[worker] = request.push, gradient
        # All have pushed this part. It can only be lost together with the step, since no worker of
        # a synchronous server may be lost.
        if self.state.live <= here.keys():
            # In the order of the ranks, so that the sum has the same bits whoever comes first.
            pushes = [here[worker] for worker in sorted(self._here.pop(part.number))]
            self._apply_part(part, first, end, pushes)
            values = self._source[first:end]
            for worker in sorted(here):  # who goes on when all have them: nobody changes them
                handle = transport.send(values, worker, Tag.VALUES)
                self._sending.setdefault(worker, []).append(handle)

    def _apply_part(
        self, part: Part, first: int, end: int, pushes: Sequence[tuple[Push, Tensor]]
    ) -> None:
        average = self._total[first:end]
        size, count = end - first, len(pushes)

        def add_up() -> None:
            average.zero_()
            for _, gradient in pushes:
                average.add_(gradient)

        if count > 1:
            self.charge("mix", count * size, add_up)

        def apply() -> None:
            # Nobody had data: no step, so that moments and weight decay leave the values alone.
            if not any(push.samples for push, _ in pushes):
                return
            if count == 1:
                average.copy_(pushes[0][1])
            if self.optimizer is not None:
                used = tuple(map(any, zip(*(push.used for push, _ in pushes), strict=True)))
                self._step(average, first, slice(*part.pieces), used, pushes[0][0].rates)

        self.charge("update", size, apply)

    @property
    def _source(self) -> Tensor:
        """The vector that workers are answered with."""
        return self.values if self.optimizer is not None else self._total

    def send(self, transport: Transport, replies: Collection[Reply]) -> None:
        """Send replies; at a quiet point the one to this rank's own worker comes last.

        So all that was sent is counted when that worker goes on.
        """
        own = transport.rank
        for reply in sorted(
            replies, key=lambda r: r.worker == own and not isinstance(r.content, Answer)
        ):
            worker, content, handles = reply.worker, reply.content, []
            values, buffer = None, None
            if reply.values and not self.early:
                values, buffer = self._values_of(reply)
            if content is not None:
                head = encode_reply(content)
                more = values is not None
                handles.append(transport.send(head, worker, self._tags[0], more=more))
            if values is not None and not self._spans:
                handles.append(transport.send(values, worker, self._tags[1], buffer=buffer))
            elif values is not None:
                for first, end in self._spans:
                    part, copy = values[first:end], None if buffer is None else buffer[first:end]
                    handles.append(transport.send(part, worker, self._tags[1], buffer=copy))
            self._sending[worker] = handles

    def finish_sending(self) -> None:
        """Wait until all that was sent has left; a worker that is lost meanwhile is left out."""
        for handles in self._sending.values():
            with contextlib.suppress(PeerLost):
                for handle in handles:
                    handle.wait()
        self._sending.clear()

    def _values_of(self, reply: Reply) -> tuple[Tensor, Tensor | None]:
        """Return what a worker is given, and a buffer for it if it may change meanwhile."""
        if isinstance(reply.content, Answer):
            if self._given is not None:
                return self._given[reply.worker], None
            if self.elastic or self.compensation is not None:
                return self._copy_for(reply.worker), None
            # The worker's gradient is used up, so that its memory can take a copy of the values:
            # a slow worker holds up nobody.
            self.charge("encode", self.values.numel(), lambda: None)  # by `send`
            return self._source, self._buffers.pop(reply.worker)
        if reply.content is None:
            return self.values, None
        assert self._agreed is not None
        return self._agreed, None

    def _copy_for(self, worker: int) -> Tensor:
        copy = self._buffers[worker]  # the gradient there is used up
        if self.elastic:
            return copy
        self.charge("encode", copy.numel(), lambda: copy.copy_(self._source))
        if self.compensation is not None:
            # As w_bak, without a further copy: the worker's next gradient comes in a new buffer.
            self.compensation.give(worker, copy)
        return copy

    def _update(self, transport: Transport, update: Update) -> None:
        """Apply `update`, from the gradients of its pushes."""
        elements, count = self.values.numel(), len(update.pushes)
        if not self.early:
            if count > 1:
                self.charge("mix", 2 * count * elements, functools.partial(self._add_up, update))
            self.charge("update", elements, functools.partial(self._apply, transport, update))
        if self.on_update is not None:
            self.on_update(self.state.consumed, self.values)

    def _add_up(self, update: Update) -> None:
        """Form the sample-weighted average of several pushes, summed in rank order."""
        self._total.zero_()
        for push in update.pushes if update.samples else ():
            self._total.add_(self._buffers[push.worker].mul_(push.samples / update.samples))

    def _apply(self, transport: Transport, update: Update) -> None:
        """Step from the gradient of the one push, or from the average of several."""
        pushes = update.pushes
        first = pushes[0]
        gradient = self._buffers[first.worker] if len(pushes) == 1 else self._total
        if self.elastic:
            # In place, so that the buffer of x holds alpha (x - c) then: the answer.
            self.values.add_(gradient.sub_(self.values).mul_(first.rates[0]))
            return
        if not update.samples:
            return
        if self.clip is not None:
            self.clip(transport, gradient)
        if self.optimizer is None:
            self._total.copy_(gradient)
            return
        if first.options != self._changed:
            apply_changed_options(self.optimizer, self._options, first.options)
            self._changed = first.options
        rates = self._allow_for_staleness(update, gradient)
        self._step(gradient, 0, slice(None), update.used, rates)

    def _step(
        self,
        gradient: Tensor,
        first: int,
        pieces: slice,
        used: Sequence[bool],
        rates: Sequence[float],
    ) -> None:
        """Let the optimizer update these pieces; `gradient` begins at element `first`."""
        assert self.optimizer is not None
        set_rates(self.optimizer, rates)
        tensors = self._tensors[pieces]
        base = int(gradient.storage_offset()) - first
        for (tensor, shape, stride, start), is_used in zip(tensors, used, strict=True):
            # None: the optimizer passes over a tensor that no worker has used.
            tensor.grad = gradient.as_strided(shape, stride, base + start) if is_used else None
        plain_step(self.optimizer)
        for tensor, *_ in tensors:
            tensor.grad = None

    def _allow_for_staleness(self, update: Update, gradient: Tensor) -> list[float]:
        """Apply the rule for stale pushes: correct `gradient` for updates since it was read.

        Returns the learning rates to step with.
        """
        if self.compensation is not None:
            (push,) = update.pushes
            self.compensation.correct(push.worker, gradient, self.values)
        divisor = self.rate_divisor(update.staleness)
        return [rate / divisor for rate in update.pushes[0].rates]

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
        self.state.dropped = saved["dropped"]
