"""The curves of a run for trackers: libraries that may be installed.

Event files for TensorBoard are written here; its writer is imported where they are asked for.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from orchestra.errors import InputError
from orchestra.records.report import Point

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

TRACKERS = {"tensorboard": "TensorBoard", "mlflow": "MLflow", "wandb": "Weights & Biases"}
"""The names of trackers; a key is at once the setting, the module and the extra."""


def require_tracker(name: str) -> None:
    """Raise `InputError` where the library of the setting `name` is not installed."""
    spec = importlib.util.find_spec(name)
    # A folder of that name in the current one is a package, too, without an origin.
    if spec is None or spec.origin is None:
        raise InputError(
            f"{name}: is true, but {TRACKERS[name]} is not installed: "
            f"pip install '.[{name}]' in a clone of Orchestra, or set it to false"
        )


class Scalars:
    """Figures over a run: one of the curves that TensorBoard shows side by side.

    They go into `folder/tensorboard/name`, which is made with the first of them. What an earlier
    part of the run wrote there of `first` and later is no longer shown.
    """

    def __init__(self, folder: Path, name: str, first: int = 0) -> None:
        require_tracker("tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._make = functools.partial(
            SummaryWriter, str(folder / "tensorboard" / name), purge_step=first
        )
        self._writer: SummaryWriter | None = None

    def add(self, at: int, figures: Mapping[str, float]) -> None:
        """Add the values of `figures`, by name, at step (or sample) `at`."""
        if self._writer is None:
            self._writer = self._make()
        for name, value in figures.items():
            self._writer.add_scalar(name, value, at)

    def flush(self) -> None:
        """Bring all of them to disk."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Close the writer: no more figures follow."""
        if self._writer is not None:
            self._writer.close()


def write_curve_events(folder: Path, points: Sequence[Point]) -> None:
    """Write the figures of the snapshots over the samples, as the curve "snapshots".

    Where each node has a model of its own, that curve is the nodes' mean, and the curves
    "snapshots-worst-node" and "snapshots-average-of-replicas" are written as well.
    """
    names = ("snapshots", "snapshots-worst-node", "snapshots-average-of-replicas")
    snapshots, worst_node, average = curves = [Scalars(folder, name) for name in names]
    for point in points:
        snapshots.add(point.samples, point.metrics)
        if point.average is not None:
            worst_node.add(point.samples, point.worst_nodes())
            average.add(point.samples, point.average)
        if point.relative_distance is not None:
            distance = {"distance of the replicas, relative": point.relative_distance}
            snapshots.add(point.samples, distance)
    for scalars in curves:
        scalars.close()
