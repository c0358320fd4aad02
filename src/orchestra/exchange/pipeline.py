"""A step of a pipeline: micro-batches go through the stages and their gradients come back."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from orchestra.collectives import Group, all_reduce
from orchestra.errors import InputError
from orchestra.exchange.stages import Stage, make_stage
from orchestra.transports.protocol import Handle
from orchestra.transports.tags import Tag
from orchestra.worker.batches import Batch, split_batch
from orchestra.worker.runtime import Work
from orchestra.worker.worker import Worker


class Pass(NamedTuple):
    """A pass of one micro-batch through one stage."""

    backward: bool
    microbatch: int


def passes_of(schedule: str, stages: int, stage: int, microbatches: int) -> tuple[Pass, ...]:
    """The passes of a step, in their order, on stage `stage`, from 0, of `stages`.

    "gpipe" (Huang et al., NeurIPS 2019) takes all forward passes, then all backward passes, and
    keeps the activations of all micro-batches. "1f1b" (Narayanan et al., SC 2021) takes the two in
    turns as soon as it can: stage s of S keeps those of S - s micro-batches at most, and a step
    takes as long.

    Both kinds go through the micro-batches from the first to the last, on every stage alike:
    messages between two stages need no numbers, and gradients add up in the same order as without
    stages.
    """
    ahead = microbatches if schedule == "gpipe" else min(stages - 1 - stage, microbatches)
    passes = [Pass(False, number) for number in range(ahead)]
    for number in range(ahead, microbatches):
        passes += [Pass(False, number), Pass(True, number - ahead)]
    passes += [Pass(True, number) for number in range(microbatches - ahead, microbatches)]
    return tuple(passes)


ONE_AT_A_TIME = threading.Lock()  # while torch.fx traces, no thread can call any module


@dataclass(frozen=True)
class PipelineSlot:
    """The place of `rank` in a pipeline: the ranks of one follow each other."""

    rank: int
    ranks: int
    stages: int

    @property
    def stage(self) -> int:
        return self.rank % self.stages

    @property
    def is_first(self) -> bool:
        """Its stage takes the batch."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Its stage knows the loss."""
        return self.stage == self.stages - 1

    @property
    def pipeline(self) -> Group:
        """The ranks of this rank's pipeline, in the order of the stages."""
        first = self.rank - self.stage
        return Group(tuple(range(first, first + self.stages)))

    @property
    def replicas(self) -> Group:
        """The ranks that have the same stage, in all pipelines."""
        return Group(tuple(range(self.stage, self.ranks, self.stages)))


def stage_of(
    module: nn.Module,
    loss_of: Callable[[nn.Module], Tensor],
    slot: PipelineSlot,
    cuts: tuple[str, ...] | None,
) -> Stage:
    """The stage of one rank; `loss_of` gives a model's loss on a few samples."""
    with ONE_AT_A_TIME:
        args, kwargs = inputs_of(loss_of)
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
        bound.apply_defaults()
        return make_stage(module, bound.args, slot.stages, cuts, slot.stage)


def is_stage(module: nn.Module) -> bool:
    """Whether `module` is a part of a model."""
    return isinstance(module, Stage)


class StandIn(nn.Module):
    """What a task's loss is given in place of the model, which no rank has as a whole."""

    def __init__(self, answer: Callable[..., Any]) -> None:
        super().__init__()
        self.calls = 0
        self._answer = answer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model would give."""
        self.calls += 1
        return self._answer(*args, **kwargs)

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """No rank knows all of them."""
        raise InputError(
            "Pipeline: the task's loss reads the parameters of the model, which no rank has as a "
            "whole: use weight_decay of the optimizer, or another strategy"
        )


class _Called(BaseException):
    """The loss has called the model: that is as far as a first stage follows it."""


def inputs_of(loss_of: Callable[[nn.Module], Tensor]) -> tuple[Any, ...]:
    """What a loss calls the model with: its arguments by position, and those by name."""

    def stop(*args: Any, **kwargs: Any) -> Any:
        raise _Called(args, kwargs)

    try:
        loss_of(StandIn(stop))
    except _Called as called:
        return called.args
    raise _not_once(0)


def _not_once(calls: int) -> InputError:
    return InputError(
        f"Pipeline: the task's loss calls the model {calls} times; between stages it can be "
        "called once"
    )


@dataclass
class PipelineStep:
    """Runs this rank's passes of a step.

    `stash` has the micro-batches between their passes: what came in, and what came out (the loss at
    last).
    """

    worker: Worker
    slot: PipelineSlot
    microbatches: int
    schedule: str
    stash: dict[int, tuple[list[Tensor], list[Tensor]]] = field(default_factory=dict)
    sent: list[Handle] = field(default_factory=list)
    loss: float = 0.0

    def run(self, batch: Batch) -> float:
        """The gradient of the mean loss over `batch`; the loss on the last stage, 0 on others."""
        worker, own = self.worker, self.slot
        parts = split_batch(batch, self.microbatches, "Pipeline.microbatches")
        total = sum(samples for _, samples in parts)
        self.loss = 0.0
        for backward, number in passes_of(self.schedule, own.stages, own.stage, len(parts)):
            part, samples = parts[number]
            worker.gradients.last_backward = backward and number == len(parts) - 1
            if backward:
                self._backward(number, samples)
            else:
                self._forward(number, part, samples, samples / total)
        for handle in self.sent:
            handle.wait()
        self.sent.clear()
        return self.loss

    def _forward(self, number: int, part: Batch, samples: int, share: float) -> None:
        received = [] if self.slot.is_first else self._receive_activations()
        results = self._charged("forward", samples, lambda: self._results(part, received, share))
        self.stash[number] = received, results
        if not self.slot.is_last:
            for result in results:
                self._send(result.detach(), +1)

    def _results(self, part: Batch, received: list[Tensor], share: float) -> list[Tensor]:
        worker, stage = self.worker, self.worker.module
        if not self.slot.is_last:
            with worker.casting():
                if not self.slot.is_first:
                    return list(stage(*received))
                args, kwargs = inputs_of(lambda model: worker.loss_of(model, part))
                return list(stage(*args, **kwargs))
        if self.slot.is_first:
            loss = worker.loss_of(stage, part)
        else:
            model = StandIn(lambda *_, **__: stage(*received))
            loss = worker.loss_of(model, part)
            if model.calls != 1:
                raise _not_once(model.calls)
        self.loss += share * float(loss.detach())
        return [loss if share == 1.0 else loss * share]

    def _backward(self, number: int, samples: int) -> None:
        received, results = self.stash.pop(number)
        gradients: list[Tensor | None] = [None]
        if not self.slot.is_last:
            gradients = [self._arriving(result) for result in results]
        pairs = zip(results, gradients, strict=True)
        trained = [(result, gradient) for result, gradient in pairs if result.requires_grad]

        def backward() -> None:
            if trained:
                torch.autograd.backward([r for r, _ in trained], [g for _, g in trained])

        self._charged("backward", samples, backward)
        for tensor in received:
            if tensor.requires_grad:
                self._send(torch.zeros_like(tensor) if tensor.grad is None else tensor.grad, -1)

    def _receive_activations(self) -> list[Tensor]:
        source, transport = self.worker.rank - 1, self.worker.transport
        stage, device = self.worker.module, self.worker.layout.device
        assert isinstance(stage, Stage)
        received = [
            transport.receive(source, Tag.ACTIVATION).wait().to(device)
            for _ in range(stage.tensors_in)
        ]
        return [tensor.requires_grad_(tensor.is_floating_point()) for tensor in received]

    def _arriving(self, result: Tensor) -> Tensor | None:
        """The gradient of `result`: the next stage sends one for all that could have one."""
        if not result.is_floating_point():
            return None
        source = self.worker.rank + 1
        arrived = self.worker.transport.receive(source, Tag.ACTIVATION_GRADIENT).wait()
        return arrived.to(result.device)

    def _send(self, tensor: Tensor, direction: int) -> None:
        tag = Tag.ACTIVATION if direction > 0 else Tag.ACTIVATION_GRADIENT
        own = tensor.detach().contiguous()
        self.sent = [handle for handle in self.sent if not handle.done()]
        self.sent.append(self.worker.transport.send(own, self.worker.rank + direction, tag))

    def _charged(self, kind: str, samples: int, function: Callable[[], Any]) -> Any:
        names = tuple(slot.name for slot in self.worker.layout.slots)
        return self.worker.compute.run(Work(kind, samples, names), function)


def sum_tied(worker: Worker, slot: PipelineSlot) -> None:
    """Parameters that several stages have get the sum of the stages' gradients, on each."""
    stage, gradients = worker.module, worker.gradients
    if not isinstance(stage, Stage):
        return
    index = {each.name: place for place, each in enumerate(worker.layout.slots)}
    for name, stages in stage.holders.items():
        if len(stages) > 1 and slot.stage in stages:
            place = index[name]
            view, used = gradients.views[place], gradients.used[place]
            total = torch.cat([view.reshape(-1), view.new_tensor([float(used)])])
            group = Group(tuple(slot.pipeline.ranks[holder] for holder in stages))
            all_reduce(worker.transport, total, "ring", group, Tag.TIED)
            view.copy_(total[:-1].view(view.shape))
            gradients.used[place] = bool(total[-1] > 0)
    gradients.forget_unused()


def agree_on_loss(worker: Worker, slot: PipelineSlot) -> None:
    """All stages learn the loss, which the last one knows, and whether somebody wants to stop."""
    step = worker.step
    known = torch.zeros(2 + slot.ranks, dtype=torch.float64)
    known[0] = float(step.stop)
    if slot.is_last:
        known[1] = step.loss
        known[2:] = torch.tensor(step.losses, dtype=torch.float64)
    all_reduce(worker.transport, known, "butterfly", slot.pipeline, Tag.AGREE)
    stop, step.loss, *losses = known.tolist()
    step.stop, step.losses = stop > 0, tuple(losses)


def clip_stages(worker: Worker, slot: PipelineSlot) -> None:
    """By the norm of the gradient of all stages; a tied parameter counts once."""
    stage = worker.module
    if worker.clip_norm is None or not isinstance(stage, Stage):
        worker.clip()
        return
    places = {name: place for place, name in enumerate(stage.holders)}
    norms = torch.zeros(len(places), dtype=worker.layout.dtype)
    for name, parameter in worker.named_parameters().items():
        if parameter.grad is not None and stage.holders[name][0] == slot.stage:
            norms[places[name]] = torch.linalg.vector_norm(parameter.grad)
    all_reduce(worker.transport, norms, "butterfly", slot.pipeline, Tag.NORM)
    total = torch.linalg.vector_norm(norms.flip(0))
    nn.utils.clip_grads_with_norm_(worker.gradients.parameters, worker.clip_norm, total)
