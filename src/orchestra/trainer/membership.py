"""Whether a run can go on from the checkpoint of another number of ranks. Imports without torch."""

from __future__ import annotations

from orchestra.data import IID
from orchestra.strategies.base import roles_of
from orchestra.strategies.switch import flattened_phases
from orchestra.strategies.watching import transitions_of
from orchestra.trainer.checkpoint_files import Manifest
from orchestra.trainer.settings import Run


def refusal_to_resume(run: Run, manifest: Manifest) -> str | None:
    """Return why `run` cannot go on from the checkpoint of `manifest`, which another number of
    ranks has written; None if it can."""
    training, ranks = run.training, manifest.ranks
    remedy = f"set ranks to {ranks} to go on, or choose another --out to begin anew"
    if training.sharding is not None and not isinstance(training.sharding, IID):
        workers = manifest.history[-1].workers
        return (
            f"sharding: {training.sharding!r} gives each of {workers} workers samples of its own, "
            f"which others cannot take over: {remedy}"
        )
    if training.record_order:
        return f"record_order: a replay has one number of ranks from its first step on: {remedy}"
    scaled = any(each.switch.learning_rate != "kept" for each in transitions_of(run.strategy))
    if manifest.phase and scaled:
        return (
            f"strategy: {run.strategy!r} has scaled the learning rate by the number of workers: "
            f"{remedy}"
        )
    strategy = flattened_phases(run.strategy)[manifest.phase]
    batch = training.global_batch(roles_of(strategy, training.ranks).shares, manifest.begun_on)
    if training.resized_batch == "kept" and batch != manifest.global_batch:
        return (
            f"equal: with {training.equal} a step has {batch} samples on {training.ranks} ranks, "
            f"and {manifest.global_batch} on {ranks}: {remedy}"
        )
    return None
