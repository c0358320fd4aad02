"""All settings of a training, apart from its task, strategy and seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from fractions import Fraction
from typing import Literal, Self, TypeAlias

from orchestra.data import IID, Sharding
from orchestra.errors import InputError
from orchestra.optimizers.settings import Constant, Optimizer, RateSchedule
from orchestra.records.exports import TRACKERS, require_tracker
from orchestra.records.record import ToTarget
from orchestra.records.report import Point
from orchestra.settings import MAX_RANKS, MAX_SEED, MAX_STEPS, REQUIRED, Settings, setting
from orchestra.settings.base import require_setting
from orchestra.strategies.base import Strategy, refusal_of
from orchestra.strategies.traits import AfterLoss, Partition
from orchestra.strategies.watching import transitions_of
from orchestra.trainer.balancing import Balancing

DEFAULT_EPOCHS = 10
# 50 time a target to 2 % of the run.
SNAPSHOTS, TO_TARGET = 10, 50
MAX_SAMPLES = 2**24  # of a step of one worker
MAX_SAMPLES_OF_A_RUN = 10**18  # samples are counted in 64 bits
# Lest a default fill a machine: 50 copies of 25 million parameters are 5 GB a rank.
_SNAPSHOT_BYTES = 4e9
Device: TypeAlias = Literal["cpu", "cuda", "auto"]
AUTO, NONE = "auto", "none"
MEASURED: Literal["measured"] = "measured"
Engine: TypeAlias = Literal["processes", "emulation", "simulation"]
Tensors: TypeAlias = Literal["real", "shapes"]


@dataclass(frozen=True, repr=False)
class Target(Settings):
    """The target of a run: a bound on one of the task's metrics."""

    metric: str = setting(REQUIRED, "a metric of the task")
    _: KW_ONLY
    at_least: float | None = setting(None, "reached from this value up", low=-1e30, high=1e30)
    at_most: float | None = setting(None, "reached from this value down", low=-1e30, high=1e30)

    def check(self) -> None:
        if (self.at_least is None) == (self.at_most is None):
            raise InputError("Target: give one of at_least and at_most")

    @property
    def rising(self) -> bool:
        """True if more is better."""
        return self.at_least is not None

    @property
    def bound(self) -> float:
        """The value that has to be reached, from below or from above."""
        value = self.at_most if self.at_least is None else self.at_least
        assert value is not None
        return value

    def reached(self, value: float) -> bool:
        """Return whether `value` of the metric is good enough."""
        return value >= self.bound if self.rising else value <= self.bound

    def penalty(self, value: float) -> float:
        """Return a value of the metric as a penalty: smaller is better."""
        return -value if self.rising else value


@dataclass(frozen=True, repr=False)
class Training(Settings):
    """How one run trains; the same for every strategy of an experiment.

    The length is `epochs` or `steps`, not both. `steps` = n is a budget of n x ranks x batch_size
    samples for the whole run, whatever the roles of the ranks.

    With `equal` = global_batch the workers process ranks x batch_size samples a step together,
    however many of the ranks are workers: with dedicated servers each worker has more.
    """

    _: KW_ONLY
    ranks: int = setting(
        4, "processes, servers included: the budget of a run", low=1, high=MAX_RANKS
    )
    batch_size: int = setting(
        32, "samples in a step of one worker, where every rank is a worker", low=1, high=MAX_SAMPLES
    )
    equal: Literal["global_batch", "worker_batch"] = setting(
        "global_batch",
        "what dedicated servers leave as it is: the samples in a step of all workers, ranks x "
        "batch_size; or of each one, batch_size",
    )
    shares: tuple[float, ...] | Balancing | Literal["measured"] | None = setting(
        None,
        "weight of each rank's part of the data and of a batch; for workers that step together "
        "also measured, the speed of its gradients, or a rule that follows it, such as LBBSP; in a "
        "file the folder of a run with as many ranks: the speeds there; equal if none",
        low=1e-12,
        high=1e12,
        above=0,
    )
    sharding: Sharding | None = setting(
        None, "fixed shards, such as IID, Stratified, Dirichlet(0.3) or Contiguous; none: all share"
    )
    work: Literal["shared", "equal"] = setting(
        "shared",
        "where workers need not step together: shared, a worker that is free takes the next batch; "
        "equal, each has a part of its own",
    )
    accumulation: int = setting(
        1, "micro-batches that a worker's batch is split into", low=1, high=MAX_SAMPLES
    )
    epochs: int | None = setting(
        None, f"passes over the data; {DEFAULT_EPOCHS} unless steps is set", low=1, high=MAX_STEPS
    )
    steps: int | None = setting(
        None,
        "in place of epochs: the run ends after steps x ranks x batch_size samples; with dedicated "
        "servers under worker_batch these are more steps",
        low=1,
        high=MAX_STEPS,
    )
    optimizer: Optimizer = setting(
        Optimizer("SGD", {"lr": 0.1}), "any of torch.optim, such as SGD(lr=0.1, momentum=0.9)"
    )
    schedule: RateSchedule = setting(
        Constant(), "of the learning rate: Constant, StepDecay or Cosine"
    )
    clip_norm: float | None = setting(None, "largest global norm of a gradient", above=0, high=1e30)
    precision: Literal["float32", "bf16"] = setting("float32", "of the forward pass (autocast)")
    engine: Engine = setting(
        "processes",
        "real processes; emulation: on nodes that Linux keeps apart; simulation: in virtual time",
    )
    cluster: str = setting(
        "one_host", "what is simulated or emulated: a preset (orchestra list clusters), or a file"
    )
    calibration: str = setting(
        AUTO,
        "figures that a simulation goes by, a file of orchestra calibrate; auto: those of this "
        "machine, where there are any; none: assumed ones",
    )
    tensors: Tensors = setting(
        "real", "shapes: a simulation of time alone, in which no value is ever computed"
    )
    threads: int | None = setting(
        None,
        "that a rank computes with; none: OMP_NUM_THREADS, else its share of the cores of its "
        "host, and in a simulation of its node",
        low=1,
        high=4096,
    )
    device: Device = setting("cpu", "where the model lives")
    snapshots: int | None = setting(
        None,
        f"copies of the parameters, evaluated after the run; none: {SNAPSHOTS}, or with a target "
        f"{TO_TARGET}, so that its time is known to 2 % of the run. Fewer, down to {SNAPSHOTS}, "
        "are taken where those of all ranks would need more than 4 GB",
        low=0,
        high=100_000,
    )
    target: Target | None = setting(None, "a metric and its at_least or at_most")
    checkpoint_every: int | None = setting(
        None,
        "steps between two checkpoints; each phase of a Switch begins with one",
        low=1,
        high=MAX_STEPS,
    )
    min_ranks: int | None = setting(
        None,
        "where ranks are lost, the run goes on with those that are left, this many at least: from "
        "the last step or average, or from the newest checkpoint, as the strategy can; and "
        "`orchestra join` adds ranks; none: the loss of a rank that all need ends the run",
        low=1,
        high=MAX_RANKS,
    )
    resized_batch: Literal["kept", "scaled"] = setting(
        "kept",
        "on another number of ranks, after losses, joins or a resumption, a step has as many "
        "samples as before; or as many a rank, and the learning rate follows the step's samples: "
        "in proportion, or by the square root for Adam and its kin",
    )
    stop_on_nonfinite: bool = setting(True, "a loss that is NaN or infinite ends the run")
    # At most 5.8 days: four times the patience is waited, and a selector takes 24.8 days.
    patience: float = setting(
        60.0, "seconds without progress until a rank counts as hung", above=0, high=500_000
    )
    grace: float = setting(
        30.0,
        "seconds from SIGTERM until whoever has sent it kills the processes: in this time the "
        "ranks come to rest and write a checkpoint",
        above=0,
        high=500_000,
    )
    bucket_megabytes: float = setting(25.0, "gradients exchanged at a time", above=0, high=1e9)
    overlap: bool = setting(True, "exchange gradients during the backward pass where possible")
    trace_steps: int = setting(
        20,
        "steps at the beginning, and after each change of roles, that the timeline shows; "
        "0: no timeline",
        low=0,
        high=MAX_STEPS,
    )
    record_order: bool = setting(
        False, "write down what depends on chance, such as arrivals, for orchestra replay"
    )
    tensorboard: bool = setting(False, "write event files for TensorBoard beside the records")
    mlflow: bool = setting(
        False, "log the run to MLflow, which reads MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME"
    )
    wandb: bool = setting(
        False, "log the run to Weights & Biases, which reads WANDB_MODE, WANDB_PROJECT and the like"
    )

    def check(self) -> None:
        if self.epochs is not None and self.steps is not None:
            raise InputError("epochs and steps are both set; give one")
        if self.epochs is None and self.steps is None:
            # The settings are frozen.
            object.__setattr__(self, "epochs", DEFAULT_EPOCHS)
        if self.ranks * self.batch_size * (self.steps or 1) > MAX_SAMPLES_OF_A_RUN:
            raise InputError(
                f"steps: {self.steps} of {self.ranks} ranks with {self.batch_size} samples are "
                f"more than {MAX_SAMPLES_OF_A_RUN:.0e} samples; give fewer"
            )
        if isinstance(self.shares, tuple) and len(self.shares) != self.ranks:
            raise InputError(
                f"shares: {len(self.shares)} weights for {self.ranks} ranks; give one for each"
            )
        if isinstance(self.shares, Balancing) and self.sharding is not None:
            raise InputError(
                f"shares: {self.shares!r} would let fast workers read their shards more often than "
                "slow ones: leave sharding out, or set shares to measured"
            )
        if self.min_ranks is not None and self.min_ranks > self.ranks:
            raise InputError(
                f"min_ranks: {self.min_ranks} are more than ranks, {self.ranks}: lower min_ranks"
            )
        if self.accumulation > self.batch_size:
            raise InputError(
                f"accumulation: a batch of {self.batch_size} cannot be split "
                f"into {self.accumulation} micro-batches"
            )
        for tracker in TRACKERS:
            if getattr(self, tracker):
                require_tracker(tracker)

    def global_batch(self, shares: Sequence[float], begun_on: int | None = None) -> int:
        """Return the samples of a full step of all workers, whose roles have these `shares`.

        They stay as they were where the run has `begun_on` another number of ranks.
        """
        batches = self.ranks if self.equal == "global_batch" else sum(shares)
        more = 1 if begun_on in (None, self.ranks) else Fraction(begun_on or 1, self.ranks)
        return round(self.batch_size * batches * more)

    def micro_batches(self, begun_on: int) -> int:
        """Return how many parts a worker's batch is split into: more of them where it has grown,
        since the run has `begun_on` more ranks than it has now."""
        return self.accumulation * max(1, -(-begun_on // self.ranks))

    def weighted(
        self, shares: tuple[float, ...], measured: tuple[float, ...] | None = None
    ) -> tuple[float, ...]:
        """Return the shares of a strategy's ranks, weighted; their sum stays as it is."""
        weights = self.shares if isinstance(self.shares, tuple) else measured
        if weights is None or len(shares) != len(weights):  # one process has it all
            return shares
        products = [share * weight for share, weight in zip(shares, weights, strict=True)]
        scale = sum(shares) / sum(products)
        return tuple(product * scale for product in products)

    @property
    def snapshots_wanted(self) -> int:
        """The number of snapshots, if memory allows."""
        if self.snapshots is not None:
            return self.snapshots
        return SNAPSHOTS if self.target is None else TO_TARGET

    def snapshots_due(self, budget: int, model_bytes: int) -> list[int]:
        """Return the samples after which each snapshot is due, evenly spaced over the `budget`.

        There are as many whether one rank keeps copies of the `model_bytes` or each does, so that
        the times to target of strategies are read off equally often.
        """
        number = self.snapshots_wanted
        if number > SNAPSHOTS:
            room = int(_SNAPSHOT_BYTES / (self.ranks * model_bytes))
            # By ranks and model alone, so that compared strategies have equally many.
            number = min(number, max(SNAPSHOTS, room))
        return evenly_due(budget, number)

    def with_setting(self, name: str, value: object) -> Self:
        """Return a copy with `name` replaced; `steps` displaces `epochs`, and the reverse."""
        require_setting(type(self), name)
        changes = {name: value}
        if name in ("steps", "epochs") and value is not None:
            changes["epochs" if name == "steps" else "steps"] = None
        return replace(self, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True, repr=False)
class Run(Settings):
    """One training under one strategy with one seed: what an engine is given."""

    name: str = setting(REQUIRED, "the strategy's label in the experiment")
    task: str = setting(REQUIRED, "notation of the task")
    strategy: Strategy = setting(REQUIRED, "when and what the ranks exchange")
    seed: int = setting(0, "of parameters, shuffling and dropout", low=0, high=MAX_SEED)
    training: Training = setting(Training(), "everything else")
    judged_on: Literal["test", "validation"] = setting(
        "test", "the split that the final figures are of: trials of a tuning leave the test alone"
    )

    @property
    def steps_together(self) -> bool:
        """True if workers wait for one another, each with a part of the samples."""
        traits = self.strategy.traits(self.training.work)
        return traits.has_barriers and traits.partition is not Partition.STAGED

    @property
    def measures_shares(self) -> bool:
        """True if shares are to be measured, and several workers wait for one another."""
        shares = self.training.shares
        wanted = shares.start if isinstance(shares, Balancing) else shares
        return wanted == MEASURED and self._several_together

    @property
    def is_elastic(self) -> bool:
        """True if the run can go on in a new group of ranks."""
        several = self.strategy.traits().distributed  # one process has no group
        return several and self.training.min_ranks is not None and not self._belongs_to_its_ranks

    @property
    def _belongs_to_its_ranks(self) -> str | None:
        """A setting that another number of ranks could not go on with, by name; None: no one."""
        training, keeps_state = self.training, self.after_loss.keeps_state
        if training.record_order:
            return "record_order"
        if isinstance(training.shares, tuple) or (training.shares is not None and keeps_state):
            return "shares"
        if training.sharding is None or not (keeps_state or not isinstance(training.sharding, IID)):
            return None
        return "sharding"

    @property
    def after_loss(self) -> AfterLoss:
        """What becomes of the run when it loses a rank."""
        return self.strategy.traits(self.training.work).after_loss

    @property
    def balancing(self) -> Balancing | None:
        """The rule by which batches follow speeds, where several workers wait for one another."""
        shares = self.training.shares
        return shares if isinstance(shares, Balancing) and self._several_together else None

    @property
    def _several_together(self) -> bool:
        return len(self.strategy.roles(self.training.ranks).workers) > 1 and self.steps_together

    def check(self) -> None:
        """Refuse settings that need values in a run of shapes, and others that do not combine."""
        training, traits = self.training, self.strategy.traits(self.training.work)
        sharded = traits.partition is Partition.SHARDED
        if sharded and self.measures_shares:
            raise InputError(
                f"shares: {MEASURED} takes gradients of the whole model, which {self.strategy!r} "
                "keeps on no rank: give one number a rank, or leave it out"
            )
        if training.precision == "bf16" and sharded:
            raise InputError(
                f"precision: bf16 keeps a copy of every parameter until its gradient is there, "
                f"for which {self.strategy!r} has no room: leave it out, or set shard='gradients'"
            )
        if training.min_ranks is not None:
            self._check_groups(training.min_ranks)
        if training.tensors == "real":
            return
        if training.engine != "simulation":
            raise InputError("tensors: shapes can only be simulated: set engine to simulation")
        for name in ("clip_norm", "target", "checkpoint_every"):
            if getattr(training, name) is not None:
                raise InputError(
                    f"{name}: needs values, which a run of shapes does not have: leave it out, or "
                    "set tensors to real"
                )
        if traits.partition is Partition.STAGED:
            raise InputError(
                f"{self.strategy!r}: its ranks pass on what layers compute, which a run of shapes "
                "does not have: set tensors to real"
            )
        if traits.reads_values:
            raise InputError(
                f"{self.strategy!r}: decides by losses or gradients, which a run of shapes does "
                "not have: name a rule that goes by steps, rates or seconds, or set tensors to real"
            )

    def _check_groups(self, least: int) -> None:
        """Refuse what fewer ranks could not go on with, of those that may be left after losses."""
        training, after_loss = self.training, self.after_loss
        if training.tensors == "shapes" and not after_loss.is_in_place:
            raise InputError(
                f"min_ranks: a run of shapes under {self.strategy!r} ends when it loses a rank, as "
                "it has no values to go on from: leave it out, or set tensors to real"
            )
        if after_loss.is_in_place and self._belongs_to_its_ranks is not None:
            return  # a loss is the end of the run, or none of its group
        if (name := self._belongs_to_its_ranks) is not None:
            raise InputError(
                f"min_ranks: {name} is of {training.ranks} ranks, and after a loss there are "
                f"fewer: leave out one of both"
            )
        if self.strategy.traits().native:
            raise InputError(
                f"min_ranks: {self.strategy!r} ends when it loses a rank, as collectives of "
                "torch.distributed cannot be given up: leave it out, or name a schedule such as "
                "'ring'"
            )
        if any(each.switch.learning_rate != "kept" for each in transitions_of(self.strategy)):
            raise InputError(
                f"min_ranks: {self.strategy!r} scales the learning rate by the number of workers, "
                "which would be another one after a loss: leave out one of both"
            )
        for ranks in range(least, training.ranks):
            if (reason := refusal_of(self.strategy, ranks)) is not None:
                raise InputError(f"min_ranks: {least} or more may be left, but {reason}")


def evenly_due(budget: int, number: int) -> list[int]:
    """Return the samples after which each of `number` snapshots is due, evenly over `budget`."""
    return [budget * (k + 1) // number for k in range(number)]


def target_times(curve: Sequence[Point], target: Target | None) -> ToTarget:
    """Return when `target` was reached, in seconds on the stopwatch.

    `seconds` is that of the first snapshot whose `metrics` reach it: those of the
    model, or the nodes' mean where replicas differ. It was reached after the snapshot before, at
    `after` (0 before the first), and by then. The two others are those of
    the first snapshot at which the worst node, and the average of the replicas, reach it. All are
    None where they do not.
    """

    def first(good: Callable[[Point], bool]) -> int | None:
        return next((place for place, point in enumerate(curve) if good(point)), None)

    def reach(figures: dict[str, float] | None) -> bool:
        if figures is None or target is None or target.metric not in figures:
            return False
        value = figures[target.metric]
        return value is not None and target.reached(value)

    def seconds(place: int | None) -> float | None:
        return None if place is None else curve[place].seconds

    reached = first(lambda point: reach(point.metrics))
    before = 0.0 if reached == 0 else seconds(None if reached is None else reached - 1)
    every_node = first(lambda point: bool(point.nodes) and all(map(reach, point.nodes.values())))
    average = first(lambda point: reach(point.average))
    return ToTarget(seconds(reached), before, seconds(every_node), seconds(average))
