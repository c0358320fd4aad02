"""Model parallelism: each rank holds a stage of the model, and micro-batches flow through them.

How a model is cut into stages is in `exchange.stages`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from orchestra import exchange
from orchestra.errors import InputError
from orchestra.settings import MAX_RANKS, setting
from orchestra.settings.notation import LazyModule
from orchestra.strategies.base import ModelPart, Roles, Strategy, torch
from orchestra.strategies.member import Member
from orchestra.strategies.traits import Footprint, Partition, Traits, WorkMode
from orchestra.transports.tags import Tag

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from orchestra import collectives
    from orchestra.collectives import Group
    from orchestra.coordinator.rest import Rest
    from orchestra.exchange import GradientAverage, Kept
    from orchestra.transports.protocol import Handle
    from orchestra.worker import batches
    from orchestra.worker.batches import Batch
    from orchestra.worker.worker import Worker
else:
    batches = LazyModule("orchestra.worker.batches")
    collectives = LazyModule("orchestra.collectives")


@dataclass(frozen=True, repr=False)
class Pipeline(Strategy):
    """The model is cut into stages, one a rank; activations go down, their gradients come back.

    For models that do not fit into the memory of one rank. A step's batch, which is that of all
    ranks of a pipeline together, is split into M micro-batches, so that the S stages work at the
    same time. Of a step the part (S - 1) / (M + S - 1) is spent waiting while the pipeline fills
    and drains (the bubble): take M several times S.

    `gpipe` (Huang et al., NeurIPS 2019) takes all forward passes first. `1f1b` (Narayanan et al.,
    SC 2021) takes the two in turns: as fast, and stage s, from 0, keeps the activations of S - s
    micro-batches, not of M. The gradient is that of the unsplit model on the same micro-batches.

    With ranks = S x R there are R replicas of the pipeline; the gradient of each stage is averaged
    over them as under AllReduce. BatchNorm sees micro-batches, as it does under accumulation.
    """

    use = "for models that have no room in the memory of one rank"
    variants = (("Pipeline()", use),)

    stages: int | None = setting(
        None, "S: ranks of a pipeline; None: all ranks", low=1, high=MAX_RANKS
    )
    microbatches: int = setting(4, "M: parts of a pipeline's batch", low=1, high=100_000)
    schedule: Literal["gpipe", "1f1b"] = setting("1f1b", "the order of the passes; see above")
    _: KW_ONLY
    cuts: tuple[str, ...] | None = setting(
        None, "the layers that begin a later stage; None: stages of equal cost, as it is measured"
    )

    def check(self) -> None:
        if self.cuts is not None and self.stages not in (None, len(self.cuts) + 1):
            raise InputError(
                f"Pipeline: {len(self.cuts)} cuts make {len(self.cuts) + 1} stages, not "
                f"{self.stages}: leave one of the two out"
            )

    def _stages(self, ranks: int) -> int:
        if self.cuts is not None:
            return len(self.cuts) + 1
        return ranks if self.stages is None else self.stages

    def slot(self, rank: int, ranks: int) -> PipelineSlot:
        return PipelineSlot(rank, ranks, self._stages(ranks))

    def traits(self, work: WorkMode = "shared") -> Traits:
        return Traits(self._memory, partition=Partition.STAGED)

    def roles(self, ranks: int) -> Roles:
        """Give the first rank of a pipeline the batch of all its ranks; all of them read it."""
        stages = self._stages(ranks)
        if ranks % stages:
            raise InputError(
                f"Pipeline: {ranks} ranks are no whole number of pipelines of {stages} stages: "
                "change ranks or stages"
            )
        firsts = [rank - rank % stages for rank in range(ranks)]
        shares = [float(stages) if rank == first else 0.0 for rank, first in enumerate(firsts)]
        return Roles(tuple(shares), reads=tuple(firsts))

    def _memory(self, rank: int, ranks: int) -> Footprint:
        """Return the memory of a stage, with its activations of the micro-batches under way."""
        slot = self.slot(rank, ranks)  # S batches come in, and 1 / S of their activations are here
        kept = self.microbatches
        if self.schedule == "1f1b":
            kept = min(kept, slot.stages - slot.stage)
        return Footprint(batches=kept / self.microbatches)

    def place(
        self, module: nn.Module, loss_of: Callable[[nn.Module], Tensor], rank: int, ranks: int
    ) -> ModelPart | None:
        """Return the stage of `rank`; ranks of the first pipeline own the parameters."""
        slot = self.slot(rank, ranks)
        if slot.stages == 1:
            return None
        stage = exchange.stage_of(module, loss_of, slot.stages, slot.stage, self.cuts)
        owned = [name for name, stages in stage.holders.items() if stages[0] == slot.stage]
        owned += [name for name, _ in stage.named_buffers()]
        return ModelPart(stage, frozenset(owned if rank < slot.stages else ()))

    def member(self, worker: Worker) -> PipelineMember:
        slot = self.slot(worker.rank, worker.runtime.ranks)
        if worker.own_loop or (slot.stages > 1 and not isinstance(worker.module, exchange.Stage)):
            raise InputError(
                "Pipeline: a rank holds one stage of the model from the beginning on, so it needs "
                "orchestra's own loop (orchestra train)"
            )
        worker.set_workers(slot.replicas.ranks)
        return PipelineMember(self, worker, worker.local_optimizer())


class Pass(NamedTuple):
    """A pass of one micro-batch through one stage."""

    backward: bool
    microbatch: int


def passes_of(schedule: str, stages: int, stage: int, microbatches: int) -> tuple[Pass, ...]:
    """Return the passes of a step, in their order, on stage `stage`, from 0, of `stages`.

    "gpipe" (Huang et al., NeurIPS 2019) takes all forward passes, then all backward passes, and
    keeps the activations of all micro-batches. "1f1b" (Narayanan et al., SC 2021) takes the two in
    turns as soon as it can: stage s of S keeps those of S - s micro-batches at most, and a step
    takes as long.

    Both kinds go through the micro-batches from the first to the last, on every stage alike:
    messages between two stages need no numbers, and gradients add up in the same order as without
    stages.
    """
    # Forward passes before the first backward one: in 1f1b as many as the stages behind this one.
    ahead = microbatches if schedule == "gpipe" else min(stages - 1 - stage, microbatches)
    passes = [Pass(False, number) for number in range(ahead)]
    for number in range(ahead, microbatches):
        passes += [Pass(False, number), Pass(True, number - ahead)]
    passes += [Pass(True, number) for number in range(microbatches - ahead, microbatches)]
    return tuple(passes)


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
        """True if the stage takes the batch."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """True if the stage knows the loss."""
        return self.stage == self.stages - 1

    @property
    def pipeline(self) -> Group:
        """The ranks of this rank's pipeline, in the order of the stages."""
        first = self.rank - self.stage
        return collectives.Group(tuple(range(first, first + self.stages)))

    @property
    def replicas(self) -> Group:
        """The ranks that have the same stage, in all pipelines."""
        return collectives.Group(tuple(range(self.stage, self.ranks, self.stages)))


@dataclass(eq=False)
class PipelineMember(Member[Pipeline]):
    """A rank with its stage, and the optimizer of the stage.

    `average` is over the replicas of the stage. `stash` holds micro-batches between their two
    passes: the tensors that came in, and those that came out (on the last stage the loss). `sent`
    holds the messages that may be in flight.
    """

    optimizer: Optimizer
    average: GradientAverage = field(init=False)
    slot: PipelineSlot = field(init=False)
    stash: dict[int, tuple[list[Tensor], list[Tensor]]] = field(init=False, default_factory=dict)
    sent: list[Handle] = field(init=False, default_factory=list)

    def open(self, *, fresh: bool) -> None:
        """Begin to listen to backward; at the start, agree with the replicas of the stage."""
        worker = self.worker
        self.slot = self.strategy.slot(worker.rank, worker.runtime.ranks)
        if fresh:
            exchange.agree_on_parameters(worker, worker.workers)
        begin = exchange.make_collective(worker, "ring").of_buckets(worker)
        self.average = exchange.GradientAverage(worker, begin)

    def rest(self, rest: Rest) -> Kept:
        """End the background flow; every rank keeps its stage."""
        self.average.close()
        return super().rest(rest)

    def begin(self) -> None:
        """Take the buffers of the first replica of the stage."""
        exchange.broadcast_buffers(self.worker, self.worker.workers)

    def gradient(self, batch: Batch | None) -> None:
        """Run the passes of a step, and exchange the gradient."""
        self.begin()
        self.worker.gradients.clear()
        if batch is not None:
            self._run_passes(batch)
        self.exchange()

    def exchange(self) -> None:
        """Average over the replicas, and sum over the stages that share a parameter."""
        self.average.finish()
        self._sum_tied()
        self._agree_on_loss()

    def update(self) -> None:
        """Update each stage by itself; tied parameters get the same update in all of theirs."""
        worker = self.worker
        self._clip()
        worker.update_locally(self.optimizer)
        if not self.slot.is_first:
            worker.step.samples = 0  # they are counted where they come in
        worker.snapshots.offer(worker.step.consumed, worker.parameters)

    # The passes of a step

    def _run_passes(self, batch: Batch) -> None:
        """Compute the gradient over `batch`; the last stage also notes the loss."""
        worker, slot = self.worker, self.slot
        count = self.strategy.microbatches * worker.accumulation
        parts = batches.split_batch(batch, count, "Pipeline.microbatches")
        total = sum(samples for _, samples in parts)
        worker.step.loss = 0.0
        passes = passes_of(self.strategy.schedule, slot.stages, slot.stage, len(parts))
        for backward, number in passes:
            part, samples = parts[number]
            worker.gradients.last_backward = backward and number == len(parts) - 1
            if backward:
                self._backward(number, samples)
            else:
                self._forward(number, part, samples, samples / total)
        for handle in self.sent:
            handle.wait()
        self.sent.clear()

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
                args, kwargs = exchange.inputs_of(lambda model: worker.loss_of(model, part))
                return list(stage(*args, **kwargs))
        if self.slot.is_first:
            loss = worker.loss_of(stage, part)
        else:
            model = exchange.StandIn(lambda *_, **__: stage(*received))
            loss = worker.loss_of(model, part)
            if model.calls != 1:
                raise exchange.called_otherwise(model.calls)
        worker.step.loss += share * float(loss.detach())
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
                # Also where this stage does not use it: the stage before waits for one.
                self._send(torch.zeros_like(tensor) if tensor.grad is None else tensor.grad, -1)

    def _receive_activations(self) -> list[Tensor]:
        source, transport = self.worker.rank - 1, self.worker.transport
        stage, device = self.worker.module, self.worker.layout.device
        assert isinstance(stage, exchange.Stage)
        received = [
            transport.receive(source, Tag.ACTIVATION).wait().to(device)
            for _ in range(stage.tensors_in)
        ]
        # Leaves of autograd, so that `_backward` finds their gradients.
        return [tensor.requires_grad_(tensor.is_floating_point()) for tensor in received]

    def _arriving(self, result: Tensor) -> Tensor | None:
        """Receive the gradient of `result`; the next stage sends one for each float tensor."""
        if not result.is_floating_point():
            return None
        source = self.worker.rank + 1
        arrived = self.worker.transport.receive(source, Tag.ACTIVATION_GRADIENT).wait()
        return arrived.to(result.device)

    def _send(self, tensor: Tensor, direction: int) -> None:
        tag = Tag.ACTIVATION if direction > 0 else Tag.ACTIVATION_GRADIENT
        own = tensor.detach().contiguous()
        # `done` also moves what the kernel can take; activations that have left may be freed.
        self.sent = [handle for handle in self.sent if not handle.done()]
        self.sent.append(self.worker.transport.send(own, self.worker.rank + direction, tag))

    def _charged(self, kind: str, samples: int, function: Callable[[], Any]) -> Any:
        names = tuple(slot.name for slot in self.worker.layout.slots)
        return exchange.charge(self.worker, kind, samples, function, names)

    # The exchange between stages

    def _sum_tied(self) -> None:
        """Sum the gradients of parameters that several stages share, on each of these."""
        worker, slot = self.worker, self.slot
        stage, gradients = worker.module, worker.gradients
        if not isinstance(stage, exchange.Stage):
            return
        index = {each.name: place for place, each in enumerate(worker.layout.slots)}
        for name, stages in stage.holders.items():
            if len(stages) > 1 and slot.stage in stages:
                place = index[name]
                view, used = gradients.views[place], gradients.used[place]
                # The flag travels behind the gradient: used on one stage, used on all.
                total = torch.cat([view.reshape(-1), view.new_tensor([float(used)])])
                group = collectives.Group(tuple(slot.pipeline.ranks[holder] for holder in stages))
                collectives.all_reduce(worker.transport, total, "ring", group, Tag.TIED)
                view.copy_(total[:-1].view(view.shape))
                gradients.used[place] = bool(total[-1] > 0)
        gradients.forget_unused()

    def _agree_on_loss(self) -> None:
        """Tell all stages the last one's loss, and whether some rank wants to stop."""
        slot, step = self.slot, self.worker.step
        known = torch.zeros(2 + slot.ranks, dtype=torch.float64)
        known[0] = float(step.stop)
        if slot.is_last:
            known[1] = step.loss
            known[2:] = torch.tensor(step.losses, dtype=torch.float64)
        collectives.all_reduce(self.worker.transport, known, "butterfly", slot.pipeline, Tag.AGREE)
        stop, step.loss, *losses = known.tolist()
        step.stop, step.losses = stop > 0, tuple(losses)

    def _clip(self) -> None:
        """Clip by the norm of the gradient of all stages; a tied parameter counts once."""
        worker, slot = self.worker, self.slot
        stage = worker.module
        if worker.clip_norm is None or not isinstance(stage, exchange.Stage):
            worker.clip()
            return
        places = {name: place for place, name in enumerate(stage.holders)}
        norms = torch.zeros(len(places), dtype=worker.layout.dtype)
        for name, parameter in worker.named_parameters().items():
            # A tied parameter counts on the first of its stages.
            if parameter.grad is not None and stage.holders[name][0] == slot.stage:
                norms[places[name]] = torch.linalg.vector_norm(parameter.grad)
        collectives.all_reduce(worker.transport, norms, "butterfly", slot.pipeline, Tag.NORM)
        total = torch.linalg.vector_norm(norms.flip(0))
        torch.nn.utils.clip_grads_with_norm_(worker.gradients.parameters, worker.clip_norm, total)
