"""What a first step costs once is paid before the stopwatch starts, on a copy of the model."""

from __future__ import annotations

import copy
from collections.abc import Callable

from orchestra.trainer.random_state import undisturbed
from orchestra.worker.batches import Batch, to_device
from orchestra.worker.worker import Worker


def warm_up(worker: Worker, read: Callable[[], Batch]) -> None:
    """A forward, a backward and an update on copies, of a micro-batch of what `read` gives.

    Random streams go on as if it had not been.
    """
    with undisturbed():
        batch, _ = worker.micro_batches(to_device(read(), worker.layout.device))[0]
        module = copy.deepcopy(worker.module)
        loss = worker.loss_of(module, batch)
        if loss.requires_grad:
            loss.backward()
        optimizer = worker.optimizer.build(dict(module.named_parameters()))
        optimizer.step()
