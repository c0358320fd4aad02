"""HOW a server's slice changes by a push: corrections for staleness, and what applies the result.

A `Correction` is a value that changes one push before it is applied; a slice can have several.
Subclass it to add one; `ParameterServer(learning_rate=...)` takes it. An `Application` holds the
values of a slice, applies updates to them, and says what workers are answered with.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from orchestra import optimizers
from orchestra.parameter_server.when import ON_ARRIVAL
from orchestra.settings import MAX_RANKS, Settings, setting
from orchestra.settings.notation import LazyModule

if TYPE_CHECKING:
    import torch as torch
    from torch import Tensor, optim

    from orchestra.optimizers import spec as spec
    from orchestra.parameter_server.messages import Push
    from orchestra.parameter_server.when import ServerSettings
else:
    torch, spec = LazyModule("torch"), LazyModule("orchestra.optimizers.spec")

EPSILON = 1e-7
"""Inside the root of the adaptive strength, as in the authors' code of DC-ASGD."""


@dataclass
class WorkerMemory:
    """What a slice keeps of one worker.

    `given` holds the values that the worker was last given, if a correction `needs_given`. `own`
    belongs to the corrections, by name. Both are in checkpoints.
    """

    given: Tensor | None = None
    own: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, repr=False)
class Correction(Settings, ABC):
    """Changes a push for the updates since its worker has read the values."""

    changes_gradient: ClassVar[bool] = True
    """`correct` may change its gradient. Where nothing does, a worker's is not copied."""

    needs_given: ClassVar[bool] = False
    """`WorkerMemory.given` is kept, one copy of the slice for each worker."""

    copies: ClassVar[int] = 0
    """Vectors of the slice's size kept for each worker, `given` included."""

    @abstractmethod
    def correct(self, push: Push, gradient: Tensor, values: Tensor, memory: WorkerMemory) -> float:
        """Change `gradient` in place; return the divisor of the push's learning rates.

        Args:
            push: its `staleness` counts the updates since its worker's read.
            gradient, values: of the slice, flat, [elements of the slice].
            memory: of the push's worker.
        """

    def contradictions(self, given: ServerSettings, setting: str) -> Iterator[str]:
        """Yield what of the `given` settings does not go with this rule: why, and the remedy.

        `setting` is what asks for the rule, such as "learning_rate='divided'".
        """
        if given.averages:
            same = "a synchronous server averages gradients of the same parameters"
            yield f"{setting} needs {ON_ARRIVAL}: {same}"


@dataclass(frozen=True, repr=False)
class DividedByWorkers(Correction):
    """Divide the learning rate by the number of workers: a round is as large as one step."""

    changes_gradient = False

    workers: int = setting(1, "number of workers", low=1, high=MAX_RANKS)

    def correct(self, push: Push, gradient: Tensor, values: Tensor, memory: WorkerMemory) -> float:
        """Return the divisor: the number of workers."""
        return self.workers


@dataclass(frozen=True, repr=False)
class DividedByStaleness(Correction):
    """Divide the learning rate by the staleness tau if above 1 (Zhang et al., IJCAI 2016)."""

    changes_gradient = False

    def correct(self, push: Push, gradient: Tensor, values: Tensor, memory: WorkerMemory) -> float:
        """Return the divisor: max(tau, 1)."""
        return max(push.staleness, 1)


@dataclass(frozen=True, repr=False)
class PolynomialStaleness(Correction):
    """Multiply the learning rate by (1 + tau)^-a, with the staleness tau.

    s_a of FedAsync (Xie, Koyejo and Gupta, 2019), with a = 0.5 in
    FedBuff (Nguyen et al., AISTATS 2022).
    """

    changes_gradient = False

    exponent: float = setting(0.5, "a", low=0, high=10)

    def correct(self, push: Push, gradient: Tensor, values: Tensor, memory: WorkerMemory) -> float:
        """Return the divisor: (1 + tau)^a."""
        return float((1 + push.staleness) ** self.exponent)


@dataclass(frozen=True, repr=False)
class DelayCompensation(Correction):
    """Correct the gradient to first order (DC-ASGD-c; Zheng et al., ICML 2017).

    w_bak(m) are the values that worker m was last given. The gradient g of worker m was computed at
    w_bak(m), and the slice w has moved since. Its Taylor expansion around w_bak(m), with
    lambda g*g for the diagonal of the Hessian, gives g + lambda g*g*(w - w_bak(m)), element by
    element.
    """

    needs_given = True
    copies = 1

    lambda0: float = setting(0.04, "lambda; the paper's for CIFAR-10", low=0, high=1e9)

    def correct(self, push: Push, gradient: Tensor, values: Tensor, memory: WorkerMemory) -> float:
        """Change `gradient` to what it would be at `values`; the rate stays."""
        # Without a strength not even infinity times 0 may change it.
        if self.lambda0:
            assert memory.given is not None
            strength = self.strength(gradient * gradient, memory)
            gradient.addcmul_(strength, values - memory.given, value=self.lambda0)
        return 1.0

    def strength(self, square: Tensor, memory: WorkerMemory) -> Tensor:
        """Return the diagonal of the Hessian over lambda; it may lie in `square`, which is g*g."""
        return square


@dataclass(frozen=True, repr=False)
class AdaptiveDelayCompensation(DelayCompensation):
    """Correct the gradient to first order with an adaptive lambda (DC-ASGD-a).

    As `DelayCompensation`; with m = `mean_square` and an MS of each worker, 0 at first,

        MS <- m MS + (1 - m) g*g        lambda = lambda0 / sqrt(MS + 1e-7)
    """

    copies = 2

    lambda0: float = setting(2.0, "lambda_0; the paper's for CIFAR-10", low=0, high=1e9)
    mean_square: float = setting(0.95, "m: what the mean square keeps in a push", low=0, high=1)

    def strength(self, square: Tensor, memory: WorkerMemory) -> Tensor:
        """Return g*g / sqrt(MS + 1e-7)."""
        if "mean_square" not in memory.own:
            memory.own["mean_square"] = torch.zeros_like(square)
        mean = memory.own["mean_square"]
        mean.mul_(self.mean_square).add_(square, alpha=1 - self.mean_square)
        return square.div_((mean + EPSILON).sqrt_())


class SliceRange(NamedTuple):
    """A part of a slice: its elements [first, end), and its `pieces` among the slice's tensors."""

    first: int
    end: int
    pieces: slice


class Application(ABC):
    """Holds the `values` of a slice, flat, and applies single or averaged pushes to them.

    `total` is memory for sums of pushes. Workers are answered with `answer`.
    """

    holds_model: ClassVar[bool] = True
    """Snapshots and the final model take the values from here."""

    applies_empty_pushes: ClassVar[bool] = False
    """A push without samples is applied, too."""

    answers_with_gradient: ClassVar[bool] = False
    """The answer to a push is what `apply` has left in its gradient."""

    def __init__(self, values: Tensor) -> None:
        self.values = self.answer = values
        self.total = torch.zeros_like(values)

    @abstractmethod
    def apply(
        self, gradient: Tensor, span: SliceRange, push: Push, used: Sequence[bool], divisor: float
    ) -> None:
        """Apply `gradient`, whose first element belongs to element `span.first` of the slice.

        Args:
            push: the first of those that make the gradient: for its rates and options.
            used: whether any worker has used each tensor of the span.
            divisor: of the learning rates.
        """

    @classmethod
    def contradictions(cls, given: ServerSettings) -> Iterator[str]:
        """Yield what of the `given` settings does not go with this: why, and the remedy."""
        return iter(())

    def optimizer_parts(self) -> list[spec.OptimizerPart]:
        """Return the optimizers of the slice."""
        return []

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state for a checkpoint, without the values."""
        return {"optimizers": [part.optimizer for part in self.optimizer_parts()]}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from `saved`."""
        for part, state in zip(self.optimizer_parts(), saved["optimizers"], strict=True):
            optimizers.restore(part.optimizer, state)


class OptimizerStep(Application):
    """w <- the optimizer's step from w with the gradient.

    Args:
        tensors: the parameters inside the slice: by name a view of `values`, and the element of the
            parameter at which it begins.
        optimizer: of these tensors.
    """

    def __init__(
        self,
        values: Tensor,
        tensors: Mapping[str, tuple[Tensor, int]],
        optimizer: optim.Optimizer,
    ) -> None:
        super().__init__(values)
        self.optimizer, self.tensors = optimizer, tensors
        begin = int(values.storage_offset())
        self._tensors = [
            (each, each.shape, each.stride(), int(each.storage_offset()) - begin)
            for each, _ in tensors.values()
        ]
        self._options = spec.get_options(optimizer)
        self._changed = ""  # of these options, by the last push that was applied
        # By worker and first element: where the last gradient lay, and a view for each tensor
        self._views: dict[tuple[int, int], tuple[int, list[Tensor]]] = {}

    def apply(
        self, gradient: Tensor, span: SliceRange, push: Push, used: Sequence[bool], divisor: float
    ) -> None:
        """Take one step with the rates and options of `push`."""
        if push.options != self._changed:
            spec.apply_changed_options(self.optimizer, self._options, push.options)
            self._changed = push.options
        spec.set_rates(self.optimizer, [rate / divisor for rate in push.rates])
        tensors, views = self._tensors[span.pieces], self._views_of(gradient, span, push.worker)
        for (tensor, *_), view, is_used in zip(tensors, views, used, strict=True):
            # None: the optimizer passes over a tensor that no worker has used.
            tensor.grad = view if is_used else None
        spec.plain_step(self.optimizer)
        for tensor, *_ in tensors:
            tensor.grad = None

    def _views_of(self, gradient: Tensor, span: SliceRange, worker: int) -> list[Tensor]:
        """Return a view of `gradient` for each tensor of `span`.

        Most pushes of a worker lie where its last one lay, and views take longer to make than a
        small update.
        """
        key, address = (worker, span.first), gradient.data_ptr()
        known, views = self._views.get(key, (-1, []))
        if known != address:
            base = int(gradient.storage_offset()) - span.first
            views = [
                gradient.as_strided(shape, stride, base + start)
                for _, shape, stride, start in self._tensors[span.pieces]
            ]
            self._views[key] = address, views
        return views

    def optimizer_parts(self) -> list[spec.OptimizerPart]:
        """Return the optimizer."""
        return [spec.OptimizerPart(self.optimizer, self.tensors)]


class GradientsBack(Application):
    """The server only averages: workers get the gradient back, and step by themselves."""

    holds_model = False

    def __init__(self, values: Tensor) -> None:
        super().__init__(values)
        self.answer = self.total

    @classmethod
    def contradictions(cls, given: ServerSettings) -> Iterator[str]:
        """Yield what does not go with servers that only average."""
        if not given.averages:
            yield (
                f"returns='gradients' needs consistency='synchronous': a server that is "
                f"{given.consistency} has no average to return"
            )

    def apply(
        self, gradient: Tensor, span: SliceRange, push: Push, used: Sequence[bool], divisor: float
    ) -> None:
        """Keep the gradient as the answer."""
        if gradient.data_ptr() != self.total[span.first : span.end].data_ptr():
            self.total[span.first : span.end].copy_(gradient)


class ElasticCentre(Application):
    """The centre c of elastic averaging (Zhang, Choromanska and LeCun, NeurIPS 2015).

    A push holds the parameters x of a worker, and alpha as its rate: d = alpha (x - c), c <- c + d,
    and the answer is d.
    """

    applies_empty_pushes = True
    answers_with_gradient = True

    def apply(
        self, gradient: Tensor, span: SliceRange, push: Push, used: Sequence[bool], divisor: float
    ) -> None:
        """Move the centre; `gradient` holds x before, and d after it."""
        self.values.add_(gradient.sub_(self.values).mul_(push.rates[0]))
