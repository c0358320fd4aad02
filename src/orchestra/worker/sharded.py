"""A worker that holds its shard of the parameters, and of the others no more than it is using."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from orchestra.optimizers.spec import OptimizerSpec
from orchestra.worker.batches import Batch
from orchestra.worker.gathering import Gathering
from orchestra.worker.layout import Layout, buffer_places
from orchestra.worker.runtime import Runtime
from orchestra.worker.snapshots import Place
from orchestra.worker.units import (
    ShardedGradients,
    Share,
    Unit,
    UnitMemory,
    cut_into_units,
    shard_size,
)
from orchestra.worker.worker import Worker


class ShardedWorker(Worker):
    """`parameters` are this rank's shard, flat: shape [shard_size(units)].

    The module's parameters have no memory but inside `gathering`, which a strategy puts there.
    """

    def __init__(
        self,
        runtime: Runtime,
        module: nn.Module,
        optimizer: OptimizerSpec,
        *,
        share: Share,
        bucket_bytes: int,
        **options: Any,
    ) -> None:
        layout = Layout.of_module(module)
        self.units = cut_into_units(layout, bucket_bytes, share, divisible=optimizer.elementwise)
        self.gathering: Gathering | None = None
        super().__init__(runtime, module, optimizer, bucket_bytes=bucket_bytes, **options)
        buffers = sum(buffer.numel() for _, buffer in self.buffers)
        self.snapshots.places = {
            "parameters": [Place(u.at, u.at + u.size, u.own) for u in self.units],
            "buffers": [Place(0, buffers, 0)] if runtime.rank == 0 else [],
        }

    def _lay_out(self, module: nn.Module) -> None:
        self.module = module
        self.layout = layout = Layout.of_module(module)
        self._buffers = buffer_places(module)
        self.memory = UnitMemory(layout, self.units)
        self.parameters = torch.zeros(
            shard_size(self.units), dtype=layout.dtype, device=layout.device
        )
        named = dict(module.named_parameters())
        for unit in self.units:
            part = self.memory.hold(unit).zero_()
            for index in range(unit.first_slot, unit.end_slot):
                parameter, view = named[layout.slots[index].name], self.memory.views[index]
                view.copy_(parameter.detach())
                parameter.data = view
            self.parameters[unit.shard] = part[unit.owned]
            self.memory.free(unit)
        self.gradients = ShardedGradients(module, layout, self.runtime.ranks, self.units)

    def values_of(self, unit: Unit) -> Tensor:
        """Memory for the parameters of `unit`, with what this rank has of them."""
        part = self.memory.hold(unit)
        part[unit.owned] = self.parameters[unit.shard]
        return part

    def _accumulate(self, batch: Batch) -> float:
        assert self.gathering is not None
        self.gathering.follow(self.accumulation - len(self.micro_batches(batch)))
        with self.gathering:
            return super()._accumulate(batch)

    def loss_of(self, module: nn.Module, batch: Batch) -> Tensor:
        assert self.gathering is not None
        self.gathering.begin_pass(last=self.gradients.last_backward)
        return super().loss_of(module, batch)
