"""Where the costs of a simulated run come from: a calibration, or assumptions. Without torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from orchestra.cluster.calibration import Calibration, TaskCosts, read_calibration
from orchestra.cluster.units import FLOPS as UNIT
from orchestra.errors import InputError
from orchestra.optimizers.settings import Optimizer
from orchestra.records.record import cache_folder
from orchestra.trainer.settings import AUTO, NONE, Run

FLOPS = 20e9
"""Floating-point operations a second that a core of speed 1 is assumed to do."""
SERIAL = 0.05
"""Part of a gradient's operations that further threads are assumed not to shorten."""


@dataclass(frozen=True)
class CostSource:
    """What a run is simulated with: nothing measured at all, or a machine's figures for its task.

    `text` says which, for the record, and `doubts` why its seconds are not to be trusted.
    """

    text: str
    calibration: Calibration | None = None
    task: TaskCosts | None = None
    doubts: tuple[str, ...] = ()


def own_calibration() -> Path:
    """Return the path at which the figures of this machine are kept.

    Raises:
        InputError: the user has no place to keep anything.
    """
    try:
        return cache_folder() / "calibration.json"
    except RuntimeError:
        raise InputError("calibration: no home folder; set ORCHESTRA_CACHE to a folder") from None


def key_of(task: str, optimizer: Optimizer, precision: str) -> tuple[str, str, str]:
    """Return what decides how long a step takes; learning rates do not."""
    arguments = {name: value for name, value in optimizer.arguments.items() if name != "lr"}
    groups = tuple(group.match for group in optimizer.groups)
    text = repr(replace(optimizer, arguments=arguments)) + (f" by {groups}" if groups else "")
    return task, text, precision


def cost_source_of(run: Run) -> CostSource:
    """Find the figures that `run` asks for with `calibration`; with auto the machine's own.

    Raises:
        InputError: a file that is not there, damaged, or without the task of the run.
    """
    training = run.training
    assumed = f"assumed: {UNIT.write(FLOPS)} a core, {SERIAL:.0%} of a gradient on one thread"
    if training.calibration == NONE:
        return CostSource(assumed)
    own = training.calibration == AUTO
    path = own_calibration() if own else Path(training.calibration)
    if own and not path.exists():
        return CostSource(f"{assumed}; this machine is not calibrated")
    calibration = read_calibration(path)
    task = calibration.task(*key_of(run.task, training.optimizer, training.precision))
    if task is not None:
        machine = f"{calibration.machine.get('processor')}, {calibration.cores} cores"
        quality = calibration.quality_of(task)
        text = f"calibrated: {machine}, {quality.measured_at}; {quality}"
        if calibration.in_memory is None:
            text += "; shared memory assumed: the file does not hold it"
        return CostSource(text, calibration, task, quality.doubts)
    if own:
        return CostSource(f"{assumed}; this machine's calibration does not hold the task")
    raise InputError(
        f"calibration: {path} does not hold {run.task} with {training.optimizer!r} in "
        f"{training.precision}; add it with orchestra calibrate --task '{run.task}' "
        f"--optimizer '{training.optimizer!r}' --out {path}"
    )
