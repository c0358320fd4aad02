"""Tasks: model, data, loss and metrics. Imported lazily, since settings must not need torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestra.tasks.evaluation import evaluate
    from orchestra.tasks.load import load_task
    from orchestra.tasks.task import Loss, Metrics, Task
    from orchestra.tasks.tensors import TensorData

_PLACES = {
    "Loss": "task",
    "Metrics": "task",
    "Task": "task",
    "TensorData": "tensors",
    "evaluate": "evaluation",
    "load_task": "load",
}

__all__ = [
    "Loss",
    "Metrics",
    "Task",
    "TensorData",
    "evaluate",
    "load_task",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
