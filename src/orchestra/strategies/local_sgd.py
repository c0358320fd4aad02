"""Local SGD and its kin: workers train apart, and average their parameters once in a while."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from orchestra import exchange
from orchestra.compression.base import Compressor
from orchestra.errors import InputError
from orchestra.settings import MAX_STEPS, setting
from orchestra.settings.base import COMMON
from orchestra.strategies.all_reduce import AllReduce, require_ring
from orchestra.strategies.base import Replicas
from orchestra.strategies.fragments import NEGLIGIBLE_WEIGHT, CompressedMean, Fragment, ReplicaMean
from orchestra.strategies.member import ReplicaMember
from orchestra.strategies.outer import Average, Outer, SlowMo
from orchestra.strategies.traits import AfterLoss, Footprint, Rehearsal, Traits, WorkMode

if TYPE_CHECKING:
    from torch import Tensor

    from orchestra.coordinator.rest import Rest
    from orchestra.exchange import CompressionState, Kept
    from orchestra.worker.worker import Worker


@dataclass(frozen=True, repr=False)
class LocalSGD(Replicas):
    """Each worker takes `every` steps of its own; then the replicas are averaged.

    Averages are weighted by the samples behind each replica since the last one; so is the one at
    the end, which closes a round that was cut short. `outer` makes of the average what
    the next round begins with: DiLoCo is LocalSGD(500, outer=Nesterov()) with Adam as the
    optimizer; post-local SGD (Lin et al., ICLR 2020) is Switch(AllReduce(), LocalSGD()).

    Streaming DiLoCo (Douillard et al., 2025) averages one of `fragments` at a time, in turn. With
    `overlap` averages are made in the background, for every outer optimizer but Elastic, and
    applied that many steps after they were sent. What the worker has learnt since is kept, `late`:

        mixed   theta <- mix theta + (1 - mix) theta_outer, as in streaming DiLoCo; with `Average`
                the pull towards a late average of Overlap-Local-SGD (Wang et al., ICASSP 2020)
        added   theta <- theta_outer + theta - theta_sent, as in CoCoD-SGD (Shen et al., IJCAI
                2019), where `overlap` is `every`

    Streaming DiLoCo sends differences in 4 bits, as compression=QSGD(7, norm="max") does: with
    `compression` x <- x_0 + sum_w C(x_w - x_0), where x_0 is what the round began with, or the last
    average.
    """

    use = "for slow links: an exchange a round, not a step"
    variants = (
        ("LocalSGD(8)", "for slow links, and steps that are short"),
        ("LocalSGD(8, outer=SlowMo(0.5))", "the same, where plain averages lose accuracy"),
        (
            "LocalSGD(3, outer=SlowMo(0.5, every=48))",
            "the same, with plain averages between two slow updates",
        ),
        (
            "LocalSGD(16, outer=Nesterov(0.7, 0.9))",
            "for very slow links and long trainings (DiLoCo)",
        ),
        (
            "LocalSGD(16, outer=Nesterov(0.7, 0.9), fragments=4, overlap=2)",
            "the same, in small pieces that nobody waits for",
        ),
        (
            "LocalSGD(4, outer=Elastic())",
            "for replicas that are to stay apart, round a common centre",
        ),
        ("LocalSGD(None)", "for no exchange before the end; the replicas must not part"),
    )  # fmt: skip

    every: int | None = setting(
        8, "H: local steps of a round; None: one average, at the very end", low=1, high=MAX_STEPS
    )
    _: KW_ONLY
    every_epochs: int | None = setting(
        None, "passes over the data of a round, in place of `every`", low=1, high=MAX_STEPS
    )
    outer: Outer = setting(
        Average(), "what the average becomes: Average, SlowMo, Nesterov, Elastic"
    )
    algorithm: Literal[
        "ring", "ring_gather", "parallel", "reduce_to_one", "halving_doubling", "butterfly", "tree"
    ] = setting("ring", "how the average is made")
    fragments: int = setting(
        1, "parts of the parameters that are averaged in turn", low=1, high=10_000
    )
    overlap: int = setting(
        0, "tau: steps that go on while a fragment is averaged", low=0, high=MAX_STEPS
    )
    mix: float = setting(
        0.5, "share of the worker's own values when a late average arrives", low=0, high=1
    )
    late: Literal["mixed", "added"] = setting(
        "mixed", "with overlap: what was learnt meanwhile is mixed with a late average, or added"
    )
    compression: Compressor | None = setting(
        None, "what differences are compressed by, as QSGD(7); none: not at all"
    )

    def check(self) -> None:
        if self.compression is not None:
            if self.compression.brings_momentum:
                raise InputError(f"LocalSGD: {self.compression!r} is for gradients: take TopK")
            require_ring("LocalSGD", self.compression, self.algorithm)
        if self.every_epochs is not None and self.every not in (None, 8):
            raise InputError("LocalSGD: every and every_epochs are both set; give one")
        by_steps = self.every is not None and self.every_epochs is None
        if (self.fragments > 1 or self.overlap) and not by_steps:
            raise InputError("LocalSGD: fragments and overlap need rounds of steps: set every")
        if self.every is not None and self.fragments > self.every:
            raise InputError(
                f"LocalSGD: {self.fragments} fragments in rounds of {self.every} steps leave some "
                "step with several: raise every or lower fragments"
            )
        if self.every is not None and self.overlap > self.every // self.fragments:
            raise InputError(
                f"LocalSGD: overlap={self.overlap} is longer than the "
                f"{self.every // self.fragments} steps between two exchanges: raise every, or "
                "lower overlap or fragments"
            )
        if self.late == "added" and not self.overlap:
            raise InputError("LocalSGD: late='added' needs averages that are late: set overlap")
        if self.overlap and self.outer.beside_gradient:
            raise InputError("LocalSGD: overlap does not go with Elastic, whose replicas differ")
        if isinstance(self.outer, SlowMo):
            self._check_slow_updates(self.outer, by_steps=by_steps)

    def _check_slow_updates(self, outer: SlowMo, *, by_steps: bool) -> None:
        if outer.every is not None and (
            not by_steps or self.every is None or outer.every % self.every
        ):
            raise InputError(
                f"LocalSGD: SlowMo(every={outer.every}) is no multiple of the steps between two "
                f"averages: set LocalSGD's every to a divisor of {outer.every}"
            )
        if outer.buffers != "maintain" and (self.fragments > 1 or self.overlap):
            raise InputError(
                f"LocalSGD: SlowMo(buffers={outer.buffers!r}) needs averages of all parameters at "
                "once: leave out fragments and overlap"
            )

    def traits(self, work: WorkMode = "shared") -> Traits:
        exchanged = self._exchange()
        after_loss = AfterLoss.KEPT if exchanged is None else AfterLoss.ROUND
        # With overlap averages are on their way between two steps.
        if self.overlap or self.every is None or self.every_epochs is not None:
            after_loss = AfterLoss.CHECKPOINT
        return replace(
            super().traits(work), exchange=exchanged, after_loss=after_loss, round=self.every or 1
        )

    def _exchange(self) -> Rehearsal | None:
        """Return the all-reduce that ends a round, where rounds of steps average whole replicas."""
        plain = self.fragments == 1 and not self.overlap and not self.outer.beside_gradient
        if self.every is None or self.every_epochs is not None or not plain:
            return None
        average = AllReduce(self.algorithm, compression=self.compression).traits().exchange
        assert average is not None
        return replace(average, every=self.every)

    def _memory(self, rank: int, ranks: int) -> Footprint:
        """A replica and its optimizer, the outer state, and the fragments on their way."""
        travelling = 1.0 if self.overlap else 1 / self.fragments
        copies = self.outer.copies + travelling * (2 if self.late == "added" else 1)
        if self.compression is not None:
            copies += self.compression.footprint + (not self.outer.copies)
        return replace(super()._memory(rank, ranks), copies=copies)

    def member(self, worker: Worker) -> LocalMember:
        state = None
        if self.compression is not None:
            state = exchange.CompressionState.of(worker, self.compression)
        rule: type[LocalMember] = LocalSGDMember
        if self.outer.beside_gradient:
            rule = EASGDMember
        elif self.overlap:
            rule = StreamingMember if self.late == "mixed" else CoCoDMember
        fragments = []
        for first, end in exchange.fragments_of(worker, self.fragments):
            values = worker.parameters[first:end]
            fragments.append(Fragment(first, end, self.outer.begin(values)))
            if self.compression is not None and fragments[-1].outer.start is None:
                fragments[-1].anchor = values.clone()
        epochs = int(worker.step.epoch)
        return rule(self, worker, worker.local_optimizer(), fragments, state, epochs=epochs)

    def ending(self, count: int, steps: int, before: int, epochs: int) -> list[int]:
        """Return which of `count` fragments end a round with step `steps`.

        `before` and `epochs` passes over the data were complete before and after it.
        """
        if self.every_epochs is not None:
            return [0] if epochs // self.every_epochs > before // self.every_epochs else []
        if self.every is None:
            return []
        every = self.every
        return [k for k in range(count) if (steps + k * every // count) % every == 0]


@dataclass(eq=False)
class LocalMember(ReplicaMember[LocalSGD]):
    """A worker that takes local steps, and averages fragments of its replica by rounds."""

    fragments: list[Fragment]
    compression: CompressionState | None
    steps: int = field(default=0, metadata=COMMON)
    epochs: int = field(default=0, metadata=COMMON)  # complete passes over the data
    samples: int = 0  # of this worker since its buffers were last averaged
    mean: ReplicaMean = field(init=False)

    def open(self, *, fresh: bool) -> None:
        """Begin a round, if the parameters are equal."""
        super().open(fresh=fresh)
        worker, settings, state = self.worker, self.strategy, self.compression
        self.mean = ReplicaMean(worker, settings.algorithm)
        if state is not None and settings.compression is not None:
            self.mean = CompressedMean(worker, settings.algorithm, settings.compression, state)
        if fresh:
            self.samples = 0
            for fragment in self.fragments:
                fragment.samples = fragment.total = 0

    def count(self) -> None:
        """Count the step, and its samples for the fragments' weights."""
        step = self.worker.step
        self.steps += 1
        self.samples += step.samples
        for fragment in self.fragments:
            fragment.samples += step.samples
            fragment.total += step.total_samples

    def ending(self) -> list[int]:
        """Return the fragments whose round ends with this step."""
        before, self.epochs = self.epochs, int(self.worker.step.epoch)
        return self.strategy.ending(len(self.fragments), self.steps, before, self.epochs)

    def step_outer(self, fragment: Fragment, average: Tensor) -> Outer:
        """Let the outer rule make of `average` what the next round begins with; return the rule."""
        worker, settings = self.worker, self.strategy
        rule = settings.outer.rule(fragment.averages, settings.every)
        rule.step(fragment.outer, fragment.replica(worker), average, worker, fragment.first)
        return rule

    def show(self, offer: Callable[..., None]) -> None:
        """Offer each fragment for snapshots, with its own weight."""
        consumed, worker = self.worker.step.consumed, self.worker
        for fragment in self.fragments:
            values, offset = fragment.replica(worker), fragment.first
            offer(consumed, values, offset=offset, weight=fragment.weight)

    def close_round(self) -> None:
        """Make the replica what all agree on next; a round may be cut short here."""

    def settle(self, rest: Rest) -> None:
        """Before all take the model, close the round."""
        if rest.reason.takes_model:
            self.close_round()

    def rest(self, rest: Rest) -> Kept:
        """Land what is in flight; at the end, show what was learnt."""
        kept = super().rest(rest)
        if rest.reason.ends:
            self.show(self.worker.snapshots.renew)
        return kept

    def kept(self) -> Kept:
        """Return each fragment with its weight."""
        learnt = [
            exchange.Learnt(fragment.first, self.what_counts(fragment), fragment.weight)
            for fragment in self.fragments
        ]
        weight = self.samples or NEGLIGIBLE_WEIGHT
        return replace(super().kept(), learnt=learnt, buffers_weight=weight)

    def what_counts(self, fragment: Fragment) -> Tensor:
        """Return the values of `fragment` that are part of the model."""
        return fragment.replica(self.worker)


@dataclass(eq=False)
class LocalSGDMember(LocalMember):
    """Local SGD, SlowMo and DiLoCo: after H local steps, x <- outer(mean of the replicas).

    Of several fragments each is averaged in its turn.
    """

    def update(self) -> None:
        self.worker.clip()
        self.worker.update_locally(self.optimizer)
        self.count()
        ending = self.ending()
        for index in ending:
            self.average(self.fragments[index])
        self.worker.step.agreed = len(ending) == len(self.fragments)
        self.show(self.worker.snapshots.offer)

    def average(self, fragment: Fragment) -> None:
        """Average the replicas, take the outer step, and treat the local optimizer's moments."""
        worker, algorithm = self.worker, self.strategy.algorithm
        average = exchange.copy_of(worker, fragment.replica(worker))
        counts = fragment.end_round(worker)
        self.mean.take(worker.transport, average, fragment, counts)
        self.step_outer(fragment, average).treat_moments(
            self.optimizer,
            lambda: exchange.average_moments(worker, self.optimizer, algorithm, *counts),
        )


@dataclass(eq=False)
class EASGDMember(LocalMember):
    """EASGD: x_i <- x_i - eta g_i(x_i) - alpha (x_i - c); c <- c + beta (mean of x - c).

    The force comes with the gradient of the step after a round, and is that of the same x_i.
    `ended` are the fragments whose round ended with the last step.
    """

    ended: list[int] = field(default_factory=list)

    def update(self) -> None:
        worker = self.worker
        worker.clip()
        forces = [(self.fragments[index], self.force(index)) for index in self.ended]
        worker.update_locally(self.optimizer)
        for fragment, force in forces:
            fragment.replica(worker).add_(force)
        self.count()
        self.ended = self.ending()
        self.show_both()

    def force(self, index: int) -> Tensor:
        """Return -alpha (x_i - c) of a fragment, and move its centre towards the mean."""
        worker, fragment = self.worker, self.fragments[index]
        own = fragment.replica(worker)
        average, moved = exchange.copy_of(worker, own), own.clone()
        self.mean.take(worker.transport, average, fragment, fragment.end_round(worker))
        self.strategy.outer.step(fragment.outer, moved, average, worker, fragment.first)
        return moved.sub_(own)

    def show_both(self) -> None:
        """Offer the centre, which is the learnt model, and also the replica."""
        consumed, offer = self.worker.step.consumed, self.worker.snapshots.offer
        for fragment in self.fragments:
            replica, offset = fragment.replica(self.worker), fragment.first
            offer(consumed, fragment.reference, offset=offset, weight=fragment.weight)
            offer(consumed, replica, offset=offset, kind="replica")

    def what_counts(self, fragment: Fragment) -> Tensor:
        """Return the centre, which is the same on all workers."""
        return fragment.reference

    def close_round(self) -> None:
        """Replace the replica by the centre."""
        for fragment in self.fragments:
            fragment.replica(self.worker).copy_(fragment.reference)

    def open(self, *, fresh: bool) -> None:
        super().open(fresh=fresh)
        if fresh:
            self.ended = []


@dataclass(eq=False)
class StreamingMember(LocalMember):
    """Streaming DiLoCo: the averages of fragments are made in the background, in turn, and come tau
    steps late. With `Average` as the outer rule: Overlap-Local-SGD.
    """

    def update(self) -> None:
        self.worker.clip()
        self.worker.update_locally(self.optimizer)
        self.count()
        for fragment in self.fragments:
            if fragment.travelling is not None and self.steps >= fragment.due:
                self.apply(fragment, fragment.travelling)
        for index in self.ending():
            self.send(self.fragments[index])
        self.show(self.worker.snapshots.offer)

    def send(self, fragment: Fragment) -> None:
        """Begin to average `fragment`."""
        fragment.travelling = exchange.copy_of(self.worker, fragment.replica(self.worker))
        fragment.due = self.steps + self.strategy.overlap
        values, counts = fragment.travelling, fragment.end_round(self.worker)
        fragment.flow = self.worker.transport.spawn(
            lambda transport: self.mean.take(transport, values, fragment, counts)
        )

    def apply(self, fragment: Fragment, average: Tensor) -> None:
        """Take the outer step, at the learning rates of this step; merge the replica into it."""
        fragment.land()
        outer = fragment.replica(self.worker)
        theta = outer.clone()  # the outer step overwrites the replica
        self.step_outer(fragment, average)
        self.merge(fragment, outer, theta)
        fragment.travelling = None

    def merge(self, fragment: Fragment, outer: Tensor, theta: Tensor) -> None:
        """theta <- mix theta + (1 - mix) theta_outer, in place of `outer`."""
        outer.lerp_(theta, self.strategy.mix)

    def settle(self, rest: Rest) -> None:
        """Wait for averages in flight, which are applied when they are due, or by `close_round`."""
        for fragment in self.fragments:
            fragment.land()
        super().settle(rest)

    def close_round(self) -> None:
        """Apply the averages in flight."""
        for fragment in self.fragments:
            if fragment.travelling is not None:
                self.apply(fragment, fragment.travelling)


@dataclass(eq=False)
class CoCoDMember(StreamingMember):
    """CoCoD-SGD: what a worker has learnt since it sent its replica is added to the average."""

    def send(self, fragment: Fragment) -> None:
        fragment.sent = exchange.copy_of(self.worker, fragment.replica(self.worker))
        super().send(fragment)

    def merge(self, fragment: Fragment, outer: Tensor, theta: Tensor) -> None:
        """theta <- theta_outer + theta - theta_sent, in place of `outer`."""
        assert fragment.sent is not None
        outer.add_(theta.sub_(fragment.sent))
        fragment.sent = None
