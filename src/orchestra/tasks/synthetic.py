"""A model of which only the size is told: to ask how long a training takes, without data."""

from __future__ import annotations

import itertools
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING

from orchestra.errors import InputError
from orchestra.settings import Settings, setting

if TYPE_CHECKING:
    from orchestra.tasks.task import Task

FLOPS_PER_PARAMETER = 6.0
"""Of a sample's gradient where each parameter is multiplied once: 2 forward, 4 backward."""


@dataclass(frozen=True, repr=False)
class Synthetic(Settings):
    """So many parameters in so many tensors of equal size, and so many operations a sample.

    For simulations of time alone (`tensors: shapes`): what it learns, the mean of its parameters
    times a number, is of no interest. For a real model's figures give its number of parameters, how
    many tensors they are in, and the operations of a sample's gradient (six a parameter and token
    for a transformer).
    """

    parameters: int = setting(100_000_000, "elements of all tensors together", low=1, high=10**13)
    _: KW_ONLY
    tensors: int = setting(150, "that the parameters are in, of equal sizes", low=1, high=100_000)
    sample_flops: float | None = setting(
        None,
        "floating-point operations of a sample's gradient; none: 6 a parameter",
        above=0,
        high=1e24,
    )
    samples: int = setting(1_000_000, "in an epoch", low=1, high=10**9)

    def check(self) -> None:
        """Each tensor has an element."""
        if self.tensors > self.parameters:
            raise InputError(
                f"synthetic: {self.parameters} parameters are too few for {self.tensors} tensors"
            )

    def build(self) -> Task:
        """The task; it holds no data."""
        from orchestra.tasks.sized import Numbers, Sized, pull
        from orchestra.tasks.task import Task

        flops = self.sample_flops or FLOPS_PER_PARAMETER * self.parameters
        edges = [self.parameters * k // self.tensors for k in range(self.tensors + 1)]
        sizes = [end - first for first, end in itertools.pairwise(edges)]
        return Task(
            model=lambda: Sized(sizes), train=Numbers(self.samples), loss=pull, sample_flops=flops
        )
