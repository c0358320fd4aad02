"""The batches of a loop of the user's own, as its script iterates, saves and resumes them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from orchestra.errors import InputError
from orchestra.optimizers.spec import get_options
from orchestra.trainer.own_loop.epochs import SAVING, Epochs
from orchestra.trainer.own_loop.model import check_fits, parameters_in
from orchestra.worker.batches import digest


class Batches(Epochs):
    """The user's loader, dealt out to the workers; iterate it as before, once an epoch.

    When an iteration ends, every worker's model holds the agreed parameters. A rank that has become
    a server gets nothing more: its iterations serve until the workers' epoch is over, and the one
    after the workers have left ends its script, with status 0. Where workers take batches from a
    queue, which `queued` loads, they get unlike numbers of them.
    """

    # Saving and resuming

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the training; every worker calls it, between two steps.

        It holds parameters, buffers and moments as each rank has them, slices on servers included,
        the epoch and the place in it, and random generators: plain data and tensors, for
        torch.save. Save the state of the first worker, which alone is complete.

        Raises:
            InputError: the state cannot be taken at this place; the message says where it can.
        """
        ranks = {}
        if not self._is_over():
            if self.is_worker():
                # Refused on each worker alike, before anything collective begins
                self._check_place()
                self.take_over()
                # Servers learn of the saving by this step of the pause
                self.strategy.quiesce(self.worker, self.state, SAVING)
                ranks = self.collect(self._order_state())
            else:
                self._serve(until_saved=True)
        return {
            "settings": self._settings(),
            "position": {
                "epoch": self.epoch,
                # Batches that were taken ahead have had no step: they are read again.
                "taken": self.taken - (self.passes.ahead or 0),
                "length": self.length,
                "order": self._order_number,
                "backwards": self.passes.done if self.taken else 0,
                "consumed": self.worker.step.consumed,
                "steps": self.steps,
            },
            "groups": get_options(self.optimizer),
            "ranks": ranks,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`; every worker calls it with the first worker's `state_dict()`.

        Call it after `distribute` and before the loop over these batches, whose first iteration
        goes on where the epoch was left.

        Raises:
            InputError: `state` is of other settings, or training has come too far to go back.
        """
        if self._is_over():
            return
        where = "batches.load_state_dict()"
        if self._in_epoch and not self.left:
            raise InputError(
                f"{where}: an iteration over the batches is under way: call it before the loop "
                "over them, or leave that with break"
            )
        check_fits(where, state, self._settings(), self.worker, self.length, self._generators())
        # A switch has happened, and the state is of the roles before it
        if self.roles != self.strategy.roles(self.worker.runtime.ranks):
            raise InputError(
                f"{where}: ranks have changed their roles since the beginning: load before training"
            )
        position, ranks = state["position"], state["ranks"]
        # Workers that go on from unlike states would train unlike models, and nothing would say so
        if not self.alike(digest([position, parameters_in(ranks)])):
            raise InputError(f"{where}: workers load unlike states: give all the same one")
        self.load(state)
        self._go_on_from(position, ranks[str(self.worker.rank)]["order"])

    def start_at(self, batch: int) -> None:
        """Begin the next epoch at its batch number `batch`, from 0."""
        position = {
            "epoch": self.epoch, "taken": batch, "backwards": 0, "order": self._order_number
        }  # fmt: skip
        self._go_on_from(position, self._order_state())

    def _go_on_from(self, position: Mapping[str, Any], order: dict[str, Any]) -> None:
        """Let the next iteration begin at `position`, as `state_dict` gave it."""
        self.epoch = position["epoch"]
        self.taken = self._resumed_at = position["taken"]
        self._passes_before = position["backwards"]
        self._deal_out()
        if self._sharded is not None:
            self._sharded.epoch = position["order"]
        self.begun = self._in_epoch = self.left = False
        self._order = order
        for generator, state in zip(self._generators(), order["generators"], strict=True):
            generator.set_state(state)

    def _settings(self) -> dict[str, Any]:
        """Return what has to be the same where a state is loaded."""
        return {
            "strategy": repr(self.strategy),
            "ranks": self.worker.runtime.ranks,
            "optimizer": type(self.optimizer).__name__,
            "accumulation": self.passes.accumulation,
            "seed": self._seed,
            "work": "shared" if self._uses_queue else "equal",
        }

    def _check_place(self) -> None:
        """Refuse to save where there is no state that could be gone on from."""
        where = "batches.state_dict()"
        if self.passes.under_way or self.passes.complete:
            raise InputError(f"{where}: gradients wait for their step: call it after that")
        if self.taken and self.source() is not None:
            raise InputError(
                f"{where} in mid-epoch needs equally many batches on every worker: set "
                "work='equal' in distribute, or save when the epoch has ended"
            )
        if self.taken and self.workers != self._roles.workers:
            raise InputError(
                f"{where}: a rank has become a server in this epoch, so that nobody takes its part "
                "of it: save when the epoch has ended"
            )

    # What else a loop tells

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Let this rank take any time inside; the others wait when they need it.

        For work that takes longer than `patience` without a forward pass of the model. Under
        `AllReduce("native")` the collectives of the others give up after four times `patience`.
        """
        reporter = self.worker.reporter
        reporter.phase("paused")
        try:
            yield
        finally:
            reporter.phase("training")

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Let `backward()` exchange nothing inside; the next one outside exchanges for all of them.

        As `no_sync` of DistributedDataParallel, for loops that know which one is the last.
        """
        self.passes.paused = True
        try:
            yield
        finally:
            self.passes.paused = False

    def report(self, loss: float) -> None:
        """Tell this step's loss, before `loss.backward()`: for rules that watch it."""
        self.loss = float(loss)
