"""Model parallelism: each rank holds a stage of the model, and micro-batches flow through them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Literal

from orchestra import exchange, optimizers
from orchestra.errors import InputError
from orchestra.settings import MOST_RANKS, setting
from orchestra.strategies.base import Footprint, ModelPart, Roles, Strategy

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from orchestra.exchange import GradientAverage, PipelineSlot, PipelineStep
    from orchestra.worker.batches import Batch
    from orchestra.worker.worker import Worker


@dataclass
class PipelineState:
    """The optimizer of this rank's stage; `average` is over the replicas of that stage."""

    optimizer: Optimizer
    average: GradientAverage = field(metadata=optimizers.TRANSIENT)
    passes: PipelineStep = field(metadata=optimizers.TRANSIENT)


@dataclass(frozen=True, repr=False)
class Pipeline(Strategy[PipelineState]):
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

    divides_model = True  # each rank has its stage

    use = "for models that have no room in the memory of one rank"
    variants = (("Pipeline()", use),)

    stages: int | None = setting(
        None, "S: ranks of a pipeline; None: all ranks", low=1, high=MOST_RANKS
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

    def _slot(self, rank: int, ranks: int) -> PipelineSlot:
        return exchange.PipelineSlot(rank, ranks, self._stages(ranks))

    def roles(self, ranks: int) -> Roles:
        """A pipeline's batch is that of all its ranks, and all of them read it."""
        stages = self._stages(ranks)
        if ranks % stages:
            raise InputError(
                f"Pipeline: {ranks} ranks are no whole number of pipelines of {stages} stages: "
                "change ranks or stages"
            )
        firsts = [rank - rank % stages for rank in range(ranks)]
        shares = [float(stages) if rank == first else 0.0 for rank, first in enumerate(firsts)]
        return Roles(tuple(shares), reads=tuple(firsts))

    def footprint(self, rank: int, ranks: int) -> Footprint:
        """Of its stage, with a part of the activations of each micro-batch that is under way."""
        slot = self._slot(rank, ranks)  # S batches come in, and 1 / S of their activations are here
        kept = self.microbatches
        if self.schedule == "1f1b":
            kept = min(kept, slot.stages - slot.stage)
        return Footprint(batches=kept / self.microbatches)

    def part_of(
        self, module: nn.Module, loss_of: Callable[[nn.Module], Tensor], rank: int, ranks: int
    ) -> ModelPart | None:
        """The stage of `rank`; the first pipeline answers for the parameters."""
        slot = self._slot(rank, ranks)
        if slot.stages == 1:
            return None
        stage = exchange.stage_of(module, loss_of, slot, self.cuts)
        owned = [name for name, stages in stage.holders.items() if stages[0] == slot.stage]
        owned += [name for name, _ in stage.named_buffers()]
        return ModelPart(stage, frozenset(owned if rank < slot.stages else ()))

    def start(self, worker: Worker) -> PipelineState:
        slot = self._slot(worker.rank, worker.runtime.ranks)
        if worker.own_loop or (slot.stages > 1 and not exchange.is_stage(worker.module)):
            raise InputError(
                "Pipeline: a rank holds one stage of the model from the beginning on, so it needs "
                "orchestra's own loop (orchestra train)"
            )
        worker.set_workers(slot.replicas.ranks)
        worker.reporter.expendable(False)
        exchange.agree_within(worker, worker.workers)
        collective = exchange.make_collective(worker, "ring")
        parts = self.microbatches * worker.accumulation
        return PipelineState(
            worker.local_optimizer(),
            exchange.GradientAverage(worker, collective.of_buckets(worker)),
            exchange.PipelineStep(worker, slot, parts, self.schedule),
        )

    def before_forward(self, worker: Worker, state: PipelineState) -> None:
        exchange.broadcast_buffers(worker, worker.workers)

    def gradient(self, worker: Worker, state: PipelineState, batch: Batch | None) -> None:
        self.before_forward(worker, state)
        worker.gradients.clear()
        if batch is not None:
            worker.step.loss = state.passes.run(batch)
        self.reduce(worker, state)

    def reduce(self, worker: Worker, state: PipelineState) -> None:
        """Averages over the replicas, and sums over the stages that share a parameter."""
        state.average.finish()
        exchange.sum_tied(worker, state.passes.slot)
        exchange.agree_on_loss(worker, state.passes.slot)

    def update(self, worker: Worker, state: PipelineState) -> None:
        """Each stage on its own; tied parameters get the same update in all of theirs."""
        slot = state.passes.slot
        exchange.clip_stages(worker, slot)
        worker.update_locally(state.optimizer)
        if slot.stage:
            worker.step.samples = 0  # they are counted where they come in
        worker.snapshots.offer(worker.step.consumed, worker.parameters)

    def stop(self, worker: Worker, state: PipelineState) -> None:
        """End the background flows; every rank keeps its stage."""
        state.average.close()
