"""Local SGD and its kin: workers train apart, and average their parameters once in a while."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from orchestra import exchange, optimizers
from orchestra.compression.base import Compressor
from orchestra.errors import InputError
from orchestra.settings import MAX_STEPS, setting
from orchestra.strategies.all_reduce import AllReduce, require_ring
from orchestra.strategies.outer import Average, Outer, OuterState, SlowMo
from orchestra.strategies.stateful import ReplicaState, StatefulReplicas
from orchestra.strategies.traits import Footprint, Rehearsal, Traits, WorkMode

if TYPE_CHECKING:
    from torch import Tensor

    from orchestra.exchange import Learnt
    from orchestra.transports.protocol import Task, Transport
    from orchestra.worker.worker import Worker

NEGLIGIBLE_WEIGHT = 2.0**-100
"""The weight of a replica without samples, lest all weights be 0."""


@dataclass
class Fragment:
    """Elements [first, end) of the flat parameters that are averaged at once; how they stand."""

    first: int = field(metadata=optimizers.TRANSIENT)
    end: int = field(metadata=optimizers.TRANSIENT)
    outer: OuterState
    samples: int = 0  # of this worker since the last average
    total: int = 0  # of all workers
    averages: int = 0  # made so far
    anchor: Tensor | None = None  # the last average, for compression, if `outer` keeps no x_0
    travelling: Tensor | None = None  # an average on its way
    sent: Tensor | None = None  # what this worker sent, if that is needed when it arrives
    due: int = 0  # the step at which it is applied
    flow: Task[None] | None = field(default=None, metadata=optimizers.TRANSIENT)

    @property
    def weight(self) -> float:
        """The weight of this replica in an exact mean: its samples since the last average."""
        return self.samples or NEGLIGIBLE_WEIGHT

    def replica(self, worker: Worker) -> Tensor:
        return worker.parameters[self.first : self.end]

    def counts(self, worker: Worker) -> tuple[int, int | None]:
        """`samples` and `total`, which a loop of the user's own may not know."""
        return self.samples, None if worker.own_loop else self.total

    @property
    def reference(self) -> Tensor:
        """The values that all workers know of this fragment: differences are taken from them."""
        known = self.anchor if self.outer.start is None else self.outer.start
        assert known is not None
        return known

    def land(self) -> None:
        """Wait for an average that is on its way."""
        if self.flow is not None:
            self.flow.wait()
            self.flow = None


@dataclass
class LocalSGDState(ReplicaState):
    """The fragments of this worker's replica, and what it counts."""

    fragments: list[Fragment]
    steps: int = 0
    epochs: int = 0  # those over
    ended: list[int] = field(default_factory=list)  # fragments that move with the next gradient
    samples: int = 0  # of this worker since its buffers were last averaged
    compression: exchange.CompressionState | None = None


@dataclass(frozen=True, repr=False)
class LocalSGD(StatefulReplicas[LocalSGDState]):
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
        return replace(super().traits(work), exchange=self._exchange())

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

    def allocate(self, worker: Worker, work: exchange.SharedWork | None) -> LocalSGDState:
        fragments = [
            Fragment(first, end, self.outer.begin(worker.parameters[first:end]))
            for first, end in exchange.fragments_of(worker, self.fragments)
        ]
        state = LocalSGDState(worker.local_optimizer(), fragments, epochs=int(worker.step.epoch))
        if self.compression is not None:
            state.compression = exchange.CompressionState.of(worker, self.compression)
            for fragment in fragments:
                if fragment.outer.start is None:
                    fragment.anchor = fragment.replica(worker).clone()
        return state

    def update(self, worker: Worker, state: LocalSGDState) -> None:
        """Take a local step; then apply averages that are due, and send others."""
        worker.clip()
        ended = [state.fragments[index] for index in state.ended]
        moves = [self._move_beside_gradient(worker, state, fragment) for fragment in ended]
        worker.update_locally(state.optimizer)  # EASGD takes both at one x: the moves were first
        for fragment, move in zip(ended, moves, strict=True):
            fragment.replica(worker).add_(move)
        state.steps += 1
        state.samples += worker.step.samples
        for fragment in state.fragments:
            fragment.samples += worker.step.samples
            fragment.total += worker.step.total_samples
            if fragment.travelling is not None and state.steps >= fragment.due:
                self._arrive(worker, fragment)
        leaving = self._leaving(worker, state)
        state.ended = leaving if self.outer.beside_gradient else []
        if not self.outer.beside_gradient:
            for index in leaving:
                self._send(worker, state, state.fragments[index])
        consumed, offer = worker.step.consumed, worker.snapshots.offer
        for fragment in state.fragments:
            contribution, offset = self._contribution(worker, fragment), fragment.first
            offer(consumed, contribution, offset=offset, weight=fragment.weight)
            if self.outer.beside_gradient:  # its centre is not what a worker has
                offer(consumed, fragment.replica(worker), offset=offset, kind="replica")

    def _contribution(self, worker: Worker, fragment: Fragment) -> Tensor:
        return self.outer.contribution(fragment.outer, fragment.replica(worker))

    def _move_beside_gradient(
        self, worker: Worker, state: LocalSGDState, fragment: Fragment
    ) -> Tensor:
        """Find what the outer rule adds to a fragment where the gradient was computed."""
        own = fragment.replica(worker)
        average, moved = exchange.copy_of(worker, own), own.clone()
        self._averaging(worker, state, fragment, average)(worker.transport)
        self.outer.step(fragment.outer, moved, average, worker, fragment.first)
        return moved.sub_(own)

    def _averaging(
        self, worker: Worker, state: LocalSGDState, fragment: Fragment, values: Tensor
    ) -> Callable[[Transport], None]:
        """Make a function that averages `values`, a copy of `fragment`; its samples count anew."""
        samples, total = fragment.counts(worker)
        fragment.samples = fragment.total = 0
        number = fragment.averages
        fragment.averages += 1

        def average(transport: Transport) -> None:
            if self.compression is None or state.compression is None:
                exchange.average_replicas(worker, transport, values, self.algorithm, samples, total)
                return
            if len(worker.workers) == 1:
                return
            part = exchange.part_of_samples(worker, transport, self.algorithm, samples, total)
            values.sub_(fragment.reference).mul_(part)
            exchange.average_compressed(
                worker, transport, values, fragment.first, self.compression, state.compression,
                self.algorithm, number,
            )  # fmt: skip
            values.add_(fragment.reference)

        return average

    def _leaving(self, worker: Worker, state: LocalSGDState) -> list[int]:
        """Find the fragments whose round ends with this step."""
        if self.every_epochs is not None:
            before, state.epochs = state.epochs, int(worker.step.epoch)
            ends = state.epochs // self.every_epochs > before // self.every_epochs
            return [0] if ends else []
        if self.every is None:
            return []
        every, count, steps = self.every, len(state.fragments), state.steps
        return [k for k in range(count) if (steps + k * every // count) % every == 0]

    def _send(self, worker: Worker, state: LocalSGDState, fragment: Fragment) -> None:
        counts = fragment.counts(worker)
        fragment.travelling = exchange.copy_of(worker, fragment.replica(worker))
        fragment.due = state.steps + self.overlap
        if self.late == "added":
            fragment.sent = exchange.copy_of(worker, fragment.travelling)
        average = self._averaging(worker, state, fragment, fragment.travelling)
        if self.overlap:
            fragment.flow = worker.transport.spawn(average)
            return
        average(worker.transport)
        self._arrive(worker, fragment)
        if isinstance(self.outer, SlowMo) and self._rule(fragment) is self.outer:
            if self.outer.buffers == "reset":
                state.optimizer.state.clear()  # Adam's count of steps, too
            elif self.outer.buffers == "average":
                exchange.average_moments(worker, state.optimizer, self.algorithm, *counts)

    def _arrive(self, worker: Worker, fragment: Fragment) -> None:
        fragment.land()
        assert fragment.travelling is not None
        own = fragment.replica(worker)
        learnt = own.clone() if self.overlap else own  # the rule below overwrites `own`
        rule = self._rule(fragment)
        rule.step(fragment.outer, own, fragment.travelling, worker, fragment.first)
        if fragment.sent is not None:
            own.add_(learnt.sub_(fragment.sent))  # CoCoD-SGD: what was learnt since it left
        elif self.overlap:
            own.lerp_(learnt, self.mix)
        if fragment.anchor is not None:
            fragment.anchor.copy_(fragment.travelling)  # it is the same on all workers
        fragment.travelling = fragment.sent = None

    def _rule(self, fragment: Fragment) -> Outer:
        """Return the outer rule for the last average of `fragment`."""
        if isinstance(self.outer, SlowMo) and self.outer.every is not None:
            assert self.every is not None
            if fragment.averages % (self.outer.every // self.every):
                return Average()  # between two slow updates
        return self.outer

    def settle(self, worker: Worker, state: LocalSGDState) -> None:
        """Wait for averages on their way; they are applied when they are due."""
        for fragment in state.fragments:
            fragment.land()

    def stop(self, worker: Worker, state: LocalSGDState) -> None:
        self._apply(worker, state)
        consumed, renew = worker.step.consumed, worker.snapshots.renew
        for fragment in state.fragments:
            contribution, offset = self._contribution(worker, fragment), fragment.first
            renew(consumed, contribution, offset=offset, weight=fragment.weight)

    def learnt(self, worker: Worker, state: LocalSGDState) -> Iterable[Learnt]:
        """Close the round, which may be cut short here: late averages count, too."""
        self._apply(worker, state)
        for fragment in state.fragments:
            yield exchange.Learnt.replica(fragment.replica(worker), fragment.weight, fragment.first)

    def rebase(self, worker: Worker, state: LocalSGDState) -> None:
        state.samples, state.ended = 0, []
        for fragment in state.fragments:
            fragment.samples = fragment.total = 0

    def buffers_weight(self, state: LocalSGDState) -> float:
        return state.samples or NEGLIGIBLE_WEIGHT

    def _apply(self, worker: Worker, state: LocalSGDState) -> None:
        """Apply averages that are on their way; replicas become what they contribute."""
        self.settle(worker, state)
        for fragment in state.fragments:
            if fragment.travelling is not None:
                self._arrive(worker, fragment)
            fragment.replica(worker).copy_(self._contribution(worker, fragment))
