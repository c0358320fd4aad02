"""A worker and the centre of elastic averaging, which servers own in slices."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from orchestra.parameter_server.client import Client
from orchestra.parameter_server.state import Answer
from orchestra.worker.runtime import Work
from orchestra.worker.worker import Worker


def pull_on_centre(
    worker: Worker, client: Client, into: Tensor, alpha: float, samples: int
) -> list[Answer]:
    """c <- c + alpha (x - c) on the servers, and alpha (x - c) into flat `into`.

    `samples` are those behind x since this worker's last exchange.
    """
    step = worker.step
    return client.push(
        worker.parameters,
        into,
        samples=samples,
        step_samples=samples,
        loss=step.loss,
        stop=step.stop,
        rates=(alpha,),
        used=[True] * len(worker.layout.slots),
    )


def look_ahead(worker: Worker, velocity: Tensor, momentum: float) -> None:
    """x <- x + delta v."""
    _charged(worker, lambda: worker.parameters.add_(velocity, alpha=momentum))


def step_elastically(
    worker: Worker,
    optimizer: torch.optim.Optimizer,
    force: Tensor | None,
    velocity: Tensor | None,
    momentum: float,
) -> None:
    """The optimizer's step and minus `force`.

    With a `velocity` v the parameters have to be x + delta v, and it becomes what x moves by
    without the force.
    """
    x = worker.parameters
    if velocity is not None:
        _charged(worker, lambda: velocity.mul_(momentum).sub_(x))
    worker.update_locally(optimizer)
    if velocity is not None:
        _charged(worker, lambda: velocity.add_(x))
    if force is not None:
        _charged(worker, lambda: x.sub_(force))


def _charged(worker: Worker, function: Callable[[], Tensor]) -> None:
    worker.compute.run(Work("mix", worker.layout.size), function)
