"""What a saved state of a loop of the user's own is of, where it is saved, and where it fits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from orchestra.errors import InputError
from orchestra.worker.batches import digest
from orchestra.worker.worker import Worker

if TYPE_CHECKING:
    from orchestra.trainer.own_batches import Batches
    from orchestra.trainer.own_loop import OwnLoop


def settings_of(loop: OwnLoop) -> dict[str, Any]:
    """What has to be the same where a state is loaded."""
    return {
        "strategy": repr(loop.strategy),
        "ranks": loop.worker.runtime.ranks,
        "optimizer": type(loop.optimizer).__name__,
        "accumulation": loop.accumulation,
        "seed": loop.batches.seed,
        "work": "shared" if loop.strategy.self_paced and loop.queued else "equal",
    }


def check_place(loop: OwnLoop) -> None:
    """Raises InputError where there is no state that could be gone on from."""
    batches, where = loop.batches, "batches.state_dict()"
    if not loop.between_steps:
        raise InputError(f"{where}: gradients wait for their step: call it after that")
    if batches.taken and loop.strategy.work(loop.state) is not None:
        raise InputError(
            f"{where} in mid-epoch needs equally many batches on every worker: set "
            "work='equal' in distribute, or save when the epoch has ended"
        )
    if batches.dealt_out_anew:
        raise InputError(
            f"{where}: a rank has become a server in this epoch, so that nobody takes its part "
            "of it: save when the epoch has ended"
        )


def check_fits(loop: OwnLoop, state: Mapping[str, Any]) -> None:
    """Collective over the workers: raises InputError unless `loop` can go on from `state`."""
    batches, worker, where = loop.batches, loop.worker, "batches.load_state_dict()"
    expected = {"settings", "position", "groups", "ranks"}
    if not isinstance(state, Mapping) or not expected <= state.keys():
        raise InputError(f"{where}: expected what batches.state_dict() returned")
    for name, ours in settings_of(loop).items():
        theirs = state["settings"].get(name)
        if theirs != ours:
            raise InputError(
                f"{where}: the state is of {name}={theirs}, and this loop of {name}={ours}: "
                "distribute with the settings that it was saved under"
            )
    if state["ranks"].keys() != {str(rank) for rank in range(worker.runtime.ranks)}:
        raise InputError(
            f"{where}: the state lacks what other ranks had: save what the first worker's "
            "batches.state_dict() returned (if orchestra.is_first())"
        )
    every = (each["parameters"] for each in state["ranks"].values())
    parameters = next(named for named in every if named)  # servers have none
    found = _differences(worker, parameters)
    if found or len(state["groups"]) != len(loop.optimizer.param_groups):
        raise InputError(
            f"{where}: the state is of another model or optimizer: "
            f"{found or 'it has other parameter groups'}"
        )
    position = state["position"]
    if position["taken"] and position["length"] != length_of(batches):
        raise InputError(
            f"{where}: the state was saved in the midst of an epoch of {position['length']} "
            f"batches on each worker, and here it has {length_of(batches)}: use the same loader"
        )
    generators = state["ranks"][str(worker.rank)]["order"]["generators"]
    if len(generators) != len(batches.generators()):
        raise InputError(f"{where}: the loader has other generators than then: use the same loader")
    roles = loop.strategy.roles(worker.runtime.ranks)
    if loop.strategy.current_roles(worker, loop.state) != roles:
        raise InputError(
            f"{where}: ranks have changed their roles since the beginning: load before training"
        )
    if not batches.alike(digest([position, parameters])):
        raise InputError(f"{where}: workers load unlike states: give all the same one")


def length_of(batches: Batches) -> int | None:
    """Of an epoch, in batches; None where the loader does not know."""
    try:
        return len(batches)
    except TypeError:
        return None


def _differences(worker: Worker, parameters: Mapping[str, Tensor]) -> str:
    """In which parameter a state is another model's; empty if in none."""
    named = worker.named_parameters()
    for name in [*named, *parameters]:
        if name not in parameters or name not in named:
            return f"parameter {name!r} is in one of them only"
        if parameters[name].shape != named[name].shape:
            theirs, ours = tuple(parameters[name].shape), tuple(named[name].shape)
            return f"parameter {name!r} has the shape {theirs} in it, and {ours} here"
    return ""
