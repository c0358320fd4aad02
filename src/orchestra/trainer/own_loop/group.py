"""A loop of the user's own goes on where ranks are lost or join: from its last completed step.

In lockstep a change of the group shows in whatever waits for the others: the exchange in
`backward()`, the buffers of a forward pass, the end of an epoch. There the ranks that are left make
the next group, and the step under way is void on all of them: until the next batch is taken,
`backward()` exchanges nothing and `step()` does nothing. Who has not completed the last step that
another one has takes over the model and the optimizer from that one. What is left of the epoch is
dealt out anew, from the first sample behind that step.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor

from orchestra import exchange
from orchestra.collectives import broadcast
from orchestra.data import loaders
from orchestra.errors import GroupChanged, InputError, PeerLost
from orchestra.optimizers.spec import get_options
from orchestra.strategies.base import Strategy
from orchestra.strategies.traits import AfterLoss
from orchestra.trainer.regrouping import NO_STEPS, GroupStanding
from orchestra.transports.tags import Tag
from orchestra.worker.runtime import RankActivity, Runtime

if TYPE_CHECKING:
    from orchestra.trainer.own_loop.loop import OwnLoop
    from orchestra.worker.worker import Worker

T = TypeVar("T")

Regroup = Callable[[PeerLost | GroupChanged], Runtime]
"""Give up this group, after an error of its transport; return the runtime of the next one."""


class Stateful(Protocol):
    """What a loop registers, such as a scheduler, a GradScaler, or an average of weights."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


def refusal_to_regroup(strategy: Strategy, loader: Any, accumulation: int) -> str | None:
    """Return why a loop of the user's own could not go on in a new group; None if it can."""
    if strategy.traits().after_loss is not AfterLoss.TOGETHER:
        return (
            f"under {strategy!r} a loop of your own ends when it loses a rank: leave it out, or "
            "take AllReduce without shards"
        )
    if accumulation > 1:
        return "accumulation would be another one with fewer ranks: leave out one of both"
    if not loaders.is_standard(loader):
        return (
            "the rest of an epoch can be dealt out anew only from a DataLoader of a map-style data "
            "set, in order or with shuffle=True: leave it out, or give such a loader"
        )
    return None


class OwnGroup:
    """The ranks that train a `loop` together, and what is registered to go with its state.

    Attributes:
        void: the step under way is; the next batch begins another one.
        enters: this rank has no state of the run, until it is taken in.
    """

    def __init__(self, loop: OwnLoop, regroup: Regroup, *, enters: bool) -> None:
        self._loop, self._regroup = loop, regroup
        self.void, self.enters = False, enters
        self._registered: dict[str, Stateful] = {}
        self._put_back: Mapping[str, Any] = {}  # states, with the next batch
        self._groups: list[dict[str, Any]] = []  # options of the optimizer, the same
        self._position = 0  # samples of the epoch, before the step that comes next
        self._buffers: list[Tensor] = []  # before the step under way
        # What is left of the epoch of that number, where it was dealt out anew
        self._rest: tuple[int, Iterator[loaders.WorkerBatch]] | None = None
        self._agreed: int | None = None  # an epoch at whose end all went on in a new group
        self._calls = 0  # of collective functions that the script has made
        self._answer: Any = None  # of the last one
        self._told = False

    def register(self, **objects: Stateful) -> None:
        """See `Batches.register`."""
        for name, each in objects.items():
            if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
                raise InputError(
                    f"batches.register(): {name} has no state_dict() and load_state_dict()"
                )
        self._registered |= objects

    # Where the loop waits for others

    def guarded(self, call: Callable[[], object]) -> bool:
        """Make `call`, unless the step is void; return whether it was made. Where the group changes
        meanwhile, go on in the next one."""
        if self.void:
            return False
        try:
            call()
        except (PeerLost, GroupChanged) as error:
            self.change(error)
            return False
        return True

    def together(self, call: Callable[[], T]) -> T:
        """Make a collective `call` of the script's own; where the group changes meanwhile, make it
        again in the next one, unless others have its answer."""
        while True:
            try:
                answer = call()
            except (PeerLost, GroupChanged) as error:
                calls = self._calls
                self.change(error)
                if self._calls == calls:
                    continue
                found: T = self._answer
                return found
            self._calls, self._answer = self._calls + 1, answer
            return answer

    def begin(self) -> None:
        """An iteration begins: tell that this rank can go on in another group; a newcomer waits
        until it is taken in."""
        if not self._told:
            self._told = True
            self._refuse_forgotten()
            self._loop.worker.reporter.elastic(self._what_it_trains())
        if self.enters:
            self._loop.worker.reporter.activity(RankActivity.JOINING)
            self.change(GroupChanged())
            self.enters = False

    def next_part(self) -> Iterator[loaders.WorkerBatch] | None:
        """Before a batch: end a void step. Return what is left of the epoch, if that was dealt out
        anew."""
        self._end_void_step()
        rest, self._rest = self._rest, None
        return None if rest is None else rest[1]

    def _end_void_step(self) -> None:
        """Take back what a void step has changed, if there was one."""
        if not self.void:
            return
        self.void = False
        self._loop.forget_step(self._groups)
        for name, state in self._put_back.items():
            if name in self._registered:
                self._registered[name].load_state_dict(state)

    def step_begins(self) -> None:
        """Keep what a forward pass changes."""
        self._buffers = [buffer.clone() for _, buffer in self._loop.worker.buffers]

    def step_done(self, position: int) -> None:
        """A step is complete; it was behind the first `position` samples of the epoch."""
        self._position, self._buffers = position, []

    def epoch_begins(self) -> None:
        """The first batch of an epoch comes next, unless that was dealt out anew."""
        if self._rest is None:
            self._position = 0

    def epoch_ends(self, epoch: int) -> None:
        """All have agreed at the end of `epoch`."""
        self._end_void_step()
        if self._rest is not None and self._rest[0] == epoch:
            self._rest = None

    @property
    def is_dealt_anew(self) -> bool:
        """True if the epoch that begins, or is under way, was dealt out anew and not begun so."""
        return self._rest is not None

    def has_agreed(self, epoch: int) -> bool:
        """Return whether all went on in a new group where `epoch` had no batches left."""
        return self._agreed == epoch

    # A change

    def change(self, error: PeerLost | GroupChanged) -> None:
        """Go on in the next group, from the last step that any rank has completed. Collective over
        its ranks."""
        while True:
            try:
                self._loop.move(self._regroup(error))
                self._take_over()
                break
            except (PeerLost, GroupChanged) as again:
                error = again
        self._loop.worker.reporter.activity(RankActivity.TRAINING)

    def _take_over(self) -> None:
        loop = self._loop
        worker, rank, epochs = loop.worker, loop.rank, loop.epochs
        if self._buffers:  # the step under way is void, or its buffers come from the donor
            with torch.no_grad():
                for kept, (_, buffer) in zip(self._buffers, worker.buffers, strict=True):
                    buffer.copy_(kept)
            self._buffers = []
        # All ranks come to the same ends, of steps, epochs and calls, in the same order.
        ends = rank.steps + epochs.epoch + self._calls
        standing = GroupStanding.among(worker, NO_STEPS if self.enters else ends, apart=False)
        told = _broadcast(worker, self._known, standing.donor)
        for packed in exchange.pack(worker.buffers):
            broadcast(worker.transport, packed.values, standing.donor, worker.everyone, Tag.BUFFERS)
            packed.unpack()
        if standing.behind:
            self._share_model(standing)
            worker.step.consumed, rank.ledger.state = told["consumed"], told["ledger"]
            rank.steps, rank.loss, epochs.turns = told["steps"], told["loss"], told["turns"]
        epochs.epoch, self._position = told["epoch"], told["position"]
        self._calls, self._answer = told["calls"], told["answer"]
        self._put_back, self._groups = told["registered"], told["groups"]
        loop.begin_anew(self._groups)
        rest, left = loop.dealer.deal_out_rest(rank, epochs.epoch, self._position)
        self._rest = epochs.epoch, rest
        self._agreed = None if left else epochs.epoch
        self.void = True

    def _known(self) -> dict[str, Any]:
        """Return what all go on with."""
        loop = self._loop
        rank, epochs = loop.rank, loop.epochs
        return {
            "steps": rank.steps,
            "loss": rank.loss,
            "consumed": loop.worker.step.consumed,
            "ledger": rank.ledger.state,
            "epoch": epochs.epoch,
            "turns": epochs.turns,
            "position": self._position,
            "calls": self._calls,
            "answer": self._answer,
            "groups": get_options(loop.optimizer),
            "registered": {name: each.state_dict() for name, each in self._registered.items()},
        }

    def _share_model(self, standing: GroupStanding) -> None:
        """Give those that are behind the donor's parameters and optimizer. Collective."""
        loop, worker = self._loop, self._loop.worker
        transport, donor, everyone = worker.transport, standing.donor, worker.everyone
        with torch.no_grad():
            broadcast(transport, worker.parameters, donor, everyone, Tag.AGREE)
        state = _broadcast(worker, loop.optimizer.state_dict, donor)
        if standing.is_behind:
            loop.load_optimizer(state)

    def _what_it_trains(self) -> str:
        """Return a digest of what all ranks of a group have to have in common."""
        loop = self._loop
        named = [
            (n, str(p.dtype), tuple(p.shape)) for n, p in loop.worker.module.named_parameters()
        ]
        loader: Any = loop.batches.loader
        text = repr(
            (
                loop.strategy, named, type(loop.optimizer).__name__, len(loader.sampler),
                loader.batch_size, sorted(self._registered),
            )
        )  # fmt: skip
        return hashlib.sha256(text.encode()).hexdigest()

    def _refuse_forgotten(self) -> None:
        """Refuse a scheduler that others would not learn of."""
        schedules = any(
            isinstance(each, torch.optim.lr_scheduler.LRScheduler)
            for each in self._registered.values()
        )
        if hasattr(self._loop.optimizer.step, "_wrapped_by_lr_sched") and not schedules:
            raise InputError(
                "min_ranks: there is a scheduler of learning rates, which a rank that joins has to "
                "learn of: batches.register(scheduler=scheduler) before the loop"
            )


def _broadcast(worker: Worker, make: Callable[[], Any], donor: int) -> Any:
    """Return what `make` makes on the rank `donor`: tensors and plain data. Collective."""
    transport, everyone, gives = worker.transport, worker.everyone, worker.rank == donor
    value = make() if gives else None
    data = _to_bytes(value) if gives else torch.empty(0, dtype=torch.uint8)
    size = torch.tensor([data.numel()])
    broadcast(transport, size, donor, everyone, Tag.AGREE)
    if not gives:
        data = torch.empty(int(size), dtype=torch.uint8)
    broadcast(transport, data, donor, everyone, Tag.AGREE)
    return value if gives else torch.load(io.BytesIO(data.numpy().tobytes()), weights_only=True)


def _to_bytes(value: Any) -> Tensor:
    file = io.BytesIO()
    torch.save(value, file)
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
