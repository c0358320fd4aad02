"""The state of a loop of the user's own: what is saved, where that is refused, and what fits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from orchestra.errors import InputError
from orchestra.optimizers.spec import get_options
from orchestra.trainer.own_loop.dealer import Dealer
from orchestra.trainer.own_loop.epochs import Epochs
from orchestra.trainer.own_loop.passes import BackwardPasses
from orchestra.trainer.own_loop.rank import OwnRank
from orchestra.trainer.own_loop.scale import LossScale
from orchestra.trainer.own_loop.strategy_state import StrategyState
from orchestra.worker.batches import digest


class Saver:
    """Saves the training of a loop, and lets it go on from what was saved."""

    def __init__(
        self,
        rank: OwnRank,
        state: StrategyState,
        dealer: Dealer,
        epochs: Epochs,
        passes: BackwardPasses,
        scale: LossScale,
    ) -> None:
        self._rank, self._state = rank, state
        self._dealer, self._epochs = dealer, epochs
        self._passes, self._scale = passes, scale

    def save(self) -> dict[str, Any]:
        """Collective over all ranks: return the state, which is complete on the first worker."""
        ranks = {}
        if not self._epochs.is_over():
            if self._rank.is_worker():
                # Refused on each worker alike, before anything collective begins
                self._check_place()
                ranks = self._epochs.save()
            else:
                self._epochs.serve(until_saved=True)
        return {
            "settings": self._settings(),
            "position": self._position(),
            "groups": get_options(self._rank.optimizer),
            "ranks": ranks,
        }

    def _position(self) -> dict[str, Any]:
        return self._epochs.position() | {
            "length": self._dealer.length,
            "consumed": self._rank.worker.step.consumed,
            "steps": self._rank.steps,
            "rescale": self._scale.rescale,
        }

    def _settings(self) -> dict[str, Any]:
        """Return what has to be the same where a state is loaded."""
        rank = self._rank
        return {
            "strategy": repr(rank.strategy),
            "ranks": rank.worker.runtime.ranks,
            "optimizer": type(rank.optimizer).__name__,
            "accumulation": self._passes.accumulation,
            "seed": self._dealer.seed,
            "work": "shared" if self._epochs.uses_queue else "equal",
        }

    def _check_place(self) -> None:
        """Refuse to save where there is no state that could be gone on from."""
        where, rank, passes = "batches.state_dict()", self._rank, self._passes
        grads = (parameter.grad for parameter in rank.worker.gradients.parameters)
        # A GradScaler that found infinities has lowered the scale, in place of a step.
        if passes.complete and (self._scale.rescale < 1.0 or all(grad is None for grad in grads)):
            rank.worker.undo_exchange()
            passes.complete = False
        if passes.under_way or passes.complete:
            raise InputError(f"{where}: gradients wait for their step: call it after that")
        if not self._epochs.taken:
            return
        if rank.source() is not None:
            raise InputError(
                f"{where} in mid-epoch needs equally many batches on every worker: set "
                "work='equal' in distribute, or save when the epoch has ended"
            )
        if self._dealer.is_rest:
            raise InputError(
                f"{where}: ranks were lost or have joined in this epoch: save when it has ended"
            )
        if rank.workers != self._dealer.workers:
            raise InputError(
                f"{where}: a rank has become a server in this epoch, so that nobody takes its part "
                "of it: save when the epoch has ended"
            )

    def load(self, state: Mapping[str, Any]) -> None:
        """Collective over the workers: go on from `state`; on ranks that serve nothing is done,
        which hear of it as they serve. InputError where `state` does not fit."""
        rank, epochs, where = self._rank, self._epochs, "batches.load_state_dict()"
        first_roles = rank.strategy.roles(rank.worker.runtime.ranks)
        if epochs.is_over() or rank.worker.rank not in first_roles.workers:
            return
        if epochs.under_way:
            raise InputError(
                f"{where}: an iteration over the batches is under way: call it before the loop "
                "over them, or leave that with break"
            )
        self._check_fits(where, state)
        # A switch has happened, and the state is of the roles before it
        if rank.roles != first_roles:
            raise InputError(
                f"{where}: ranks have changed their roles since the beginning: load before training"
            )
        position, ranks = state["position"], state["ranks"]
        # Workers that go on from unlike states would train unlike models, and nothing would say so
        if not rank.alike(digest([position, _parameters_in(ranks)])):
            raise InputError(f"{where}: workers load unlike states: give all the same one")
        self._state.load(state)
        self._dealer.item = None  # of the queue before, which nobody has to be told of
        self._go_on(position, ranks[str(rank.worker.rank)]["order"])

    def start_at(self, batch: int) -> None:
        """Begin the next epoch at its batch number `batch`, from 0."""
        position = self._position() | {"taken": batch, "backwards": 0}
        self._go_on(position, self._epochs.order_state())

    def _go_on(self, position: dict[str, Any], order: dict[str, Any]) -> None:
        """Let the next iteration begin at `position`."""
        self._scale.go_on(position.get("rescale", 1.0))
        self._epochs.go_on(position, order)

    def _check_fits(self, where: str, state: Mapping[str, Any]) -> None:
        """Refuse a `state` that this loop cannot go on from. Messages begin with `where`."""
        expected = {"settings", "position", "groups", "ranks"}
        if not isinstance(state, Mapping) or not expected <= state.keys():
            raise InputError(f"{where}: expected what batches.state_dict() returned")
        for name, ours in self._settings().items():
            theirs = state["settings"].get(name)
            if theirs != ours:
                raise InputError(
                    f"{where}: the state is of {name}={theirs}, and this loop of {name}={ours}: "
                    "distribute with the settings that it was saved under"
                )
        position, ranks, worker = state["position"], state["ranks"], self._rank.worker
        if ranks.keys() != {str(rank) for rank in range(worker.runtime.ranks)}:
            raise InputError(
                f"{where}: the state lacks what other ranks had: save what the first worker's "
                "batches.state_dict() returned (if orchestra.is_first())"
            )
        found = _differences(worker.named_parameters(), _parameters_in(ranks))
        if not found and len(state["groups"]) != len(worker.optimizer.groups):
            found = "it has other parameter groups"
        if found:
            raise InputError(f"{where}: the state is of another model or optimizer: {found}")
        length = self._dealer.length
        if position["taken"] and position["length"] != length:
            raise InputError(
                f"{where}: the state was saved in the midst of an epoch of {position['length']} "
                f"batches on each worker, and here it has {length}: use the same loader"
            )
        generators = ranks[str(worker.rank)]["order"]["generators"]
        if len(generators) != len(self._dealer.generators()):
            raise InputError(
                f"{where}: the loader has other generators than then: use the same loader"
            )


def _parameters_in(ranks: Mapping[str, Any]) -> Mapping[str, Tensor]:
    """Return some worker's parameters in a state; ranks that serve have none."""
    every = (each["parameters"] for each in ranks.values())
    return next(named for named in every if named)


def _differences(named: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> str:
    """Return in which parameter `others` are another model's; empty if in none."""
    for name in [*named, *others]:
        if name not in others or name not in named:
            return f"parameter {name!r} is in one of them only"
        if others[name].shape != named[name].shape:
            theirs, ours = tuple(others[name].shape), tuple(named[name].shape)
            return f"parameter {name!r} has the shape {theirs} in it, and {ours} here"
    return ""
