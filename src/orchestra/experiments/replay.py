"""A recorded run, repeated to the bit: a debugger for asynchronous training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestra.engines.simulation.replay import STATES, replay_run
from orchestra.errors import InputError
from orchestra.experiments.experiment import for_training, runs
from orchestra.experiments.file import load
from orchestra.experiments.run import PARENT, RESOLVED, SUMMARY, fresh_folder
from orchestra.records.record import read_summary


@dataclass(frozen=True)
class Replay:
    """How a replay went.

    Attributes:
        equal: whether the final parameters are those of the run, bit for bit; None where it was
            stopped before the end, or the run has no final parameters.
        steps: of each worker, how many it has done.
        states: where the replay was stopped: of each worker after its step `until`, and of each
            server when the last worker was there, what a checkpoint keeps ("parameters",
            "buffers", "position", "strategy" ...) and "gradients". Both vectors are flat, in the
            order of the model's parameters.
        folder: where it was written.
    """

    equal: bool | None
    steps: Mapping[int, int]
    states: Mapping[int, Any]
    folder: Path


def replay(
    run: str | Path,
    until: int | None = None,
    *,
    out: str | Path | None = None,
    quiet: bool = False,
) -> Replay:
    """Repeat a run that was recorded with `record_order`, in virtual time, to the same bits.

    Args:
        run: its folder.
        until: a step of each worker, at which to stop; the end by default.
        out: a folder that does not exist yet, for what the replay writes; a new one in `runs` by
            default.
        quiet: no progress.

    Raises:
        InputError: the run was not recorded, or `until` is no step.
        RunFailed: the replay failed.
    """
    source = Path(run)
    if until is not None and until < 1:
        raise InputError(f"until: {until} is no step; the first is 1")
    if not (source / RESOLVED).is_file():
        raise InputError(f"{source}: there is no {RESOLVED}; give the folder of one run")
    if inside := sorted(path.parent for path in source.glob(f"runs/*/*/*/{RESOLVED}")):
        raise InputError(f"{source}: is a comparison; give one of its runs, such as {inside[0]}")
    experiment = for_training(load(source / RESOLVED), str(source / RESOLVED))
    (settings,) = runs(experiment)
    if not settings.training.record_order:
        raise InputError(f"{source}: this run was not recorded; make one with --record-order")
    folder = Path(out) if out is not None else fresh_folder(PARENT, f"{source.name}-replay")
    if folder.exists() and any(folder.iterdir()):
        raise InputError(f"{folder}: holds files; choose another --out")
    folder.mkdir(parents=True, exist_ok=True)
    (record,) = read_summary(source / SUMMARY)
    threads = record.threads_by_rank if record.engine == "processes" else None
    replayed = replay_run(settings, source, folder, until=until, threads=threads, quiet=quiet)
    stopped = replayed.parameters_sha256 is None
    then = record.parameters_sha256
    return Replay(
        None if stopped or then is None else replayed.parameters_sha256 == then,
        replayed.steps,
        _states(folder) if stopped else {},
        folder,
    )


def _states(folder: Path) -> dict[int, Any]:
    from orchestra.trainer import checkpoints

    place = folder / f"{STATES:04d}"
    ranks = range(len(list(place.glob("rank-*"))))
    return {rank: checkpoints.read_rank(folder, STATES, rank) for rank in ranks}
