"""Tasks: model, data, loss and metrics. Imported lazily, since settings must not need torch."""

from typing import TYPE_CHECKING

from orchestra.settings.notation import lazy_package

if TYPE_CHECKING:
    from orchestra.tasks.task import Loss, Metrics, Task, TensorData, evaluate, load_task

__all__ = ["Loss", "Metrics", "Task", "TensorData", "evaluate", "load_task"]
__getattr__ = lazy_package(__name__, "task", names=__all__)
