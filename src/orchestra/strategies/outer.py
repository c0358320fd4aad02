"""Outer optimizers: from the average of the replicas to the start of the next round.

x_0 is what the round began with, the same on every worker; x the average of the replicas; Delta =
x_0 - x. Each rule is written so that rate 1 without momentum gives x itself, bit for bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from orchestra.settings import MAX_STEPS, Settings, setting

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.optim import Optimizer

    from orchestra.worker.worker import Worker


@dataclass
class OuterState:
    """`start` is x_0 (under `Elastic` the centre), `velocity` the outer momentum; both flat."""

    start: Tensor | None = None
    velocity: Tensor | None = None


@dataclass(frozen=True, repr=False)
class Outer(Settings, ABC):
    """Makes of the average of the replicas what the next round begins with."""

    # It takes the replicas at which the next gradient is computed, not those before. What it
    # changes is then added beside the local step of that gradient.
    beside_gradient: ClassVar[bool] = False
    copies: ClassVar[int] = 2  # vectors of all parameters in its state

    def begin(self, parameters: Tensor) -> OuterState:
        """Return the state before the first round."""
        return OuterState(parameters.clone(), parameters.new_zeros(parameters.shape))

    @abstractmethod
    def step(
        self, state: OuterState, own: Tensor, average: Tensor, worker: Worker, first: int
    ) -> None:
        """Replace `own` in place by what the next round begins with.

        `own` is the part of this worker's replica that begins at element `first`.
        """

    def rule(self, averages: int, every: int | None) -> Outer:
        """Return the rule for the average of this number, from 1; local steps are `every`."""
        return self

    def treat_moments(self, optimizer: Optimizer, average: Callable[[], None]) -> None:
        """Treat the local optimizer's moments after the rule; by default leave them.

        `average` replaces them by their mean over the workers.
        """


@dataclass(frozen=True, repr=False)
class Average(Outer):
    """The average itself: local SGD (Stich, ICLR 2019)."""

    copies = 0

    def begin(self, parameters: Tensor) -> OuterState:
        return OuterState()

    def step(
        self, state: OuterState, own: Tensor, average: Tensor, worker: Worker, first: int
    ) -> None:
        own.copy_(average)


@dataclass(frozen=True, repr=False)
class SlowMo(Outer):
    """Slow momentum (Wang et al., ICLR 2020), Algorithm 1; with rate 1 it is BMUF.

    u <- beta u + (x_0 - x) / gamma;  x_0 <- x_0 - alpha gamma u.

    The base algorithm is local SGD, which averages every H steps (`LocalSGD.every`; 3 by default in
    fairscale, the authors' code). The rule above comes every tau steps (`every` here; 48 there), in
    place of that plain average. Then the buffers of the base optimizer are maintained, reset or
    averaged over the workers (Algorithm 1, line 2); fairscale maintains them.
    """

    momentum: float = setting(0.5, "beta: of the slow momentum", low=0.0, high=1.0)
    _: KW_ONLY
    rate: float = setting(1.0, "alpha: the slow learning rate", above=0.0, high=1e9)
    every: int | None = setting(
        None, "tau: steps from one slow update to the next, a multiple of LocalSGD's; none: those",
        low=1, high=MAX_STEPS)  # fmt: skip
    buffers: Literal["maintain", "reset", "average"] = setting(
        "maintain", "what becomes of the local optimizers' moments at a slow update"
    )

    def rule(self, averages: int, every: int | None) -> Outer:
        """Return plain averages between two slow updates."""
        if self.every is None or every is None or averages % (self.every // every) == 0:
            return self
        return Average()

    def treat_moments(self, optimizer: Optimizer, average: Callable[[], None]) -> None:
        if self.buffers == "reset":
            optimizer.state.clear()  # Adam's count of steps, too
        elif self.buffers == "average":
            average()

    def step(
        self, state: OuterState, own: Tensor, average: Tensor, worker: Worker, first: int
    ) -> None:
        """Apply the rule above, with the local rate gamma of each parameter's group.

        A local rate of 0 moves nothing, and adds nothing to u.
        """
        assert state.start is not None
        assert state.velocity is not None
        delta = state.start - average
        own.copy_(average).add_(delta, alpha=1 - self.rate)
        # With u = beta u' + Delta / gamma: x_0 - alpha gamma u = x + (1 - alpha) Delta - alpha
        # gamma beta u'.
        for part, gamma in worker.rates_in(first, first + own.numel()):
            if gamma > 0:
                velocity = state.velocity[part].mul_(self.momentum)
                own[part].sub_(velocity, alpha=self.rate * gamma)
                velocity.add_(delta[part], alpha=1 / gamma)
        state.start.copy_(own)


@dataclass(frozen=True, repr=False)
class Nesterov(Outer):
    """The outer optimizer of DiLoCo (Douillard et al., 2023): SGD with Nesterov momentum on Delta.

    v <- mu v + Delta;  x_0 <- x_0 - eta (Delta + mu v).
    """

    rate: float = setting(0.7, "eta: the outer learning rate", above=0.0, high=1e9)
    momentum: float = setting(0.9, "mu: of the outer momentum", low=0.0, high=1.0)

    def step(
        self, state: OuterState, own: Tensor, average: Tensor, worker: Worker, first: int
    ) -> None:
        assert state.start is not None
        assert state.velocity is not None
        delta = state.start - average
        state.velocity.mul_(self.momentum).add_(delta)
        own.copy_(average).add_(delta, alpha=1 - self.rate)
        # x_0 - eta (Delta + mu v) = x + (1 - eta) Delta - eta mu v.
        own.sub_(state.velocity, alpha=self.rate * self.momentum)
        state.start.copy_(own)


@dataclass(frozen=True, repr=False)
class Elastic(Outer):
    """Elastic averaging (EASGD; Zhang, Choromanska and LeCun, NeurIPS 2015), synchronous.

    With the centre c, and beta = p alpha for p workers, in the steps t that tau divides
    (equations 3 and 4; tau is LocalSGD's `every`):

        x_i <- x_i - eta g_i(x_i) - alpha (x_i - c);  c <- c + beta (x - c)

    with gradient, force and average all of the x_i and c before the step. In other steps x_i takes
    its gradient alone. The replicas stay apart; c is what was learnt. Where workers do not wait for
    each other: `ElasticAveraging`.
    """

    beside_gradient = True  # gradient and elastic force are those of one x_i

    beta: float = setting(
        0.9, "pull of the workers on the centre; alpha is beta / p", above=0, high=1
    )

    def step(
        self, state: OuterState, own: Tensor, average: Tensor, worker: Worker, first: int
    ) -> None:
        """Apply the rule above, without the gradient."""
        centre = state.start
        assert centre is not None
        own.lerp_(centre, self.beta / len(worker.workers))
        # After the force, which is that of the centre before the step.
        centre.lerp_(average, self.beta)
