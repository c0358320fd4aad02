"""The traits of a strategy: what planner, engines, trainer and report ask of it before it runs."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from orchestra.worker.worker import Worker

WorkMode = Literal["shared", "equal"]
"""The setting `work` of a run: whether a free worker may take the next batch of the run."""


class Pace(enum.IntEnum):
    """How closely the workers keep together, from the tightest coupling to none."""

    LOCKSTEP = 0  # all take every step together, and know its mean loss
    ROUNDS = 1  # all count the same steps; each knows its own loss (local SGD, gossip)
    FREE = 2  # no worker waits for another (asynchronous server, pairwise averaging)


class Dealing(enum.Enum):
    """How batches reach the workers."""

    PLAN = enum.auto()  # the plan of the data gives each worker its part of every step
    QUEUE = enum.auto()  # a free worker takes the next batch from a queue of the whole run


class Partition(enum.Enum):
    """How the parameters, or the optimizer's state, are laid over the ranks."""

    REPLICATED = enum.auto()  # each worker holds the whole model
    SHARDED = enum.auto()  # each worker holds a shard, and gathers the rest as needed (FSDP)
    STAGED = enum.auto()  # each rank holds a stage of layers (pipeline parallelism)


class AfterLoss(enum.Enum):
    """What becomes of a run that has lost a rank, in words."""

    IN_PLACE = (
        "the others go on; after the loss of a server, with min_ranks, from the newest checkpoint"
    )
    IN_PLACE_HANDED_OVER = (
        "the others go on; after the loss of a server, with min_ranks, from the newest values that "
        "a worker has of its slice, and the moments of the newest checkpoint"
    )
    TOGETHER = "with min_ranks those that are left go on together, from the last step"
    ROUND = "with min_ranks those that are left go on together, from the last average of all"
    KEPT = "with min_ranks those that are left go on together, from the mean of kept replicas"
    HANDED_OVER = (
        "with min_ranks those that are left go on together, from the last step; a lost server's "
        "slice has the values of a worker and the moments of the newest checkpoint"
    )
    CHECKPOINT = "with min_ranks those that are left go on together, from the newest checkpoint"

    @property
    def keeps_state(self) -> bool:
        """True if each rank keeps what a new group goes on from; else that is a checkpoint."""
        return self in (AfterLoss.TOGETHER, AfterLoss.ROUND, AfterLoss.KEPT)

    @property
    def hands_over(self) -> bool:
        """True if the ranks of a new group write what they have as a checkpoint."""
        return self in (AfterLoss.HANDED_OVER, AfterLoss.IN_PLACE_HANDED_OVER)

    @property
    def is_in_place(self) -> bool:
        """True if the others continue in their group without a worker."""
        return self in (AfterLoss.IN_PLACE, AfterLoss.IN_PLACE_HANDED_OVER)


@dataclass(frozen=True)
class Footprint:
    """The memory of a rank in training, in multiples of what it trains: a model or part.

    `copies` are vectors of all parameters in addition to the optimizer's state: for arriving
    values, for anchors and outer momenta. `batches` is the number of per-worker batches whose
    activations are held at the same time. `buckets_in_flight` is how often two buckets are held in
    addition to a rank's shard: for gradients, and for parameters in use.
    """

    parameters: float = 1.0
    gradients: float = 1.0
    optimizer: float = 1.0
    copies: float = 0.0
    batches: float = 1.0
    buckets_in_flight: float = 0.0

    def joined(self, other: Footprint, how: Callable[[float, float], float]) -> Footprint:
        """Combine two footprints part by part with `how` (a sum, a maximum)."""
        return Footprint(*map(how, astuple(self), astuple(other)))


@dataclass(frozen=True)
class Rehearsal:
    """One exchange of a strategy whose workers wait for one another.

    Exchanges of the same `name` take equally long. The workers exchange after every `every` of
    their steps. `rehearse` exchanges a flat vector in place of gradients, and leaves any values in
    it; it is collective over the workers.
    """

    name: str
    rehearse: Callable[[Worker, Tensor], None]
    every: int = 1


@dataclass(frozen=True)
class Traits:
    """What is known of a strategy before it runs.

    Attributes:
        memory: what a rank keeps, by rank and number of ranks.
        depends_on_speed: the parameters depend on the speed of ranks and links. If not, a
            simulation on one cluster knows them for every other. `Pace.FREE` implies it.
        answers_beside: workers answer others in a background flow, on the core of their gradients.
        reads_loss: decisions depend on the training loss.
        reads_values: the timing of communication depends on losses, gradients or parameters.
        native: torch.distributed's own collectives (gloo, NCCL) are used.
        distributed: several processes train, given several ranks.
        partition: how the parameters are laid over the ranks.
        optimizer: how the optimizer's state is laid over the ranks: whole on each worker, or in
            shards of workers or servers.
        exchange: None if it is not known how long an exchange takes.
        after_loss: what becomes of a run that has lost a worker.
        round: the steps that a worker may take between two exchanges.
        phases: of a strategy that trains in phases, the traits of each.
    """

    memory: Callable[[int, int], Footprint]
    pace: Pace = Pace.LOCKSTEP
    dealing: Dealing = Dealing.PLAN
    partition: Partition = Partition.REPLICATED
    depends_on_speed: bool = False
    answers_beside: bool = False
    reads_loss: bool = False
    reads_values: bool = False
    native: bool = False
    distributed: bool = True
    optimizer: Partition = Partition.REPLICATED
    exchange: Rehearsal | None = None
    after_loss: AfterLoss = AfterLoss.CHECKPOINT
    round: int = 1
    phases: tuple[Traits, ...] = ()

    def __post_init__(self) -> None:
        if self.pace is Pace.FREE:
            object.__setattr__(self, "depends_on_speed", True)

    @property
    def lockstep(self) -> bool:
        """True if all workers take every step together."""
        return self.pace is Pace.LOCKSTEP

    @property
    def has_barriers(self) -> bool:
        """True if workers wait for one another, so that the slowest sets the pace of all."""
        if self.phases:
            return any(phase.has_barriers for phase in self.phases)
        # Without waiting, what a worker computes would depend on which of them is ahead.
        return self.lockstep or not self.depends_on_speed


def combined(phases: Sequence[Traits]) -> Traits:
    """Return the traits of a strategy that trains in `phases`. Each phase has a whole model.

    The pace is that of the loosest phase, and the dealing that of the last one.
    """

    def memory(rank: int, ranks: int) -> Footprint:
        each = (phase.memory(rank, ranks) for phase in phases)
        return functools.reduce(lambda one, other: one.joined(other, max), each)

    owners = [phase.optimizer for phase in phases]
    ends = {phase.after_loss for phase in phases}
    after_loss = AfterLoss.CHECKPOINT
    if all(end.is_in_place for end in ends):
        after_loss = AfterLoss.IN_PLACE
    elif ends <= {AfterLoss.TOGETHER, AfterLoss.HANDED_OVER}:
        # Phases have different state, so ranks hand it over by a checkpoint, which knows them all.
        after_loss = AfterLoss.HANDED_OVER
    return Traits(
        memory,
        max(phase.pace for phase in phases),
        phases[-1].dealing,
        depends_on_speed=any(phase.depends_on_speed for phase in phases),
        reads_loss=any(phase.reads_loss for phase in phases),
        reads_values=any(phase.reads_values for phase in phases),
        native=any(phase.native for phase in phases),
        after_loss=after_loss,
        optimizer=next((o for o in owners if o is not Partition.REPLICATED), Partition.REPLICATED),
        phases=tuple(phases),
    )
