"""`orchestra bench fidelity`: predictions of the simulation beside the same runs on processes."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestra.bench.calibrate import calibrate
from orchestra.bench.fidelity.cases import Case, Subtask
from orchestra.bench.fidelity.formula import closed_formula, constant
from orchestra.bench.fidelity.measure import (
    FidelityRow,
    Observation,
    largest_difference,
    observe,
    row_of,
)
from orchestra.bench.turns import Progress, order
from orchestra.cluster.calibration import Calibration, read_calibration

__all__ = ["Fidelity", "bench_fidelity"]


@dataclass(frozen=True)
class Fidelity:
    """The rows, and the calibration that all predictions were made with."""

    rows: tuple[FidelityRow, ...]
    calibration: Calibration


def bench_fidelity(
    chosen: Sequence[Case],
    tasks: Sequence[Subtask],
    rounds: int = 3,
    seconds: float = 0.4,
    calibration: Path | None = None,
    on_progress: Progress | None = None,
) -> Fidelity:
    """Calibrate, predict, then run for real in `rounds` rounds, every other one in reverse.

    With `calibration`, that file is taken, and nothing is measured. Nothing that is predicted has
    been run before, and nothing is fitted afterwards.
    """
    with tempfile.TemporaryDirectory(prefix="orchestra-fidelity-") as name:
        folder = Path(name)
        path = calibration or folder / "calibration.json"
        if calibration is None:
            subjects = [task.subject for task in tasks]
            path.write_text(calibrate(subjects, seconds, on_progress).to_json())
        measured = read_calibration(path)
        total, done = len(chosen) * (rounds + 1), 0
        virtual: list[Observation] = []
        real: list[list[Observation]] = [[] for _ in chosen]
        for case in chosen:
            run = case.simulated(measured.cluster, str(path))
            virtual.append(observe(run, _parameters(folder, case, "virtual")))
            done += 1
            if on_progress is not None:
                on_progress(f"predicting {case.label}", done / total)
        for number in range(rounds):
            for place in order(range(len(chosen)), number):
                case = chosen[place]
                real[place].append(observe(case.run, _parameters(folder, case, "real")))
                done += 1
                if on_progress is not None:
                    on_progress(f"running {case.label}", done / total)
        rows = tuple(
            row_of(
                case,
                real[place],
                virtual[place],
                formula=closed_formula(case, measured),
                constant=constant(case, measured),
                parameters_differ=_difference(folder, case),
            )
            for place, case in enumerate(chosen)
        )
    return Fidelity(rows, measured)


def _parameters(folder: Path, case: Case, kind: str) -> Path:
    return folder / f"{case.task.name}-{case.ranks}-{case.label}-{kind}.safetensors"


def _difference(folder: Path, case: Case) -> float | None:
    """Of the final parameters, where the order of arrivals has no part in them."""
    if not case.run.strategy.synchronous:
        return None
    files = [_parameters(folder, case, kind) for kind in ("virtual", "real")]
    return largest_difference(*files)
