"""The metrics of torchmetrics in a model, computed over a group of workers.

By themselves they would ask torch.distributed, which has no group, or one with servers in it.
"""

from __future__ import annotations

from torch import nn
from torchmetrics.metric import Metric, jit_distributed_available

from orchestra.integrations.worker_group import WorkerGroup


def connect(model: nn.Module, group: WorkerGroup) -> None:
    """Let the metrics of `model` be computed over the members of `group`."""
    for metric in _metrics(model, group):
        metric.distributed_available_fn = group.is_several
        metric.dist_sync_fn = group.gather


def disconnect(model: nn.Module, group: WorkerGroup) -> None:
    """Undo `connect`."""
    for metric in _metrics(model, group):
        metric.distributed_available_fn = jit_distributed_available
        metric.dist_sync_fn = None


def _metrics(model: nn.Module, group: WorkerGroup) -> list[Metric]:
    """Return those without a function of the user's, which stays."""
    metrics = [module for module in model.modules() if isinstance(module, Metric)]
    return [metric for metric in metrics if metric.dist_sync_fn in (None, group.gather)]
